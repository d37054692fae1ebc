"""What all processes of a training group do at a step: the pure decision, and that all get the same one."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.checkpoint.policy import Every, OnPreemption, SavePolicy
from tpupipe.data.stream import add_digests
from tpupipe.errors import StageError
from tpupipe.faults.plan import parse_faults
from tpupipe.stages.coordinator import CONFER_EVERY_S, _Coordinator, decide

POLICY = SavePolicy.of([Every(minutes=1), OnPreemption(min_notice_s=5)])
CALM = {
    "step": 10,
    "seconds_per_step": 0.1,
    "since_save_s": 0.0,
    "stop_reason": "",
    "preemption_notice_s": None,
    "preempted": False,
}


@pytest.mark.parametrize(
    ("news", "save", "stop"),
    [
        ({}, False, False),
        ({"since_save_s": 59.9}, False, False),
        ({"since_save_s": 60.0}, True, False),
        ({"stop_reason": "Ctrl-C"}, True, True),
        ({"stop_reason": "Ctrl-C", "since_save_s": 99.0}, True, True),
        ({"preempted": True}, True, True),
        ({"preempted": True, "preemption_notice_s": 5.0}, True, True),
        ({"preempted": True, "preemption_notice_s": 4.9}, False, True),
        ({"preempted": True, "preemption_notice_s": 0.0, "stop_reason": "Ctrl-C"}, False, True),
        ({"preemption_notice_s": 3.0}, False, False),
    ],
)
def test_decision(news, save, stop):
    """Time, a wish to end, and a preemption, which counts first: saving what could not finish helps nobody."""
    decision = decide(POLICY, **(CALM | news))
    assert (decision.save, decision.stop, bool(decision.reason)) == (save, stop, stop)


def test_the_reason_is_told():
    """The log says why the loop ended."""
    assert decide(POLICY, **(CALM | {"stop_reason": "SIGTERM"})).reason == "SIGTERM"
    assert "preempted" in decide(POLICY, **(CALM | {"stop_reason": "SIGTERM", "preempted": True})).reason


@given(st.floats(0, 1e4), st.integers(1, 10**9))
def test_the_next_conference_is_about_a_second_away_and_never_now(seconds_per_step, step):
    """At least one step on; as many steps as fit into the interval."""
    ahead = decide(POLICY, **(CALM | {"step": step, "seconds_per_step": seconds_per_step})).next_step - step
    assert ahead >= 1
    assert ahead == 1 or ahead * seconds_per_step <= CONFER_EVERY_S * (1 + 1e-9)


@pytest.mark.parametrize(
    ("step", "next_step"), [(10, 20), (25, 30), (30, 31), (33, 34), (34, 44), (40, 50), (29, 30), (5, 15)]
)
def test_where_an_earlier_start_failed_they_confer_after_each_step(step, next_step):
    """It failed after 30 to 33 steps, while they conferred every ten: the next ones are not passed over."""
    assert decide(POLICY, **(CALM | {"step": step}), doubted=[(30, 34)]).next_step == next_step


def test_all_earlier_failures_are_doubted():
    """One at 12 does not make that at 30 forgotten."""
    doubted = [(30, 34), (12, 14)]
    assert [decide(POLICY, **(CALM | {"step": s}), doubted=doubted).next_step for s in (10, 13, 14, 25)] == [
        12,
        14,
        24,
        30,
    ]


def test_a_start_is_told_what_is_doubted():
    """Every start anew: the one after it has doubts of its own, or none."""
    coordinator = _Coordinator()
    coordinator.begin_group("b", ["plan"], 1, 10, [(10, 12)])
    assert ask(coordinator, 11, restart=1).next_step == 12
    coordinator.begin_group("c", ["plan"], 2, 10)
    assert ask(coordinator, 11, restart=2).next_step == 13


def test_the_measured_pace_may_be_wrong_for_one_conference_only():
    """Steps of 1 s that a host hands to the devices two at a time: no silence of more than 10 steps.

    Dispatch is asynchronous, so a step may seem to take no time at all.
    """
    coordinator = _Coordinator()
    now = 0.0  # of the host, which runs at most two steps ahead of devices that take 1 s a step
    confer_at, before, when = 1, 0, 0.0
    silences = []
    for step in range(1, 200):
        now = max(now + 1e-4, step - 2.0)
        if step == confer_at:
            silences.append(step - before)
            decision = coordinator.decide(0, step, (now - when) / (step - before), POLICY, False, None)
            confer_at, before, when = decision.next_step, step, now
    assert max(silences) <= 10
    assert confer_at < 220


# -- the actor's class, without Ray --------------------------------------------------------------


def ask(coordinator, step, *, restart=0, preempted=False):
    return coordinator.decide(restart, step, 0.5, POLICY, preempted, None)


def test_the_first_that_asks_decides_for_all():
    """A preemption that only a later one has heard of waits for the next conference."""
    coordinator = _Coordinator()
    first = ask(coordinator, 10)
    assert ask(coordinator, 10, preempted=True) == first
    assert not first.stop
    assert ask(coordinator, first.next_step, preempted=True).stop


def test_a_process_that_is_a_step_behind_gets_the_same_answer():
    """One is at step 11 already when the other asks about 10, and the driver asked to stop in between.

    Dispatch is asynchronous: a process may ask about the next step before another has asked about this one.
    """
    coordinator = _Coordinator()
    fast = ask(coordinator, 10)
    coordinator.request_stop("Ctrl-C")
    assert ask(coordinator, 11).stop
    assert ask(coordinator, 10) == fast
    assert ask(coordinator, 11).stop


def test_an_old_start_is_turned_away():
    """A process of a start that is over gets an error, not a decision."""
    coordinator = _Coordinator()
    coordinator.begin_group("b", ["plan"], 1, 0)
    with pytest.raises(StageError, match="Start 0"):
        ask(coordinator, 10)
    assert ask(coordinator, 10, restart=1) is not None


def test_digests_are_summed_when_all_parts_are_there():
    """None until the last process has said; then the sum, whatever the order; a part said twice counts once."""
    coordinator = _Coordinator()
    parts = {2: 2**64 - 1, 0: 5, 1: 7}
    for rank, part in parts.items():
        assert coordinator.digest(20, 3) is None
        coordinator.add_digest(0, 20, rank, part)
        coordinator.add_digest(0, 20, rank, part)
    assert coordinator.digest(20, 3) == add_digests(*parts.values()) == 11
    assert coordinator.digest(20, 3) == 11


def test_digests_of_an_old_start_do_not_count():
    """What a dead start said about a step is no part of the next one's sum."""
    coordinator = _Coordinator()
    coordinator.add_digest(0, 20, 0, 5)
    coordinator.begin_group("b", ["plan"], 1, 0)
    coordinator.add_digest(0, 20, 1, 5)
    coordinator.add_digest(1, 20, 0, 1)
    assert coordinator.digest(20, 2) is None
    coordinator.add_digest(1, 20, 1, 2)
    assert coordinator.digest(20, 2) == 3


def test_faults_are_counted_over_processes_and_restarts():
    """times=2: two claims in all; every firing is an event that names fault, point, facts and process."""
    coordinator = _Coordinator()
    twice, once = parse_faults(["slow@train.step,times=2", "raise@train.step=2,rank=0"])
    where = {"pid": "71", "node": "ab"}
    assert [coordinator.claim_fault(0, twice, {"step": s}, where) for s in "01"] == [True, True]
    coordinator.begin_group("b", ["plan"], 1, 0)
    assert coordinator.claim_fault(0, twice, {"step": "2"}, where) is False
    assert coordinator.claim_fault(1, once, {"step": "2", "rank": "0"}, where) is True
    records, kill = coordinator.drain()
    assert [(r["kind"], r["position"], r["step"]) for r in records] == [
        ("fault", 0, "0"),
        ("fault", 0, "1"),
        ("fault", 1, "2"),
    ]
    last = records[-1]
    assert (last["text"], last["action"], last["point"]) == ("raise@train.step=2,rank=0", "raise", "train.step")
    assert (last["rank"], last["pid"], last["node"]) == ("0", "71", "ab")
    assert kill is False
    assert coordinator.drain() == ([], False)


def test_a_group_waits_for_its_own_turn():
    """Nothing while it is another's turn; its plan when it begins; an empty answer when it is not needed."""
    coordinator = _Coordinator()
    coordinator.begin_group("first", ["its plan"], 0, 0)
    assert coordinator.plan_of("spare", 0.01) is None
    told: list[object] = []
    waiting = threading.Thread(target=lambda: told.append(coordinator.plan_of("spare", 30)))
    waiting.start()
    coordinator.begin_group("spare", ["the next plan"], 1, 40)
    waiting.join(30)
    assert told == [["the next plan"]]
    coordinator.dismiss_group("third")
    assert coordinator.plan_of("third", 0.01) == []


def test_a_drawn_pass_that_is_repeated_after_a_restart_is_let_through():
    """rate=: the process that comes back to the step that killed it, under another pid, goes past it."""
    coordinator = _Coordinator()
    (fault,) = parse_faults(["kill-worker@train.step,rate=0.5,times=5"])
    facts = {"step": "4", "rank": "1"}
    assert coordinator.claim_fault(0, fault, facts, {"pid": "71"}) is True
    coordinator.begin_group("b", ["plan"], 1, 0)
    assert coordinator.claim_fault(0, fault, facts, {"pid": "72"}) is False
    assert coordinator.claim_fault(0, fault, {"step": "5", "rank": "1"}, {"pid": "72"}) is True
