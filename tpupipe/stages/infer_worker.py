"""What runs on each host during inference: units through a pipeline that reads, computes and commits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpupipe.data.buckets import AutoBuckets, Buckets
from tpupipe.data.columns import to_table
from tpupipe.data.sources import Source, Unit
from tpupipe.data.unit_writer import UnitFooter, UnitWriter
from tpupipe.data.windows import Window, committed_windows, read_windows
from tpupipe.errors import StageError, TpupipeError
from tpupipe.faults.plan import Fault
from tpupipe.faults.points import point
from tpupipe.job import Infer
from tpupipe.ledger.events import event
from tpupipe.programs.infer import infer_mesh
from tpupipe.programs.infer_batches import ReadyWindow, ready_window
from tpupipe.programs.infer_buckets import length_histogram
from tpupipe.programs.infer_rows import BadRow, Columns, UnitMapper, errors_table
from tpupipe.programs.sharding import forget_slices, state_shardings
from tpupipe.stages.base import arm_worker, last_lines, reported
from tpupipe.stages.compiled import use_compile_cache
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.infer_engine import Computed, InferEngine
from tpupipe.stages.infer_params import ParamsSource
from tpupipe.stages.infer_pipeline import Pipeline, Sink
from tpupipe.stages.lockstep import Lockstep
from tpupipe.stages.stall import Bounds, Phase, Watchdog
from tpupipe.stages.unit_failures import is_the_units_own
from tpupipe.stages.units import Committed, UnitTarget, clear_errors, commit_errors, commit_written

UNIT, ROW = "unit", "row"
MOST_VALUES = 2**31 - 1  # of a row: more than a ragged column holds of a unit


@dataclass(frozen=True)
class InferPlan:
    """All that an inference worker needs. Sent to every worker.

    Args:
        stage: The declaration, overrides applied and bucket lengths chosen.
        target: Where units go.
        source: The inputs; ``None`` where units are committed units of an earlier stage.
        data_stage: That earlier stage.
        input_options: fsspec's options for opening inputs.
        params: Where the parameters are.
        coordinator: Where to report.
        faults: Faults to inject.
        bounds: How long a worker may be without progress.
    """

    stage: Infer
    target: UnitTarget
    source: Source | None
    data_stage: str
    input_options: Mapping[str, Any]
    params: ParamsSource
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]
    bounds: Bounds


@dataclass(frozen=True)
class UnitDone:
    """What a worker says of a unit it did.

    Args:
        committed: The committed unit.
        compilations: Programs compiled so far by this worker.
        last_bad: The last of its rows that were set aside.
    """

    committed: Committed
    compilations: int
    last_bad: BadRow | None


@dataclass(frozen=True)
class UnitFailed:
    """A unit that could not be done; the worker is well."""

    unit: str
    error: TpupipeError


@dataclass
class _UnitJob:
    unit: Unit
    index: int
    bad: list[BadRow] = field(default_factory=list)


class InferWorker:
    """The actor: one per host. The model is on all devices of the host, or with others on all devices of a slice.

    ``run`` is called for several units at a time, each in a thread of its own that waits for the pipeline.

    Args:
        plan: What to do.
        rank: Its number among all hosts at work.
        lockstep: The group that holds a model together; its process 0 alone commits.
    """

    def __init__(self, plan: InferPlan, rank: int, lockstep: Lockstep | None = None) -> None:
        self._plan = plan
        self._rank = rank
        self._lockstep = lockstep
        self._turn, self._turned = 0, threading.Condition()
        self._phase, self._watchdogs, self._lock = plan.bounds.working, set[Watchdog](), threading.Lock()
        who = f"inference worker {rank}"
        starting = Watchdog(plan.bounds.starting, who, plan.target, plan.coordinator, rank=rank)
        with reported(plan.coordinator, rank=rank), starting.watching():
            arm_worker(plan.faults, plan.coordinator, plan.target, stage=plan.stage.name, rank=rank)
            self._start(rank, starting)

    def _start(self, rank: int, watchdog: Watchdog) -> None:
        import jax

        plan, stage, began = self._plan, self._plan.stage, time.monotonic()
        forget_slices()
        if self._lockstep is not None:
            self._lockstep.join(plan.coordinator)
        use_compile_cache(plan.target.store, plan.target.paths)
        devices = jax.local_devices() if self._lockstep is None else jax.devices()
        mesh, rows = infer_mesh(stage, devices)
        watchdog.enter(plan.bounds.restoring)
        params = plan.params.load(lambda tree: state_shardings(tree, mesh, stage.sharding, stage.batch_axes))
        self._engine = InferEngine(stage, params, mesh, rows, self._compiling)
        self._template: Columns | None = None
        self._pipeline: Pipeline[_UnitJob, UnitDone | None] = Pipeline(
            self._read, self._engine, self._sink, self._progress, lockstep=self._lockstep is not None
        )
        point("params.loaded", step=plan.params.step)
        plan.coordinator.report(event("starting", rank=rank, seconds=time.monotonic() - began))

    def ready(self) -> bool:
        """Whether this worker has started: a call that ends says so."""
        return True

    def run(self, unit: Unit, index: int, turn: int = 0) -> UnitDone | UnitFailed | None:
        """Does one unit, up to its commit.

        Args:
            unit: The unit.
            index: Its position in the stage.
            turn: How many units this group was given before: calls overtake one another, and must not in lockstep.

        Returns:
            How it went; ``None`` where another process commits it.
        """
        try:
            with reported(self._plan.coordinator, unit=unit.id), self._watched(unit):
                return self._submit(_UnitJob(unit, index), turn).result()
        except TpupipeError as error:
            return UnitFailed(unit.id, error)
        except Exception as error:  # noqa: BLE001 - the driver decides what it means
            told = f"unit {unit.id} of stage {self._plan.stage.name!r}: {type(error).__name__}: {last_lines(error)}"
            return UnitFailed(unit.id, StageError(told, stage=self._plan.stage.name, unit=unit.id))

    def _submit(self, job: _UnitJob, turn: int) -> Future[UnitDone | None]:
        if self._lockstep is None:
            return self._pipeline.submit(job)
        with self._turned:
            self._turned.wait_for(lambda: self._turn == turn)  # the unit's watchdog bounds it
            self._turn += 1
            self._turned.notify_all()
            return self._pipeline.submit(job)

    # -- watchdogs: one per unit in flight, all of which beat when the pipeline makes progress ------

    @contextlib.contextmanager
    def _watched(self, unit: Unit) -> Iterator[None]:
        plan = self._plan
        what = f"unit {unit.id}, or one in flight with it on inference worker {self._rank},"
        watchdog = Watchdog(plan.bounds.working, what, plan.target, plan.coordinator, unit=unit.id)
        with watchdog.watching():
            with self._lock:
                watchdog.enter(self._phase)
                self._watchdogs.add(watchdog)
            try:
                yield
            finally:
                with self._lock:
                    self._watchdogs.discard(watchdog)

    def _progress(self) -> None:
        with self._lock:
            for watchdog in self._watchdogs:
                watchdog.beat()

    def _enter(self, phase: Phase) -> None:
        with self._lock:
            self._phase = phase
            for watchdog in self._watchdogs:
                watchdog.enter(phase)

    @contextlib.contextmanager
    def _compiling(self, shapes: str, ahead: bool) -> Iterator[None]:
        began = time.monotonic()
        self._enter(self._plan.bounds.compiling)
        try:
            yield
        finally:
            self._enter(self._plan.bounds.working)
        seconds = time.monotonic() - began
        self._plan.coordinator.report(
            event("compiling", seconds=seconds, init_seconds=0.0, shapes=shapes, ahead=ahead, rank=self._rank)
        )

    # -- the pipeline's ends ---------------------------------------------------------------------

    def _read(self, job: _UnitJob) -> Iterator[ReadyWindow]:
        stage, engine = self._plan.stage, self._engine
        mapper = UnitMapper(stage, job.unit.id, self._template)
        for window in unit_windows(self._plan, job.unit):
            mapped = mapper.map(window)
            job.bad = mapper.bad
            yield ready_window(stage, job.unit.id, mapped, engine.devices, engine.spec)
        self._template = mapper.template
        point("unit.read", index=job.index, unit=job.unit.id)

    def _sink(self, job: _UnitJob) -> Sink[UnitDone | None]:
        if self._lockstep is not None and self._lockstep.process > 0:
            return _Elsewhere()
        return _UnitSink(self._plan, job, self._engine)


def unit_windows(plan: InferPlan, unit: Unit) -> Iterator[Window]:
    """The rows of a unit."""
    if plan.source is not None:
        return read_windows(plan.source, unit, storage_options=plan.input_options)
    name = plan.target.paths.unit(plan.data_stage, unit.id)
    return committed_windows(plan.target.store, name, unit.id, total_bytes=unit.size_bytes)


def sample_unit(plan: InferPlan, unit: Unit, auto: AutoBuckets) -> dict[int, int] | TpupipeError:
    """A task: how many of a unit's rows have which length; or why they cannot be mapped."""
    any_length = Buckets((MOST_VALUES,), column=auto.column, too_long="truncate")
    with reported(plan.coordinator, unit=unit.id):
        mapper = UnitMapper(replace(plan.stage, buckets=any_length), unit.id)
        rows_of: Counter[int] = Counter()
        try:
            for window in unit_windows(plan, unit):
                rows_of.update(length_histogram(mapper.map(window).fed, auto))
        except TpupipeError as error:
            if not is_the_units_own(error):
                raise
            return error
    return dict(rows_of)


class _Elsewhere:
    """What another process of the group writes."""

    def append(self, computed: Computed) -> None: ...

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class _UnitSink:
    """Writes a unit's windows to its object, and commits it."""

    def __init__(self, plan: InferPlan, job: _UnitJob, engine: InferEngine) -> None:
        self._plan = plan
        self._job = job
        self._engine = engine
        self._writer = UnitWriter(job.unit.id, plan.target.chunk_rows)
        self._counts = UnitFooter(job.unit.id)

    def append(self, computed: Computed) -> None:
        window = computed.window
        rows = len(window.rows)
        unit = np.full(rows, self._job.unit.id, dtype=f"U{len(self._job.unit.id)}")
        self._writer.append(to_table({UNIT: unit, ROW: window.rows, **window.kept, **computed.outputs}))
        counts = self._counts
        self._counts = replace(
            counts,
            rows_in=counts.rows_in + window.rows_in,
            rows_truncated=counts.rows_truncated + window.truncated,
            values_fed=counts.values_fed + computed.values_fed,
            values_real=counts.values_real + computed.values_real,
        )

    def finish(self) -> UnitDone:
        target, unit, index, bad = self._plan.target, self._job.unit, self._job.index, self._job.bad
        point("unit.mapped", index=index, unit=unit.id)
        if bad:
            commit_errors(target, unit, errors_table(unit.id, bad))
        else:
            clear_errors(target, unit)
        counts = replace(self._counts, rows_bad=len(bad))
        committed = commit_written(target, unit, index, self._writer, counts)
        return UnitDone(committed, self._engine.compilations, bad[-1] if bad else None)

    def discard(self) -> None:
        self._writer.discard()
