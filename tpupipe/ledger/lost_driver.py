"""What a driver that died cost: the next one finds where it was in its events, and tells with its first new work."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpupipe.errors import StoreError
from tpupipe.ledger.events import EventLog
from tpupipe.store.layout import RunPaths, parse_event_segment
from tpupipe.store.lease import Standing
from tpupipe.store.objects import Store

Event = Mapping[str, Any]

NEW_WORK = ("metrics", "unit", "checkpoint", "stage_done")
"""Events of work that was not done before: a step's metrics, a committed unit or checkpoint, a finished stage."""

_SEGMENTS = 200  # a driver writes one each five seconds; where it was is nearly always in its last one
_PLACES = (*NEW_WORK, "at", "train_start", "stage")


@dataclass(frozen=True)
class LostDriver:
    """A driver that ended without giving its run back.

    Args:
        attempt: Its lease epoch.
        host: Where it ran.
        heard_s: Its last sign of life, seconds since 1970 on its own clock: a beat, or an event that was kept.
        since_s: Since when there is no new work: ``heard_s``, or that of an earlier driver if this one did none.
        stage: What it worked on; empty between stages, and where its events do not say.
        step: Training: steps that were done, as far as it was told.
    """

    attempt: int
    host: str
    heard_s: float
    since_s: float
    stage: str = ""
    step: int | None = None


def steps_done(event: Event) -> int:
    """Steps of training that were done when an event happened, as far as it tells; 0 if it does not."""
    step = str(event.get("step", ""))
    if event["kind"] not in ("at", "metrics", "trained", "stopped", "fault") or not step.isdigit():
        return 0
    return int(step) + (event.get("point") == "train.updated")


def lost_in(before: Standing, events: Iterable[Event]) -> LostDriver:
    """Where a lost driver was; pure.

    Args:
        before: Its lease, as it stood when the run was taken.
        events: Its last events, in the order they were kept.
    """
    stage, step, heard_s = "", None, before.said_s
    waiting_s: float | None = None  # since when, while it was itself on the way back from an earlier driver's end
    for event in events:
        heard_s = max(heard_s, event["time_s"])
        kind = event["kind"]
        if kind == "driver_lost":
            stage, step, waiting_s = event["stage"], event["step"], event["since_s"]
        elif kind in NEW_WORK:
            waiting_s = None
        if event.get("stage", stage) != stage and kind in _PLACES:
            stage, step = event["stage"], None
        if kind == "stage_done":
            stage, step = "", None
        elif kind == "train_start":
            step = max(step or 0, event["step"])
        elif done := steps_done(event):
            step = max(step or 0, done)
    return LostDriver(before.epoch, before.owner.host, heard_s, waiting_s or heard_s, stage, step)


class Comeback:
    """Watches a driver's events for its first new work, and says then what the loss of the one before it cost.

    Args:
        lost: The driver before.
        log: Where to tell it.
    """

    def __init__(self, lost: LostDriver, log: EventLog) -> None:
        self._lost = lost
        self._log = log
        self._begins: int | None = None
        self._told = False

    def see(self, event: Event) -> None:
        """Takes one event; all but the first one of new work, and what stands before it, change nothing."""
        if self._told:
            return
        if event["kind"] == "train_start" and event["stage"] == self._lost.stage:
            self._begins = event["step"]
        elif event["kind"] in NEW_WORK:
            self._told = True
            self._tell(event)

    def _tell(self, event: Event) -> None:
        took_s = max(0.0, event["time_s"] - self._lost.since_s)  # two machines' clocks
        facts: dict[str, Any] = {"attempt": self._lost.attempt, "seconds": took_s, "stage": event["stage"]}
        said = ""
        if self._begins is not None and self._lost.step is not None:
            facts["lost_steps"] = max(0, self._lost.step - self._begins)
            said = f"; {facts['lost_steps']} step(s) were lost and done again"
        message = f"{event['stage']}: first new work {took_s:.1f} s after the last sign of life of a lost driver{said}"
        self._log.emit("driver_recovered", message, **facts)


def tell_lost_driver(store: Store, paths: RunPaths, before: Standing | None, log: EventLog) -> None:
    """Tells that the driver before this one was lost, if it was, and has the log tell what that cost.

    Args:
        store: Where the run is.
        paths: The run.
        before: The lease before ours, as it stood when we took the run; ``None`` if there was none.
        log: This driver's events.
    """
    if before is None or before.released:
        return
    events: Sequence[Event] = ()
    try:
        events = _last_events(store, paths, before.epoch)
    except (StoreError, ValueError) as error:  # this is only told: the run goes on from what is committed
        log.emit("problem", f"where attempt {before.epoch} was is not known: {error}", level=logging.WARNING)
    if any(event["kind"] == "ended" for event in events):
        return  # by itself; only giving the run back failed
    lost = lost_in(before, events)
    where = f"in stage {lost.stage}" if lost.stage else "between stages"
    step = f" with {lost.step} step(s) done" if lost.step is not None else ""
    message = f"attempt {lost.attempt} on {lost.host} ended without giving the run back, {where}{step}"
    log.emit("driver_lost", message, level=logging.WARNING, **asdict(lost))
    log.watch(Comeback(lost, log).see)


def _last_events(store: Store, paths: RunPaths, epoch: int) -> list[Event]:
    """The last events of an attempt, back to its latest new work; all of them, if it did none."""
    names = sorted(info.name for info in store.list(paths.event_segments(epoch)) if parse_event_segment(info.name))
    events: list[Event] = []
    for name in reversed(names[-_SEGMENTS:]):
        events[:0] = [json.loads(line) for line in store.read(name).splitlines()]
        if any(event["kind"] in (*NEW_WORK, "driver_lost") for event in events):
            break
    return events
