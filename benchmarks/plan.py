"""Planning and resuming a stage with very many committed units. No devices, no Ray cluster, no network.

    python benchmarks/plan.py [--units 1000000] [--case CASE] [--json]

The store is the project's own client of Cloud Storage with a double behind it: it answers in pages of 1000 objects with
the JSON that Cloud Storage sends, parsed as usual. A request costs no time here; what a real one adds is ``requests``
times its latency. Making up the answers (``double_s``) and the list of input files is not counted. Cases: ``compacted``
(the usual resume), ``footers`` (no compacted listing: every unit's footer is read), ``finished`` (the manifest of a
complete stage is read).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, Self

import pyarrow as pa

from tpupipe.data.chunks import Manifest, ManifestUnit, UnitFooter, encode_unit, merge_schemas
from tpupipe.data.listing import InputFile
from tpupipe.data.sources import Files, Unit
from tpupipe.errors import ObjectNotFoundError
from tpupipe.stages.committed import CommittedUnits, resume_units
from tpupipe.stages.finished import read_manifest
from tpupipe.stages.units import Committed
from tpupipe.store.connection import Endpoint
from tpupipe.store.gcs import GcsStore
from tpupipe.store.layout import RunPaths
from tpupipe.store.retry import AttemptError, Failure, RetryPolicy
from tpupipe.store.uri import StoreURI

STAGE = "embed"
PAGE = 1000
PENDING = 1000
UNIT_BYTES = 4_000_000
RUN = ("job", "run")
ROWS = 64
PARAMS = "p" * 32
GENERATION = "1764468000000000"
ROWS_OF_A_UNIT = pa.table({"unit": pa.array(["x"] * ROWS), "row": pa.array(range(ROWS), pa.int64())})
CREATED = "2026-11-30T02:00:00.000Z"


class Bucket:
    """Stands in for the connection to Cloud Storage: one unit object per id, and a few whole objects.

    Args:
        folder: Folder of the units.
        size: Bytes of each.
        objects: Other objects, by full name.
    """

    endpoint = Endpoint("http://127.0.0.1:9")
    bucket_seen = True

    def __init__(self, folder: str, size: int, objects: dict[str, bytes]) -> None:
        self.units: Sequence[Unit] = []
        self.committed = 0
        self.seconds = self.cpu_s = 0.0
        self._folder, self._size, self._objects = folder, size, objects
        self.requests = {"list": 0, "read": 0}

    def json(self, method: str, path: str, limit: Any, params: dict[str, str]) -> dict[str, Any]:  # noqa: ARG002 - as Connection.json
        """One page of a listing."""
        if not path.endswith("/o"):
            return _item(self._known(path), 0)
        self.requests["list"] += 1
        began, cpu_began = time.monotonic(), time.thread_time()
        start = int(params.get("pageToken", 0))
        found = self.units[start : min(start + PAGE, self.committed)]
        items = [_item(f"{self._folder}/{unit.id}.parquet", self._size) for unit in found]
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < self.committed else {}
        # Through text and back: parsing the answers is part of the cost.
        text = json.dumps({"items": items, **more})
        self.seconds += time.monotonic() - began
        self.cpu_s += time.thread_time() - cpu_began
        page: dict[str, Any] = json.loads(text)
        return page

    def request(self, method: str, path: str, limit: Any, headers: dict[str, str]) -> Any:  # noqa: ARG002 - as Connection.request
        """Content of an object, whole or the asked-for range."""
        self.requests["read"] += 1
        name = path.rpartition("/o/")[2].removesuffix("?alt=media").replace("%2F", "/")
        if name.startswith(self._folder):
            unit = self.units[int(name.removeprefix(self._folder + "/").partition("-")[0])]
            data = unit_object(unit)
        else:
            data = self._objects[self._known(path.removesuffix("?alt=media"))]
        if "Range" in headers:
            first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
        return _Answer(data)

    def _known(self, path: str) -> str:
        name = path.rpartition("/o/")[2].replace("%2F", "/")
        if name not in self._objects:
            raise AttemptError(Failure(ObjectNotFoundError, "no such object"))
        return name


class _Answer:
    """As much of an HTTP response as the client looks at."""

    def __init__(self, data: bytes) -> None:
        self.headers = {"content-length": str(len(data))}
        self.status_code = 206
        self._data = data

    def iter_content(self, size: int) -> Any:
        """The body in pieces."""
        return (self._data[i : i + size] for i in range(0, len(self._data), size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _item(name: str, size: int) -> dict[str, str]:
    checksum = base64.b64encode(b"\0\0\0\1").decode()
    return {"name": name, "size": str(size), "crc32c": checksum, "generation": GENERATION, "timeCreated": CREATED}


def listed_files(units: int) -> list[InputFile]:
    """One input file for each unit: the costliest plan there is for so many units."""
    return [InputFile(f"gs://my-bucket/corpus/part-{i:08d}.jsonl", UNIT_BYTES, f"17{i:014d}") for i in range(units)]


def planned(files: Sequence[InputFile]) -> Sequence[Unit]:
    """The units of those files."""
    return Files("gs://my-bucket/corpus", unit_bytes=UNIT_BYTES).units_of(files)


def footer(unit: Unit) -> UnitFooter:
    """What a committed unit says of itself."""
    return UnitFooter(
        unit.id,
        rows=ROWS,
        chunks=(ROWS,),
        rows_in=ROWS,
        input_fingerprint=unit.fingerprint,
        params_fingerprint=PARAMS,
        code_fingerprint="c" * 32,
        lease_epoch=1,
    )


def unit_object(unit: Unit) -> bytes:
    """A committed unit."""
    return encode_unit(ROWS_OF_A_UNIT, chunk_rows=ROWS, footer=footer(unit))


def prepare(count: int, case: str) -> tuple[int, dict[str, bytes]]:
    """Size of a unit's object, and the other objects that the store holds before."""
    paths = RunPaths(*RUN)
    units = planned(listed_files(count))
    size = len(unit_object(units[0]))
    schema = ROWS_OF_A_UNIT.schema
    if case == "compacted":
        known = (Committed(footer(u), schema, size, 1, GENERATION) for u in itertools.islice(units, count - PENDING))
        return size, {paths.compacted(STAGE): CommittedUnits.of(known).encode()}
    if case == "finished":
        entries = tuple(ManifestUnit(u.id, ROWS, (ROWS,), size, 1) for u in units)
        manifest = Manifest(STAGE, entries, merge_schemas([schema]), {"rows_in": str(ROWS * count)})
        return size, {paths.manifest(STAGE): manifest.to_json()}
    return size, {}


def measure(count: int, case: str) -> dict[str, Any]:
    """Plans the inputs and finds out what is pending."""
    # In a process of its own, so that the peak is that of planning.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        size, objects = pool.submit(prepare, count, case).result()
    paths = RunPaths(*RUN)
    bucket = Bucket(paths.units(STAGE), size, objects)
    store = GcsStore(StoreURI.parse("gs://my-bucket"), RetryPolicy(timeout_s=60, attempts=1), bucket)  # type: ignore[arg-type] # a double
    files = listed_files(count)
    before_mb = _peak_mb()
    run = SimpleNamespace(store=store, paths=paths)
    began, cpu_began = time.monotonic(), time.process_time()
    units = planned(files)
    del files
    inputs_s = time.monotonic() - began
    bucket.units, bucket.committed = units, count - PENDING
    if case == "finished":
        manifest = read_manifest(store, paths, STAGE)
        pending = 0 if manifest is not None and manifest.rows == ROWS * count else count
    else:
        todo, committed = resume_units(run, STAGE, units, PARAMS)  # type: ignore[arg-type] # what it looks at
        pending = len(todo)
        assert len(committed) + pending == count  # noqa: S101 - or the measurement means nothing
    return {
        "case": case,
        "units": count,
        "pending": pending,
        "seconds": round(time.monotonic() - began - bucket.seconds, 2),
        "cpu_s": round(time.process_time() - cpu_began - bucket.cpu_s, 2),
        "double_s": round(bucket.seconds, 2),
        "inputs_s": round(inputs_s, 2),
        "peak_mb": round(_peak_mb()),
        "before_mb": round(before_mb),
        "requests": bucket.requests,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1_000_000)
    parser.add_argument("--case", choices=("compacted", "footers", "finished"), default="compacted")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    measured = measure(arguments.units, arguments.case)
    if arguments.json:
        sys.stdout.write(json.dumps(measured) + "\n")
        return
    for name, value in measured.items():
        sys.stdout.write(f"{name:>18}  {value}\n")


if __name__ == "__main__":
    main()
