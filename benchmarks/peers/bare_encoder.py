"""The limit: the same programs over the same packed batches, padded and in memory beforehand; nothing is read or written.

One process per faked host, with every other unit each. They begin together.

    python -m benchmarks.peers.bare_encoder WORK_JSON ROWS_FOLDER WEIGHTS FOLDER RANK HOSTS
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from benchmarks.encoder import OUTPUT, encode_rows, load_weights
from benchmarks.rows import CallLog, RowsWork, parquet_files
from tpupipe.data.buckets import Buckets, plan_batches

NICENESS = 15  # that of Ray's worker processes
IN_FLIGHT = 3  # as in the stage that is measured against this
BARRIER_TIMEOUT_S = 120.0


def main(work: RowsWork, rows: Path, weights: Path, folder: Path, *, rank: int, hosts: int) -> None:
    """Encodes this process's share; then, with the clock stopped, writes it to be compared."""
    os.nice(NICENESS)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    buckets = Buckets(tuple(work.lengths), batch_tokens=work.batch_tokens)
    placed = jax.device_put(load_weights(weights.read_bytes()), replicated)
    encode = jax.jit(encode_rows, out_shardings=sharding)
    calls = CallLog(folder / "calls")
    began = time.monotonic()
    for length in buckets.lengths:
        batch = pad([], buckets.rows_for(length, multiple=jax.device_count()), length)
        jax.block_until_ready(encode(placed, jax.device_put(batch, sharding)))
    compile_s = time.monotonic() - began

    ids = []
    fed: list[tuple[NDArray[np.int64], dict[str, NDArray[Any]]]] = []
    total = 0
    for file in parquet_files(rows)[rank::hosts]:
        table = pq.read_table(file)
        tokens = table["tokens"].to_numpy()
        fed += [
            (total + packed.rows, pad(tokens[packed.rows], packed.batch_rows, packed.bucket_length))
            for packed in plan_batches([len(row) for row in tokens], buckets, row_multiple=jax.device_count())
        ]
        ids.append(table["id"].to_numpy())
        total += table.num_rows
    vectors = np.empty((total, OUTPUT), np.float32)
    flying: deque[tuple[NDArray[np.int64], Any]] = deque()

    def land() -> None:
        places, result = flying.popleft()
        vectors[places] = np.asarray(result)[: len(places)]

    wait_for_all(folder / "barrier", rank, hosts)
    calls.ready(compile_s, len(buckets.lengths))
    for places, batch in fed:
        result = encode(placed, jax.device_put(batch, sharding))["vector"]
        result.copy_to_host_async()
        flying.append((places, result))
        if len(flying) > IN_FLIGHT:
            land()
    while flying:
        land()
    ended = time.time()
    calls.call(total, sum(b["tokens"].size for _, b in fed), sum(int(b["lengths"].sum()) for _, b in fed))
    (folder / "out").mkdir(exist_ok=True)
    file = folder / "out" / f"{rank}.parquet"
    pq.write_table(pa.table({"id": np.concatenate(ids), "vector": list(vectors)}), file)
    os.utime(file, (ended, ended))  # the output was there, in memory, at that time


def pad(rows: Any, batch_rows: int, length: int) -> dict[str, NDArray[Any]]:
    """A batch of a static shape."""
    batch = {"tokens": np.zeros((batch_rows, length), np.int32), "lengths": np.zeros(batch_rows, np.int32)}
    for i, row in enumerate(rows):
        batch["tokens"][i, : len(row)] = row
        batch["lengths"][i] = len(row)
    return batch


def wait_for_all(folder: Path, rank: int, hosts: int) -> None:
    """Returns when all processes have come so far.

    Raises:
        TimeoutError: One did not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).touch()
    ends = time.monotonic() + BARRIER_TIMEOUT_S
    while len(list(folder.iterdir())) < hosts:
        if time.monotonic() > ends:
            raise TimeoutError(f"{len(list(folder.iterdir()))} of {hosts} processes after {BARRIER_TIMEOUT_S:.0f} s")
        time.sleep(0.005)


if __name__ == "__main__":
    given = RowsWork.from_json(sys.argv[1])
    main(given, *map(Path, sys.argv[2:5]), rank=int(sys.argv[5]), hosts=int(sys.argv[6]))
