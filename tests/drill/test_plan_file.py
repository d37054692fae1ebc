"""Plan files: every mistake is told at once, with what is allowed, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpupipe.drill.plan import Skipped
from tpupipe.drill.plan_file import chosen, duration_s, read_plan
from tpupipe.drill.scenario import Scenario
from tpupipe.errors import ConfigError, UsageError
from tpupipe.faults.plan import Action, parse_fault


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return path

    return to_file


def test_a_plan_file_gives_its_scenarios_in_order(write):
    """A kill of the driver begins another attempt, and so does a refused one, which has no faults of its own."""
    plan = read_plan(
        write("""
scenarios:
  - name: twice
    about: two drivers
    faults: ["kill-driver@train.step=3", "kill-worker@train.step=5,rank=1"]
    store_faults: ["503@create,rate=0.1,seed=1"]
    set: ["budgets.app_errors=1"]
    intervals: 2
    recovery_s: 45
  - name: nothing
  - {name: refused, store_faults: ["403@create"], first_status: 1, faults: ["kill-worker@train.step=5"]}
""")
    )
    assert plan == (
        Scenario(
            "twice",
            (("kill-driver@train.step=3",), ("kill-worker@train.step=5,rank=1",)),
            ("503@create,rate=0.1,seed=1",),
            ("budgets.app_errors=1",),
            2,
            about="two drivers",
            recovery_s=45.0,
        ),
        Scenario("nothing"),
        Scenario("refused", ((), ("kill-worker@train.step=5",)), ("403@create",), first_status=1),
    )


def test_the_plan_of_ten_kills_has_ten():
    """Nine at moments that are drawn, and the driver at the commit of a unit: three attempts."""
    [scenario] = read_plan(Path(__file__).parents[2] / "configs" / "drills" / "embed-ten-kills.yaml")
    faults = [parse_fault(text) for attempt in scenario.attempts for text in attempt]
    assert sum(fault.times for fault in faults if fault.action in {Action.KILL_WORKER, Action.KILL_DRIVER}) == 10
    assert [fault.rate < 1 for fault in faults].count(False) == 1
    assert len(scenario.attempts) == 3


def test_all_problems_are_told_at_once(write):
    """A misspelt point, a bad store fault, an override without a value, an unknown key: each with its place."""
    bad_values = """
scenarios:
  - {name: one, faults: ["kill-worker@train.stp=3"], store_faults: ["999@create"], set: ["budgets"]}
  - {name: Two Words}
"""
    with pytest.raises(ConfigError) as caught:
        read_plan(write(bad_values))
    text = str(caught.value)
    assert "scenarios.0.faults.0" in text
    assert "Did you mean train.step" in text
    assert "scenarios.0.store_faults.0" in text
    assert "scenarios.0.set.0" in text
    assert "scenarios.1.name" in text
    assert len(caught.value.data["problems"]) == 4
    assert "plan.yaml" in text


def test_an_unknown_key_names_the_nearest(write):
    with pytest.raises(ConfigError, match="nearest: faults"):
        read_plan(write("scenarios: [{name: a, fault: []}]"))


@pytest.mark.parametrize("wrong", ["recovery_s: 0", "recovery_s: soon", "first_status: 0", "first_status: 256"])
def test_bounds_out_of_range_are_refused(write, wrong):
    with pytest.raises(ConfigError, match=wrong.partition(":")[0]):
        read_plan(write(f"scenarios: [{{name: a, {wrong}}}]"))


@pytest.mark.parametrize("text", ["[]", "scenarios: []", "{}", "scenarios: [{faults: []}]"])
def test_a_plan_without_scenarios_or_names_is_refused(write, text):
    with pytest.raises(ConfigError):
        read_plan(write(text))


def test_a_missing_file_and_two_equal_names_are_refused(write, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_plan(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Two scenarios are named 'a'"):
        read_plan(write("scenarios: [{name: a}, {name: a}]"))


def test_only_keeps_the_plans_order_and_names_near_ones():
    """A name that is near is proposed; one that the job has no place for is refused with the reason."""
    one, two = Scenario("kill-worker"), Scenario("kill-driver")
    assert chosen([one, two], [], ["kill-driver", "kill-worker"]) == ((one, two), ())
    assert chosen([one, two], [Skipped("x", "y")], []) == ((one, two), (Skipped("x", "y"),))
    with pytest.raises(UsageError, match="Did you mean kill-worker"):
        chosen([one, two], [], ["kill-workr"])
    with pytest.raises(UsageError, match="cannot be run for this job: no training"):
        chosen([one], [Skipped("kill-twice", "no training")], ["kill-twice"])


@pytest.mark.parametrize("text", ["", "0", "10x", "m", "-5", "1m2h"])
def test_durations_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match="is not a duration"):
        duration_s(text)
