"""Ask the embeddings that ``jobs.embed_text`` made: which texts are nearest to a question.

    python -m jobs.nearest FOLDER "read a file line by line" "wait for a child process"

FOLDER is where the stage's units are; with configs/local.yaml and run ``first``
.tpupipe/gcs/tpupipe-local/runs/embed-text/first/stages/embedded/units.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.embed_text import MAX_TOKENS, WIDTH, embed, load, model_files, tokenised


def read_embeddings(folder: str) -> tuple[NDArray[np.float32], Any]:
    """Read the output of the stage as one dataset.

    Args:
        folder: Where its Parquet files are.

    Returns:
        ``float32[N, 384]``, and a table of N rows: ``file``, ``line``, ``kind``, ``text``.
    """
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(folder, format="parquet").to_table(
        columns=["embedding", "file", "line", "kind", "text"]
    )
    flat = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(-1, WIDTH), table.drop_columns("embedding")


def embed_here(texts: list[str]) -> NDArray[np.float32]:
    """Embed a few texts in this process, on its CPU, padded to the longest: ``float32[n, 384]``."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # a few questions are no work for chips, which may be in use
    import jax

    rows = tokenised(texts)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), min(int(lengths.max()), MAX_TOKENS)), np.int32)
    for row, into in zip(rows, tokens, strict=True):
        into[: len(row)] = row
    params = load((model_files() / "model.safetensors").read_bytes())
    return np.asarray(jax.jit(embed)(params, {"tokens": tokens, "lengths": lengths})["embedding"])


def nearest(
    embeddings: NDArray[np.float32], questions: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the rows with the largest cosine.

    Args:
        embeddings: ``[N, D]`` of unit length.
        questions: ``[Q, D]`` of unit length.
        count: How many for each question.

    Returns:
        Row numbers ``[Q, count]`` (fewer where N is less), nearest first, and their cosines.
    """
    cosines = questions @ embeddings.T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(cosines, order, axis=1)


def main(arguments: list[str] | None = None) -> int:
    """Print the nearest texts of every question."""
    parser = argparse.ArgumentParser(prog="python -m jobs.nearest", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the stage's Parquet files are")
    parser.add_argument("question", nargs="+")
    parser.add_argument("-n", type=int, default=3, help="answers per question (3)", dest="count")
    chosen = parser.parse_args(arguments)
    if not any(Path(chosen.folder).glob("*.parquet")):
        parser.error(
            f"{chosen.folder} holds no .parquet file; a run's are in <store>/embed-text/<run>/stages/embedded/units"
        )
    embeddings, table = read_embeddings(chosen.folder)
    order, cosines = nearest(embeddings, embed_here(chosen.question), chosen.count)
    print(f"{len(embeddings)} texts")  # noqa: T201 - the answer
    for question, rows, near in zip(chosen.question, order, cosines, strict=True):
        print(f"\n{question}")  # noqa: T201
        for row, cosine in zip(table.take(rows).to_pylist(), near, strict=True):
            text = textwrap.shorten(row["text"], 90, placeholder=" …")
            print(f"  {cosine:.3f}  {row['file']}:{row['line']}  {text}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
