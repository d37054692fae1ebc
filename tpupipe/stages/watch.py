"""What the training workers of one start report: booked, told, and kept for the decision that follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpupipe.errors import TpupipeError
from tpupipe.faults.plan import Action
from tpupipe.job import Train
from tpupipe.ledger.events import Seconds
from tpupipe.ledger.lost_driver import steps_done
from tpupipe.ledger.text import human_bytes
from tpupipe.stages.base import StageRun, tell_fault, told_errors

# Faults that end a worker: what comes after them is time of recovery.
_ENDS = (Action.KILL_WORKER, Action.KILL_HOST, Action.LOSE_SLICE, Action.RAISE, Action.HANG)


@dataclass
class Ending:
    """What one start of the workers reported. Filled from their events while it runs.

    Args:
        trained: What process 0 said at the end of the training.
        stopped: What it said when it ended before that.
        errors: What processes raised.
        stalls: What processes said that made no progress.
        step: The most steps known to be done.
        between: At the latest conference, the steps that were done, and those after which the next was to be. The
            first one is after the first step.
    """

    trained: dict[str, Any] | None = None
    stopped: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    between: tuple[int, int] | None = None

    @property
    def exact_step(self) -> int | None:
        """The steps that were done, where that is exactly known: the next conference was to be after the very next one."""
        return None if self.between is None or self.between[1] > self.between[0] + 1 else self.between[0]

    def known_errors(self) -> list[TpupipeError]:
        """Errors of our own tree among those reported."""
        return told_errors(self.errors)

    def reached(self, step: int) -> None:
        """Notes that ``step`` steps were done."""
        self.step = max(step, self.step or 0)


@dataclass
class Recovery:
    """Since when, and from which step, the stage is recovering from a failure.

    Args:
        since_s: When the first failure since the last new step was seen, seconds since 1970.
        step: Steps that were done then, as far as they were reported.
    """

    since_s: float
    step: int | None


class TrainWatch:
    """Books what the workers of one start report: seconds, log lines, and how it ended."""

    def __init__(self, stage: Train, run: StageRun, seconds: Seconds, recovery: Recovery | None) -> None:
        self.stage = stage
        self.run = run
        self.ending = Ending()
        self.failed_s: float | None = None
        self.left_s = 0.0  # what the steps will still take, at the latest pace; 0 if unknown
        self.recompilations = 0
        self._paced = False
        self._seconds = seconds
        self._recovery = recovery
        self._restored_step = 0
        self._prepared: set[int] = set()

    def look(self) -> None:
        """Takes what was reported since the last look."""
        for record in self.run.absorb(self.stage.name):
            self._take(record)

    def recovery(self) -> Recovery:
        """What the next start recovers from; a start that failed before its first new step goes on with the same."""
        if self._recovery is None:
            return Recovery(self.failed_s or time.time(), self.ending.step)
        reached = [step for step in (self._recovery.step, self.ending.step) if step is not None]
        return Recovery(self._recovery.since_s, max(reached, default=None))

    def tell(self, kind: str, message: str, level: int = logging.INFO, **facts: Any) -> None:
        """Keeps and tells an event of this stage."""
        self.run.log.emit(kind, f"{self.stage.name}: {message}", level=level, stage=self.stage.name, **facts)

    def _take(self, record: Mapping[str, Any]) -> None:
        book = getattr(self, f"_on_{record['kind']}", None)
        if book is not None:  # other kinds are for the event log only
            book(record)

    def _on_starting(self, record: Mapping[str, Any]) -> None:
        self._seconds.add("starting", record["seconds"])

    def _on_compiling(self, record: Mapping[str, Any]) -> None:
        self._prepared.add(record["rank"])
        if len(self._prepared) == record["of"] and self.ending.between is None:  # no process restores any more
            self.ending.between = self._restored_step, self._restored_step + 1
        if record["rank"]:
            return  # all processes compile at once: the first one's seconds count
        self._seconds.add("compiling", record["seconds"] + record["init_seconds"])
        self.tell("compiled", f"compiled in {record['seconds']:.1f} s")

    def _on_recompiled(self, record: Mapping[str, Any]) -> None:
        if record["rank"]:
            return  # all processes compile at once
        self.recompilations += 1
        text = f"compiled anew after the first step (number {self.recompilations}): {'; '.join(record['changes'][:3])}"
        self.tell("recompiled", text, logging.WARNING, changes=record["changes"], count=self.recompilations)

    def _on_working(self, record: Mapping[str, Any]) -> None:
        self._seconds.add("working", record["seconds"])
        self._seconds.add("saving", record["saving_s"])

    def _on_at(self, record: Mapping[str, Any]) -> None:
        self.ending.reached(record["step"])
        self.ending.between = record["step"], record["next"]

    def _on_checkpoint(self, record: Mapping[str, Any]) -> None:
        size, seconds = human_bytes(record["size_bytes"]), record["seconds"]
        retried = f", {record['retries']} request(s) were repeated" if record["retries"] else ""
        message = f"checkpoint of step {record['step']} committed ({size}, durable after {seconds:.2f} s{retried})"
        self.tell("saved", message, step=record["step"])

    def _on_problem(self, record: Mapping[str, Any]) -> None:
        self.tell("problem", record["what"], logging.WARNING)

    def _on_stalled(self, record: Mapping[str, Any]) -> None:
        self.failed_s = self.failed_s or record["time_s"]
        self.ending.stalls.append(dict(record))
        self.tell("stall", record["what"], logging.WARNING, uri=record["uri"])

    def _on_fault(self, record: Mapping[str, Any]) -> None:
        if record["action"] in _ENDS:
            self.failed_s = record["time_s"]
        tell_fault(self.run, self.stage.name, record)
        if done := steps_done(record):
            self.ending.reached(done)

    def _on_trained(self, record: Mapping[str, Any]) -> None:
        self.ending.trained = dict(record)

    def _on_stopped(self, record: Mapping[str, Any]) -> None:
        self.ending.stopped = dict(record)

    def _on_worker_error(self, record: Mapping[str, Any]) -> None:
        self.failed_s = self.failed_s or record["time_s"]
        self.ending.errors.append(dict(record))

    def _on_restored(self, record: Mapping[str, Any]) -> None:
        step = self._restored_step = record["step"]
        lost = self._lost_steps()
        said = "".join(f"; {steps} step(s) were lost and are done again" for steps in lost.values())
        self.tell("restored", f"restored step {step} in {record['seconds']:.1f} s{said}", step=step, **lost)

    def _lost_steps(self) -> dict[str, int]:
        """Steps that were done before the failure and are done again; empty where nobody said how far it was."""
        if self._recovery is None or self._recovery.step is None:
            return {}
        return {"lost_steps": max(0, self._recovery.step - self._restored_step)}

    def _on_metrics(self, record: Mapping[str, Any]) -> None:
        self.ending.reached(record["step"])
        if self._paced:  # the first report is of one step, which says nothing about the pace
            self.left_s = (record["of"] - record["step"]) * self.stage.batch_size / record["rows_per_s"]
        self._paced = True
        shown = ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
        self.tell(
            "progress",
            f"step {record['step']}/{record['of']}  {shown}  {record['rows_per_s']:.0f} rows/s",
            step=record["step"],
        )
        if self._recovery is not None:
            took, lost = record["time_s"] - self._recovery.since_s, self._lost_steps()
            self._recovery = None
            self.tell("recovered", f"first new step {took:.1f} s after the failure", seconds=took, **lost)
