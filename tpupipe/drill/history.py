"""What the events of a disturbed run tell: which faults fired, what was lost, how long the way back took. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpupipe.drill.facts import JobFacts
from tpupipe.faults.plan import Action, parse_fault
from tpupipe.ledger.lost_driver import NEW_WORK, steps_done

Event = Mapping[str, Any]

_COMPUTED = ("unit.mapped", "unit.before_commit", "unit.after_commit")
_NOT_COMMITTED = ("unit.mapped", "unit.before_commit")
_ENDS_A_WORKER = (Action.KILL_WORKER, Action.KILL_HOST, Action.LOSE_SLICE, Action.HANG)
# After a failure there, the training has steps to take for certain: no save of the last step was begun.
_STEPS_TO_TAKE = ("train.step", "train.updated")


@dataclass(frozen=True)
class AttemptHistory:
    """One attempt: what it was given, what it told, how it ended.

    Args:
        faults: The faults it was given, in order.
        events: Its events, in the order they were kept.
        killed: Whether SIGKILL ended it.
        ended_s: When it ended, seconds since 1970.
    """

    faults: tuple[str, ...]
    events: tuple[Event, ...]
    killed: bool
    ended_s: float


def fired(attempt: AttemptHistory) -> Counter[str]:
    """How often each fault of an attempt fired; a fault's event is durable before it kills anybody."""
    return Counter(event["text"] for event in attempt.events if event["kind"] == "fault")


def never_fired(attempt: AttemptHistory) -> list[str]:
    """Faults that did not fire as often as they were meant to: what was not tried was not survived.

    A ``slow`` beside a failure only holds a process until that failure comes; it may come first.
    """
    given = [parse_fault(text) for text in attempt.faults]
    failures = [fault for fault in given if fault.action is not Action.SLOW]
    seen = fired(attempt)
    wanted: Counter[str] = Counter()
    for fault in failures or given:
        wanted[fault.text] += fault.times if fault.rate >= 1 else 1
    return [text for text, times in wanted.items() if seen[text] < times]


# -- training ------------------------------------------------------------------------------------


def lost_steps(attempts: Sequence[AttemptHistory], stage: str) -> list[int]:
    """Steps that each new start of a training stage's workers did again.

    Args:
        attempts: All attempts of the run.
        stage: The training stage.
    """
    lost: list[int] = []
    reached: int | None = None
    for event in _of_stage(attempts, stage):
        if event["kind"] == "train_start":
            begins = int(event["step"])
            if reached is not None:
                lost.append(max(0, reached - begins))
            reached = begins
        else:
            done = steps_done(event)
            reached = done if reached is None else max(reached, done)
    return lost


def _of_stage(attempts: Sequence[AttemptHistory], stage: str) -> Iterator[Event]:
    return (event for attempt in attempts for event in attempt.events if event.get("stage") == stage)


# -- the way back ----------------------------------------------------------------------------------


def recoveries_s(attempts: Sequence[AttemptHistory]) -> list[float]:
    """Seconds from each failure to the first new work: a step, a unit, or a worker that is ready for one."""
    found: list[float] = []
    for number, attempt in enumerate(attempts):
        if number and attempts[number - 1].killed:
            died = attempts[number - 1].ended_s
            back = next((e["time_s"] for e in attempt.events if e["kind"] in NEW_WORK and e["time_s"] > died), None)
            found += [] if back is None else [back - died]
        found += [float(e["seconds"]) for e in attempt.events if e["kind"] == "recovered"]
        found += _replaced(attempt.events)
    return found


def _replaced(events: Sequence[Event]) -> Iterator[float]:
    """Of inference workers: from the failure to the next one that has its parameters."""
    for position, event in enumerate(events):
        if event["kind"] != "failure" or "units_back" not in event:  # training tells its own recovery
            continue
        ready = (e["time_s"] for e in events[position:] if e["kind"] == "starting" and e.get("stage") == event["stage"])
        back = next((when for when in ready if when > event["time_s"]), None)
        if back is not None:
            yield back - event["time_s"]


def never_recovered(attempt: AttemptHistory, stage: str) -> bool:
    """Whether workers of a training stage were ended at a step, and nothing told of a new step afterwards.

    Args:
        attempt: One that ended well.
        stage: The training stage.
    """
    failed = False
    for event in _of_stage([attempt], stage):
        if event["kind"] == "fault" and event["point"] in _STEPS_TO_TAKE:
            failed = failed or event["action"] in (*_ENDS_A_WORKER, Action.RAISE)
        elif event["kind"] == "recovered":
            failed = False
    return failed


def rows_redone(
    attempts: Sequence[AttemptHistory], facts: JobFacts, unit_rows: Mapping[str, Sequence[tuple[str, int]]]
) -> int:
    """Rows whose work was done more than once: lost steps, and units at which a process was killed.

    Args:
        attempts: All attempts of the run.
        facts: The job.
        unit_rows: ``(unit, rows)`` of every unit of a stage, in order.

    Returns:
        The number, as far as the events tell: units that were half-way in other processes are not known.
    """
    rows = sum(
        sum(lost_steps(attempts, stage.name)) * stage.batch_size for stage in facts.stages if stage.kind == "train"
    )
    for event in (e for attempt in attempts for e in attempt.events if e["kind"] == "fault"):
        # What is committed when the driver dies is used by the next one; a worker's unit is handed out again.
        by_driver = event["action"] == Action.KILL_DRIVER and event["point"] in _NOT_COMMITTED
        by_worker = event["action"] in _ENDS_A_WORKER and event["point"] in _COMPUTED
        if by_driver or by_worker:
            rows += dict(unit_rows.get(event["stage"], ())).get(event["unit"], 0)
    return rows
