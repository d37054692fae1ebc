"""What a failure cost, by what the workers report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tpupipe.ledger.events import Seconds, event
from tpupipe.stages.watch import Recovery, TrainWatch


class Run:
    """A run that only has a log, and reports to absorb."""

    def __init__(self, *records):
        self.records = list(records)
        self.told = []
        self.log = SimpleNamespace(emit=lambda kind, message, **facts: self.told.append((kind, message, facts)))

    def absorb(self, _):
        records, self.records = self.records, []
        return records


def look(recovery, *records):
    run = Run(*records)
    watch = TrainWatch(SimpleNamespace(name="fit"), run, Seconds(), recovery)
    watch.look()
    return watch, {kind: (message, facts) for kind, message, facts in run.told}


def metrics(step):
    return event("metrics", step=step, of=10, metrics={"loss": 1.0}, rows_per_s=2.0)


@pytest.mark.parametrize(("reached", "lost"), [(8, 3), (5, 0), (4, 0)])
def test_steps_that_are_done_again_are_lost(reached, lost):
    """Restored at 5 after so many were done: the difference is a fact of `restored` and of `recovered`."""
    _, told = look(Recovery(0.0, reached), event("restored", step=5, seconds=1.0), metrics(6))
    assert told["restored"][1]["lost_steps"] == told["recovered"][1]["lost_steps"] == lost
    assert f"{lost} step(s) were lost" in told["restored"][0]


def test_without_a_checkpoint_all_steps_are_lost():
    """Nothing is restored: `recovered` says that all 4 are done again."""
    _, told = look(Recovery(0.0, 4), metrics(1))
    assert told["recovered"][1]["lost_steps"] == 4


def test_what_nobody_reported_is_not_guessed():
    """A first start, and a failure before anybody said how far it was: no number."""
    for recovery in (None, Recovery(0.0, None)):
        _, told = look(recovery, event("restored", step=5, seconds=1.0), metrics(6))
        assert "lost_steps" not in told["restored"][1]
        assert "lost" not in told["restored"][0]


@pytest.mark.parametrize(
    ("action", "ends"),
    [("kill-worker", True), ("lose-slice", True), ("hang", True), ("slow", False), ("drain-host", False)],
)
def test_recovery_is_counted_from_what_ends_the_worker(action, ends):
    """A pause or a notice is not the failure itself."""
    fault = {**event("fault", position=0, text=f"{action}@train.step=3", action=action, step="3"), "time_s": 7.0}
    watch, told = look(None, fault)
    assert watch.failed_s == (7.0 if ends else None)
    assert watch.ending.step == 3
    assert "fires" in told["fault_fired"][0]


def test_two_failures_in_a_row_are_one_recovery():
    """Killed again in the restore: the steps lost at first are still lost, and the time runs from the first failure."""
    again = {**event("fault", position=0, text="x", action="kill-worker", step="3"), "time_s": 90.0}
    watch, _ = look(Recovery(7.0, 8), again)
    assert watch.recovery() == Recovery(7.0, 8)
    _, told = look(watch.recovery(), event("restored", step=3, seconds=1.0), {**metrics(4), "time_s": 100.0})
    assert told["recovered"][1] == {"level": 20, "stage": "fit", "seconds": 93.0, "lost_steps": 5}


def test_a_failure_after_the_first_new_step_is_another_one():
    """Recovered once: the next recovery counts from its own failure and step."""
    killed = {**event("fault", position=0, text="x", action="kill-worker", step="6"), "time_s": 90.0}
    watch, _ = look(Recovery(7.0, 8), event("restored", step=3, seconds=1.0), metrics(4), killed)
    assert watch.recovery() == Recovery(90.0, 6)


def compiling(rank):
    return event("compiling", rank=rank, of=2, seconds=1.0, init_seconds=0.0, from_cache=False)


def test_a_death_in_the_first_step_is_at_that_step():
    """All have restored and compiled, and none has conferred: whoever dies now does so in the first step."""
    restored = event("restored", step=40, seconds=1.0)
    watch, _ = look(None, restored, compiling(0))
    assert watch.ending.exact_step is None, "the other process may still restore"
    watch, _ = look(None, restored, compiling(0), compiling(1))
    assert watch.ending.exact_step == 40
    watch, _ = look(None, compiling(0), event("at", step=1, next=3), compiling(1))
    assert watch.ending.between == (1, 3)


def test_a_fault_after_the_update_is_one_step_further():
    """As `train.updated` of step 7 says: 8 are done."""
    fault = {"action": "slow", "text": "slow@x", "step": "7"}
    assert look(None, event("fault", point="train.step", **fault))[0].ending.step == 7
    assert look(None, event("fault", point="train.updated", **fault))[0].ending.step == 8
