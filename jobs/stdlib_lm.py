"""Train a byte-level language model on the Python standard library, then score files it has not seen.

A decoder-only transformer in plain JAX: RMSNorm, rotary positions, causal attention, AdamW. The input is real
text that is on every machine which runs Python; about one file in fifty is held out, decided by its name.

    tpupipe run jobs.stdlib_lm -c configs/local.yaml
    python -m jobs.stdlib_lm -c configs/local.yaml --set job.steps=400
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

import tpupipe
from tpupipe import Buckets, Every, Files, Infer, Preprocess, Train

SEPARATOR = 0
"""The byte between two files and before every scored piece; it does not occur in source text."""

_HELD_OUT_ONE_IN = 50
# Not sources of the library itself, or (tests, idlelib) as much text again without being other text.
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Params(BaseModel):
    """The ``job:`` section of the configuration.

    Args:
        width: Size of the residual stream.
        layers: Transformer blocks.
        heads: Attention heads.
        seq_len: Bytes of context.
        batch_size: Rows of one global batch.
        steps: Optimiser steps.
        seed: Seed of the parameters and of the order of rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(default=64, ge=4, le=8192)
    layers: int = Field(default=2, ge=1, le=128)
    heads: int = Field(default=4, ge=1, le=128)
    seq_len: int = Field(default=128, ge=8, le=8192)
    batch_size: int = Field(default=32, ge=1)
    steps: int = Field(default=160, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Params:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of 2 * heads = {2 * self.heads} (rotary pairs)")
        return self


@dataclass(frozen=True)
class TinyLM:
    """The model as three pure functions: ``init``, ``train_step`` and ``nll``.

    Args:
        width: Size of the residual stream.
        layers: Transformer blocks.
        heads: Attention heads.
        steps: Length of the learning rate's schedule.
    """

    width: int
    layers: int
    heads: int
    steps: int

    def init(self, key: Any) -> dict[str, Any]:
        """Make the training state: ``{"params", "opt"}``, all float32 but the optimiser's step count."""
        import jax
        import jax.numpy as jnp

        def normal(index: int, *shape: int) -> Any:
            return jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32) * shape[-2] ** -0.5

        d, n = self.width, self.layers
        params = {
            "embed": normal(0, 256, d) * 16 / d**0.5,  # rows of unit length per coordinate / sqrt(d): also the output
            "norm": jnp.ones((d,)),
            "blocks": {  # stacked: few large arrays are reduced over the hosts faster than many small ones
                "qkv": normal(1, n, d, 3 * d),
                "out": normal(2, n, d, d) * (2 * n) ** -0.5,
                "up": normal(3, n, d, 4 * d),
                "down": normal(4, n, 4 * d, d) * (2 * n) ** -0.5,
                "norms": jnp.ones((n, 2, d)),
            },
        }
        return {"params": params, "opt": self._optimiser().init(params)}

    def train_step(self, state: dict[str, Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take one AdamW step.

        Args:
            state: From ``init`` or the step before.
            batch: ``tokens: uint8[B, seq_len + 1]``, ``mask: bool[B]``.

        Returns:
            The next state, and ``loss`` (nats per byte) and ``grad_norm``, both before the step.
        """
        import jax
        import jax.numpy as jnp
        import optax

        tokens, mask = batch["tokens"].astype(jnp.int32), batch["mask"]

        def mean_loss(params: Any) -> Any:
            rows = self._losses(params, tokens[:, :-1], tokens[:, 1:]).mean(axis=1)
            return jnp.sum(rows * mask) / jnp.maximum(mask.sum(), 1)

        loss, gradients = jax.value_and_grad(mean_loss)(state["params"])
        updates, opt = self._optimiser().update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss, "grad_norm": optax.tree.norm(gradients)}

    def nll(self, params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Score rows. Padding behind a row's length changes nothing, as no position looks ahead.

        Args:
            params: ``state["params"]``.
            batch: ``tokens: uint8[B, L]`` padded to L, ``lengths: int32[B]``.

        Returns:
            ``nll: float32[B]``, mean nats per byte of the row, every byte predicted from those before it and
            the first from ``SEPARATOR``; ``bytes: int32[B]``, how many that are.
        """
        import jax.numpy as jnp

        tokens, lengths = batch["tokens"].astype(jnp.int32), batch["lengths"]
        inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=SEPARATOR)
        real = jnp.arange(tokens.shape[1]) < lengths[:, None]
        total = jnp.sum(self._losses(params, inputs, tokens) * real, axis=1)
        return {"nll": total / jnp.maximum(lengths, 1), "bytes": lengths}

    def logits(self, params: Any, tokens: Any) -> Any:
        """Predict the next byte at every position: ``int32[B, L]`` -> ``float32[B, L, 256]``."""
        import jax
        import jax.numpy as jnp

        rows, length = tokens.shape
        head = self.width // self.heads
        rotate = _rotary(length, head)
        causal = jnp.tril(jnp.ones((length, length), bool))

        def block(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
            qkv = _rms_norm(x, p["norms"][0]) @ p["qkv"]
            q, k, v = (part.reshape(rows, length, self.heads, head) for part in jnp.split(qkv, 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) * head**-0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, self.width)
            x = x + mixed @ p["out"]
            return x + jax.nn.gelu(_rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"], None

        x, _ = jax.lax.scan(block, params["embed"][tokens] * self.width**0.5, params["blocks"])
        return _rms_norm(x, params["norm"]) @ params["embed"].T

    def _losses(self, params: Any, inputs: Any, targets: Any) -> Any:
        """Nats of every target byte: ``float32[B, L]``."""
        import optax

        return optax.softmax_cross_entropy_with_integer_labels(self.logits(params, inputs), targets)

    def _optimiser(self) -> Any:
        import optax

        warmup = min(20, self.steps // 5)
        rate = optax.warmup_cosine_decay_schedule(1e-4, 1e-2, warmup, max(self.steps, warmup + 1), 1e-3)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


def _rms_norm(x: Any, scale: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _rotary(length: int, head: int) -> Any:
    """Give the function that rotates pairs of ``[B, L, H, head]`` by their position (RoPE, arXiv:2104.09864)."""
    import jax.numpy as jnp

    frequency = 1e4 ** -(jnp.arange(0, head, 2) / head)
    angle = jnp.arange(length)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    return rotate


@dataclass(frozen=True)
class Pack:
    """Training rows of one unit: its files joined by ``SEPARATOR`` and cut to equal rows.

    Args:
        seq_len: Bytes of context; a row is one longer, and starts with the last byte of the row before.
    """

    seq_len: int

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Map ``{text: object[n]}`` to ``{tokens: uint8[rows, seq_len + 1]}``."""
        text = bytes([SEPARATOR]).join([b"", *(text.encode() for text in batch["text"]), b""])
        stream = np.frombuffer(text, np.uint8)
        rows = max(-(-(len(stream) - 1) // self.seq_len), 1)
        padded = np.full(rows * self.seq_len + 1, SEPARATOR, np.uint8)
        padded[: len(stream)] = stream
        tokens = np.lib.stride_tricks.sliding_window_view(padded, self.seq_len + 1)[:: self.seq_len]
        # Neighbours in a file are alike: mixed here, a chunk (and so a batch) holds text of many files. The golden
        # ratio's step visits every row once because it is made coprime to their number.
        stride = max(int(rows * 0.618), 1)
        while np.gcd(stride, rows) != 1:
            stride += 1
        return {"tokens": tokens[np.arange(rows) * stride % rows]}


@dataclass(frozen=True)
class Split:
    """Rows to score: every held-out file cut to pieces, none left out.

    Args:
        piece_bytes: Bytes of a piece; the last of a file may be shorter. Pieces are scored one by one, without
            the text before them.
    """

    piece_bytes: int

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Map ``{path, text: object[n]}`` to ``{tokens: object[m] of uint8[<= piece_bytes], file, offset}``."""
        files, offsets, pieces = [], [], []
        for path, text in zip(batch["path"], batch["text"], strict=True):
            data = np.frombuffer(text.encode(), np.uint8)
            for start in range(0, len(data), self.piece_bytes):
                files.append(_relative(path))
                offsets.append(start)
                pieces.append(data[start : start + self.piece_bytes])
        tokens = np.empty(len(pieces), object)
        tokens[:] = pieces
        return {"tokens": tokens, "file": np.array(files, object), "offset": np.array(offsets, np.int64)}


def stdlib_files() -> tuple[list[str], list[str]]:
    """List the standard library's sources: ``(training files, held-out files)``, each sorted.

    A file is held out by the hash of its path inside the library, so the split is the same on every machine
    and does not move when other files come or go.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts) and path.stat().st_size:
            digest = hashlib.sha256(relative.as_posix().encode()).digest()
            (train if int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN else held_out).append(str(path))
    return train, held_out


def _relative(path: str) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path


def build(params: Params) -> tpupipe.Job:
    """Declare the job: pack, train, score."""
    model = TinyLM(params.width, params.layers, params.heads, params.steps)
    train, held_out = stdlib_files()
    lengths = sorted({max(params.seq_len // 4, 1), max(params.seq_len // 2, 1), params.seq_len})
    return tpupipe.Job(
        "stdlib-lm",
        [
            Preprocess("tokens", source=Files(train, unit_bytes=1_000_000), map=Pack(params.seq_len), chunk_rows=256),
            Train(
                "lm",
                data="tokens",
                init=model.init,
                step=model.train_step,
                batch_size=params.batch_size,
                steps=params.steps,
                seed=params.seed,
                mesh={"data": -1},
                checkpoint=Every(steps=max(params.steps // 8, 1), keep=3),
            ),
            Infer(
                "nll",
                data=Files(held_out, unit_bytes=100_000),
                map=Split(params.seq_len),
                params="lm",
                apply=model.nll,
                buckets=Buckets(lengths=tuple(lengths), column="tokens", batch_rows=64),
                keep=("file", "offset"),
            ),
        ],
    )


if __name__ == "__main__":
    tpupipe.main(build)
