"""One of two processes that hold a model together; prints what its engine gave back.

Arguments: address, process, and the process whose third window is another one (-1: none).
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpupipe.data.sources import JsonLines
from tpupipe.job import Infer
from tpupipe.programs.infer import infer_mesh
from tpupipe.programs.infer_batches import ready_window
from tpupipe.programs.infer_rows import MappedWindow
from tpupipe.programs.sharding import put_whole, state_shardings
from tpupipe.stages.infer_engine import Computed, InferEngine


def apply(params: Any, batch: Any) -> Any:
    return {"y": batch["x"] @ params, "seen": jnp.sum(batch["mask"]) * jnp.ones_like(batch["x"][:, 0])}


def window(start: int, rows: int) -> MappedWindow:
    x = (np.arange(rows * 4).reshape(rows, 4) + start).astype(np.float32)
    return MappedWindow({"x": x}, {}, np.arange(rows), None, rows, 0)


def main(address: str, process: int, strayed: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    stage = Infer("s", JsonLines("x"), "fit", apply=apply, batch_rows=6, sharding="fsdp", parallel="sharded")
    mesh, rows = infer_mesh(stage, jax.devices())
    weights = np.arange(32, dtype=np.float32).reshape(4, 8)
    params = put_whole(weights, state_shardings(weights, mesh, stage.sharding, stage.batch_axes))
    engine = InferEngine(stage, params, mesh, rows, lambda *_: contextlib.nullcontext())
    got: list[Any] = []
    for start, count in ((0, 10), (7, 3), (20, 5)):
        mapped = window(start + (start == 20 and strayed == process), count)
        engine.submit(ready_window(stage, f"u{start}", mapped, engine.devices, engine.spec), got.append)
    while engine.collect():
        pass
    outputs = [
        {"rows": g.outputs["y"].tolist(), "seen": g.outputs["seen"].tolist()}
        if isinstance(g, Computed)
        else {"error": type(g).__name__, "message": str(g)}
        for g in got
    ]
    sys.stdout.write(
        json.dumps({"devices": engine.devices, "local": params.addressable_shards[0].data.size, "got": outputs}) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
