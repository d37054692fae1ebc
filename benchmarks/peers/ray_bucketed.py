"""Ray Data with buckets done by hand: a batch is a whole input file, its rows grouped by bucket.

As ``ray_padded`` otherwise. All programs are compiled in ``__init__``; the batches of one call are all dispatched before the
first is fetched. Which rows share a batch is decided by hand, each bucket's last batch being what is left over, or with
``packed`` by tpupipe's own packer, which fills such batches with shorter rows. With a folder for it, Ray Data's own
checkpoint by row id is on.

    python -m benchmarks.peers.ray_bucketed WORK_JSON ROWS_FOLDER WEIGHTS FOLDER RAY_ADDRESS by-hand|packed [CHECKPOINT]
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray.data.checkpoint import CheckpointConfig

from benchmarks.common import SLICE
from benchmarks.encoder import OUTPUT, encode_rows, load_weights
from benchmarks.rows import CallLog, RowsWork
from tpupipe.data.buckets import Buckets, plan_batches

Batch = tuple[NDArray[np.int64], int, int]
"""Row numbers, rows of the static shape, and its length."""


class Encoder:
    """The model on all devices of a host, one program per bucket.

    Args:
        weights: The weights' file.
        work: The buckets.
        calls: Where calls are written down.
        packed: Whether tpupipe's packer decides which rows share a batch.
    """

    def __init__(self, weights: str, work: RowsWork, calls: str, *, packed: bool) -> None:
        # ruff: noqa: PLC0415 - JAX belongs to the actors
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.sharding = NamedSharding(mesh, PartitionSpec("data"))
        replicated = NamedSharding(mesh, PartitionSpec())
        self.devices = len(jax.devices())
        self.packed = packed
        self.buckets = Buckets(tuple(work.lengths), batch_tokens=work.batch_tokens)
        self.weights = jax.device_put(load_weights(Path(weights).read_bytes()), replicated)
        self.encode = jax.jit(encode_rows, out_shardings=self.sharding)
        self.calls = CallLog(calls)
        began = time.monotonic()
        for length in self.buckets.lengths:  # compile before the first rows come
            rows = self.buckets.rows_for(length, multiple=self.devices)
            jax.block_until_ready(self._run([], rows, length))
        self.calls.ready(time.monotonic() - began, len(self.buckets.lengths))

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One batch of the data set: a whole file."""
        tokens = batch["tokens"]
        lengths = [len(row) for row in tokens]
        batches = self._packed(lengths) if self.packed else self._by_hand(lengths)
        results = [self._run(tokens[rows], batch_rows, length) for rows, batch_rows, length in batches]
        vectors = np.empty((len(tokens), OUTPUT), np.float32)
        for (rows, _, _), result in zip(batches, results, strict=True):
            vectors[rows] = np.asarray(result)[: len(rows)]
        self.calls.call(len(tokens), sum(batch_rows * length for _, batch_rows, length in batches), sum(lengths))
        return {"id": batch["id"], "vector": vectors}

    def _by_hand(self, lengths: list[int]) -> list[Batch]:
        """Rows of one bucket share batches; the last batch of each has the rows that are left over."""
        bucket_of = np.searchsorted(self.buckets.lengths, lengths)
        batches: list[Batch] = []
        for bucket, length in enumerate(self.buckets.lengths):
            rows = np.flatnonzero(bucket_of == bucket)
            size = self.buckets.rows_for(length, multiple=self.devices)
            batches += [(rows[at : at + size], size, length) for at in range(0, len(rows), size)]
        return batches

    def _packed(self, lengths: list[int]) -> list[Batch]:
        planned = plan_batches(lengths, self.buckets, row_multiple=self.devices)
        return [(batch.rows, batch.batch_rows, batch.bucket_length) for batch in planned]

    def _run(self, rows: Any, batch_rows: int, length: int) -> Any:
        import jax

        tokens = np.zeros((batch_rows, length), np.int32)
        lengths = np.zeros(batch_rows, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            lengths[i] = len(row)
        batch = jax.device_put({"tokens": tokens, "lengths": lengths}, self.sharding)
        return self.encode(self.weights, batch)["vector"]


def main(
    work: RowsWork, rows: str, weights: str, folder: Path, *, address: str, packed: bool, checkpoint: str | None
) -> None:
    """Encodes all rows."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    if checkpoint is not None:
        context.checkpoint_config = CheckpointConfig("id", checkpoint, delete_checkpoint_on_success=False)
    ds = ray.data.read_parquet(rows, override_num_blocks=work.units)  # or small files are one block, for one actor
    ds = ds.map_batches(
        Encoder,
        fn_constructor_args=(weights, work, str(folder / "calls")),
        fn_constructor_kwargs={"packed": packed},
        batch_size=work.unit_rows,
        compute=ray.data.ActorPoolStrategy(size=SLICE.hosts),
        num_cpus=1,
        resources={"TPU": SLICE.chips_per_host},
    )
    ds.write_parquet(str(folder / "out"))


if __name__ == "__main__":
    given = RowsWork.from_json(sys.argv[1])
    main(
        given,
        sys.argv[2],
        sys.argv[3],
        Path(sys.argv[4]),
        address=sys.argv[5],
        packed=sys.argv[6] == "packed",
        checkpoint=sys.argv[7] if len(sys.argv) > 7 else None,
    )
