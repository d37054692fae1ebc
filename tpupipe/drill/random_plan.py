"""Random failures for soak tests: what a seed and a number give is always the same. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tpupipe.drill.facts import JobFacts, StageFacts
from tpupipe.drill.plan import DEADLINE_S, stall_timeout_s
from tpupipe.drill.scenario import Scenario, split_attempts
from tpupipe.faults.plan import HOW

MOST_FAULTS = 3
STORE_SHARE = 0.25  # of the trials whose store fails, too
# A save that was under way is lost with its process, and the one before may have been damaged.
INTERVALS = 3

_STEP_POINTS = ("train.step", "train.updated")
_SAVE_POINTS = ("save.start", "save.arrays_written", "save.before_commit", "save.after_commit")
# An error there is a save that failed, which ends a run, as it should.
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

Placed = tuple[int, int, str]  # position of the stage, step or unit, and the fault: sorts by when it fires


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
    # One failure at a place: the same error twice at one step ends a run, as it should.
    places = {
        (stage, at): fault for stage, at, fault in (_fault(rng, facts) for _ in range(rng.randint(1, MOST_FAULTS)))
    }
    stalls = [f"stages.{s.name}.stall_timeout_s={stall_timeout_s(facts)}" for s in facts.stages if s.kind == "train"]
    return Scenario(
        f"trial-{number:04d}",
        split_attempts([places[place] for place in sorted(places)]),
        store_faults=_store_faults(rng, facts),
        overrides=("budgets.app_errors=8", "budgets.worker_failures=8", "budgets.host_failures=8", *stalls),
        intervals=INTERVALS,
        must_fire=False,
        about=f"seed {seed}, number {number}",
    )


def _fault(rng: random.Random, facts: JobFacts) -> Placed:
    position = rng.choices(range(len(facts.stages)), [3 if s.kind == "train" else 1 for s in facts.stages])[0]
    stage = facts.stages[position]
    draw: Callable[[random.Random, JobFacts, StageFacts], tuple[int, str]]
    draw = _of_training if stage.kind == "train" else _of_units
    at, fault = draw(rng, facts, stage)
    return position, at, f"{fault},stage={stage.name}"


def _of_units(rng: random.Random, _: JobFacts, stage: StageFacts) -> tuple[int, str]:
    unit = rng.randrange(max(1, stage.total or 1))
    action = rng.choice(("kill-worker", "kill-worker", "kill-driver", "slow"))
    return unit, f"{action}@{rng.choice(_UNIT_POINTS)}={unit}"


def _of_training(rng: random.Random, facts: JobFacts, stage: StageFacts) -> tuple[int, str]:
    total, every = stage.total or 1, stage.every or stage.total or 1
    saves = [*range(every, total, every), total]
    at_save = rng.random() < 0.4
    step = rng.choice(saves) if at_save else rng.randrange(total)
    point = rng.choice(_SAVE_POINTS if at_save else _STEP_POINTS)
    actions = ["kill-worker", "kill-worker", "kill-driver", "hang", "slow"]
    if point not in _IN_BACKGROUND:
        actions.append("raise")
    if facts.faked:
        actions += ["kill-host", "lose-slice", f"drain-host,deadline_s={DEADLINE_S}"]
    if point == "save.after_commit":
        actions.append(f"corrupt-checkpoint,how={rng.choice(HOW)}")
    action, _, more = rng.choice(actions).partition(",")
    # Records are written by rank 0 alone; of the other points any process will do.
    rank = 0 if point.startswith("save.") and point != "save.start" else rng.randrange(facts.hosts)
    return step, f"{action}@{point}={step},rank={rank}" + (f",{more}" if more else "")


def _store_faults(rng: random.Random, facts: JobFacts) -> tuple[str, ...]:
    if not facts.emulated or rng.random() >= STORE_SHARE:
        return ()
    fault = rng.choice(_STORE_FAULTS)
    return (fault.format(rate=rng.choice((0.02, 0.05, 0.1)), seed=rng.randrange(1000), after=rng.randrange(20, 200)),)
