"""Random trials: drawn again by their seed, always well formed, and over time of every kind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.drill.test_drill_plan import LM, TRAIN
from tpupipe.drill.plan import stall_timeout_s
from tpupipe.drill.plan_file import duration_s
from tpupipe.drill.random_plan import _same_place, random_plan, random_scenario
from tpupipe.drill.run import DrillOptions
from tpupipe.drill.scenario import kills_driver
from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault
from tpupipe.faults.points import POINTS
from tpupipe.faults.store_faults import StoreFaults

MANY = 400


def test_a_seed_gives_the_same_trials_again():
    """The trial depends on seed and number only, not on those before it."""
    first = list(itertools.islice(random_plan(LM, 7), 20))
    assert first == [random_scenario(LM, 7, number) for number in range(1, 21)]
    assert first != list(itertools.islice(random_plan(LM, 8), 20))


def test_trials_are_well_formed_and_of_every_kind():
    """All faults can be read, driver kills end their attempts, steps and ranks exist, and every action comes up."""
    seen: set[Action] = set()
    points: set[str] = set()
    for scenario in itertools.islice(random_plan(LM, 1), MANY):
        StoreFaults.parse(*scenario.store_faults)
        assert not scenario.must_fire
        for attempt in scenario.attempts[:-1]:
            assert [kills_driver(text) for text in attempt] == [False] * (len(attempt) - 1) + [True]
        for text in scenario.faults:
            fault = parse_fault(text)
            seen.add(fault.action)
            points.add(fault.point)
            if fault.action is Action.RAISE:  # an error in the background of a save ends a run, as it should
                assert fault.point in {"train.step", "train.updated", "save.start", "restore.start", "restore.done"}
            if fault.action is Action.HANG:  # others have bounds of their own, of up to half an hour
                assert fault.point in {"train.step", "train.updated", "save.start"}
            facts = dict(fault.when)
            if "step" in facts:
                assert 0 <= int(facts["step"]) <= (TRAIN.total or 0)
            assert int(facts.get("rank", 0)) < LM.hosts
    assert seen == set(Action)
    of_ticks = {"generation.begun", "tick.before_claim", "tick.claimed", "tick.before_done"}
    assert points == set(POINTS) - of_ticks - {"lease.beat", "train.trained"}


def test_the_same_stall_is_not_drawn_twice():
    """After the update of step 39 and before step 40 are one place, and so are steps that processes may be apart."""
    one, other = (0, 40, "hang@train.updated=39,rank=0,stage=lm"), (0, 40, "hang@train.step=40,rank=1,stage=lm")
    assert one[1] == 39 + 1
    facts = replace(LM, stages=(TRAIN,))
    assert _same_place(one, other, facts)
    assert _same_place(one, (0, 42, "kill-worker@train.step=42"), facts)
    assert not _same_place(one, (0, 43, "kill-worker@train.step=43"), facts)
    first, second = ((0, n, f"kill-worker@save.arrays_written={n},rank=0") for n in (40, 50))
    assert _same_place(first, second, replace(facts, save_s=1.0, step_s=0.1)), "the save of 40 may end at step 50"
    assert not _same_place(first, (0, 50, second[2].replace("rank=0", "rank=1")), facts), "they are told apart"
    slow = replace(facts, step_s=1.0, save_s=4.0)
    assert _same_place(one, (0, 46, "kill-worker@train.step=46"), slow), "where steps are told one by one"
    assert not _same_place((0, 1, ""), (1, 1, ""), LM), "another stage"
    assert not _same_place((0, 1, ""), (0, 2, ""), LM), "another unit"


@pytest.mark.parametrize(
    "facts", [LM, replace(LM, stages=(replace(TRAIN, total=10, every=5),), step_s=1.0, save_s=1.0)]
)
def test_no_two_failures_of_one_attempt_are_told_of_one_step(facts):
    """By the steps done when each fires; two that are told alike would end a correct run."""
    for scenario in itertools.islice(random_plan(facts, 3), MANY):
        for attempt in scenario.attempts:
            told = sorted(
                int(dict(f.when)["step"]) + (f.point == "train.updated")
                for f in map(parse_fault, attempt)
                if f.point.startswith(("train.", "save."))
            )
            assert all(later - earlier > 2 for earlier, later in itertools.pairwise(told)), attempt


def test_what_is_waited_for_is_expected():
    """A hang and a notice make a trial, and its recoveries, longer."""
    hung = [s for s in itertools.islice(random_plan(LM, 1), MANY) if "hang@" in str(s.faults)]
    assert hung
    assert all(s.extra_s >= stall_timeout_s(LM) for s in hung)


def test_a_real_slice_and_a_real_store_are_left_alone():
    """Where hosts cannot be lost and the store cannot fail, no trial asks for it."""
    real = replace(LM, faked=False, emulated=False)
    scenarios = list(itertools.islice(random_plan(real, 1), MANY))
    assert not any(s.store_faults for s in scenarios)
    actions = {parse_fault(text).action for s in scenarios for text in s.faults}
    assert actions.isdisjoint({Action.KILL_HOST, Action.LOSE_SLICE, Action.DRAIN_HOST})


def test_random_needs_a_budget():
    """Trials have no end of their own."""
    with pytest.raises(UsageError, match="--budget"):
        DrillOptions(seed=1)
    with pytest.raises(UsageError, match="--only"):
        DrillOptions(seed=1, budget_s=duration_s("5m"), only=("kill-worker",))
