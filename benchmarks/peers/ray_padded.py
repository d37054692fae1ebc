"""Ray Data's recipe for batch inference, every row padded to the longest length.

The guide (docs.ray.io, "End-to-end: Offline Batch Inference"): ``read_parquet``, ``map_batches`` with a class that loads
the model in ``__init__``, an ``ActorPoolStrategy`` of a fixed size with the accelerators of each actor, ``write_parquet``.

    python -m benchmarks.peers.ray_padded WORK_JSON ROWS_FOLDER WEIGHTS FOLDER RAY_ADDRESS
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

from benchmarks.common import SLICE
from benchmarks.encoder import LONGEST, encode_rows, load_weights
from benchmarks.rows import CallLog, RowsWork


class Encoder:
    """The model on all devices of a host.

    Args:
        weights: The weights' file.
        rows: Rows of a batch.
        calls: Where calls are written down.
    """

    def __init__(self, weights: str, rows: int, calls: str) -> None:
        # ruff: noqa: PLC0415 - JAX belongs to the actors
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.sharding = NamedSharding(mesh, PartitionSpec("data"))
        replicated = NamedSharding(mesh, PartitionSpec())
        self.rows = rows
        self.weights = jax.device_put(load_weights(Path(weights).read_bytes()), replicated)
        self.encode = jax.jit(encode_rows, out_shardings=self.sharding)
        self.calls = CallLog(calls)
        began = time.monotonic()
        self._run([np.zeros(1, np.int32)])  # compile before the first rows come
        self.calls.ready(time.monotonic() - began, 1)

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One batch of the data set."""
        vectors = self._run(batch["tokens"])
        self.calls.call(len(vectors), self.rows * LONGEST, sum(map(len, batch["tokens"])))
        return {"id": batch["id"], "vector": vectors}

    def _run(self, rows: Any) -> NDArray[np.float32]:
        import jax

        tokens = np.zeros((self.rows, LONGEST), np.int32)
        lengths = np.zeros(self.rows, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            lengths[i] = len(row)
        outputs = self.encode(self.weights, jax.device_put({"tokens": tokens, "lengths": lengths}, self.sharding))
        return np.asarray(outputs["vector"])[: len(rows)]


def main(work: RowsWork, rows: str, weights: str, folder: Path, address: str) -> None:
    """Encodes all rows."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ds = ray.data.read_parquet(rows, override_num_blocks=work.units)  # or small files are one block, for one actor
    ds = ds.map_batches(
        Encoder,
        fn_constructor_args=(weights, work.padded_rows, str(folder / "calls")),
        batch_size=work.padded_rows,
        compute=ray.data.ActorPoolStrategy(size=SLICE.hosts),
        num_cpus=1,
        resources={"TPU": SLICE.chips_per_host},
    )
    ds.write_parquet(str(folder / "out"))


if __name__ == "__main__":
    main(RowsWork.from_json(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
