"""Preprocess: input units through Ray Data, one committed Parquet object each."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from tpupipe.data.columns import to_numpy, to_table
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Source, Unit, fingerprint_units
from tpupipe.errors import StageError, TpupipeError, UserCodeError
from tpupipe.faults.plan import Fault
from tpupipe.faults.points import point
from tpupipe.job import Preprocess
from tpupipe.ledger.events import Seconds, event
from tpupipe.stages.base import StageResult, StageRun, arm_worker
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.units import (
    Committed,
    UnitTarget,
    check_reused,
    commit_unit,
    planned_units,
    read_all_committed,
    read_manifest,
    split_pending,
    user_traceback,
    write_manifest,
)

TELL_EVERY_S = 2.0


@dataclass(frozen=True)
class UnitTask:
    """What a Ray Data task does with one unit. Sent to workers."""

    source: Source
    map: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    target: UnitTarget
    input_options: Mapping[str, Any]
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        unit, index = row["unit"], row["index"]
        arm_worker(self.faults, self.coordinator, stage=self.target.stage)
        table = read_unit(self.source, unit, storage_options=self.input_options)
        point("unit.read", index=index, unit=unit.id)
        try:
            rows = to_table(self.map(to_numpy(table)))
        except TpupipeError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"map of stage {self.target.stage!r} raised on unit {unit.id} "
                f"({', '.join(part.path for part in unit.parts[:3])}…): {type(error).__name__}: {error}",
                stage=self.target.stage,
                unit=unit.id,
            ) from error
        point("unit.mapped", index=index, unit=unit.id)
        committed = commit_unit(self.target, unit, index, rows, rows_in=table.num_rows)
        self.coordinator.report(event("unit", unit=unit.id, rows=committed.footer.rows))
        return {"committed": committed}


def run_preprocess(stage: Preprocess, run: StageRun) -> StageResult:
    """Runs one ``Preprocess`` stage to its manifest.

    Raises:
        UserCodeError: The job's function raised.
        StageError: Ray gave up on the stage.
        InterruptedRunError: Somebody asked the run to end; committed units stay.
    """
    seconds = Seconds()
    manifest = read_manifest(run.store, run.paths, stage.name)
    uri = run.store.uri(run.paths.stage(stage.name))
    if manifest is not None:
        total = len(manifest.units)
        rows_in = int(manifest.fingerprints.get("rows_in", 0))
        return StageResult("done", total, total, total, rows_in, manifest.rows, uri, seconds.rounded())
    units = planned_units(run, stage.source)
    if stage.dataset is not None:
        return _run_dataset(stage, run, units, seconds)
    pending, present = split_pending(run, stage.name, units)
    reused = read_all_committed(run.store, present.values())
    check_reused(stage.name, units, reused, "")
    run.log.emit(
        "stage",
        f"{stage.name}: {len(units)} units, {len(pending)} to do" + (f", {len(reused)} done before" if reused else ""),
        stage=stage.name,
        units=len(units),
        pending=len(pending),
    )
    with seconds.measured("working"):
        fresh = _map_units(stage, run, units, pending)
        committed = [*reused, *fresh]
        rows_in = sum(c.footer.rows_in for c in committed)
        manifest = write_manifest(run, stage.name, units, committed, {"code": run.code, "rows_in": str(rows_in)})
    return StageResult(
        "done", len(units), len(units), len(reused) or None, rows_in, manifest.rows, uri, seconds.rounded()
    )


def _map_units(stage: Preprocess, run: StageRun, units: Sequence[Unit], pending: Sequence[Unit]) -> list[Committed]:
    if not pending:
        return []
    assert stage.map is not None  # noqa: S101 - the declaration has one of map and dataset
    task = UnitTask(
        stage.source,
        stage.map,
        UnitTarget(
            run.store, run.paths, stage.name, run.lease.fence, stage.chunk_rows, "", run.code, str(run.sample)
        ),
        run.input_options,
        run.coordinator,
        run.faults,
    )
    positions = {unit.id: index for index, unit in enumerate(units)}
    items = [{"unit": unit, "index": positions[unit.id]} for unit in pending]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map(
        task, concurrency=concurrency(run, stage.name), num_cpus=1
    )
    done: list[Committed] = []
    told = time.monotonic()
    for row in _rows(dataset, stage.name):
        done.append(row["committed"])
        run.absorb(stage.name)
        run.stop.check()
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            run.log.emit("progress", f"{stage.name}: {len(done)} of {len(pending)} units", stage=stage.name)
    return done


def concurrency(run: StageRun, stage: str) -> int | None:
    """Units at work at a time: as configured; on a faked slice what this machine has, for its logical CPUs are not."""
    configured = run.settings(stage).concurrency
    if configured is None and run.config.cluster.kind == "fake":
        return max(2, os.cpu_count() or 2)
    return configured


def _rows(dataset: ray.data.Dataset, stage: str) -> Any:
    try:
        yield from dataset.iter_rows()
    except RayError as error:
        raise failure_of(error, stage) from error


def failure_of(error: BaseException, stage: str) -> TpupipeError:
    """Our own error inside a Ray error, or a ``StageError`` that carries the remote traceback's end."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TpupipeError):
            return seen
        cause = getattr(seen, "cause", None)
        seen = cause if isinstance(cause, BaseException) else seen.__cause__
    return StageError(f"Stage {stage!r} failed on the cluster:\n{user_traceback(error)}", stage=stage)


# -- dataset=: the whole stage at once ------------------------------------------------------


@dataclass(frozen=True)
class _ReadUnit:
    source: Source
    input_options: Mapping[str, Any]

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_unit(self.source, row["unit"], storage_options=self.input_options).to_pylist()
        return rows


@dataclass(frozen=True)
class _WriteBlock:
    """Writes one block of the user's dataset as a unit.

    Its name begins with the lease epoch and a hash of the content, so equal blocks give the same order of rows
    whatever order the tasks ended in; without the manifest it has no effect.
    """

    target: UnitTarget
    inputs: str

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        content = hashlib.sha256()
        for record_batch in batch.combine_chunks().to_batches():
            content.update(record_batch.serialize())
        name = f"{self.target.fence.epoch:06d}-{content.hexdigest()[:16]}-{uuid.uuid4().hex[:8]}"
        unit = Unit(id=name, parts=(), fingerprint=self.inputs)
        return {"committed": [commit_unit(self.target, unit, 0, batch, rows_in=batch.num_rows)]}


def _run_dataset(stage: Preprocess, run: StageRun, units: Sequence[Unit], seconds: Seconds) -> StageResult:
    assert stage.dataset is not None  # noqa: S101 - the declaration has one of map and dataset
    run.log.emit("stage", f"{stage.name}: {len(units)} units through dataset=, commits as a whole", stage=stage.name)
    inputs = fingerprint_units(units)
    target = UnitTarget(
        run.store, run.paths, stage.name, run.lease.fence, stage.chunk_rows, "", run.code, str(run.sample)
    )
    with seconds.measured("working"):
        rows = ray.data.from_items([{"unit": u} for u in units], override_num_blocks=len(units)).flat_map(
            _ReadUnit(stage.source, run.input_options), num_cpus=1
        )
        try:
            transformed = stage.dataset(rows)
        except Exception as error:
            raise UserCodeError(
                f"dataset of stage {stage.name!r} raised: {type(error).__name__}: {error}", stage=stage.name
            ) from error
        if not isinstance(transformed, ray.data.Dataset):
            raise UserCodeError(
                f"dataset of stage {stage.name!r} returned {type(transformed).__name__}, not a ray.data.Dataset.",
                stage=stage.name,
            )
        written = transformed.map_batches(
            _WriteBlock(target, inputs), batch_size=None, batch_format="pyarrow", concurrency=concurrency(run, stage.name)
        )
        committed = []
        for row in _rows(written, stage.name):
            committed.append(row["committed"])
            run.stop.check()
        ordered = sorted(committed, key=lambda c: c.footer.unit)
        made = [Unit(id=c.footer.unit, parts=(), fingerprint=inputs) for c in ordered]
        manifest = write_manifest(run, stage.name, made, ordered, {"code": run.code, "source": inputs})
    uri = run.store.uri(run.paths.stage(stage.name))
    return StageResult("done", len(units), len(units), None, manifest.rows, manifest.rows, uri, seconds.rounded())

