"""The standard plan: every fault kind has its place in any job, and what fits a budget is chosen in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import tpupipe
from tpupipe import Every, Files, Infer, Preprocess, Train
from tpupipe.config import BudgetsConfig, Config
from tpupipe.drill.facts import JobFacts, StageFacts, job_facts, measured
from tpupipe.drill.plan import STANDARD_NAMES, estimated_s, next_that_fits, standard_plan
from tpupipe.drill.scenario import Scenario, split_attempts
from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault
from tpupipe.faults.points import POINTS
from tpupipe.faults.store_faults import OPERATIONS, StoreFault, StoreFaults, fresh_marks
from tpupipe.faults.store_faults import decide as decide_request
from tpupipe.faults.store_requests import Operation, StoreRequest
from tpupipe.stages.failures import Failure, Kind, Retry, decide
from tpupipe.store.layout import RunPaths

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
    """Every fault kind, and a kill during a save, between arrays and commit, after it, during and after a restore."""
    faults = [parse_fault(text) for s in plan(LM).values() for text in s.faults]
    assert {f.action for f in faults} == set(Action)
    points = {f.point for f in faults if f.action in (Action.KILL_WORKER, Action.KILL_DRIVER)}
    of_ticks = {"generation.begun", "tick.before_claim", "tick.claimed", "tick.before_done"}  # not drilled
    assert points >= set(POINTS) - of_ticks
    assert {f.how for f in faults if f.action is Action.CORRUPT_CHECKPOINT} == {"flip", "truncate", "delete"}
    kinds = {StoreFault.parse(text).kind for s in plan(LM).values() for text in s.store_faults}
    assert kinds >= {"503", "429", "403", "outage", "truncate", "reset", "lost", "latency", "stale-list"}


def test_failures_stand_between_two_checkpoints():
    """Half-way to the second save, with the first to go back to; saves are hit at the second."""
    assert (TRAIN.first_save, TRAIN.next_save, TRAIN.middle) == (20, 40, 30)
    assert "kill-worker@train.step=30,rank=1,stage=lm" in plan(LM)["kill-worker"].faults
    assert "kill-worker@save.arrays_written=40,rank=0,stage=lm" in plan(LM)["kill-between-arrays-and-commit"].faults
    assert "kill-worker@restore.start=20,rank=0,stage=lm" in plan(LM)["kill-in-restore"].faults
    assert "kill-worker@restore.done=20,rank=0,stage=lm" in plan(LM)["kill-in-restore"].faults


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


def fired_at(faults: Sequence[str]) -> list[tuple[str, int]]:
    """Where failures of training fire, in this order, where a restart begins at step 0: action and steps done.

    A process tells of every step that it has done, after ``train.updated``, as it does where steps take their time.
    """
    points = ("train.step", "train.updated")
    left = [f for f in map(parse_fault, faults) if f.action is not Action.SLOW and f.point in points]
    found: list[tuple[str, int]] = []
    while left:
        passes = ((point, step) for step in range(10_000) for point in points)
        hit, told = next((f, s) for p, s in passes for f in left if f.matches(p, {**dict(f.when), "step": s}))
        left.remove(hit)
        # A stall is told with the steps that its own process has done.
        done = told + (hit.action is Action.HANG and hit.point == "train.updated")
        found += [(hit.action.value, done)] * hit.times
    return found


@pytest.mark.parametrize(("total", "every"), [(160, 20), (10, 5), (3, 1), (2, 1), (7, 5), (5, 5), (1, 100), (2, 2)])
def test_no_failure_is_taken_for_the_one_before_it_again(total, every):
    """Even where each step is told, no two deaths of a scenario are at one step: a repeated one would end a good run."""
    facts = replace(LM, stages=(StageFacts("lm", "train", total=total, every=every),))
    for name, scenario in plan(facts).items():
        for attempt in scenario.attempts:
            earlier: list[Failure] = []
            for action, step in fired_at(attempt):
                failure = Failure(Kind.WORKER, step or None, "the worker process of rank 0 died")
                assert isinstance(decide(BudgetsConfig(worker_failures=4), earlier, failure), Retry), (name, action)
                earlier.append(failure)


def test_two_kills_in_a_row_are_both_before_the_next_checkpoint():
    """The later one is further on, so that the restart after the first one reaches it."""
    [attempt] = plan(LM)["kill-twice"].attempts
    (_, first), (_, second) = fired_at(attempt)
    assert (first, second) == (29, 30)
    assert TRAIN.first_save <= first < second < TRAIN.next_save
    assert not any(parse_fault(text).times > 1 for text in attempt)


def test_the_lease_beats_before_the_first_stage_is_complete():
    """The kill at a beat comes some seconds after the lease was taken, and a unit is held for longer than that."""
    attempts = plan(LM)["kill-driver-at-commits"].attempts
    assert ("slow@unit.read=4,stage=tokens,seconds=10", "kill-driver@lease.beat=2") in attempts
    assert attempts[0] == ("kill-driver@run.identity",)
    only_training = plan(replace(LM, stages=(TRAIN,)))["kill-driver-at-commits"].attempts
    assert ("slow@train.step=0,rank=0,stage=lm,seconds=10", "kill-driver@lease.beat=2") in only_training
    whole = replace(LM, stages=(replace(PREPARE, by_unit=False),))
    assert "lease.beat" not in str(plan(whole)["kill-driver-at-commits"].attempts), "nothing to hold"


# -- stores that fail --------------------------------------------------------------------------------


def test_a_part_of_the_arrays_is_kept_waiting_beyond_the_kill():
    """The first object of the second save's arrays lands, the rest is late; the kill is at the step after that save."""
    scenario = plan(LM)["kill-in-arrays"]
    [late] = map(StoreFault.parse, scenario.store_faults)
    folder = RunPaths("job", "run").checkpoint_arrays("lm", step=TRAIN.next_save, epoch=1)
    write = StoreRequest("POST", Operation.CREATE, "b", f"runs/{folder}/ocdbt.process_1/d/1", begins=True)
    assert late.matches(write)
    assert (late.kind, late.after) == ("latency", 1)
    assert not late.matches(replace(write, name=f"runs/{folder}/_CHECKPOINT_METADATA")), "that is no array"
    restarted = RunPaths("job", "run").checkpoint_arrays("lm", step=TRAIN.next_save, epoch=1, restart=1)
    later = replace(write, name=f"runs/{restarted}/ocdbt.process_1/d/1")
    assert not late.matches(later), "the next start is not held up"
    hold, kill = map(parse_fault, scenario.faults)
    assert hold.seconds < late.seconds
    assert (kill.action, kill.point, dict(kill.when)["step"]) == ("kill-worker", "train.step", str(TRAIN.next_save))


def test_the_last_save_is_not_the_one_that_is_cut_off():
    """Where the second save is the last, no step comes after it: the first one is hit."""
    short = replace(LM, stages=(replace(TRAIN, total=40),))
    assert "kill-worker@train.step=20,rank=0,stage=lm" in plan(short)["kill-in-arrays"].faults


def test_a_refused_commit_ends_the_first_attempt_and_not_the_second():
    """Status 1 is asked for, then the store works; without training it is the units that are refused."""
    scenario = plan(LM)["store-denied"]
    assert [scenario.status_of(n) for n in range(2)] == [1, 0]
    assert [scenario.store_faults_of(n) for n in range(2)] == [("403@create,name=COMMIT.json",), ()]
    units = plan(replace(LM, stages=(PREPARE,)))["store-denied"]
    assert units.store_faults == ("403@create,name=/units/",)


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_the_listing_at_the_end_is_never_a_stale_one(saves):
    """At the start, after each save, at the restart, at the end: the second and the third of them lag behind."""
    faults = StoreFaults.parse(*plan(LM)["store-listings"].store_faults[1:])
    prefix = "runs/" + RunPaths("job", "run").checkpoints("lm") + "/"
    listing = StoreRequest("GET", Operation.LIST, "b", prefix)
    of_one = replace(listing, name=prefix + "0000000020-000001/arrays/")
    marks, stale = fresh_marks(faults), []
    for request in [listing, of_one, *[listing] * saves, listing, of_one, listing]:
        decision, marks = decide_request(faults, marks, request, 0.0)
        stale.append(decision.fault is not None)
    assert stale == [False, False, True, True, *[False] * (saves + 1)]


def test_without_training_only_listings_fail():
    assert plan(replace(LM, stages=(INFER,)))["store-listings"].store_faults == ("503@list,burst=3,after=1",)


def test_every_rate_of_a_store_fault_hits_one_of_the_first_requests():
    """What hits nothing in a small run would fail the scenario."""
    for scenario in plan(LM).values():
        for fault in map(StoreFault.parse, scenario.store_faults):
            if fault.rate < 1:
                request = StoreRequest("GET", next(iter(OPERATIONS[fault.operation])), "b", "x")
                marks, hits = fresh_marks(one := StoreFaults((fault,))), 0
                for _ in range(30):
                    decision, marks = decide_request(one, marks, request, 0.0)
                    hits += bool(decision.hits)
                assert hits, fault.text


# -- recoveries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "row"),
    [
        ((), 1),
        (("slow@train.step=1,stage=lm", "kill-worker@train.step=1,stage=lm"), 1),
        (("kill-worker@train.step=1,stage=lm", "kill-worker@unit.read=1,stage=tokens"), 1),
        (("kill-worker@train.step=1,stage=lm,times=2", "kill-worker@unit.read=1,stage=tokens"), 2),
        (("kill-worker@train.step=1,stage=lm", "hang@train.step=2"), 2),
        (("corrupt-checkpoint@train.step=1,stage=lm", "kill-worker@train.step=1,stage=lm"), 1),
    ],
)
def test_failures_in_a_row_are_those_of_one_stage(faults, row):
    """What only holds or damages is none; one that is bound to no stage may come in any."""
    assert Scenario("s", (faults,)).failures_in_a_row == row


def test_the_bound_on_a_recovery_grows_with_what_a_start_takes():
    """A minute, or three times what is done again: no machine is so slow that only its drill is."""
    assert replace(LM, startup_s=15.0, save_s=1.0, step_s=0.1, unit_s=0.0).recovery_s == 60
    assert replace(LM, startup_s=100.0, save_s=10.0, step_s=1.0, unit_s=30.0).recovery_s == 363


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
    assert {"kill-host", "lose-slice", "drain-host", "kill-in-arrays"} <= set(real)
    assert {"store-errors", "store-slow", "store-listings", "store-denied"} <= set(real)
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
    seconds = {"starting": 4.0, "working": 10.4, "saving": 0.6}
    result = {"stages": {"p": stage, "whole": stage, "t": stage, "i": stage}, "seconds": seconds}
    events = [{"kind": "checkpoint", "seconds": 0.7}, {"kind": "checkpoint", "seconds": 2.5}]
    known = measured(facts, result, events, 30.0)
    assert known.first("train").total == 13
    assert known.save_s == 2.5
    assert np.isclose(known.step_s, 0.2)
    assert np.isclose(known.startup_s, 19.0), "all of it but the work and the saves"
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


def test_a_first_attempt_that_must_fail_has_one_after_it():
    with pytest.raises(UsageError, match="there is no second"):
        Scenario("x", first_status=1)


def test_a_scenarios_name_leaves_room_in_the_runs_name():
    with pytest.raises(UsageError, match="33 characters"):
        Scenario("x" * 33)
    with pytest.raises(UsageError, match="not a scenario name"):
        Scenario("Kill It")
