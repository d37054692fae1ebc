"""A job small enough for tests, whose state remembers what it was fed: ``order[step]`` are the ids of that step."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

import tpupipe
from tpupipe import Every, Infer, JsonLines, OnPreemption, Preprocess, Quarantine, Train


class Params(BaseModel):
    inputs: str
    rows: int = 100
    batch_size: int = 10
    steps: int = 10
    every: int = 5
    shuffle: bool = False
    break_at: str = ""
    width: int = 8
    with_empty: bool = False
    score: bool = True
    bad_id: int = -1
    die_id: int = -1
    quarantine: bool = False
    sharded: bool = False


def keep_ids(batch: Any) -> Any:
    return {"id": np.asarray(batch["id"], np.int32)}


def failing_map(_: Any) -> Any:
    raise ZeroDivisionError("the job's own mistake")


def hang_for_ever() -> None:
    """Leaves a file that says so, where the test has marked its processes with a folder."""
    if mark := os.environ.get("TPUPIPE_TEST_MARK"):
        Path(mark, "hangs").touch()
    threading.Event().wait()


class Picky:
    """Keeps ids, but raises at one of them and dies at another."""

    def __init__(self, bad_id: int, die_id: int) -> None:
        self.bad_id, self.die_id = bad_id, die_id

    def __call__(self, batch: Any) -> Any:
        ids = np.asarray(batch["id"], np.int32)
        if self.die_id in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.bad_id in ids:
            raise ValueError(f"id {self.bad_id} cannot be used")
        return {"id": ids}


class Model:
    def __init__(self, steps: int, batch_size: int, width: int, break_at: str) -> None:
        self.steps, self.batch_size, self.width, self.break_at = steps, batch_size, width, break_at

    def init(self, key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        if self.break_at == "init":
            hang_for_ever()
        return {
            "params": {"w": jax.random.normal(key, (self.width, 4)), "b": jnp.zeros((self.width,))},
            "order": jnp.full((self.steps, self.batch_size), -1, jnp.int32),
            "step": jnp.zeros((), jnp.int32),
        }

    def step(self, state: Any, batch: Any) -> Any:
        import jax
        import jax.numpy as jnp

        if self.break_at == "step":
            raise ZeroDivisionError("the job's own mistake")
        x = jnp.sin(batch["id"].astype(jnp.float32))[:, None] * jnp.ones((1, self.width))

        def loss(p: Any) -> Any:
            return jnp.sum(jnp.where(batch["mask"], jnp.sum(jnp.tanh(x @ p["w"]), axis=1) - 1.0, 0.0) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], gradients)
        order = state["order"].at[state["step"]].set(jnp.where(batch["mask"], batch["id"], -1))
        slices = int(os.environ.get("MEGASCALE_NUM_SLICES", "1"))
        metrics = {"loss": value, "first_id": batch["id"][0], "slices": jnp.asarray(slices)}
        return {"params": params, "order": order, "step": state["step"] + 1}, metrics

    def apply(self, params: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        return {"id": batch["id"], "score": batch["id"] * 2.0 + 0.0 * jnp.sum(params["w"])}


def no_rows(_: Any) -> Any:
    return {"id": np.empty((0,), np.int32)}


def model(cfg: Params) -> Model:
    return Model(cfg.steps, cfg.batch_size, cfg.width, cfg.break_at)


def build(cfg: Params) -> tpupipe.Job:
    return job(cfg, model(cfg))


def job(cfg: Params, lm: Model) -> tpupipe.Job:
    source = JsonLines(cfg.inputs, unit_bytes=300)
    scores = Infer(
        "scores",
        data=source,
        map=Picky(cfg.bad_id, cfg.die_id),
        params="fit",
        apply=lm.apply,
        bad_rows=Quarantine(max=2) if cfg.quarantine else "fail",
        parallel="sharded" if cfg.sharded else "replica",
        sharding="fsdp" if cfg.sharded else "replicated",
    )
    nothing = Infer("nothing", data=source, map=no_rows, params="fit", apply=lm.apply)
    return tpupipe.Job(
        "small",
        [
            Preprocess(
                "ids",
                source=source,
                map=failing_map if cfg.break_at == "map" else keep_ids,
                chunk_rows=8,
            ),
            Train(
                "fit",
                data="ids",
                init=lm.init,
                step=lm.step,
                batch_size=cfg.batch_size,
                steps=cfg.steps,
                shuffle=cfg.shuffle,
                batch_axes=("data",) if cfg.batch_size % 8 == 0 else (),
                mesh={"data": -1},
                checkpoint=[Every(steps=cfg.every, keep=3), OnPreemption()],
            ),
            *([scores] if cfg.score else []),
            *([nothing] if cfg.with_empty else []),
        ],
    )


if __name__ == "__main__":
    tpupipe.main(build)
