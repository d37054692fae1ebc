"""The rows of different lengths that ``infer.py`` has encoded, and what all of its contenders tell of themselves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.common import BenchmarkError
from benchmarks.encoder import LENGTHS, LONGEST, VOCABULARY

MEDIAN, SIGMA = 66, 0.8
TOLERANCE = 1e-4


@dataclass(frozen=True)
class RowsWork:
    """What every contender does.

    Args:
        units: Input files, one unit each.
        unit_rows: Rows of each.
        batch_tokens: Tokens of a batch of the contenders with buckets, padding included.
        padded_rows: Rows of a batch of the contender that pads everything to the longest length.
        lengths: The buckets.
        seed: Of rows and weights.
    """

    units: int
    unit_rows: int = 1024
    batch_tokens: int = 1536
    padded_rows: int = 8
    lengths: Sequence[int] = LENGTHS
    seed: int = 0

    @property
    def rows(self) -> int:
        """Of all units."""
        return self.units * self.unit_rows

    def to_json(self) -> str:
        """What the peers' processes are started with."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RowsWork:
        """Reads what ``to_json`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Encoded:
    """One contender, once.

    Args:
        seconds: From the time at which a worker had compiled (the mean over the workers) to the last output.
        startup_s: From the start of its process to that time.
        compile_s: Compiling, of it; the mean over the workers.
        compilations: Programs of one worker.
        padding: Share of the tokens fed that are padding.
        total_s: From the start of its process to its end.
    """

    seconds: float
    startup_s: float
    compile_s: float
    compilations: int
    padding: float
    total_s: float


def write_rows(work: RowsWork, folder: Path) -> None:
    """Writes the rows: a Parquet file per unit with ``id`` (int64) and ``tokens`` (list of int32)."""
    folder.mkdir()
    random = np.random.default_rng(work.seed)
    for unit in range(work.units):
        lengths = row_lengths(random, work.unit_rows)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = random.integers(0, VOCABULARY, ends[-1], np.int32)
        ids = np.arange(unit * work.unit_rows, (unit + 1) * work.unit_rows)
        table = pa.table({"id": ids, "tokens": pa.ListArray.from_arrays(ends, values)})
        pq.write_table(table, folder / f"{unit:04d}.parquet")


def row_lengths(random: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Log-normal lengths, 1 to the longest."""
    drawn = np.exp(random.normal(np.log(MEDIAN), SIGMA, rows))
    return np.clip(np.round(drawn), 1, LONGEST).astype(np.int64)


def read_vectors(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids, ascending, and their vectors ``f32[N, 32]``, of Parquet files that anybody wrote."""
    table = ds.dataset([str(f) for f in parquet_files(folder)], format="parquet").to_table(["id", "vector"])
    ids = table["id"].to_numpy()
    vectors = np.stack(table["vector"].to_numpy(zero_copy_only=False)).astype(np.float32)
    order = np.argsort(ids, kind="stable")
    return ids[order], vectors[order]


def parquet_files(folder: Path) -> list[Path]:
    """All below the folder."""
    return sorted(folder.rglob("*.parquet"))


def last_written_s(folder: Path) -> float:
    """When the last of the folder's Parquet files was written, in seconds since the epoch."""
    return max(file.stat().st_mtime for file in parquet_files(folder))


def require_each_once(who: str, ids: NDArray[np.int64], rows: int) -> None:
    """Raises ``BenchmarkError`` unless the ids are 0 to ``rows`` - 1."""
    if not np.array_equal(ids, np.arange(rows)):
        raise BenchmarkError(f"{who}: {len(ids)} rows came out of {rows}, {len(np.unique(ids))} different ones.")


def require_same(who: str, vectors: NDArray[np.float32], other: str, others: NDArray[np.float32]) -> float:
    """The largest difference of a number in the vectors of the same rows.

    Raises:
        BenchmarkError: It is above ``TOLERANCE``.
    """
    difference = float(np.abs(vectors - others).max())
    if not difference <= TOLERANCE:
        raise BenchmarkError(f"{who} and {other} do not compute the same: vectors differ by up to {difference:.2g}.")
    return difference


# -- what the peers' workers tell ------------------------------------------------------------


class CallLog:
    """A peer's worker writes down when it was ready, and every call of its model.

    Args:
        folder: One file per worker in it.
    """

    def __init__(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = Path(folder, f"{os.getpid()}.jsonl")

    def ready(self, compile_s: float, compilations: int) -> None:
        """All programs are compiled."""
        self._tell(ready_s=time.time(), compile_s=compile_s, compilations=compilations)

    def call(self, rows: int, fed: int, real: int) -> None:
        """So many rows came out; tokens fed, padding included, and real ones."""
        self._tell(rows=rows, fed=fed, real=real)

    def _tell(self, **facts: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def read_calls(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the workers told: of being ready, and of calls."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().split("\n")[:-1]]
    told = [json.loads(line) for line in lines]
    return [t for t in told if "ready_s" in t], [t for t in told if "rows" in t]


def encoded(calls: Path, began_s: float, ended_s: float, written_s: float) -> Encoded:
    """A peer's measurement out of what its workers told.

    Args:
        calls: The log's folder.
        began_s: When its process was started.
        ended_s: When it had ended.
        written_s: When its last output was there.

    Raises:
        BenchmarkError: No worker told anything.
    """
    ready, done = read_calls(calls)
    if not ready or not done:
        raise BenchmarkError(f"No worker of {calls.name} told anything.")
    begins = float(np.mean([r["ready_s"] for r in ready]))
    return Encoded(
        seconds=written_s - begins,
        startup_s=begins - began_s,
        compile_s=float(np.mean([r["compile_s"] for r in ready])),
        compilations=max(r["compilations"] for r in ready),
        padding=1 - sum(d["real"] for d in done) / sum(d["fed"] for d in done),
        total_s=ended_s - began_s,
    )
