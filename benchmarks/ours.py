"""tpupipe as a contender: the job that is measured, run as a user does, and the rows it was fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import BenchmarkError, Work, World, last_json, run_python
from benchmarks.lm import DATA, JOB, STAGE
from tpupipe.data.chunks import ChunkReader
from tpupipe.data.stream import Stream
from tpupipe.ledger.events import read_events
from tpupipe.stages.finished import read_manifest
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store

STORE_URI = "gs://bench/runs"


@dataclass(frozen=True)
class Inputs:
    """The rows that tpupipe was fed, in its order: what the others train on.

    Args:
        batches: ``.npy`` of ``uint8[steps, B, seq_len + 1]``.
        parquet: The same rows, one column ``tokens``.
    """

    batches: Path
    parquet: Path


def run_job(work: Work, place: World, name: str, timeout_s: float, *arguments: str) -> dict[str, Any]:
    """Runs the job with further arguments of ``tpupipe run``; gives its result."""
    sets = {
        "store.uri": STORE_URI,
        "sample": "10%",
        f"stages.{STAGE}.checkpoint": f"{{steps: {work.save_every}, keep: 3}}",
        **{
            f"job.{key}": getattr(work, key)
            for key in ("steps", "batch_size", "width", "layers", "heads", "seq_len", "seed")
        },
    }
    overrides = [argument for key, value in sets.items() for argument in ("--set", f"{key}={value}")]
    command = ["run", "benchmarks.lm", "-c", "configs/local.yaml", "--run", name, "--json", *overrides, *arguments]
    [output] = run_python(
        [["-c", "from tpupipe.cli import app; app()", *command]],
        timeout_s=timeout_s,
        variables=[{"TPUPIPE_ROOT": str(place.base)}],
    )
    return last_json(output)


def stage_events(place: World, name: str) -> Sequence[dict[str, Any]]:
    """The events of a run's training stage, by time."""
    events = [e for e in read_events(_store(place), RunPaths(JOB, name)) if e.get("stage") == STAGE]
    return sorted(events, key=lambda e: float(e["time_s"]))


def take_inputs(work: Work, place: World, name: str) -> Inputs:
    """Reads the rows back that a run of tpupipe was fed."""
    store, paths = _store(place), RunPaths(JOB, name)
    manifest = read_manifest(store, paths, DATA)
    if manifest is None:
        raise BenchmarkError(f"Run {name} has no prepared data.")
    reader = ChunkReader(store, paths, manifest)
    stream = Stream(manifest.chunk_rows, work.seed, work.batch_size, steps=work.steps)
    indices = [stream.batch(step) for step in range(work.steps)]
    batches = np.stack([reader.rows(index.chunk, index.row)["tokens"] for index in indices])
    inputs = Inputs(place.base / "batches.npy", place.base / "rows.parquet")
    np.save(inputs.batches, batches)
    rows = batches.reshape(-1, batches.shape[-1])
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    pq.write_table(pa.table({"tokens": column}), inputs.parquet)
    return inputs


def _store(place: World) -> Store:
    return open_store(STORE_URI, endpoint=place.endpoint)
