"""Train: Ray Train's ``JaxTrainer`` on the held reservation, started again from the newest intact checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import PreemptionError, WorkerGroupError
from ray.train.v2.jax import JaxConfig, JaxTrainer

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.checkpoint.saver import SaveTarget
from tpupipe.checkpoint.verify import Selection, newest_intact
from tpupipe.data.chunks import Manifest
from tpupipe.data.stream import Stream
from tpupipe.errors import CheckpointError, InterruptedRunError, StageError, TpupipeError
from tpupipe.job import Train
from tpupipe.ledger.events import Seconds
from tpupipe.stages.base import StageResult, StageRun
from tpupipe.stages.context import Restorable
from tpupipe.stages.failures import Budget, Failure, Kind, final_error
from tpupipe.stages.record import TrainRecord, read_train_record, write_train_record
from tpupipe.stages.train_worker import TrainPlan, train_worker
from tpupipe.stages.units import read_manifest, require_rows, user_traceback

POLL_S = 0.1
LOG_EVERY_S = 5.0
SAVE_TIMEOUT_S = 600.0

# Read by Ray Train in the driver, when a trainer is made. Ray's defaults notice a dead worker after 2 s and wait 30 s
# for the others to say goodbye to a process that is gone.
RAY_TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1.0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    "JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S": "2",
}


@dataclass
class Ending:
    """What one start of the workers reported. Filled from their events while it runs."""

    trained: dict[str, Any] | None = None
    stopped: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None

    def known_errors(self) -> list[TpupipeError]:
        """Errors of our own tree among those reported."""
        return [e["error"] for e in self.errors if isinstance(e["error"], TpupipeError)]


def run_train(stage: Train, run: StageRun) -> StageResult:
    """Runs one ``Train`` stage to its record.

    Raises:
        UserCodeError: The job's functions raised.
        CheckpointSaveError, NoIntactCheckpointError, CheckpointMismatchError: Nothing was lost, nothing is guessed.
        BudgetExceededError: Too many failures, or the same one twice at one step.
        InterruptedRunError: Somebody asked the run to end; the state was saved.
    """
    seconds = Seconds()
    manifest = read_manifest(run.store, run.paths, stage.data)
    if manifest is None:
        raise StageError(f"Stage {stage.data!r}, which {stage.name!r} reads, is not complete.", stage=stage.name)
    require_rows(stage.data, manifest)
    options = {"seed": stage.seed, "batch_size": stage.batch_size, "steps": stage.steps, "epochs": stage.epochs}
    stream = Stream(manifest.chunk_rows, **options)  # type: ignore[arg-type]
    record = read_train_record(run.store, run.paths, stage.name)
    if record is not None:
        return _result(stage, run, stream, record, record.steps, seconds)

    budget = Budget(run.config.budgets, stage.name)
    unreadable: set[str] = set()
    first_step: int | None = None
    restart = 0
    lost_at: float | None = None
    while True:
        selection = _select(stage, run, unreadable)
        at = selection.commit.step if selection.commit else 0
        first_step = at if first_step is None else first_step
        _tell_start(stage, run, stream, selection, restart)
        ending = Ending()
        try:
            error = _start_workers(stage, run, selection, options, restart, ending, seconds, lost_at)
        finally:
            _settle(run, stage, ending, seconds)
        if ending.trained is not None:
            break  # also if a worker fell over afterwards: everything was committed by then
        lost_at = time.time()
        _handle(stage, run, selection, ending, error, budget, unreadable)
        restart += 1
    final = newest_intact(run.store, run.paths, stage.name, exclude=unreadable)
    if final.commit is None or final.commit.step != stream.steps:
        found = "none" if final.commit is None else f"step {final.commit.step}"
        raise StageError(
            f"Stage {stage.name!r} took its last step, but its last checkpoint is not intact (newest intact: {found}).",
            hint="The same command trains the missing steps again.",
            stage=stage.name,
        )
    record = TrainRecord(
        steps=stream.steps,
        params_digest=ending.trained["params_digest"],
        sample_digest=f"{final.commit.sample_digest:016x}",
        metrics=dict(final.commit.metrics) or dict(ending.trained["metrics"]),
        checkpoint=final.folder,
        checkpoint_fingerprint=final.commit.fingerprint,
        rows_fed=_rows_fed(stage, stream, manifest),
        rows_dropped=stream.rows_dropped,
    )
    run.lease.check()
    write_train_record(run.store, run.paths, stage.name, record)
    return _result(stage, run, stream, record, first_step or None, seconds)


def _rows_fed(stage: Train, stream: Stream, manifest: Manifest) -> int:
    fed = stream.steps * stage.batch_size
    return fed if stage.epochs is None else min(fed, stage.epochs * manifest.rows)


def _result(
    stage: Train, run: StageRun, stream: Stream, record: TrainRecord, resumed_from: int | None, seconds: Seconds
) -> StageResult:
    return StageResult(
        status="done",
        done=record.steps,
        total=stream.steps,
        resumed_from=resumed_from,
        rows_in=record.rows_fed,
        rows_out=record.rows_fed,
        rows_dropped=record.rows_dropped,
        uri=run.store.uri(run.paths.stage(stage.name)),
        seconds=seconds.rounded(),
        metrics=record.metrics,
        params_digest=record.params_digest,
        sample_digest=record.sample_digest,
        checkpoint=run.store.uri(record.checkpoint),
    )


def _select(stage: Train, run: StageRun, unreadable: set[str]) -> Selection:
    selection = newest_intact(run.store, run.paths, stage.name, exclude=unreadable)
    for damage in selection.damaged:
        run.log.emit(
            "checkpoint_damaged",
            f"{stage.name}: {damage}. It is passed over, not deleted.",
            level=logging.WARNING,
            stage=stage.name,
            step=damage.step,
            folder=damage.folder,
        )
    newest = selection.commit.step if selection.commit else -1
    for found in selection.uncommitted:
        if found.step > newest:
            run.log.emit(
                "checkpoint_uncommitted",
                f"{stage.name}: {found.folder} of step {found.step} has no commit record and does not count; "
                "it is left alone.",
                level=logging.WARNING,
                stage=stage.name,
                step=found.step,
                folder=found.folder,
            )
    return selection


def _tell_start(stage: Train, run: StageRun, stream: Stream, selection: Selection, restart: int) -> None:
    commit = selection.commit
    origin = f"from the checkpoint of step {commit.step}" if commit else "from scratch"
    run.log.emit(
        "train_start",
        f"{stage.name}: {stream.steps} steps of {stage.batch_size} rows, {origin}"
        + (f" (start {restart + 1} of the workers)" if restart else ""),
        stage=stage.name,
        step=commit.step if commit else 0,
        restart=restart,
    )


# -- one start of the workers ---------------------------------------------------------------


def _start_workers(
    stage: Train,
    run: StageRun,
    selection: Selection,
    options: Mapping[str, Any],
    restart: int,
    ending: Ending,
    seconds: Seconds,
    lost_at: float | None,
) -> BaseException | None:
    """Runs a trainer to its end; what the workers report goes to ``ending`` meanwhile. Gives the trainer's error."""
    spec = run.config.cluster.slice_spec()
    policy = SavePolicy.of(stage.checkpoint)
    plan = TrainPlan(
        stage=stage,
        target=SaveTarget(
            run.store, run.paths, stage.name, run.lease.fence, restart, policy.keep, timeout_s=SAVE_TIMEOUT_S
        ),
        policy=policy,
        start=Restorable(selection.folder, selection.commit) if selection.commit else None,
        stream_options=options,
        devices=spec.devices if spec else run.config.cluster.gpus or 1,
        hosts_per_slice=spec.hosts_per_slice if spec else 1,
        slices=spec.slices if spec else 1,
        coordinator=run.coordinator,
        faults=run.faults,
        log_every_s=run.settings(stage.name).log_every_s or LOG_EVERY_S,
        started_s=time.time(),
    )
    run.coordinator.new_group(restart)
    with (
        run.stop.handled(),
        tempfile.TemporaryDirectory(prefix="tpupipe-train-") as scratch,
        _ray_train_settings(),
    ):
        # A name of its own each time: Ray Train resumes a name it has seen, from its own idea of a checkpoint.
        trainer = JaxTrainer(
            lambda config: train_worker(config["plan"]),
            train_loop_config={"plan": plan},
            jax_config=_jax_config(run),
            scaling_config=_scaling(run),
            run_config=RunConfig(
                name=f"{run.paths.run}-{uuid.uuid4().hex[:8]}",
                storage_path=scratch,
                # All retries are ours: Ray's would start again on a lost slice for ever.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            ),
        )
        fit = _Fit(trainer)
        asked = False
        recovering = lost_at
        while fit.running(POLL_S):
            for record in run.absorb(stage.name):
                recovering = _take(record, run, stage, ending, seconds, recovering)
            if run.stop.asked and not asked:
                asked = True
                run.log.emit("stopping", f"{stage.name}: saving and stopping ({run.stop.reason})", stage=stage.name)
                run.coordinator.request_stop(run.stop.reason)
        return fit.error


class _Fit:
    """``trainer.fit()`` in a thread, so that the driver can watch, and Ray does not take the signal handlers over."""

    def __init__(self, trainer: JaxTrainer) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(trainer,), name="trainer-fit", daemon=True)
        self._thread.start()

    def _run(self, trainer: JaxTrainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - the stage reads it
            self.error = error

    def running(self, timeout_s: float) -> bool:
        """Waits a little; whether it still runs."""
        self._thread.join(timeout_s)
        return self._thread.is_alive()


@contextlib.contextmanager
def _ray_train_settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in RAY_TRAIN_SETTINGS}
    os.environ.update(RAY_TRAIN_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _jax_config(run: StageRun) -> JaxConfig:
    return JaxConfig(use_gpu=True) if run.reservation is None else JaxConfig(use_tpu=True)


def _scaling(run: StageRun) -> ScalingConfig:
    if run.reservation is None:
        return ScalingConfig(num_workers=run.config.cluster.gpus or 1, use_gpu=True)
    # No TPU here: the reservation holds the chips, and use_tpu=True would reserve a second time and give the slice
    # back at every restart.
    return ScalingConfig(
        num_workers=len(run.reservation.hosts),
        resources_per_worker={"CPU": 1},
        placement_strategy="STRICT_SPREAD",
        label_selector=run.reservation.label_selectors,
    )


# -- what the workers say -------------------------------------------------------------------


def _take(
    record: Mapping[str, Any], run: StageRun, stage: Train, ending: Ending, seconds: Seconds, recovering: float | None
) -> float | None:
    """Books one worker event. Gives back since when the run is recovering, ``None`` once it has taken a step."""
    match record["kind"]:
        case "starting":
            seconds.add("starting", record["seconds"])
        case "compiling":
            seconds.add("compiling", record["seconds"] + record["init_seconds"])
            run.log.emit("compiled", f"{stage.name}: compiled in {record['seconds']:.1f} s", stage=stage.name)
        case "working":
            seconds.add("working", record["seconds"])
            seconds.add("saving", record["saving_s"])
        case "restored":
            run.log.emit(
                "restored",
                f"{stage.name}: restored step {record['step']} in {record['seconds']:.1f} s",
                stage=stage.name,
                step=record["step"],
            )
        case "metrics":
            ending.step = record["step"]
            _tell_metrics(record, run, stage)
            if recovering is not None:
                took = record["time_s"] - recovering
                run.log.emit(
                    "recovered",
                    f"{stage.name}: first new step {took:.1f} s after the failure",
                    stage=stage.name,
                    seconds=took,
                )
                return None
        case "checkpoint":
            run.log.emit(
                "saved",
                f"{stage.name}: checkpoint of step {record['step']} committed "
                f"({record['size_bytes'] / 1e6:.1f} MB, durable after {record['seconds']:.2f} s)",
                stage=stage.name,
                step=record["step"],
            )
        case "fault":
            run.log.emit(
                "fault_fired",
                f"{stage.name}: injected fault {run.faults[record['position']].text!r} fires",
                level=logging.WARNING,
                stage=stage.name,
            )
        case "trained":
            ending.trained = dict(record)
        case "stopped":
            ending.stopped = dict(record)
        case "worker_error":
            ending.errors.append(dict(record))
    return recovering


def _tell_metrics(record: Mapping[str, Any], run: StageRun, stage: Train) -> None:
    shown = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
    run.log.emit(
        "progress",
        f"{stage.name}: step {record['step']}/{record['of']}  {shown}  {record['rows_per_s']:.0f} rows/s",
        stage=stage.name,
        step=record["step"],
    )


def _settle(run: StageRun, stage: Train, ending: Ending, seconds: Seconds) -> None:
    for record in run.absorb(stage.name):
        _take(record, run, stage, ending, seconds, None)


# -- what to do about a failure -------------------------------------------------------------


def _handle(
    stage: Train,
    run: StageRun,
    selection: Selection,
    ending: Ending,
    error: BaseException | None,
    budget: Budget,
    unreadable: set[str],
) -> None:
    """Returns if the workers are to be started again; raises otherwise."""
    if run.stop.asked:
        saved = ending.stopped is not None
        raise InterruptedRunError(
            f"Interrupted by {run.stop.reason}"
            + (f"; the state after step {ending.stopped['step']} was saved." if saved and ending.stopped else "."),
            reason=run.stop.reason,
        )
    known = ending.known_errors()
    final = final_error(known)
    if final is not None:
        raise final
    damaged = [e for e in known if isinstance(e, CheckpointError)]
    if damaged and selection.commit is not None:
        run.log.emit(
            "checkpoint_unreadable",
            f"{stage.name}: {damaged[0].message} Trying an older checkpoint.",
            level=logging.WARNING,
            stage=stage.name,
            step=selection.commit.step,
        )
        unreadable.add(selection.folder)
        return
    lost = run.reservation.lost_hosts() if run.reservation else []
    failure = classify(error, ending, lost_hosts=len(lost))
    run.log.emit(
        "failure",
        f"{stage.name}: {failure.what} (charged to {failure.kind.value})",
        level=logging.WARNING,
        stage=stage.name,
        step=ending.step,
        failure=asdict(failure),
    )
    budget.charge(failure)
    if run.reservation is not None and (lost or failure.kind is Kind.PREEMPTED):
        run.reservation.renew(failure.what)


def classify(error: BaseException | None, ending: Ending, *, lost_hosts: int) -> Failure:
    """What kind of failure ended the workers; pure.

    Args:
        error: What the trainer raised.
        ending: What the workers reported before.
        lost_hosts: Hosts of the reservation that are dead now.
    """
    if ending.stopped is not None or isinstance(error, PreemptionError):
        return Failure(Kind.PREEMPTED, ending.step, "a host is being preempted")
    if lost_hosts:
        return Failure(Kind.HOST, ending.step, f"{lost_hosts} host(s) of the slice were lost")
    dead = _dead_ranks(error)
    if dead:
        return Failure(Kind.WORKER, None, f"the worker process of rank {', '.join(map(str, dead))} died")
    reported = ending.errors[0] if ending.errors else None
    if reported is not None:
        return Failure(
            Kind.WORKER if _is_collateral(reported["what"]) else Kind.APP,
            ending.step,
            _first_line(reported["what"]),
            str(reported["traceback"]),
        )
    detail = user_traceback(error) if error is not None else ""
    return Failure(Kind.WORKER, ending.step, f"the workers ended: {type(error).__name__}", detail)


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300] if text else ""


def _is_collateral(what: str) -> bool:
    """Whether a worker's error is what JAX raises when *another* process went away."""
    return what.startswith(("JaxRuntimeError", "XlaRuntimeError")) or "Gloo" in what


def _dead_ranks(error: BaseException | None) -> list[int]:
    if not isinstance(error, WorkerGroupError):
        return []
    return sorted(rank for rank, failure in error.worker_failures.items() if _is_death(failure))


def _is_death(failure: BaseException) -> bool:
    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, RayActorError):
            return True
        seen = seen.__cause__
    return "ActorDiedError" in str(failure) or "RayActorError" in str(failure)

