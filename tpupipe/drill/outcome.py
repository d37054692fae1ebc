"""The verdict on a scenario: what was seen is compared with the reference run, and the first difference is named. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpupipe.drill.facts import JobFacts
from tpupipe.drill.history import (
    AttemptHistory,
    fired,
    lost_steps,
    never_fired,
    never_recovered,
    recoveries_s,
    rows_redone,
)
from tpupipe.drill.scenario import Scenario
from tpupipe.errors import StageError
from tpupipe.faults.plan import parse_fault

DIGESTS = ("params_digest", "sample_digest")


@dataclass(frozen=True)
class AttemptSeen:
    """How one attempt's process ended.

    Args:
        history: What it was given and told.
        exit_status: Its own; negative for a signal; ``None`` if it had to be stopped.
        seconds: How long it took.
        error: Its error, if it said one.
        log: File of its log.
    """

    history: AttemptHistory
    exit_status: int | None
    seconds: float
    error: str = ""
    log: str = ""


@dataclass(frozen=True)
class Seen:
    """All that was seen of a scenario.

    Args:
        attempts: In order. Fewer than asked for where one did not end as expected.
        result: The last attempt's result, as ``--json`` prints it.
        unit_rows: ``(unit, rows)`` of every unit of a stage, in order.
        differences: Stage to the first difference of its output, for those that differ.
        digests: ``(stage, digest)`` to where it comes from (leaf, steps), for those that differ.
        left: What of the slice was not given back.
        store_fired: Store fault to the number of requests it hit.
        unreadable: What of the run could not be read, so that it could not be compared.
    """

    attempts: tuple[AttemptSeen, ...]
    result: Mapping[str, Any] = field(default_factory=dict)
    unit_rows: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    store_fired: Mapping[str, int] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a scenario proved.

    Args:
        scenario: Its name.
        about: One line.
        run: Name of its run.
        failed: What is not as it should be, worst first; empty if it passed.
        fired: How often faults fired.
        kinds: The same by kind: the actions, and ``store``.
        faults: How often they were to fire.
        lost_steps: Of each restart of training.
        allowed_steps: What each may be at most; ``None`` where checkpoints go by the clock.
        recoveries_s: Of each failure, as far as it can be told.
        rows_redone: Rows whose work was done more than once.
        attempts: Drivers that were started.
        seconds: All attempts together.
        log: Log of the last attempt.
        allowed_recovery_s: What each recovery may take at most.
    """

    scenario: str
    about: str
    run: str
    failed: tuple[str, ...]
    fired: int
    kinds: Mapping[str, int]
    faults: int
    lost_steps: tuple[int, ...]
    allowed_steps: int | None
    recoveries_s: tuple[float, ...]
    rows_redone: int
    attempts: int
    seconds: float
    log: str = ""
    allowed_recovery_s: float | None = None

    @property
    def passed(self) -> bool:
        """Whether everything is as it should be."""
        return not self.failed


def judge(
    scenario: Scenario, facts: JobFacts, reference: Mapping[str, Any], seen: Seen, *, run: str, seconds: float
) -> Verdict:
    """Compares a disturbed run with the reference.

    Args:
        scenario: What was asked for.
        facts: The job, as the reference run measured it.
        reference: The reference run's result.
        seen: What was seen.
        run: Name of the disturbed run.
        seconds: How long all of it took.
    """
    histories = [attempt.history for attempt in seen.attempts]
    lost = {s.name: lost_steps(histories, s.name) for s in facts.stages if s.kind == "train"}
    allowed = {s.name: scenario.intervals * s.every for s in facts.stages if s.kind == "train" and s.every}
    recoveries = recoveries_s(histories)
    allowed_s = allowed_recovery_s(scenario, facts)
    ended = _endings(scenario, seen)
    failed = [
        *ended,
        *seen.unreadable,
        *(_unfired(scenario, seen) if scenario.must_fire else ()),
        *_results(reference, seen),
        *seen.differences.values(),
        *(f"not given back: {what}" for what in seen.left),
        *_losses(lost, allowed),
        *_recoveries(recoveries, allowed_s),
        *(_unrecovered(histories[-1], lost) if histories and not ended else ()),
    ]
    kinds = _kinds(seen)
    return Verdict(
        scenario=scenario.name,
        about=scenario.about,
        run=run,
        failed=tuple(failed),
        fired=sum(kinds.values()),
        kinds=kinds,
        faults=sum(parse_fault(text).times for text in scenario.faults) + len(scenario.store_faults),
        lost_steps=tuple(steps for each in lost.values() for steps in each),
        allowed_steps=max(allowed.values(), default=None),
        recoveries_s=tuple(round(s, 2) for s in recoveries),
        rows_redone=rows_redone(histories, facts, seen.unit_rows),
        attempts=len(seen.attempts),
        seconds=round(seconds, 1),
        log=seen.attempts[-1].log if seen.attempts else "",
        allowed_recovery_s=round(allowed_s, 1),
    )


def reference_failed(name: str, run: str, error: StageError, seconds: float) -> Verdict:
    """The verdict on a reference run that did not end well: there is nothing to compare anything with."""
    return Verdict(
        scenario=name,
        about="nothing is done to it: what all others would be compared with",
        run=run,
        failed=(error.message,),
        fired=0,
        kinds={},
        faults=0,
        lost_steps=(),
        allowed_steps=None,
        recoveries_s=(),
        rows_redone=0,
        attempts=1,
        seconds=round(seconds, 1),
        log=str(error.data.get("log", "")),
    )


def allowed_recovery_s(scenario: Scenario, facts: JobFacts) -> float:
    """What a recovery of a scenario may take, from the failure to the first new work.

    Where failures follow one another before there is any, it is from the first of them; a time-out or a notice that is
    waited for is a part of it.
    """
    if scenario.recovery_s is not None:
        return scenario.recovery_s
    return scenario.failures_in_a_row * facts.recovery_s + scenario.extra_s


def _kinds(seen: Seen) -> dict[str, int]:
    found: Counter[str] = Counter()
    for attempt in seen.attempts:
        for text, times in fired(attempt.history).items():
            found[parse_fault(text).action.value] += times
    if stores := sum(1 for number in seen.store_fired.values() if number):
        found["store"] = stores
    return dict(found)


def _endings(scenario: Scenario, seen: Seen) -> list[str]:
    failed = []
    for number, attempt in enumerate(seen.attempts):
        wanted = scenario.status_of(number)
        if ended_well(attempt, wanted) or (attempt.exit_status == 0 and not scenario.must_fire):
            continue
        what = f"attempt {number + 1} of {len(scenario.attempts)}"
        because = f": {attempt.error}" if attempt.error else ""
        if attempt.exit_status is None:
            failed.append(f"{what} did not end within {attempt.seconds:.0f} s and was stopped{because}")
        elif wanted == 0:
            failed.append(f"{what} ended with exit status {attempt.exit_status}{because}")
        elif wanted is not None:
            failed.append(f"{what} ended with exit status {attempt.exit_status} instead of {wanted}{because}")
        elif attempt.exit_status == 0:
            failed.append(f"{what} went to the end: {attempt.history.faults[-1]!r} never killed the driver")
        else:
            failed.append(f"{what} should have been killed, and ended with exit status {attempt.exit_status}{because}")
    if not failed and seen.result.get("status") != "done":
        failed.append(f"the run's status is {seen.result.get('status', 'unknown')!r} instead of 'done'")
    return failed


def ended_well(attempt: AttemptSeen, wanted: int | None) -> bool:
    """Whether an attempt ended with the exit status that it must have; ``None``: by the kill of its driver."""
    return attempt.history.killed if wanted is None else attempt.exit_status == wanted


def _unfired(scenario: Scenario, seen: Seen) -> list[str]:
    faults = [text for attempt in seen.attempts for text in never_fired(attempt.history)]
    stores = [text for text in scenario.store_faults if not seen.store_fired.get(text)] if seen.attempts else []
    return [
        f"fault {text!r} did not fire (as often as asked): what was not tried proves nothing" for text in faults
    ] + [f"store fault {text!r} hit no request: what was not tried proves nothing" for text in stores]


def _results(reference: Mapping[str, Any], seen: Seen) -> list[str]:
    failed = []
    for name, digest in differing_digests(reference, seen.result):
        where = seen.digests.get((name, digest), "")
        failed.append(f"stage {name}: {digest} differs from the reference" + (f": {where}" if where else ""))
    return failed


def differing_digests(reference: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(stage, digest)`` of complete training stages that do not have the reference's."""
    found = []
    for name, wanted in reference["stages"].items():
        stage = result.get("stages", {}).get(name, {})
        if stage.get("status") == "done":
            found += [(name, digest) for digest in DIGESTS if wanted.get(digest) != stage.get(digest)]
    return found


def _losses(lost: Mapping[str, Sequence[int]], allowed: Mapping[str, int]) -> list[str]:
    return [
        f"stage {name}: {max(steps)} steps were lost, at most {allowed[name]} may be"
        for name, steps in lost.items()
        if name in allowed and max(steps, default=0) > allowed[name]
    ]


def _recoveries(taken_s: Sequence[float], allowed_s: float) -> list[str]:
    longest = max(taken_s, default=0.0)
    return [f"a recovery took {longest:.1f} s, at most {allowed_s:.0f} s may it take"] if longest > allowed_s else []


def _unrecovered(last: AttemptHistory, training: Iterable[str]) -> list[str]:
    return [
        f"stage {name}: its workers were ended in a step, and no new step was told of afterwards"
        for name in training
        if never_recovered(last, name)
    ]


# -- where a sample digest parts ---------------------------------------------------------------------


def parting(reference: Mapping[int, int], found: Mapping[int, int]) -> str:
    """Between which checkpoints two runs were first fed other rows.

    Args:
        reference: Step to sample digest of the reference run's checkpoints.
        found: The same of the other run.

    >>> parting({5: 1, 10: 2, 15: 3}, {5: 1, 10: 7, 15: 9})
    'other rows, or rows in other places, were fed between step 5 and step 10'
    """
    common = sorted(set(reference) & set(found))
    first = next((step for step in common if reference[step] != found[step]), None)
    if first is None:
        return "the checkpoints that are left do not show where"
    before = max((step for step in common if step < first), default=0)
    return f"other rows, or rows in other places, were fed between step {before} and step {first}"
