"""Preprocess: input units through Ray Data, one committed Parquet object each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from tpupipe.data.columns import to_numpy, to_table
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Source, Unit, fingerprint_units
from tpupipe.errors import StoreError, TpupipeError, UserCodeError
from tpupipe.faults.plan import Action, Fault
from tpupipe.faults.points import point
from tpupipe.job import Preprocess
from tpupipe.ledger.events import Seconds, event
from tpupipe.local.periodic import periodically
from tpupipe.programs.user_code import user_code
from tpupipe.stages.base import StageRun, arm_worker, failure_of, reported, told_errors
from tpupipe.stages.committed import Compaction, PendingUnits, resume_units
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.failures import Budget, Failure, Kind, unreachable
from tpupipe.stages.finished import units_done
from tpupipe.stages.progress import UnitProgress
from tpupipe.stages.result import StageResult
from tpupipe.stages.retry import answered, budget_of, charge
from tpupipe.stages.stall import STALL_TIMEOUT_S, Watchdog
from tpupipe.stages.unit_failures import (
    UnitFailures,
    died_error,
    first_inputs,
    is_the_units_own,
    probes_of,
    trial_order,
)
from tpupipe.stages.units import (
    Committed,
    UnitTarget,
    commit_unit,
    write_manifest,
)

LOOK_EVERY_S = 0.2
AWAY_ENDS_PASS = 3  # units for which the store was away, after which a pass begins no other


@dataclass(frozen=True)
class FailedUnit:
    """A unit that failed as often as a unit may; ``died`` if its process died the last time."""

    unit: str
    error: TpupipeError
    died: bool


@dataclass(frozen=True)
class UnitAway:
    """A unit for which the store could not be reached, or was not asked any more: nothing is known of the unit itself."""

    unit: str
    error: StoreError | None


@dataclass(frozen=True)
class UnitTask:
    """What a Ray Data task does with one unit, in one of the passes over those that are to do. Sent to workers."""

    source: Source
    map: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    target: UnitTarget
    input_options: Mapping[str, Any]
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]
    unit_failures: int
    stall_timeout_s: float
    number: int = 0  # of the pass

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Reads, maps and commits the unit of one row of the dataset of units.

        Returns:
            The committed unit; or the unit and its error, if that failed too often or the store was away. Any other
            error that is not about the unit is raised.
        """
        unit, index = pickle.loads(row["unit"]), row["index"]  # noqa: S301 - made by the driver
        arm_worker(self.faults, self.coordinator, self.target, stage=self.target.stage)
        begun, away = f"{self.target.stage}/{unit.id}", f"{self.target.stage} away/{self.number}"
        if self.coordinator.counted(away) >= AWAY_ENDS_PASS:
            return {"committed": pickle.dumps(UnitAway(unit.id, None))}
        error: TpupipeError | None = None
        # Counted over processes: Ray Data repeats a task whose process died for ever.
        while self.coordinator.count(begun) <= self.unit_failures:
            watchdog = Watchdog(self.stall_timeout_s, f"unit {unit.id}", self.target, self.coordinator, unit=unit.id)
            try:
                with reported(self.coordinator, unit=unit.id), watchdog.watching():
                    committed = self._run(unit, index)
            except StoreError as raised:
                if not unreachable(raised):
                    raise
                self.coordinator.count(begun, -1)
                self.coordinator.count(away)
                return {"committed": pickle.dumps(UnitAway(unit.id, raised))}
            except TpupipeError as raised:
                if not is_the_units_own(raised):
                    raise
                error = raised
                continue
            self.coordinator.report(event("unit", unit=unit.id, rows=committed.footer.rows))
            return {"committed": pickle.dumps(committed)}
        died = died_error(self.target.stage, unit.id, "its map may need more memory than the host has")
        return {"committed": pickle.dumps(FailedUnit(unit.id, error or died, died=error is None))}

    def _run(self, unit: Unit, index: int) -> Committed:
        table = read_unit(self.source, unit, storage_options=self.input_options)
        point("unit.read", index=index, unit=unit.id)
        rows = to_table(self._mapped(unit, to_numpy(table)))
        point("unit.mapped", index=index, unit=unit.id)
        return commit_unit(self.target, unit, index, rows, rows_in=table.num_rows)

    def _mapped(self, unit: Unit, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        with user_code("map", self.target.stage, unit=unit.id, first_input=unit.parts[0].path):
            return self.map(batch)


def run_preprocess(stage: Preprocess, run: StageRun) -> StageResult:
    """Runs one ``Preprocess`` stage to its manifest.

    Raises:
        UserCodeError: The job's function raises on the first units it is given.
        UnitsSetAsideError: Some units failed again and again; all others are committed.
        StageError: Ray gave up on the stage.
        BudgetExceededError: The store was away too often.
        InterruptedRunError: Somebody asked the run to end; committed units stay.
    """
    seconds = Seconds()
    units = run.inputs[stage.source]
    if stage.dataset is not None:
        return _run_dataset(stage, run, units, seconds)
    budget = budget_of(run, stage.name)
    pending, reused = answered(run, budget, lambda: resume_units(run, stage.name, units, ""))
    run.log.emit(
        "stage",
        f"{stage.name}: {len(units)} units, {len(pending)} to do" + (f", {len(reused)} done before" if reused else ""),
        stage=stage.name,
        units=len(units),
        pending=len(pending),
    )
    with seconds.measured("working"):
        allowed = run.config.budgets.unit_failures
        failures = UnitFailures(stage.name, allowed, probes_of(pending), succeeded=bool(reused))
        with Compaction(run, stage.name, reused) as compaction:
            if pending:
                _map_units(stage, run, pending, budget=budget, failures=failures, compaction=compaction)
        committed = compaction.committed
        failures.check(first_inputs(pending, failures.set_aside), len(committed))
        facts = {"code": run.code, "rows_in": str(committed.total("rows_in"))}
        manifest = answered(run, budget, lambda: write_manifest(run, stage.name, units, committed, facts))
    return units_done(manifest, run.store.uri(run.paths.outputs(stage.name)), len(reused), seconds)


def _target(stage: Preprocess, run: StageRun) -> UnitTarget:
    return UnitTarget(
        run.store, run.paths, stage.name, run.lease.fence, stage.chunk_rows, "", run.code, str(run.sample)
    )


def _map_units(
    stage: Preprocess,
    run: StageRun,
    pending: PendingUnits,
    *,
    budget: Budget,
    failures: UnitFailures,
    compaction: Compaction,
) -> None:
    """Passes over the pending units: after the first one come those for which the store was away, a charge for each pass."""
    assert stage.map is not None  # noqa: S101 - the declaration has one of map and dataset
    task = UnitTask(
        stage.source,
        stage.map,
        _target(stage, run),
        run.input_options,
        run.coordinator,
        run.faults,
        run.config.budgets.unit_failures,
        run.settings(stage.name).stall_timeout_s or STALL_TIMEOUT_S,
    )
    todo = list(trial_order(len(pending)))
    progress = UnitProgress(run, stage.name, len(pending))
    while True:
        away: dict[str, StoreError | None] = {}
        for answer in _answers(task, run, pending, todo):
            if isinstance(answer, UnitAway):
                away[answer.unit] = answer.error
                if answer.error is not None:
                    text = f"{stage.name}: unit {answer.unit} waits for the store: {answer.error.message}"
                    run.log.emit("unit_away", text, level=logging.WARNING, stage=stage.name, unit=answer.unit)
            elif isinstance(answer, FailedUnit):
                failures.give_up(answer.unit, answer.error, died=answer.died)
                text = f"{stage.name}: unit {answer.unit} is set aside: {answer.error.message}"
                run.log.emit("unit_set_aside", text, level=logging.ERROR, stage=stage.name, unit=answer.unit)
            else:
                failures.success()
                compaction.add(answer)
                progress.add(answer)
                progress.tell()
        if not away:
            return
        said = [error.message.splitlines()[0] for error in away.values() if error is not None]
        what = said[0] if said else "the store could not be reached"
        charge(run, budget, Failure(Kind.STORE, None, what), units_back=len(away))
        todo = [i for i in todo if pending[i].id in away]
        task = dataclasses.replace(task, number=task.number + 1)


def _answers(
    task: UnitTask, run: StageRun, pending: PendingUnits, todo: Sequence[int]
) -> Iterator[Committed | FailedUnit | UnitAway]:
    """What became of each unit of one pass, as it is known."""
    stage = task.target.stage
    items = [{"unit": pickle.dumps(pending[i]), "index": int(pending.positions[i])} for i in todo]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map(
        task, **_task_options(run, stage, len(items))
    )
    told: list[TpupipeError] = []
    try:
        with _ending_when_asked(run, stage):
            for row in _rows(dataset):
                told += told_errors(run.absorb(stage))
                run.stop.check()
                yield pickle.loads(row["committed"])  # noqa: S301 - made by our own task
            run.absorb(stage)
    except RayError as error:
        told += told_errors(run.absorb(stage))
        final = [e for e in told if not (is_the_units_own(e) or unreachable(e))]
        raise failure_of(error, final, stage) from error


def _task_options(run: StageRun, stage: str, tasks: int) -> dict[str, Any]:
    """How many units are at work at a time.

    On a faked slice, by default as many as this machine has CPUs, for its logical ones are not real; and all on the
    driver's node, for on each of the others a process would have to start, which takes longer than a small unit.
    """
    at_a_time = run.settings(stage).concurrency
    faked = run.config.cluster.kind == "fake"
    if at_a_time is None and faked:
        at_a_time = max(2, os.cpu_count() or 2)
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return {
        "compute": ray.data.TaskPoolStrategy(size=None if at_a_time is None else min(at_a_time, tasks)),
        "num_cpus": 1,
        "label_selector": here if faked else None,
    }


def _rows(dataset: ray.data.Dataset) -> Iterator[dict[str, Any]]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    # The stage tells its own progress and errors; set here because Ray Data sets its levels when it is first used.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    yield from dataset.iter_rows()


def _ending_when_asked(run: StageRun, stage: str) -> contextlib.AbstractContextManager[None]:
    """Lets a fault kill this driver while Ray Data has no row for it: the worker that asked for it waits for its end."""
    if not any(fault.action is Action.KILL_DRIVER for fault in run.faults):
        return contextlib.nullcontext()

    def look() -> None:
        if run.coordinator.driver_kill_requested():
            run.absorb(stage)

    return periodically(LOOK_EVERY_S, look, name="kill-driver")


# -- dataset=: the whole stage at once ------------------------------------------------------


@dataclass(frozen=True)
class _ReadUnit:
    source: Source
    target: UnitTarget
    input_options: Mapping[str, Any]
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        unit = pickle.loads(row["unit"])  # noqa: S301 - made by the driver
        arm_worker(self.faults, self.coordinator, self.target, stage=self.target.stage)
        with reported(self.coordinator, unit=unit.id):
            rows: list[dict[str, Any]] = read_unit(self.source, unit, storage_options=self.input_options).to_pylist()
        point("unit.read", index=row["index"], unit=unit.id)
        self.coordinator.report(event("unit_read", unit=unit.id, rows=len(rows)))
        return rows


@dataclass(frozen=True)
class _WriteBlock:
    """Writes one block of the user's dataset as a unit.

    Its name begins with the lease epoch and a hash of the content, so equal blocks give the same order of rows
    whatever order the tasks ended in; without the manifest it has no effect.
    """

    target: UnitTarget
    inputs: str
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        arm_worker(self.faults, self.coordinator, self.target, stage=self.target.stage)
        index = self.coordinator.count(f"{self.target.stage}/blocks") - 1 if self.faults else 0
        content = hashlib.sha256()
        for record_batch in batch.combine_chunks().to_batches():
            content.update(record_batch.serialize())
        name = f"{self.target.fence.epoch:06d}-{content.hexdigest()[:16]}-{uuid.uuid4().hex[:8]}"
        unit = Unit(id=name, parts=(), fingerprint=self.inputs)
        with reported(self.coordinator, unit=name):
            committed = commit_unit(self.target, unit, index, batch, rows_in=batch.num_rows)
        return {"committed": [pickle.dumps(committed)]}


def _run_dataset(stage: Preprocess, run: StageRun, units: Sequence[Unit], seconds: Seconds) -> StageResult:
    assert stage.dataset is not None  # noqa: S101 - the declaration has one of map and dataset
    run.log.emit("stage", f"{stage.name}: {len(units)} units through dataset=, commits as a whole", stage=stage.name)
    inputs = fingerprint_units(units)
    target = _target(stage, run)
    budget = budget_of(run, stage.name)
    with seconds.measured("working"):
        committed, rows_in = answered(run, budget, lambda: _write_blocks(stage, run, units, target, inputs))
        ordered = sorted(committed, key=lambda c: c.footer.unit)
        made = [Unit(id=c.footer.unit, parts=(), fingerprint=inputs) for c in ordered]
        facts = {"code": run.code, "source": inputs, "rows_in": str(rows_in)}
        manifest = answered(run, budget, lambda: write_manifest(run, stage.name, made, ordered, facts))
    return units_done(manifest, run.store.uri(run.paths.outputs(stage.name)), None, seconds)


def _write_blocks(
    stage: Preprocess, run: StageRun, units: Sequence[Unit], target: UnitTarget, inputs: str
) -> tuple[list[Committed], int]:
    """One try of the whole stage: an object for each block of the user's dataset, and how many rows were read."""
    run.absorb(stage.name)  # what the tasks of a try before this one told after its end
    told: list[TpupipeError] = []
    committed: list[Committed] = []
    read: dict[str, int] = {}  # by unit: a task that Ray runs again reads its rows again

    def absorb() -> None:
        records = run.absorb(stage.name)
        told.extend(told_errors(records))
        read.update({r["unit"]: r["rows"] for r in records if r["kind"] == "unit_read"})

    try:
        with _ending_when_asked(run, stage.name):
            for row in _rows(_blocks_of(stage, run, units, target, inputs)):
                committed.append(pickle.loads(row["committed"]))  # noqa: S301 - made by our own task
                absorb()
                run.stop.check()
            absorb()
    except RayError as error:
        absorb()
        raise failure_of(error, sorted(told, key=unreachable), stage.name) from error
    return committed, sum(read.values())


def _blocks_of(
    stage: Preprocess, run: StageRun, units: Sequence[Unit], target: UnitTarget, inputs: str
) -> ray.data.Dataset:
    """The rows of the source through the user's ``dataset``, and each block of them committed."""
    assert stage.dataset is not None  # noqa: S101 - as above
    told = (run.coordinator, run.faults)
    items = [{"unit": pickle.dumps(unit), "index": index} for index, unit in enumerate(units)]
    options = _task_options(run, stage.name, len(units))
    rows = ray.data.from_items(items, override_num_blocks=len(units)).flat_map(
        _ReadUnit(stage.source, target, run.input_options, *told), **options
    )
    with user_code("dataset", stage.name, passing=RayError):  # it may run parts of it at once
        transformed = stage.dataset(rows)
    if not isinstance(transformed, ray.data.Dataset):
        raise UserCodeError(
            f"dataset of stage {stage.name!r} returned {type(transformed).__name__}, not a ray.data.Dataset.",
            stage=stage.name,
        )
    return transformed.map_batches(
        _WriteBlock(target, inputs, *told), batch_size=None, batch_format="pyarrow", **options
    )
