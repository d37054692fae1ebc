"""Train: Ray Train's ``JaxTrainer`` on the held reservation, started again from the newest intact checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2.api.exceptions import PreemptionError, WorkerGroupError

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.checkpoint.saver import SaveTarget
from tpupipe.checkpoint.verify import Selection, newest_intact, reads_whole
from tpupipe.config import process_variables
from tpupipe.data.chunks import Manifest
from tpupipe.data.stream import Stream
from tpupipe.errors import (
    CheckpointError,
    CheckpointReadError,
    CheckpointSaveError,
    InterruptedRunError,
    StageError,
    StoreError,
)
from tpupipe.job import Train
from tpupipe.ledger.events import Seconds
from tpupipe.stages.base import StageRun, last_lines, last_look
from tpupipe.stages.context import Restorable
from tpupipe.stages.failures import Budget, Failure, Kind, final_error, unreachable
from tpupipe.stages.finished import read_manifest, trained
from tpupipe.stages.record import TrainRecord, write_train_record
from tpupipe.stages.result import StageResult
from tpupipe.stages.retry import answered, budget_of, charge, leave_draining, loss_of
from tpupipe.stages.stall import Bounds
from tpupipe.stages.train_group import RAY_TRAIN_SETTINGS, TrainGroups
from tpupipe.stages.train_worker import TrainPlan
from tpupipe.stages.units import require_rows
from tpupipe.stages.watch import Ending, Recovery, TrainWatch

POLL_S = 0.1
LOG_EVERY_S = 5.0
SAVE_TIMEOUT_FACTOR = 10.0  # a save is many operations, each bounded by store.timeout_s
SAVE_SILENCE_FACTOR = 1.75  # as for one operation of the store with its retries


def run_train(stage: Train, run: StageRun) -> StageResult:
    """Runs one ``Train`` stage to its record.

    Raises:
        UserCodeError: The job's functions raised.
        CheckpointSaveError, NoIntactCheckpointError, CheckpointMismatchError: Nothing was lost, nothing is guessed.
        BudgetExceededError: Too many failures, or the same one twice at one step.
        InterruptedRunError: Somebody asked the run to end; the state was saved.
    """
    seconds = Seconds()
    budget = budget_of(run, stage.name)
    manifest = answered(run, budget, lambda: read_manifest(run.store, run.paths, stage.data))
    if manifest is None:
        raise StageError(f"Stage {stage.data!r}, which {stage.name!r} reads, is not complete.", stage=stage.name)
    require_rows(stage.data, manifest)
    options = {
        "seed": stage.seed,
        "batch_size": stage.batch_size,
        "steps": stage.steps,
        "epochs": stage.epochs,
        "shuffle": stage.shuffle,
    }
    stream = Stream(manifest.chunk_rows, **options)  # type: ignore[arg-type]
    with process_variables(RAY_TRAIN_SETTINGS), TrainGroups(stage, run) as groups:
        ending, first_step, unreadable = _until_trained(
            stage, run, groups, budget, options=options, seconds=seconds, steps=stream.steps
        )
    final = answered(run, budget, lambda: newest_intact(run.store, run.paths, stage.name, exclude=unreadable))
    if final.commit is None or final.commit.step != stream.steps:
        found = "none" if final.commit is None else f"step {final.commit.step}"
        raise StageError(
            f"Stage {stage.name!r} took its last step, but its last checkpoint is not intact (newest intact: {found}).",
            hint="The same command trains the missing steps again.",
            stage=stage.name,
        )
    record = TrainRecord(
        steps=stream.steps,
        params_digest=ending["params_digest"],
        sample_digest=f"{final.commit.sample_digest:016x}",
        metrics=dict(final.commit.metrics) or dict(ending["metrics"]),
        checkpoint=final.folder,
        checkpoint_fingerprint=final.commit.fingerprint,
        rows_fed=_rows_fed(stage, stream, manifest),
        rows_dropped=stream.rows_dropped,
    )

    def commit() -> None:
        run.lease.check()
        write_train_record(run.store, run.paths, stage.name, record)

    answered(run, budget, commit)
    return trained(record, run.store, run.store.uri(run.paths.stage(stage.name)), first_step, seconds)


def _until_trained(
    stage: Train,
    run: StageRun,
    groups: TrainGroups,
    budget: Budget,
    *,
    options: Mapping[str, Any],
    seconds: Seconds,
    steps: int,
) -> tuple[Mapping[str, Any], int, set[str]]:
    """Starts workers until they have done all steps.

    Returns:
        What they reported at the end, the step of the first start, and folders of checkpoints that could not be read.
    """
    unreadable: set[str] = set()
    first_step: int | None = None
    restart = 0
    recovery: Recovery | None = None
    doubted: tuple[tuple[int, int], ...] = ()
    while True:
        run.stop.check()
        leave_draining(run, budget, groups.drop)  # a group kept ready stands on the hosts that are given back
        selection = answered(run, budget, lambda: _select(stage, run, unreadable))
        at = selection.commit.step if selection.commit else 0
        first_step = at if first_step is None else first_step
        _tell_start(stage, run, steps, selection, restart)
        watch = TrainWatch(stage, run, seconds, recovery)
        ending = watch.ending
        try:
            error = _work(groups, _plan(stage, run, selection, options, restart), watch, doubted)
        finally:
            with last_look(stage.name):
                watch.look()
        if ending.trained is not None:
            return ending.trained, first_step, unreadable  # also if a worker fell over afterwards: all was committed
        recovery = watch.recovery()
        doubted += (ending.between,) if ending.between else ()
        unreadable.update(_handle(watch, selection, error, budget, groups))
        restart += 1


def _rows_fed(stage: Train, stream: Stream, manifest: Manifest) -> int:
    fed = stream.steps * stage.batch_size
    return fed if stage.epochs is None else min(fed, stage.epochs * manifest.rows)


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
    for late in selection.late:
        run.log.emit(
            "checkpoint_late",
            f"{stage.name}: {late}. It is passed over, not deleted.",
            level=logging.WARNING,
            stage=stage.name,
            step=late.found.step,
            folder=late.found.folder,
        )
    return selection


def _tell_start(stage: Train, run: StageRun, steps: int, selection: Selection, restart: int) -> None:
    commit = selection.commit
    origin = f"from the checkpoint of step {commit.step}" if commit else "from scratch"
    run.log.emit(
        "train_start",
        f"{stage.name}: {steps} steps of {stage.batch_size} rows, {origin}"
        + (f" (start {restart + 1} of the workers)" if restart else ""),
        stage=stage.name,
        step=commit.step if commit else 0,
        restart=restart,
    )


# -- one start of the workers ---------------------------------------------------------------


def _plan(stage: Train, run: StageRun, selection: Selection, options: Mapping[str, Any], restart: int) -> TrainPlan:
    spec = run.config.cluster.slice_spec()
    policy = SavePolicy.of(stage.checkpoint)
    settings = run.settings(stage.name)
    return TrainPlan(
        stage=stage,
        target=SaveTarget(
            run.store,
            run.paths,
            stage.name,
            run.lease.fence,
            restart,
            policy.keep,
            timeout_s=SAVE_TIMEOUT_FACTOR * run.config.store.timeout_s,
            silence_s=SAVE_SILENCE_FACTOR * run.config.store.timeout_s,
        ),
        policy=policy,
        start=Restorable(selection.folder, selection.commit) if selection.commit else None,
        stream_options=options,
        devices=spec.devices if spec else run.config.cluster.gpus or 1,
        hosts_per_slice=spec.hosts_per_slice if spec else 1,
        slices=spec.slices if spec else 1,
        coordinator=run.coordinator,
        faults=run.faults,
        log_every_s=settings.log_every_s or LOG_EVERY_S,
        started_s=time.time(),
        bounds=Bounds.of(settings),
    )


def _work(
    groups: TrainGroups, plan: TrainPlan, watch: TrainWatch, doubted: Sequence[tuple[int, int]]
) -> BaseException | None:
    """Has a group do its work, watching what it reports meanwhile. Gives its trainer's error.

    Args:
        groups: Of the stage.
        plan: Its work.
        watch: Takes what it reports.
        doubted: Steps between which earlier starts failed; see ``coordinator.decide``.
    """
    run = watch.run
    with run.stop.handled():
        group = groups.take()
        group.begin(plan, doubted)
        asked = False
        while group.running(POLL_S):
            watch.look()
            if watch.ending.trained is None:
                groups.keep_ready(left_s=watch.left_s)
            else:
                groups.dismiss()
            if run.stop.asked and not asked:
                asked = True
                begun = watch.ending.step is not None
                what = "saving and stopping" if begun else "stopping before the first step"
                watch.tell("stopping", f"{what} ({run.stop.reason})")
                run.coordinator.request_stop(run.stop.reason)
                if not begun:
                    group.end()
        run.log.emit("group_ended", stage=plan.stage.name)
        return group.error


# -- what to do about a failure -------------------------------------------------------------


def _handle(
    watch: TrainWatch, selection: Selection, error: BaseException | None, budget: Budget, groups: TrainGroups
) -> set[str]:
    """Returns if the workers are to be started again, with folders of checkpoints to pass over; raises otherwise."""
    run, ending = watch.run, watch.ending
    if run.stop.asked:
        stopped = ending.stopped or {}
        saved = f"; the state after step {stopped['step']} was saved." if stopped.get("saved") else "."
        raise InterruptedRunError(f"Interrupted by {run.stop.reason}{saved}", reason=run.stop.reason)
    lost = run.reservation.lost_hosts() if run.reservation else []
    known = ending.known_errors()
    # When a process is gone, saves of the others fail with it; that is no failure of the store.
    bereaved = bool(lost or ending.stalls or dead_ranks(error))
    final = final_error([e for e in known if not (bereaved and isinstance(e, CheckpointSaveError))])
    if final is not None:
        raise final
    damaged = [e for e in known if isinstance(e, CheckpointReadError)]
    if (
        damaged
        and selection.commit is not None
        and not bereaved
        and not answered(run, budget, partial(reads_whole, run.store, selection.folder, selection.commit))
    ):
        message = f"{damaged[0].message} Trying an older checkpoint."
        watch.tell("checkpoint_unreadable", message, logging.WARNING, step=selection.commit.step)
        return {selection.folder}
    lost_as = loss_of(run.reservation, lost) if run.reservation and lost else None
    failure = classify(error, ending, lost_as)
    charge(run, budget, failure, ending.step)
    if run.reservation is not None and (lost or failure.kind is Kind.PREEMPTED):
        groups.drop()  # it stands on the hosts that are given back
        run.reservation.renew(failure.what)
    return set()


def classify(error: BaseException | None, ending: Ending, lost: tuple[Kind, str] | None) -> Failure:
    """What kind of failure ended the workers; pure.

    Args:
        error: What the trainer raised.
        ending: What the workers reported before.
        lost: What of the reservation is dead now, as ``loss`` says it.
    """
    if ending.stopped is not None or isinstance(error, PreemptionError):
        return Failure(Kind.PREEMPTED, ending.step, "a host is being preempted")
    if lost is not None:
        return Failure(lost[0], ending.step, lost[1])
    if ending.stalls:
        # The first in the program is the one that the others waited for.
        stall = min(ending.stalls, key=lambda s: s.get("step", 0))
        return Failure(Kind.STALLED, stall.get("step"), stall["phase"], stall["traceback"], stall["uri"])
    dead = dead_ranks(error)
    if dead:
        detail = last_lines(error) if error is not None else ""
        what = f"the worker process of rank {', '.join(map(str, dead))} died"
        return Failure(Kind.WORKER, ending.exact_step, what, detail)
    # The cause, whoever spoke first: what the others report is that a peer went away.
    if ending.errors:
        reported = min(ending.errors, key=lambda e: _CAUSES.index(_kind(e)))
        kind = _kind(reported)
        step = reported.get("step", ending.step) if kind is Kind.APP else ending.exact_step
        return Failure(kind, step, _first_line(reported["what"]), str(reported["traceback"]))
    detail = last_lines(error) if error is not None else ""
    return Failure(Kind.WORKER, ending.exact_step, f"the workers ended: {type(error).__name__}", detail)


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300] if text else ""


_ITS_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "error calling callback")
"""In JAX's errors that are about the program itself and not about another process."""
_CAUSES = (Kind.APP, Kind.STORE, Kind.WORKER)  # the cause of a failure before what followed from it


def _kind(reported: Mapping[str, Any]) -> Kind:
    """What a worker's error is charged to: the job, the store, or that JAX missed *another* process."""
    what, error = str(reported["what"]), reported["error"]
    if unreachable(error) or isinstance(error, CheckpointReadError):
        return Kind.STORE  # also a checkpoint that could not be read: `_handle` found it whole
    if isinstance(error, (StoreError, CheckpointError, StageError)):
        return Kind.WORKER
    missed = what.startswith(("JaxRuntimeError", "XlaRuntimeError")) or "Gloo" in what
    return Kind.WORKER if missed and not any(sign in what for sign in _ITS_OWN) else Kind.APP


def dead_ranks(error: BaseException | None) -> list[int]:
    """Ranks whose process died, by what the trainer raised."""
    if not isinstance(error, WorkerGroupError):
        return []
    return sorted(rank for rank, failure in error.worker_failures.items() if _is_death(failure))


def _is_death(failure: BaseException) -> bool:
    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, RayActorError):
            return True
        inner = getattr(seen, "health_check_failure", None)  # Ray Train's wrapper around what polling a worker raised
        seen = inner if isinstance(inner, BaseException) else seen.__cause__
    return False
