"""Random trials: drawn again by their seed, always well formed, and over time of every kind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.drill.test_drill_plan import LM, TRAIN
from tpupipe.drill.plan_file import duration_s
from tpupipe.drill.random_plan import random_plan, random_scenario
from tpupipe.drill.run import DrillOptions
from tpupipe.drill.scenario import kills_driver
from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault
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
    for scenario in itertools.islice(random_plan(LM, 1), MANY):
        StoreFaults.parse(*scenario.store_faults)
        assert not scenario.must_fire
        for attempt in scenario.attempts[:-1]:
            assert [kills_driver(text) for text in attempt] == [False] * (len(attempt) - 1) + [True]
        for text in scenario.faults:
            fault = parse_fault(text)
            seen.add(fault.action)
            if fault.action is Action.RAISE:  # an error in the background of a save ends a run, as it should
                assert fault.point in {"train.step", "train.updated", "save.start"}
            facts = dict(fault.when)
            if facts["stage"] == TRAIN.name:
                assert 0 <= int(facts["step"]) <= (TRAIN.total or 0)
                assert int(facts["rank"]) < LM.hosts
    assert seen == set(Action)


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
