"""What a stage has committed, as columns: one listing of names and one compacted object, not one read per unit.

The compacted object is a cache. A unit in it counts only if the listing shows that very object (name, generation and
size); every other object of the listing has its footer read. So a missing, stale or damaged cache costs time and
changes nothing, and a unit that was deleted from the store is pending again.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tpupipe.data.acyclic import acyclic
from tpupipe.data.chunks import UnitFooter
from tpupipe.data.sources import Unit, unit_names
from tpupipe.errors import DataError, ObjectNotFoundError, RunChangedError, StoreError
from tpupipe.stages.base import StageRun
from tpupipe.stages.units import Committed, made_from_other, place_of, read_committed
from tpupipe.store.layout import RunPaths, parse_unit
from tpupipe.store.objects import ObjectInfo, Store

logger = logging.getLogger("tpupipe")

T = TypeVar("T")

_FORMAT = 1
_DIGEST_BYTES = 16
_FOOTER_THREADS = 16
_BATCH = 8192
_FRESH = 1024  # units that are kept as objects before they become columns
_WORTH_KEEPING = 256  # units whose footers are quicker read again than a cache of them is kept
_GROWTH = 8  # the cache is written again when it would grow by this part of itself

_TYPES = {"str": pa.string(), "int": pa.int64(), "tuple[int, ...]": pa.list_(pa.int64())}
_FEW = pa.dictionary(pa.int32(), pa.string())
_FEW_VALUES = ("params_fingerprint", "code_fingerprint", "sample")
_FOOTER = tuple(f.name for f in dataclasses.fields(UnitFooter))
SCHEMA = pa.schema(
    [(f.name, _FEW if f.name in _FEW_VALUES else _TYPES[str(f.type)]) for f in dataclasses.fields(UnitFooter)]
    + [("size_bytes", pa.int64()), ("crc32c", pa.int64()), ("generation", pa.string()), ("schema", pa.int32())]
)
_LISTED = pa.schema([(name, SCHEMA.field(name).type) for name in ("unit", "size_bytes", "crc32c", "generation")])


class CommittedUnits:
    """Committed units of a stage, a few dozen bytes each; iterating makes a ``Committed`` at a time.

    Args:
        table: One row per unit, see ``SCHEMA``.
        schemas: What its column ``schema`` counts in.
        uncached: How many of them the compacted object does not have.
    """

    def __init__(self, table: pa.Table, schemas: Sequence[pa.Schema], uncached: int = 0) -> None:
        self.table, self.schemas, self.uncached = table, tuple(schemas), uncached

    @classmethod
    def of(cls, committed: Iterable[Committed]) -> CommittedUnits:
        """Makes columns of them; memory for objects does not grow with their number."""
        schemas: list[pa.Schema] = []
        tables = [SCHEMA.empty_table()]
        for batch in _batches(committed):
            columns = [[getattr(c.footer, name) for c in batch] for name in _FOOTER]
            columns += [[c.size_bytes for c in batch], [c.crc32c for c in batch], [c.generation for c in batch]]
            columns.append([place_of(schemas, c.schema) for c in batch])
            tables.append(pa.table(columns, SCHEMA))
        table = pa.concat_tables(tables)
        return cls(table, schemas, table.num_rows)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Committed]:
        fields = len(_FOOTER)
        chunks = _FOOTER.index("chunks")
        for batch in self.table.to_batches(max_chunksize=_BATCH):
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                values = list(row)
                values[chunks] = tuple(values[chunks])
                size_bytes, crc32c, generation, schema = values[fields:]
                yield Committed(UnitFooter(*values[:fields]), self.schemas[schema], size_bytes, crc32c, generation)

    def total(self, column: str) -> int:
        """Sum of a column of numbers."""
        return int(pc.sum(self.table[column]).as_py() or 0)

    def with_more(self, more: CommittedUnits) -> CommittedUnits:
        """These and others."""
        if not len(more):
            return self
        schemas = list(self.schemas)
        places = pa.array([place_of(schemas, schema) for schema in more.schemas], pa.int32())
        moved = pc.take(places, more.table["schema"])
        at = SCHEMA.get_field_index("schema")
        table = pa.concat_tables([self.table, more.table.set_column(at, SCHEMA.field(at), moved)])
        return CommittedUnits(table, schemas, self.uncached + more.uncached)

    # -- the compacted object ------------------------------------------------------------------

    def encode(self) -> bytes:
        """The compacted object: a digest, then a compressed Arrow stream."""
        schemas = [base64.b64encode(schema.serialize().to_pybytes()).decode() for schema in self.schemas]
        described = SCHEMA.with_metadata({b"tpupipe": json.dumps({"format": _FORMAT, "schemas": schemas}).encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, described, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(self.table, max_chunksize=1 << 16)
        body = bytes(sink.getvalue())
        return _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> CommittedUnits | None:
        """Reads ``encode`` back; ``None`` for anything that is not whole or is of another version."""
        body = memoryview(data)[_DIGEST_BYTES:]
        if _digest(body) != data[:_DIGEST_BYTES]:
            return None
        try:
            table = pa.ipc.open_stream(pa.py_buffer(body)).read_all()
            record = json.loads(table.schema.metadata[b"tpupipe"])
            if record["format"] != _FORMAT or not table.schema.equals(SCHEMA):
                return None
            schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in record["schemas"]]
        except (pa.ArrowException, ValueError, KeyError, TypeError):
            return None  # it is whole, so another version wrote it
        return cls(table.replace_schema_metadata(None), schemas)


class PendingUnits(Sequence[Unit]):
    """Some of a stage's units, in input order, made when they are asked for.

    Args:
        units: All of them.
        positions: ``int64[n]``: which.
    """

    def __init__(self, units: Sequence[Unit], positions: np.ndarray) -> None:
        self._units, self.positions = units, positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Unit: ...

    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...

    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self._units[i] for i in self.positions[index].tolist()]
        return self._units[int(self.positions[index])]


def resume_units(
    run: StageRun, stage: str, units: Sequence[Unit], params_fingerprint: str
) -> tuple[PendingUnits, CommittedUnits]:
    """Units without a committed object, in input order, and what is committed of the others.

    One complete listing of the stage's objects decides what exists; nothing is guessed.

    Raises:
        StoreError: The store could not be listed or read.
        RunChangedError: A committed unit was made from other input or parameters.
        DataError: An object is not the unit that its name says.
    """
    with acyclic():
        ids, fingerprints = _names(units)
    cached = _read_cache(run.store, run.paths, stage)
    believed, others = _believed(cached, _listed(run.store, run.paths.units(stage) + "/", ids))
    known = cached if believed.all() else CommittedUnits(cached.table.filter(pa.array(believed)), cached.schemas)
    del cached
    committed = known.with_more(CommittedUnits.of(_footers(run, stage, others)))
    position = np.searchsorted(ids, _keys(committed.table["unit"]))
    _check_made_from_the_same(stage, committed, fingerprints[position], params_fingerprint)
    missing = np.ones(len(units), bool)
    missing[position] = False
    return PendingUnits(units, np.flatnonzero(missing)), committed


class Compaction:
    """What a stage has committed, while it commits more; keeps its compacted object. Leaving it writes what is new.

    Args:
        run: The run.
        stage: The stage.
        committed: What was committed before.
    """

    def __init__(self, run: StageRun, stage: str, committed: CommittedUnits) -> None:
        self._run, self._stage = run, stage
        self._kept = committed
        self._fresh: list[Committed] = []
        self._write_if(_WORTH_KEEPING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_if(1)

    def add(self, committed: Committed) -> None:
        """Takes note of a unit; writes once in a while, so that a driver that is killed leaves most of it."""
        self._fresh.append(committed)
        self._write_if(max(_WORTH_KEEPING, len(self._kept) // _GROWTH))
        if len(self._fresh) >= _FRESH:
            self._settle()

    @property
    def committed(self) -> CommittedUnits:
        """All units that are committed now."""
        self._settle()
        return self._kept

    def _settle(self) -> None:
        self._kept = self._kept.with_more(CommittedUnits.of(self._fresh))
        self._fresh = []

    def _write_if(self, enough: int) -> None:
        if self._kept.uncached + len(self._fresh) < enough or len(self._kept) + len(self._fresh) < _WORTH_KEEPING:
            return
        self._settle()
        name = self._run.paths.compacted(self._stage)
        try:
            if not self._run.lease.lost:
                self._run.store.put(name, self._kept.encode())
        except StoreError as error:  # the units are committed; without the cache the next attempt reads their footers
            logger.warning("The compacted listing of stage %s was not written: %s", self._stage, error)
        self._kept.uncached = 0


def _believed(cached: CommittedUnits, listed: Iterable[pa.Table]) -> tuple[np.ndarray, list[pa.Table]]:
    """Of the compacted units, which the listing shows unchanged (``bool[n]``); and what else it shows.

    The listing passes by in parts and is not kept: there may be a million names.
    """
    keys = _keys(cached.table["unit"])
    order = np.argsort(keys, kind="stable")
    believed = np.zeros(len(keys), bool)
    columns = cached.table.select(["generation", "size_bytes"]).combine_chunks()  # taken from once a page
    others = []
    for part in listed:
        found, place = _find(keys, _keys(part["unit"]), order)
        same = found & _equal(columns.take(pa.array(place)), part) if len(keys) else found
        believed[place[same]] = True
        if not same.all():
            others.append(part.filter(pa.array(~same)))
    return believed, others


def _equal(then: pa.Table, now: pa.Table) -> np.ndarray:
    pairs = (pc.equal(then[name], now[name]) for name in ("generation", "size_bytes"))
    same: np.ndarray = np.logical_and.reduce([_numbers(pair) for pair in pairs])
    return same


def _names(units: Sequence[Unit]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and fingerprints of units as ``bytes[n]`` of one width each: small, fast to search. They are ASCII."""
    parts = [
        (np.array([unit for unit, _ in batch], "S"), np.array([fingerprint for _, fingerprint in batch], "S"))
        for batch in _batches(unit_names(units))
    ]
    ids, fingerprints = zip(*parts, strict=True) if parts else ((np.array([], "S1"),), (np.array([], "S1"),))
    return np.concatenate(ids), np.concatenate(fingerprints)


def _keys(column: pa.ChunkedArray) -> np.ndarray:
    """A column of short ASCII texts as ``bytes[n]`` of one width, which sort as the texts do."""
    parts = [np.array([], "S1")]
    for chunk in column.chunks:
        width = pc.max(pc.binary_length(chunk)).as_py() or 1
        if pc.min(pc.binary_length(chunk)).as_py() == width:  # no object per text
            fixed = chunk.cast(pa.binary()).cast(pa.binary(width))
            parts.append(np.frombuffer(fixed.buffers()[1], f"S{width}", len(fixed), fixed.offset * width))
        else:
            parts.append(chunk.to_numpy(zero_copy_only=False).astype("S"))
    return np.concatenate(parts)


def _find(keys: np.ndarray, wanted: np.ndarray, order: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Whether each wanted key is among ``keys`` (sorted, or by ``order``), and where; anywhere if it is not."""
    if not len(keys):
        return np.zeros(len(wanted), bool), np.zeros(len(wanted), np.intp)
    place = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    place = place if order is None else order[place]
    return keys[place] == wanted, place


def _read_cache(store: Store, paths: RunPaths, stage: str) -> CommittedUnits:
    nothing = CommittedUnits(SCHEMA.empty_table(), ())
    name = paths.compacted(stage)
    try:
        found = CommittedUnits.decode(store.read(name))
    except ObjectNotFoundError:
        return nothing
    if found is None:
        logger.warning("%s is damaged or of another version; the units' footers are read instead.", store.uri(name))
    return found or nothing


def _listed(store: Store, prefix: str, ids: np.ndarray) -> Iterator[pa.Table]:
    """The committed objects of the units in ``ids`` (sorted), a page at a time; what else lies there is none."""
    for page in store.pages(prefix):
        units = [parse_unit(name) for name in page.names]
        table = pa.table([units, page.sizes, page.crc32c, page.generations], _LISTED)
        if table["unit"].null_count:
            table = table.filter(table["unit"].is_valid())
        wanted, _ = _find(ids, _keys(table["unit"]))
        yield table if wanted.all() else table.filter(pa.array(wanted))


def _footers(run: StageRun, stage: str, listed: Iterable[pa.Table]) -> Iterator[Committed]:
    """What the listed units say of themselves, several at a time, never all in memory."""

    def read(row: tuple[str, int, int | None, str]) -> Committed:
        unit, size, crc32c, generation = row
        committed = read_committed(run.store, ObjectInfo(run.paths.unit(stage, unit), size, crc32c, generation, 0.0))
        if committed.footer.unit != unit:
            name = run.store.uri(run.paths.unit(stage, unit))
            raise DataError(f"{name} holds unit {committed.footer.unit}; it was moved or is damaged.", path=name)
        return committed

    with ThreadPoolExecutor(_FOOTER_THREADS, thread_name_prefix="tpupipe-footers") as pool:
        for part in listed:
            yield from pool.map(read, zip(*(column.to_pylist() for column in part.columns), strict=True))


def _check_made_from_the_same(stage: str, committed: CommittedUnits, now: np.ndarray, params_fingerprint: str) -> None:
    others = set(committed.table["params_fingerprint"].unique().to_pylist()) - {params_fingerprint}
    differs = np.flatnonzero(_keys(committed.table["input_fingerprint"]) != now)
    if not len(differs) and not others:
        return
    if len(differs):
        at = int(differs[0])
        what, had, has = "input", committed.table["input_fingerprint"][at].as_py(), now[at].decode()
    else:
        had = min(others)
        at = committed.table["params_fingerprint"].to_pylist().index(had)
        what, has = "parameters", params_fingerprint
    error = made_from_other(stage, committed.table["unit"][at].as_py(), what, had, has)
    raise RunChangedError(error.message, hint="Use another --run for the changed inputs or parameters.", **error.data)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    found: np.ndarray = column.to_numpy()
    return found


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
