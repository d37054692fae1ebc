"""The verdict on a scenario: what was seen is compared with the reference run, and the first difference is named. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpupipe.drill.facts import JobFacts
from tpupipe.drill.history import AttemptHistory, fired, lost_steps, never_fired, recoveries_s, rows_redone
from tpupipe.drill.scenario import Scenario
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
    """

    attempts: tuple[AttemptSeen, ...]
    result: Mapping[str, Any] = field(default_factory=dict)
    unit_rows: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    store_fired: Mapping[str, int] = field(default_factory=dict)


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
    failed = [
        *_endings(scenario, seen),
        *(_unfired(scenario, seen) if scenario.must_fire else ()),
        *_results(reference, seen),
        *seen.differences.values(),
        *(f"not given back: {what}" for what in seen.left),
        *_losses(lost, allowed),
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
        recoveries_s=tuple(round(s, 2) for s in recoveries_s(histories)),
        rows_redone=rows_redone(histories, facts, seen.unit_rows),
        attempts=len(seen.attempts),
        seconds=round(seconds, 1),
        log=seen.attempts[-1].log if seen.attempts else "",
    )


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
    for number, attempt in enumerate(seen.attempts, 1):
        last = number == len(scenario.attempts)
        if ended_well(attempt, last=last) or (attempt.exit_status == 0 and not scenario.must_fire):
            continue
        what = f"attempt {number} of {len(scenario.attempts)}"
        because = f": {attempt.error}" if attempt.error else ""
        if attempt.exit_status is None:
            failed.append(f"{what} did not end within {attempt.seconds:.0f} s and was stopped{because}")
        elif last:
            failed.append(f"{what} ended with exit status {attempt.exit_status}{because}")
        elif attempt.exit_status == 0:
            failed.append(f"{what} went to the end: {attempt.history.faults[-1]!r} never killed the driver")
        else:
            failed.append(f"{what} should have been killed, and ended with exit status {attempt.exit_status}{because}")
    if not failed and seen.result.get("status") != "done":
        failed.append(f"the run's status is {seen.result.get('status', 'unknown')!r} instead of 'done'")
    return failed


def ended_well(attempt: AttemptSeen, *, last: bool) -> bool:
    """Whether an attempt ended as expected: the last by success, those before by the kill of their driver."""
    return attempt.exit_status == 0 if last else attempt.history.killed


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
