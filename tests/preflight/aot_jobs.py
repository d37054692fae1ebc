"""Jobs that are only compiled: one of a chosen size, one that a TPU cannot run, and one that ends the compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

import tpupipe
from tpupipe import Buckets, Files, Infer, Preprocess, Train


class Params(BaseModel):
    """What a test chooses.

    Args:
        folder: Input files.
        width: Of each square layer.
        layers: Of the model.
        batch: Rows of a batch.
        operation: Done to the first layer's product: ``none``, ``eig`` or ``abort``.
        infer: Whether there is an inference stage.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    width: int = 256
    layers: int = 4
    batch: int = 64
    operation: str = "none"
    infer: bool = False


def rows(batch: Any) -> dict[str, Any]:
    """A row of 16 numbers for each file."""
    return {"x": np.ones((len(batch["text"]), 16), np.float32)}


def ragged(batch: Any) -> dict[str, Any]:
    """A ragged row for each file."""
    found = np.empty(len(batch["text"]), object)
    found[:] = [np.ones(3, np.int32) for _ in batch["text"]]
    return {"tokens": found}


def build(params: Params) -> tpupipe.Job:
    """Layers with momentum: each takes ``width ** 2 * 8`` bytes of state."""

    def init(key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        w = jax.random.normal(key, (params.layers, params.width, params.width), jnp.float32)
        return {"params": w, "momentum": jnp.zeros_like(w)}

    def step(state: Any, batch: Any) -> Any:
        import jax
        import jax.numpy as jnp

        x = jnp.pad(batch["x"], ((0, 0), (0, params.width - 16)))
        if params.operation == "eig":
            x = x + jnp.linalg.eig(x.T @ x)[0].real.sum()
        if params.operation == "abort":
            x = x + jnp.abs(jnp.linalg.cholesky((x.T @ x).astype(jnp.complex64))).sum()

        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, layer: (h @ layer, None), x, w)[0])

        value, gradient = jax.value_and_grad(loss)(state["params"])
        momentum = state["momentum"] * 0.9 + gradient
        return {"params": state["params"] - momentum, "momentum": momentum}, {"loss": value}

    def apply(weights: Any, batch: Any) -> dict[str, Any]:
        return {"sum": batch["tokens"].sum(axis=1) + weights[0, 0, 0]}

    stages: list[Any] = [
        Preprocess("rows", source=Files(f"{params.folder}/*.txt"), map=rows),
        Train("fit", data="rows", init=init, step=step, batch_size=params.batch, steps=10),
    ]
    if params.infer:
        buckets = Buckets((4, 8), batch_rows=16)
        stages.append(Infer("score", Files(f"{params.folder}/*.txt"), "fit", apply=apply, map=ragged, buckets=buckets))
    return tpupipe.Job("aot-test", stages)
