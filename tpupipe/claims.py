"""Which tick of a dataset takes which inputs: decided once, by a record that is created before any work is done.

Claims are numbered without gaps and created with create-if-absent: whoever creates number n has seen 1 to n-1, so no
input is in two claims and no tick has two, whoever runs at the same time. A claim never changes; a tick that is run
again works on what its claim says.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tpupipe.data.listing import InputFile
from tpupipe.errors import DataError, ObjectExistsError
from tpupipe.faults.points import point
from tpupipe.store.layout import GenerationPaths, parse_claim
from tpupipe.store.objects import Store

FORMAT = 1
_READERS = 16
_KEY = b"tpupipe"

Inputs = Mapping[str, Sequence[InputFile]]
"""Input files, sorted by path, by the name of the (first) stage that reads them."""


@dataclass(frozen=True)
class Claim:
    """What one tick works on.

    Args:
        number: Its place among the claims of the generation, from 1.
        tick: The tick.
        inputs: Its input files.
    """

    number: int
    tick: str
    inputs: Inputs

    @property
    def files(self) -> int:
        """Files of all stages."""
        return sum(len(files) for files in self.inputs.values())

    def encode(self) -> bytes:
        """The claim as a Parquet file, one row per input."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [(stage, file) for stage, files in self.inputs.items() for file in files]
        columns = {
            "stage": pa.array([stage for stage, _ in rows], pa.string()),
            "path": pa.array([file.path for _, file in rows], pa.string()),
            "size_bytes": pa.array([file.size_bytes for _, file in rows], pa.int64()),
            "version": pa.array([file.version for _, file in rows], pa.string()),
        }
        record = {"format": FORMAT, "number": self.number, "tick": self.tick, "stages": list(self.inputs)}
        table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(record)})
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        return sink.getvalue()

    @classmethod
    def decode(cls, data: bytes, name: str) -> Claim:
        """Reads ``encode`` back.

        Raises:
            DataError: It is not a claim, or is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
            record = json.loads(table.schema.metadata[_KEY])
            if record["format"] != FORMAT:
                raise DataError(f"{name} has format {record['format']}; this version reads {FORMAT}.", path=name)
            inputs: dict[str, list[InputFile]] = {stage: [] for stage in record["stages"]}
            for stage, path, size, version in zip(*(column.to_pylist() for column in table.columns), strict=True):
                inputs[stage].append(InputFile(path, size, version))
            return cls(record["number"], record["tick"], inputs)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{name} is not a readable claim: {error!r}.",
                hint="It says which inputs a tick covers; without it nothing can be called new. Restore it.",
                path=name,
            ) from error


def new_inputs(listed: Inputs, claims: Iterable[Claim], until_s: float | None = None) -> dict[str, list[InputFile]]:
    """The listed files that no claim has in this version; pure.

    Args:
        listed: What there is.
        claims: All claims of the generation.
        until_s: Only files that were modified up to then, seconds since 1970; a file of unknown age counts as old.
    """
    covered: dict[str, set[bytes]] = {stage: set() for stage in listed}
    for claim in claims:
        for stage, files in claim.inputs.items():
            covered.setdefault(stage, set()).update(map(_key, files))
    return {
        stage: [
            file
            for file in files
            if _key(file) not in covered[stage]
            and (until_s is None or file.modified_s is None or file.modified_s <= until_s)
        ]
        for stage, files in listed.items()
    }


def changed_inputs(claim: Claim, listed: Inputs) -> list[str]:
    """Paths of the claim that are there in another version now; pure. Files that are gone are not among them."""
    changed = []
    for stage, files in claim.inputs.items():
        now = {file.path: _key(file) for file in listed.get(stage, ())}
        changed += [file.path for file in files if now.get(file.path, _key(file)) != _key(file)]
    return changed


def _key(file: InputFile) -> bytes:
    text = f"{file.path}\0{file.size_bytes}\0{file.version}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def read_claims(store: Store, generation: GenerationPaths) -> list[Claim]:
    """All claims of a generation, in order.

    Raises:
        StoreError: They could not be listed or read; that is never "no claims".
        DataError: One is damaged or missing.
    """
    names = _claim_names(store, generation)
    if not _gapless(names):
        # A listing that passes while claims are created may show a later one and not the one before it. That one was
        # there first, so a listing begun now shows both.
        names = _claim_names(store, generation)
    if not _gapless(names):
        raise DataError(
            f"The claims in {store.uri(generation.claims)} are not numbered 1 to {len(names)}: one is missing.",
            hint="Restore it: its inputs would be taken again.",
        )
    with ThreadPoolExecutor(_READERS, thread_name_prefix="tpupipe-claims") as pool:
        return list(pool.map(lambda name: Claim.decode(store.read(name), store.uri(name)), names))


def _claim_names(store: Store, generation: GenerationPaths) -> list[str]:
    return [info.name for info in store.list(generation.claims + "/") if parse_claim(info.name) is not None]


def _gapless(names: Sequence[str]) -> bool:
    return [parse_claim(name) for name in names] == list(range(1, len(names) + 1))


def claim_inputs(
    store: Store,
    generation: GenerationPaths,
    tick: str,
    listed: Inputs,
    *,
    until_s: float | None,
    check: Callable[[], None],
) -> Claim:
    """The tick's claim: the one it has, or a new one on everything that no other claim has.

    Args:
        store: The store.
        generation: The generation of the dataset.
        tick: The tick.
        listed: The inputs, listed before this call.
        until_s: See ``new_inputs``.
        check: Refuses when another driver owns the tick by now.

    Raises:
        FencedError: By ``check``.
        StoreError: The store failed.
    """
    while True:
        claims = read_claims(store, generation)
        for claim in claims:
            if claim.tick == tick:
                return claim
        claim = Claim(len(claims) + 1, tick, new_inputs(listed, claims, until_s))
        check()
        point("tick.before_claim", tick=tick)
        try:
            store.create(generation.claim(claim.number), claim.encode())
        except ObjectExistsError:
            continue  # another tick was faster; look at what it left
        return claim
