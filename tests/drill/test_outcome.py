"""The verdict: what was seen against the reference, with the first difference named; and what the events add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpupipe.drill.facts import JobFacts, StageFacts
from tpupipe.drill.history import AttemptHistory, lost_steps, never_fired, recoveries_s, rows_redone
from tpupipe.drill.outcome import AttemptSeen, Seen, allowed_recovery_s, judge, parting
from tpupipe.drill.scenario import Scenario

FACTS = JobFacts(
    (
        StageFacts("ids", "preprocess", total=2),
        StageFacts("fit", "train", total=10, every=5, batch_size=8),
        StageFacts("scores", "infer", total=2),
    ),
    hosts=2,
    faked=True,
    emulated=True,
)
KILL = "kill-worker@train.step=7,rank=1"
KILL_DRIVER = "kill-driver@train.step=7"
DONE = {
    "status": "done",
    "stages": {
        "ids": {"status": "done"},
        "fit": {"status": "done", "params_digest": "p1", "sample_digest": "s1"},
        "scores": {"status": "done"},
    },
}


def fault(text, at_s=1.0, stage="fit", **facts):
    action, _, point = text.partition(",")[0].partition("@")
    point = point.partition("=")[0]
    return {"kind": "fault", "time_s": at_s, "text": text, "action": action, "point": point, "stage": stage, **facts}


def of(kind, at_s=2.0, stage="fit", **facts):
    return {"kind": kind, "time_s": at_s, "stage": stage, **facts}


RECOVERED = (
    of("train_start", step=0),
    fault(KILL, step="7"),
    of("train_start", step=5),
    of("recovered", seconds=9.5),
    of("metrics", step=10),
)


def attempt(faults=(KILL,), events=RECOVERED, status=0, error=""):
    history = AttemptHistory(tuple(faults), tuple(events), killed=status == -9, ended_s=100.0)
    return AttemptSeen(history, status, 60.0, error, "log")


def verdict(seen, scenario=None):
    return judge(scenario or Scenario("s", ((KILL,),)), FACTS, DONE, seen, run="r", seconds=60.04)


GOOD = Seen((attempt(),), DONE)


def test_a_run_that_came_back_with_the_same_answer_passes():
    """2 steps of 8 rows were lost, an interval is 5 steps."""
    found = verdict(GOOD)
    assert found.passed
    assert (found.fired, found.faults, found.lost_steps, found.allowed_steps) == (1, 1, (2,), 5)
    assert (found.recoveries_s, found.rows_redone, found.attempts, found.seconds) == ((9.5,), 16, 1, 60.0)
    assert found.allowed_recovery_s == round(FACTS.recovery_s, 1)


def other_digest(name):
    stages = DONE["stages"]
    return {**DONE, "stages": {**stages, "fit": {**stages["fit"], name: "other"}}}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(GOOD, result=other_digest("params_digest")), "stage fit: params_digest differs"),
        (replace(GOOD, result=other_digest("sample_digest")), "stage fit: sample_digest differs"),
        (replace(GOOD, result={**DONE, "status": "failed"}), "the run's status is 'failed'"),
        (replace(GOOD, differences={"scores": "stage scores, unit u, row 3"}), "stage scores, unit u, row 3"),
        (replace(GOOD, left=("placement group g",)), "not given back: placement group g"),
        (replace(GOOD, attempts=(attempt(events=RECOVERED[2:]),)), "did not fire"),
        (replace(GOOD, attempts=(attempt(status=1, error="StageError: no"),)), "exit status 1: StageError: no"),
        (replace(GOOD, attempts=(attempt(status=-9),)), "exit status -9"),
        (replace(GOOD, attempts=(attempt(status=None),)), "did not end within 60 s"),
        (replace(GOOD, unreadable=("the events could not be read: gone",)), "could not be read: gone"),
        (replace(GOOD, attempts=(attempt(events=(*RECOVERED[:3], *RECOVERED[4:])),)), "no new step was told of"),
    ],
)
def test_each_broken_promise_fails_and_is_named(seen, said):
    """One thing is wrong, and it is the first that is said."""
    found = verdict(seen)
    assert not found.passed
    assert said in found.failed[0]
    assert len(found.failed) == 1


def test_where_a_digest_parts_is_said_with_it():
    where = {("fit", "params_digest"): "leaf ['w'][0, 1]: 2.0 instead of 1.0"}
    seen = replace(GOOD, result=other_digest("params_digest"), digests=where)
    assert verdict(seen).failed[0].endswith("from the reference: leaf ['w'][0, 1]: 2.0 instead of 1.0")


def test_more_lost_steps_than_an_interval_fail_unless_the_scenario_allows_them():
    """7 of 5: the checkpoint of step 5 was not there."""
    events = [{**e, "step": 0} if e["kind"] == "train_start" else e for e in RECOVERED]
    seen = replace(GOOD, attempts=(attempt(events=events),))
    assert verdict(seen).failed == ("stage fit: 7 steps were lost, at most 5 may be",)
    assert verdict(seen, Scenario("s", ((KILL,),), intervals=2)).passed


def recovering(seconds):
    events = [{**e, "seconds": seconds} if e["kind"] == "recovered" else e for e in RECOVERED]
    return replace(GOOD, attempts=(attempt(events=events),))


def test_a_recovery_beyond_its_bound_fails():
    """61 s of the default, which is a minute and the longest stage of units; and whatever the scenario says instead."""
    facts = replace(FACTS, startup_s=1.0, unit_s=0.0)
    scenario = Scenario("s", ((KILL,),))

    def failed(seconds, scenario=scenario):
        return judge(scenario, facts, DONE, recovering(seconds), run="r", seconds=1.0).failed

    assert failed(59.9) == ()
    assert failed(61.0) == ("a recovery took 61.0 s, at most 60 s may it take",)
    assert failed(61.0, replace_scenario(extra_s=10.0)) == (), "a time-out that is waited for"
    assert failed(61.0, replace_scenario(recovery_s=62.0)) == ()
    assert failed(9.0, replace_scenario(recovery_s=8.0)) == ("a recovery took 9.0 s, at most 8 s may it take",)


def replace_scenario(**more):
    return Scenario("s", ((KILL,),), **more)


def test_two_failures_in_a_row_may_take_twice_as_long():
    twice = Scenario("s", (("kill-worker@train.step=6,rank=1,stage=fit", "kill-worker@train.step=7,rank=1,stage=fit"),))
    assert allowed_recovery_s(twice, FACTS) == 2 * FACTS.recovery_s


NEVER = [
    ("the last step was done", "kill-worker@train.trained=10", "10"),
    ("a save of the last step may have been committed", "kill-worker@save.after_commit=10", "10"),
    ("not a stage of steps", "kill-worker@unit.read=1", "1"),
    ("nothing ended", "slow@train.step=7", "7"),
    ("the driver's end, which the next attempt recovers from", "kill-driver@train.step=7", "7"),
]


@pytest.mark.parametrize(("text", "step"), [place for _, *place in NEVER], ids=[why for why, *_ in NEVER])
def test_what_has_no_new_step_to_take_needs_no_recovery(text, step):
    """A correct run is never failed for not telling of one."""
    events = (of("train_start", step=0), fault(text, step=step), of("trained", step=10))
    seen = Seen((attempt((text,), events),), DONE)
    assert verdict(seen, Scenario("s", ((text,),))).passed


def test_a_failure_after_a_recovery_needs_one_of_its_own():
    """Two kills, one recovery between them and none after: the second was not recovered from, by what is told."""
    late = "kill-worker@train.updated=8,rank=0"
    events = (*RECOVERED, fault(late, step="8"), of("train_start", step=5))
    assert "no new step was told of" in verdict(Seen((attempt((KILL, late), events),), DONE)).failed[0]
    events = (*events, of("recovered", seconds=3.0))
    assert verdict(Seen((attempt((KILL, late), events),), DONE)).passed


def test_a_refused_first_attempt():
    """It must end with the status asked for: neither well nor otherwise; the second one as ever."""
    scenario = Scenario("s", ((), ()), ("403@create",), first_status=1)
    fired = {"403@create": 2}

    def failed(*statuses):
        attempts = tuple(attempt((), (), status=status) for status in statuses)
        return verdict(Seen(attempts, DONE, store_fired=fired), scenario).failed

    assert failed(1, 0) == ()
    assert failed(0) == ("attempt 1 of 2 ended with exit status 0 instead of 1",)
    assert failed(3) == ("attempt 1 of 2 ended with exit status 3 instead of 1",)
    assert failed(1, 1) == ("attempt 2 of 2 ended with exit status 1",)


def test_an_attempt_that_should_have_been_killed_and_was_not():
    """It went to the end, or failed otherwise: the driver's kill was not survived, as there was none."""
    scenario = Scenario("s", ((KILL_DRIVER,), ()))
    unharmed = Seen((attempt((KILL_DRIVER,), ()),), DONE)
    assert "went to the end" in verdict(unharmed, scenario).failed[0]
    failed = Seen((attempt((KILL_DRIVER,), (), status=1, error="E"),), {"status": "failed"})
    assert "should have been killed, and ended with exit status 1: E" in verdict(failed, scenario).failed[0]


def test_killed_drivers_pass_when_the_next_one_finishes():
    """Killed at step 7, started again at 5: 2 steps lost, 20 s from its death to the first new step."""
    first = attempt((KILL_DRIVER,), [of("train_start", step=0), fault(KILL_DRIVER, step="7")], status=-9)
    second = attempt((), [of("train_start", 110.0, step=5), of("metrics", 120.0, step=6)])
    found = verdict(Seen((first, second), DONE), Scenario("s", ((KILL_DRIVER,), ())))
    assert found.passed
    assert (found.lost_steps, found.recoveries_s, found.fired) == ((2,), (20.0,), 1)


def test_a_kill_by_somebody_else_is_not_the_fault():
    """SIGKILL from elsewhere ends the attempt too; the fault's own event is missing."""
    scenario = Scenario("s", ((KILL_DRIVER,), ()))
    seen = Seen((attempt((KILL_DRIVER,), (), status=-9), attempt((), ())), DONE)
    assert "did not fire" in verdict(seen, scenario).failed[0]


def test_a_store_fault_that_hit_nothing_fails():
    scenario = Scenario("s", store_faults=("503@create",))
    seen = Seen((attempt((), ()),), DONE)
    assert "hit no request" in verdict(seen, scenario).failed[0]
    hit = replace(seen, store_fired={"503@create": 3})
    assert verdict(hit, scenario).passed
    assert (verdict(hit, scenario).fired, verdict(hit, scenario).faults) == (1, 1)


# -- what the events add up to ------------------------------------------------------------------------


def history(*events, faults=(), killed=False):
    return AttemptHistory(tuple(faults), tuple(events), killed=killed, ended_s=100.0)


def test_a_fault_that_is_to_fire_twice_has_to():
    text = KILL + ",times=2"
    once = history(fault(text), faults=[text])
    assert never_fired(once) == [text]
    assert never_fired(history(fault(text), fault(text), faults=[text])) == []


def test_a_fault_with_a_rate_has_to_fire_once():
    text = "kill-worker@train.step,rate=0.5,seed=1,times=3"
    assert never_fired(history(fault(text), faults=[text])) == []
    assert never_fired(history(faults=[text])) == [text]


def test_a_pause_is_asked_for_only_where_it_is_all_there_is():
    """Beside a kill it holds the process, and the kill may come first."""
    slow = "slow@train.step=7,seconds=2"
    assert never_fired(history(fault(KILL), faults=[slow, KILL])) == []
    assert never_fired(history(faults=[slow])) == [slow]


def test_each_restart_loses_its_own_steps():
    """Killed before step 7 and after the update of step 7, which is 8 steps done; both times back to 5."""
    after = "kill-worker@train.updated=7"
    one = history(
        of("train_start", step=0),
        fault(KILL, step="7"),
        of("train_start", step=5),
        fault(after, step="7"),
        of("train_start", step=5),
    )
    assert lost_steps([one], "fit") == [2, 3]


def test_steps_of_other_stages_do_not_count():
    """An inference fault names the step of its parameters, and is no step of the training."""
    loaded = fault("kill-worker@params.loaded", stage="scores", step="10")
    assert lost_steps([history(of("train_start", step=0), loaded)], "fit") == []


def test_recovery_of_inference_is_until_the_new_worker_has_its_parameters():
    events = [
        of("starting", 1.0, "scores"),
        of("failure", 5.0, "scores", units_back=2),
        of("starting", 4.9, "scores"),
        of("starting", 12.5, "scores"),
    ]
    assert recoveries_s([history(*events)]) == [7.5]


def test_units_count_as_redone_where_their_work_was_lost():
    """A worker's unit is handed out again even if it was committed; a driver's next attempt uses what is committed."""
    rows = {"scores": [("u0", 10), ("u1", 20)], "ids": [("v0", 1)]}

    def at(text, unit="u1", stage="scores"):
        return rows_redone([history(fault(text, stage=stage, unit=unit))], FACTS, rows)

    assert at("kill-worker@unit.before_commit=1") == 20
    assert at("kill-worker@unit.after_commit=1") == 20
    assert at("kill-worker@unit.read=1") == 0
    assert at("kill-driver@unit.before_commit=0", "u0") == 10
    assert at("kill-driver@unit.after_commit=0", "u0") == 0
    assert at("slow@unit.before_commit=0", "u0") == 0


def test_a_driver_killed_where_no_stage_is():
    """Its event has no stage and no unit."""
    event = {k: v for k, v in fault("kill-driver@run.reserved").items() if k != "stage"}
    assert rows_redone([history(event)], FACTS, {}) == 0
    assert lost_steps([history(event)], "fit") == []


def test_the_parting_is_between_two_checkpoints():
    assert "between step 0 and step 5" in parting({5: 1, 10: 2}, {5: 9, 10: 8})
    assert "between step 5 and step 15" in parting({5: 1, 10: 2, 15: 3}, {5: 1, 15: 8})
    assert "do not show where" in parting({5: 1}, {10: 2})
