"""The job that is measured in ``infer.py``: a small transformer encoder over rows of different lengths.

Two layers of width 128: 0.8 MFLOP a token in its matrices, and attention within the row beside that.
"""

# ruff: noqa: PLC0415 - a job module is imported by the driver too, which has no use for JAX

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from typing import Any

import pydantic

import tpupipe

JOB, STAGE = "bench-encoder", "encode"
LONGEST = 512
VOCABULARY = 4096
WIDTH, HEADS, LAYERS, OUTPUT = 128, 2, 2, 32
LENGTHS = (24, 32, 40, 48, 64, 80, 96, 112, 136, 160, 184, 216, 256, 320, 400, 512)
"""The sixteen lengths that pad the rows of ``benchmarks.rows`` least; the peers that pack by hand get the same."""


class Params(pydantic.BaseModel):
    """The job's section of the configuration.

    Args:
        inputs: Glob of Parquet files with ``id`` (int64) and ``tokens`` (list of int32).
        weights: File that ``save_weights`` wrote.
        batch_tokens: Tokens of a batch, padding included.
    """

    inputs: str
    weights: str
    batch_tokens: int = 1536


def build(params: Params) -> tpupipe.Job:
    """Declare the job: one vector per row."""
    encode = tpupipe.Infer(
        STAGE,
        data=tpupipe.Parquet(params.inputs),
        params=tpupipe.Pretrained(params.weights, load=load_weights),
        apply=encode_rows,
        buckets=tpupipe.Buckets(lengths=LENGTHS, batch_tokens=params.batch_tokens, column="tokens"),
        keep=("id",),
    )
    return tpupipe.Job(JOB, [encode])


# -- the model ------------------------------------------------------------------------------


def make_weights(seed: int) -> dict[str, Any]:
    """Random weights by name, float32."""
    import numpy as np

    shapes = {"embedding": (VOCABULARY, WIDTH), "output": (WIDTH, OUTPUT)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.qkv": (WIDTH, 3 * WIDTH),
            f"{layer}.mix": (WIDTH, WIDTH),
            f"{layer}.up": (WIDTH, 4 * WIDTH),
            f"{layer}.down": (4 * WIDTH, WIDTH),
        }
    weights = {}
    for name, shape in shapes.items():
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scale = 1.0 if name == "embedding" else shape[0] ** -0.5
        weights[name] = (scale * random.standard_normal(shape)).astype(np.float32)
    return weights


def save_weights(weights: Mapping[str, Any]) -> bytes:
    """The weights as one ``.npz``."""
    import numpy as np

    file = io.BytesIO()
    np.savez(file, **weights)
    return file.getvalue()


def load_weights(content: bytes) -> dict[str, Any]:
    """What ``save_weights`` wrote."""
    import numpy as np

    with np.load(io.BytesIO(content)) as file:
        return dict(file)


def encode_rows(weights: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """One vector of length 1 per row: ``tokens`` ``int32[B, L]`` and ``lengths`` ``int32[B]`` to ``vector`` ``f32[B, 32]``.

    The result does not depend on L.
    """
    import jax
    import jax.numpy as jnp

    tokens, lengths = batch["tokens"], batch["lengths"]
    rows, length = tokens.shape
    real = jnp.arange(length) < lengths[:, None]
    frequency = 10_000.0 ** -(jnp.arange(WIDTH // 2) / (WIDTH // 2))
    angle = jnp.arange(length)[:, None] * frequency
    x = weights["embedding"][tokens] + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
    bias = jnp.where(real, 0.0, -1e9)[:, None, None, :]
    for layer in range(LAYERS):
        qkv = _normalised(x) @ weights[f"{layer}.qkv"]
        q, k, v = qkv.reshape(rows, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(2, 3) * (WIDTH // HEADS) ** -0.5
        mixed = (jax.nn.softmax(scores + bias) @ v).swapaxes(1, 2).reshape(rows, length, WIDTH)
        x = x + mixed @ weights[f"{layer}.mix"]
        x = x + jax.nn.relu(_normalised(x) @ weights[f"{layer}.up"]) @ weights[f"{layer}.down"]
    pooled = (x * real[:, :, None]).sum(1) / jnp.maximum(lengths, 1)[:, None]
    vector = pooled @ weights["output"]
    norm = jnp.sqrt((vector**2).sum(1, keepdims=True) + 1e-12)
    return {"vector": vector / norm}


def _normalised(x: Any) -> Any:
    import jax.numpy as jnp

    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
