"""Infer: pending units over actors on the reserved hosts, each row of the input exactly once in the output."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpupipe.checkpoint.verify import newest_intact
from tpupipe.cluster.reservation import Host
from tpupipe.data.chunks import ManifestUnit
from tpupipe.data.sources import Unit
from tpupipe.errors import JobError, NoIntactCheckpointError, StageError, TpupipeError
from tpupipe.job import Infer, Train, default_params
from tpupipe.ledger.events import Seconds
from tpupipe.stages.base import StageRun, failure_of, tell_fault, told_errors
from tpupipe.stages.committed import Compaction, resume_units
from tpupipe.stages.failures import Budget, Failure, Kind
from tpupipe.stages.finished import read_manifest, units_done
from tpupipe.stages.infer_worker import InferPlan, InferWorker, ParamsSource, UnitDone
from tpupipe.stages.record import read_train_record
from tpupipe.stages.result import StageResult
from tpupipe.stages.stall import STALL_TIMEOUT_S
from tpupipe.stages.units import (
    UnitTarget,
    write_manifest,
)
from tpupipe.store.layout import RunPaths, parse_checkpoint
from tpupipe.store.objects import Store, open_store

CHUNK_ROWS = 4096
IN_FLIGHT = 2  # one at work, one behind it, so that a worker never waits for the driver
POLL_S = 0.5
TELL_EVERY_S = 2.0
START_TIMEOUT_S = 300.0


def run_infer(stage: Infer, run: StageRun) -> StageResult:
    """Runs one ``Infer`` stage to its manifest.

    Raises:
        UserCodeError: The job's functions raised.
        NoIntactCheckpointError: There are no parameters to load.
        RunChangedError: Units were committed from other inputs or parameters.
        BudgetExceededError: Too many workers or hosts were lost.
        InterruptedRunError: Somebody asked the run to end; committed units stay.
    """
    seconds = Seconds()
    units = _units(stage, run)
    params = find_params(stage, run)
    fingerprint = params.commit.fingerprint
    run.settle_params(stage.name, fingerprint)
    pending, reused = resume_units(run, stage.name, units, fingerprint)
    run.log.emit(
        "stage",
        f"{stage.name}: {len(units)} units, {len(pending)} to do"
        + (f", {len(reused)} done before" if reused else "")
        + f"; parameters of step {params.commit.step}",
        stage=stage.name,
        units=len(units),
        pending=len(pending),
    )
    target = UnitTarget(
        run.store, run.paths, stage.name, run.lease.fence, CHUNK_ROWS, fingerprint, run.code, str(run.sample)
    )
    from_stage = stage.data if isinstance(stage.data, str) else ""
    plan = InferPlan(
        stage,
        target,
        None if isinstance(stage.data, str) else stage.data,
        from_stage,
        run.input_options,
        params,
        run.coordinator,
        run.faults,
        run.settings(stage.name).stall_timeout_s or STALL_TIMEOUT_S,
    )
    began = time.monotonic()
    with Compaction(run, stage.name, reused) as compaction:
        done = _Pool(stage, run, plan, units, seconds).work(pending, compaction) if pending else []
    committed = itertools.chain(reused, (d.committed for d in done))
    rows_in = reused.total("rows_in") + sum(d.committed.footer.rows_in for d in done)
    manifest = write_manifest(
        run, stage.name, units, committed, {"code": run.code, "params": fingerprint, "rows_in": str(rows_in)}
    )
    seconds.add("working", time.monotonic() - began - sum(seconds.rounded().values()))
    result = units_done(manifest, run.store.uri(run.paths.outputs(stage.name)), len(reused), seconds)
    return replace(result, metrics=_padding(done), checkpoint=params.store.uri(params.folder))


def _padding(done: Sequence[UnitDone]) -> Mapping[str, float]:
    padded = sum(d.padded_values for d in done)
    if not padded:
        return {}
    return {
        "padding_share": round(1 - sum(d.real_values for d in done) / padded, 4),
        "compilations": float(max(d.compilations for d in done)),
    }


def _units(stage: Infer, run: StageRun) -> Sequence[Unit]:
    if not isinstance(stage.data, str):
        return run.inputs[stage.data]
    manifest = read_manifest(run.store, run.paths, stage.data)
    if manifest is None:
        raise StageError(f"Stage {stage.data!r}, which {stage.name!r} reads, is not complete.", stage=stage.name)
    return [Unit(id=u.unit, parts=(), fingerprint=_fingerprint(u)) for u in manifest.units]


def _fingerprint(unit: ManifestUnit) -> str:
    return f"{unit.unit}-{unit.rows}-{unit.size_bytes}"


def find_params(stage: Infer, run: StageRun) -> ParamsSource:
    """The newest intact checkpoint that ``stage.params`` names: of this run, or of another by URI.

    Raises:
        NoIntactCheckpointError: There is none.
        JobError: The URI does not name a training stage of a run, or the job has no ``Train`` stage to take the
            model's structure from.
    """
    if "/" not in stage.params:
        trained = run.job.stage(stage.params)
        if not isinstance(trained, Train):
            raise JobError(f"stage {stage.name!r}: params={stage.params!r} is not a Train stage.")
        store, paths, name, wanted = run.store, run.paths, trained.name, None
        init, params = trained.init, trained.params
    else:
        store, paths, name, wanted = parse_params_uri(stage.params, run)
        if stage.init is None:
            raise JobError(
                f"stage {stage.name!r}: params={stage.params!r} is a URI, so init= must say what the state looks like.",
                hint="Infer(init=lm.init, ...): it is only traced, never run.",
            )
        init, params = stage.init, default_params
    selection = newest_intact(store, paths, name, only=wanted)
    if selection.commit is None:
        raise NoIntactCheckpointError(
            f"stage {stage.name!r}: there is no committed checkpoint at {stage.params!r}.",
            hint="Train first, or name a run's training stage or one of its checkpoints.",
            stage=stage.name,
        )
    record = read_train_record(store, paths, name) if wanted is None else None
    if record is not None and record.checkpoint_fingerprint != selection.commit.fingerprint:
        damaged = "; ".join(str(d) for d in selection.damaged) or "it is not in the store"
        raise NoIntactCheckpointError(
            f"stage {stage.name!r}: the last checkpoint of {stage.params!r} (step {record.steps}) cannot be used: {damaged}.",
            hint="Nothing was deleted. Older parameters are not taken instead; name a checkpoint's URI to use them.",
            stage=stage.name,
        )
    return ParamsSource(store, selection.folder, selection.commit, init, params)


def parse_params_uri(uri: str, run: StageRun) -> tuple[Store, RunPaths, str, str | None]:
    """Reads ``<store>/<job>/<run>/stages/<stage>[/checkpoints/<step>-<epoch>]``.

    Returns:
        Store, names of the run, training stage, and the folder where one checkpoint was named.

    Raises:
        JobError: It is not of that form.
    """
    head, found, tail = uri.rstrip("/").partition("/stages/")
    place, _, run_name = head.rpartition("/")
    root, _, job_name = place.rpartition("/")
    stage, _, checkpoint = tail.partition("/checkpoints/")
    parsed = parse_checkpoint(checkpoint) if checkpoint else None
    if not found or not root or not stage or "/" in stage or (checkpoint and parsed is None):
        raise JobError(
            f"params={uri!r} is not a training stage or checkpoint of a run.",
            hint="<store>/<job>/<run>/stages/<stage>, or that with /checkpoints/<step>-<epoch>.",
        )
    store = open_store(
        root, endpoint=run.endpoint, timeout_s=run.config.store.timeout_s, attempts=run.config.store.attempts
    )
    paths = RunPaths(job_name, run_name)
    return store, paths, stage, f"{paths.checkpoints(stage)}/{checkpoint}" if parsed else None


# -- the pool of workers --------------------------------------------------------------------


@dataclass
class _Worker:
    """One actor and the units given to it, oldest first."""

    actor: Any
    rank: int
    given: deque[tuple[Any, Unit]]


class _Pool:
    """One worker per reserved host; units of a lost worker go back to the queue."""

    def __init__(self, stage: Infer, run: StageRun, plan: InferPlan, units: Sequence[Unit], seconds: Seconds) -> None:
        self._stage = stage
        self._run = run
        self._plan = plan
        self._units = units
        self._positions: Mapping[str, int] = {}
        self._seconds = seconds
        self._budget = Budget(run.config.budgets, stage.name)
        self._workers: list[_Worker] = []
        self._errors: list[TpupipeError] = []

    def work(self, pending: Sequence[Unit], compaction: Compaction) -> list[UnitDone]:
        """Does all units. Ends the workers on every way out."""
        queue = deque(pending)
        wanted = {unit.id for unit in pending}
        self._positions = {unit.id: index for index, unit in enumerate(self._units) if unit.id in wanted}
        done: list[UnitDone] = []
        told = time.monotonic()
        try:
            self._start_all(min(len(pending), self._places()))
            while queue or any(worker.given for worker in self._workers):
                self._run.stop.check()
                self._hand_out(queue)
                noted = len(done)
                self._collect(queue, done)
                for each in done[noted:]:
                    compaction.add(each.committed)
                self._book()
                if time.monotonic() - told > TELL_EVERY_S:
                    told = time.monotonic()
                    self._run.log.emit(
                        "progress", f"{self._stage.name}: {len(done)} of {len(pending)} units", stage=self._stage.name
                    )
        finally:
            for worker in self._workers:
                ray.kill(worker.actor)
            self._book()
        return done

    def _places(self) -> int:
        reservation = self._run.reservation
        return len(reservation.hosts) if reservation else self._run.config.cluster.gpus or 1

    def _start_all(self, count: int) -> None:
        self._workers = [self._start(rank) for rank in range(count)]

    def _start(self, rank: int) -> _Worker:
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
        if self._run.reservation is None:
            options["num_gpus"] = 1
        else:
            host = self._run.reservation.hosts[rank]
            options.update(_placement(host, self._run))
        actor = ray.remote(InferWorker).options(**options).remote(self._plan, rank)
        return _Worker(actor, rank, deque())

    def _hand_out(self, queue: deque[Unit]) -> None:
        for worker in self._workers:
            while queue and len(worker.given) < IN_FLIGHT:
                unit = queue.popleft()
                worker.given.append((worker.actor.run.remote(unit, self._positions[unit.id]), unit))

    def _collect(self, queue: deque[Unit], done: list[UnitDone]) -> None:
        first = [worker.given[0][0] for worker in self._workers if worker.given]
        ready, _ = ray.wait(first, num_returns=1, timeout=POLL_S)
        for worker in list(self._workers):
            if not worker.given or worker.given[0][0] not in ready:
                continue
            try:
                done.append(ray.get(worker.given[0][0], timeout=START_TIMEOUT_S))
                worker.given.popleft()
            except (RayActorError, GetTimeoutError) as error:
                self._replace(worker, queue, error)
                return  # the set of workers may be another one now
            except RayError as error:
                self._book()
                raise failure_of(error, self._errors, self._stage.name) from error

    def _replace(self, worker: _Worker, queue: deque[Unit], error: RayError) -> None:
        """Puts a lost worker's units back and starts another in its place, on a new slice if a host was lost."""
        self._book()
        if self._errors:  # it did not die, it said why it could not start
            raise self._errors[0]
        reservation = self._run.reservation
        lost = reservation.lost_hosts() if reservation else []
        kind = Kind.HOST if lost else Kind.WORKER
        what = f"{len(lost)} host(s) of the slice were lost" if lost else f"inference worker {worker.rank} died"
        self._run.log.emit(
            "failure",
            f"{self._stage.name}: {what}; its {len(worker.given)} unit(s) go back",
            level=logging.WARNING,
            stage=self._stage.name,
        )
        self._budget.charge(Failure(kind, None, what, str(error)))
        gone = self._workers if lost else [worker]
        for each in gone:
            queue.extendleft(unit for _, unit in reversed(each.given))
            ray.kill(each.actor)
        if lost and reservation is not None:
            reservation.renew(what)
            self._start_all(len(self._workers))
        else:
            self._workers[self._workers.index(worker)] = self._start(worker.rank)

    def _book(self) -> None:
        for record in self._run.absorb(self._stage.name):
            match record["kind"]:
                case "starting":
                    self._seconds.add("starting", record["seconds"] / len(self._workers or [None]))
                case "compiling":
                    self._seconds.add("compiling", record["seconds"] / len(self._workers or [None]))
                case "worker_error":
                    self._errors += told_errors([record])
                case "stalled":
                    self._run.log.emit(
                        "stall", f"{self._stage.name}: {record['what']}", level=logging.WARNING, uri=record["uri"]
                    )
                case "fault":
                    tell_fault(self._run, self._stage.name, record)


def _placement(host: Host, run: StageRun) -> dict[str, Any]:
    spec = run.config.cluster.slice_spec()
    chips = spec.chips_per_host if spec else 0
    placement: dict[str, Any] = {
        "resources": {"TPU": chips},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(host.group, placement_group_bundle_index=host.bundle),
    }
    if run.config.cluster.kind == "tpu":
        # Each host works alone: libtpu must not wait for the other hosts of the slice.
        placement["runtime_env"] = {"env_vars": {"TPU_PROCESS_BOUNDS": "1,1,1", "CLOUD_TPU_TASK_ID": "0"}}
    return placement
