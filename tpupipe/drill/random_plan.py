"""Random failures for soak tests: what a seed and a number give is always the same. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from tpupipe.drill.facts import JobFacts, StageFacts
from tpupipe.drill.plan import DEADLINE_S, stall_timeout_s
from tpupipe.drill.scenario import Scenario, split_attempts
from tpupipe.faults.plan import HOW, Action, parse_fault

MOST_FAULTS = 3
STORE_SHARE = 0.25  # of the trials whose store fails, too
# A save that was under way is lost with its process, and the one before may have been damaged.
INTERVALS = 3
_STORE_EXTRA_S = 10.0

_STEP_POINTS = ("train.step", "train.updated")
_SAVE_POINTS = ("save.start", "save.arrays_written", "save.before_commit", "save.after_commit")
# An error there is a save that failed, which ends a run, as it should; a hang is noticed at the next save, or at the end
# after the bound on a save.
_IN_BACKGROUND = ("save.arrays_written", "save.before_commit", "save.after_commit")
_UNIT_POINTS = ("unit.read", "unit.mapped", "unit.before_commit", "unit.after_commit")
_STORE_FAULTS = (
    "503@create,rate={rate},seed={seed}",
    "429@read,rate={rate},seed={seed}",
    "reset@create,rate={rate},seed={seed}",
    "lost@create,rate={rate},seed={seed}",
    "truncate@download,rate={rate},seed={seed}",
    "outage@any,seconds=4,after={after}",
)

Placed = tuple[int, int, str]  # position of the stage, steps done (or unit), and the fault: sorts by when it fires

DRIVER_SHARE = 0.1  # of the failures: at the driver's own places
LOAD_SHARE = 0.15  # of those of a stage that loads parameters: while it does
_BEFORE_STAGES, _AT_END = -1, 10**9
_START_POINTS = ("run.identity", "run.lease_acquired", "run.reserved")  # in the order in which they are passed
_RESTORE_POINTS = ("restore.start", "restore.done")
# Processes may be two steps apart. Steps are told one by one where they take half a second or more, and after a failure.
_RUN_AHEAD_STEPS, _TOLD_ONE_BY_ONE_S = 2, 0.25


def random_plan(facts: JobFacts, seed: int) -> Iterator[Scenario]:
    """Trials without end. Not each of their faults has to fire: an earlier one may have taken its place away.

    Args:
        facts: The job, as the reference run measured it.
        seed: Gives the same trials again.
    """
    number = 0
    while True:
        number += 1
        yield random_scenario(facts, seed, number)


def random_scenario(facts: JobFacts, seed: int, number: int) -> Scenario:
    """One trial."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - drawn to be drawn again, not to be secret
    places: list[Placed] = []
    for placed in [_fault(rng, facts) for _ in range(rng.randint(1, MOST_FAULTS))]:
        # One failure at a place: the same error twice at one step ends a run, as it should.
        if not any(_same_place(placed, other, facts) for other in places):
            places.append(placed)
    faults = [fault for *_, fault in sorted(places)]
    store_faults = _store_faults(rng, facts)
    stall_s = stall_timeout_s(facts)
    stalls = [f"stages.{s.name}.stall_timeout_s={stall_s}" for s in facts.stages if s.kind == "train"]
    return Scenario(
        f"trial-{number:04d}",
        split_attempts(faults),
        store_faults=store_faults,
        overrides=("budgets.app_errors=8", "budgets.worker_failures=8", "budgets.host_failures=8", *stalls),
        intervals=INTERVALS,
        must_fire=False,
        about=f"seed {seed}, number {number}",
        extra_s=_waited_for_s(faults, store_faults, stall_s),
    )


def _same_place(one: Placed, other: Placed, facts: JobFacts) -> bool:
    """Whether two failures may be told of the same step (or are at the same unit, or place of the driver)."""
    if one[0] != other[0]:
        return False
    training = 0 <= one[0] < len(facts.stages) and facts.stages[one[0]].kind == "train"
    apart = _steps_apart(facts, alike=_failure(one[2]) == _failure(other[2])) if training else 0
    return abs(one[1] - other[1]) <= apart


def _failure(fault: str) -> tuple[Action, str | None]:
    """What a failure is called, apart from its step."""
    parsed = parse_fault(fault)
    return parsed.action, dict(parsed.when).get("rank")


def _steps_apart(facts: JobFacts, *, alike: bool) -> int:
    """Steps by which the step that is told of a failure may differ from the one at which it was placed."""
    exact = alike or facts.step_s > _TOLD_ONE_BY_ONE_S
    # A save's places are passed while steps go on.
    in_a_save = math.ceil(facts.save_s / max(facts.step_s, 1e-3)) if exact else 0
    return _RUN_AHEAD_STEPS + in_a_save


def _waited_for_s(faults: Sequence[str], store_faults: Sequence[str], stall_s: int) -> float:
    hangs, drains = (sum(f.startswith(f"{action}@") for f in faults) for action in ("hang", "drain-host"))
    return float(stall_s * hangs + DEADLINE_S * drains + _STORE_EXTRA_S * len(store_faults))


def _fault(rng: random.Random, facts: JobFacts) -> Placed:
    if rng.random() < DRIVER_SHARE:
        return _of_driver(rng, facts)
    position = rng.choices(range(len(facts.stages)), [3 if s.kind == "train" else 1 for s in facts.stages])[0]
    stage = facts.stages[position]
    draw: Callable[[random.Random, JobFacts, StageFacts], tuple[int, str]]
    draw = _of_training if stage.kind == "train" else _of_units
    at, fault = draw(rng, facts, stage)
    return position, at, f"{fault},stage={stage.name}"


def _of_driver(rng: random.Random, facts: JobFacts) -> Placed:
    """At the driver's own places, each of which it passes once."""
    places: list[Placed] = [
        (_BEFORE_STAGES, order, f"kill-driver@{point}") for order, point in enumerate(_START_POINTS)
    ]
    for position, stage in enumerate(facts.stages):
        places.append((position, _AT_END, f"kill-driver@stage.manifest={stage.name}"))
        places.append((position, _AT_END + 1, f"kill-driver@stage.done={stage.name}"))
    return rng.choice([*places, (len(facts.stages), 0, "kill-driver@run.result")])


def _of_units(rng: random.Random, _: JobFacts, stage: StageFacts) -> tuple[int, str]:
    if stage.kind == "infer" and rng.random() < LOAD_SHARE:
        point = rng.choice((*_RESTORE_POINTS, "params.loaded"))
        return -1, f"{rng.choice(('kill-worker', 'slow'))}@{point}"
    unit = rng.randrange(max(1, stage.total or 1))
    action = rng.choice(("kill-worker", "kill-worker", "kill-driver", "slow"))
    return unit, f"{action}@{rng.choice(_UNIT_POINTS)}={unit}"


def _of_training(rng: random.Random, facts: JobFacts, stage: StageFacts) -> tuple[int, str]:
    total, every = stage.total or 1, stage.every or stage.total or 1
    if rng.random() < LOAD_SHARE:
        # The first restore after whatever fails before that step. No hang: that has a bound of half an hour.
        action, point = rng.choice(("kill-worker", "raise", "slow")), rng.choice(_RESTORE_POINTS)
        return rng.randrange(total), f"{action}@{point},rank={rng.randrange(facts.hosts)}"
    saves = [*range(every, total, every), total]
    at_save = rng.random() < 0.4
    step = rng.choice(saves) if at_save else rng.randrange(total)
    point = rng.choice(_SAVE_POINTS if at_save else _STEP_POINTS)
    actions = ["kill-worker", "kill-worker", "kill-driver", "slow"]
    if point not in _IN_BACKGROUND:
        actions += ["raise", "hang"]
    if facts.faked:
        actions += ["kill-host", "lose-slice", f"drain-host,deadline_s={DEADLINE_S}"]
    if point == "save.after_commit":
        actions.append(f"corrupt-checkpoint,how={rng.choice(HOW)}")
    action, _, more = rng.choice(actions).partition(",")
    # Records are written by rank 0 alone; of the other points any process will do.
    rank = 0 if point.startswith("save.") and point != "save.start" else rng.randrange(facts.hosts)
    done = step + (point == "train.updated")
    return done, f"{action}@{point}={step},rank={rank}" + (f",{more}" if more else "")


def _store_faults(rng: random.Random, facts: JobFacts) -> tuple[str, ...]:
    if not facts.emulated or rng.random() >= STORE_SHARE:
        return ()
    fault = rng.choice(_STORE_FAULTS)
    return (fault.format(rate=rng.choice((0.02, 0.05, 0.1)), seed=rng.randrange(1000), after=rng.randrange(20, 200)),)
