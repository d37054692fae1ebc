"""The standard plan: every fault kind has its place in any job, and what fits a budget is chosen in a fixed order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import tpupipe
from tpupipe import Every, Files, Infer, Preprocess, Train
from tpupipe.config import Config
from tpupipe.drill.facts import JobFacts, StageFacts, job_facts, measured
from tpupipe.drill.plan import STANDARD_NAMES, estimated_s, next_that_fits, standard_plan
from tpupipe.drill.scenario import Scenario, split_attempts
from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault
from tpupipe.faults.points import POINTS
from tpupipe.faults.store_faults import StoreFault

PREPARE = StageFacts("tokens", "preprocess", total=9)
TRAIN = StageFacts("lm", "train", total=160, every=20, batch_size=32)
INFER = StageFacts("nll", "infer", total=5)
LM = JobFacts((PREPARE, TRAIN, INFER), hosts=2, faked=True, emulated=True)


def plan(facts: JobFacts) -> dict[str, Scenario]:
    return {s.name: s for s in standard_plan(facts)[0]}


def skipped(facts: JobFacts) -> dict[str, str]:
    return {s.name: s.why for s in standard_plan(facts)[1]}


def test_a_job_with_all_kinds_of_stages_gets_every_scenario():
    assert tuple(plan(LM)) == STANDARD_NAMES
    assert skipped(LM) == {}


def test_every_action_is_in_the_plan_and_the_saves_and_restores_are():
    """Every fault kind, and a kill during a save, between arrays and commit, after it, and during a restore."""
    faults = [parse_fault(text) for s in plan(LM).values() for text in s.faults]
    assert {f.action for f in faults} == set(Action)
    points = {f.point for f in faults if f.action in (Action.KILL_WORKER, Action.KILL_DRIVER)}
    of_ticks = {"generation.begun", "tick.before_claim", "tick.claimed", "tick.before_done"}  # not drilled
    assert points >= set(POINTS) - {"run.identity", "lease.beat", "restore.done"} - of_ticks
    assert {f.how for f in faults if f.action is Action.CORRUPT_CHECKPOINT} == {"flip", "truncate", "delete"}
    kinds = {StoreFault.parse(text).kind for s in plan(LM).values() for text in s.store_faults}
    assert kinds >= {"503", "429", "outage", "truncate", "reset", "lost"}


def test_failures_stand_between_two_checkpoints():
    """Half-way to the second save, with the first to go back to; saves are hit at the second."""
    assert (TRAIN.first_save, TRAIN.next_save, TRAIN.middle) == (20, 40, 30)
    assert "kill-worker@train.step=30,rank=1,stage=lm" in plan(LM)["kill-worker"].faults
    assert "kill-worker@save.arrays_written=40,rank=0,stage=lm" in plan(LM)["kill-between-arrays-and-commit"].faults
    assert "kill-worker@restore.start=20,rank=0,stage=lm" in plan(LM)["kill-in-restore"].faults


@pytest.mark.parametrize(
    ("total", "every", "first", "following", "middle"),
    [(10, 5, 5, 10, 7), (3, 1, 1, 2, 1), (2, 1, 1, 2, 1), (7, 5, 5, 7, 6), (5, 5, None, 5, 2), (1, 100, None, 1, 0)],
)
def test_places_exist_in_short_trainings_too(total, every, first, following, middle):
    """A failure's step is one that the training takes, and the save is one that it makes."""
    stage = StageFacts("lm", "train", total=total, every=every)
    assert (stage.first_save, stage.next_save, stage.middle) == (first, following, middle)
    for scenario in plan(replace(LM, stages=(stage,))).values():
        for fault in map(parse_fault, scenario.faults):
            step = int(dict(fault.when).get("step", 0))
            assert step < total if fault.point.startswith("train.") else step <= total


def test_two_kills_in_a_row_are_both_before_the_next_checkpoint():
    [attempt] = plan(LM)["kill-twice"].attempts
    kill = parse_fault(attempt[-1])
    assert kill.times == 2
    assert TRAIN.first_save <= int(dict(kill.when)["step"]) < TRAIN.next_save


def test_a_kill_of_the_driver_ends_its_attempt():
    """One attempt for each, with only its own faults, and one more to the end."""
    attempts = plan(LM)["kill-driver"].attempts
    assert len(attempts) == 5
    assert attempts[-1] == ()
    assert all(attempt[-1].startswith("kill-driver@") for attempt in attempts[:-1])


def test_a_worker_killed_at_the_drivers_point_is_the_driver():
    assert split_attempts(["kill-worker@run.reserved", "raise@train.step=1"]) == (
        ("kill-worker@run.reserved",),
        ("raise@train.step=1",),
    )


def test_the_process_is_held_as_long_as_saves_take():
    """Three times the slowest save of the reference, so that the checkpoint before is durable."""
    faults = plan(replace(LM, save_s=4.0))["kill-worker"].faults
    assert "slow@train.step=30,rank=1,stage=lm,seconds=12.0" in faults


def test_a_hang_is_longer_than_anything_that_is_meant_to_take_long():
    [override] = plan(replace(LM, save_s=4.0, step_s=3.0))["hang"].overrides
    assert override == "stages.lm.stall_timeout_s=150"


def test_a_job_without_training_keeps_what_it_has_a_place_for():
    facts = replace(LM, stages=(PREPARE, INFER))
    assert "train.step" not in " ".join(plan(facts)["kill-worker"].faults)
    assert skipped(facts)["kill-twice"] == "the job has no Train stage"
    assert set(plan(facts)) | set(skipped(facts)) == set(STANDARD_NAMES)


def test_a_stage_with_dataset_has_no_fault_points():
    facts = replace(LM, stages=(replace(PREPARE, by_unit=False), TRAIN))
    assert not [f for s in plan(facts).values() for f in s.faults if "@unit." in f]


def test_what_cannot_be_is_said_with_the_reason():
    """Hosts of a real slice are not killed, a real store is not made to fail, one checkpoint cannot be fallen back from."""
    real = skipped(replace(LM, faked=False, emulated=False))
    assert {"kill-host", "lose-slice", "drain-host", "store-errors"} <= set(real)
    short = skipped(replace(LM, stages=(replace(TRAIN, total=20),)))
    assert "nothing to restore" in short["kill-in-restore"]
    assert "nothing to fall back to" in skipped(replace(LM, stages=(replace(TRAIN, total=40),)))["corrupt-flip"]


# -- from the declaration --------------------------------------------------------------------------


def identity(batch):
    return batch


def declared(**train):
    train = {"steps": 100, "checkpoint": Every(steps=10)} | train
    stages = [
        Preprocess("p", Files("*.txt"), map=identity),
        Preprocess("whole", Files("*.txt"), dataset=identity),
        Train("t", "p", init=identity, step=lambda state, batch: (state, batch), batch_size=8, **train),
        Infer("i", "p", params="t", apply=lambda _, batch: batch),
    ]
    return tpupipe.Job("job", stages)


def config(**cluster):
    cluster = {"kind": "fake", "generation": "v6e", "topology": "4x4"} | cluster
    return Config.model_validate({"store": {"uri": "gs://b/r", "embedded": True}, "cluster": cluster})


def test_facts_of_a_declaration():
    """Stages by kind, the checkpoint interval, hosts; units are not listed."""
    facts = job_facts(declared(), config())
    assert facts.hosts == 4
    assert (facts.faked, facts.emulated) == (True, True)
    assert [(s.name, s.kind, s.by_unit, s.total, s.every) for s in facts.stages] == [
        ("p", "preprocess", True, None, None),
        ("whole", "preprocess", False, None, None),
        ("t", "train", True, 100, 10),
        ("i", "infer", True, None, None),
    ]


def test_a_training_by_epochs_is_planned_before_its_steps_are_known():
    """The names are all there before the reference run; its number of steps decides afterwards."""
    facts = job_facts(declared(steps=None, epochs=2), config())
    assert "corrupt-flip" in plan(facts)
    stage = {"total": 13, "seconds": {"working": 2.6}}
    result = {"stages": {"p": stage, "whole": stage, "t": stage, "i": stage}}
    known = measured(facts, result, [{"kind": "checkpoint", "seconds": 0.7}, {"kind": "checkpoint", "seconds": 2.5}])
    assert known.first("train").total == 13
    assert known.save_s == 2.5
    assert np.isclose(known.step_s, 0.2)
    assert "corrupt-flip" not in plan(known)


def test_checkpoints_by_the_clock_have_no_interval_in_steps():
    facts = job_facts(declared(checkpoint=Every(minutes=5)), config())
    assert facts.first("train").every is None
    assert "kill-worker" in plan(facts)
    assert "kill-in-restore" in skipped(facts)


# -- what fits ---------------------------------------------------------------------------------------


def named(name, seconds):
    return Scenario(name, extra_s=seconds)


def test_without_a_budget_everything_is_run_in_order():
    one, two = named("one", 5), named("two", 5)
    assert next_that_fits([one, two], left_s=math.inf, reference_s=60) == (one, (two,))


def test_what_does_not_fit_is_passed_over_for_the_next_that_does():
    long, short = named("long", 100), named("short", 0)
    assert next_that_fits([long, short], left_s=70, reference_s=60) == (short, ())
    assert next_that_fits([long, short], left_s=50, reference_s=60) == (None, ())


def test_estimates_are_corrected_by_what_scenarios_took():
    """Twice as slow as estimated so far: the next one is taken for twice as long."""
    one = named("one", 0)
    assert next_that_fits([one], left_s=100, reference_s=60)[0] is one
    assert next_that_fits([one], left_s=100, reference_s=60, taken=[(50, 100)])[0] is None


def test_failures_and_attempts_cost_time():
    assert estimated_s(Scenario("a"), 60) < estimated_s(Scenario("a", (("kill-worker@train.step",),)), 60)
    assert estimated_s(Scenario("a"), 60) < estimated_s(Scenario("a", (("kill-driver@train.step",), ())), 60)


def test_a_scenarios_name_leaves_room_in_the_runs_name():
    with pytest.raises(UsageError, match="33 characters"):
        Scenario("x" * 33)
    with pytest.raises(UsageError, match="not a scenario name"):
        Scenario("Kill It")
