"""When a training stage saves, and that it cannot be told not to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.checkpoint.policy import Every, OnPreemption, SavePolicy
from tpupipe.errors import JobError

OFF_ARGUMENTS = [
    {},
    {"steps": None},
    {"steps": None, "minutes": None},
    *({name: value} for name in ("steps", "minutes") for value in (0, -1, False, 0.0, -0.5)),
    {"steps": 10, "minutes": 0},
    {"steps": 0, "minutes": 10},
    {"steps": 10, "keep": 0},
    {"steps": 10, "keep": -1},
]


@pytest.mark.parametrize("arguments", OFF_ARGUMENTS, ids=repr)
def test_an_interval_that_means_never_is_refused(arguments):
    """Zero, negative, False, no interval at all, nothing kept: an error, not a run without checkpoints."""
    with pytest.raises(JobError):
        Every(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"minutes": math.inf},
        {"minutes": math.nan},
        {"steps": math.inf},
        {"steps": math.nan},
        {"steps": 2.5},
        {"steps": "never"},
        {"minutes": "off"},
        {"steps": 10, "keep": "none"},
        {"steps": 10, "keep": 1.5},
    ],
    ids=repr,
)
def test_a_value_that_is_no_interval_is_refused(arguments):
    """An interval that never comes, or is not a number, is an error of the declaration."""
    with pytest.raises(JobError):
        Every(**arguments)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        (),
        [],
        False,
        True,
        0,
        "off",
        "never",
        {},
        [None],
        OnPreemption(),
        [OnPreemption()],
    ],
    ids=repr,
)
def test_a_policy_that_means_off_is_refused(policy):
    """Whatever stands where a policy belongs: an error that says checkpoints cannot be switched off."""
    with pytest.raises(JobError, match="cannot be switched off"):
        SavePolicy.of(policy)


def test_policies_compose():
    """The shortest intervals, the largest number kept, and the preemption's notice."""
    policy = SavePolicy.of(
        [Every(steps=100, keep=2), Every(minutes=10), Every(steps=30, minutes=20, keep=5), OnPreemption(min_notice_s=7)]
    )
    assert policy == SavePolicy(steps=30, minutes=10, keep=5, preemption_min_notice_s=7)


@given(st.integers(1, 50), st.integers(1, 200))
def test_steps_are_counted_from_the_start_and_the_last_is_always_saved(every, last):
    """The saved steps are the multiples and the last one, wherever a run was resumed."""
    policy = SavePolicy.of(Every(steps=every))
    saved = [step for step in range(1, last + 1) if policy.due_at_step(step, last)]
    assert saved == sorted({*range(every, last + 1, every), last})


def test_without_a_step_interval_the_last_step_is_saved():
    """Every(minutes=) still saves the end."""
    policy = SavePolicy.of(Every(minutes=10))
    assert [step for step in range(1, 8) if policy.due_at_step(step, 7)] == [7]


def test_minutes():
    """Due once so many minutes have passed; never where only steps were given."""
    assert not SavePolicy.of(Every(minutes=2)).due_by_time(119.9)
    assert SavePolicy.of(Every(minutes=2)).due_by_time(120.0)
    assert not SavePolicy.of(Every(steps=2)).due_by_time(1e9)


@pytest.mark.parametrize(("notice_s", "due"), [(None, True), (30.0, True), (5.0, True), (4.9, False), (0.0, False)])
def test_preemption(notice_s, due):
    """Saved when the notice leaves time, or has no deadline."""
    policy = SavePolicy.of([Every(steps=10), OnPreemption(min_notice_s=5.0)])
    assert policy.due_on_preemption(notice_s) is due
    assert SavePolicy.of(Every(steps=10)).due_on_preemption(notice_s) is False
