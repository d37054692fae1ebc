"""Which units are tried again, which are set aside, and when a stage gives up."""

from __future__ import annotations

import pickle

import pytest

from tpupipe.errors import (
    BadRowError,
    DataError,
    FencedError,
    JobError,
    StageError,
    StoreTimeoutError,
    UnitsSetAsideError,
    UserCodeError,
)
from tpupipe.stages.unit_failures import Next, UnitFailures

BAD = UserCodeError("map raised ValueError: 5\nTraceback ...")


def failures(allowed=3, units=10, succeeded=True):
    return UnitFailures("s", allowed, units, succeeded)


def test_a_unit_is_set_aside_at_the_last_failure_that_it_may_have():
    """Exceptions and deaths count together, per unit."""
    counted = failures()
    assert [counted.raised("a", BAD), counted.died("a", BAD)] == [Next.AGAIN, Next.AGAIN]
    assert [counted.raised("b", BAD), counted.died("a", BAD)] == [Next.AGAIN, Next.SET_ASIDE]
    assert list(counted.set_aside) == ["a"]
    assert failures(allowed=1).died("a", BAD) is Next.SET_ASIDE


def test_the_stage_then_fails_naming_each_with_its_last_error():
    """Unit, first input and first line of the last error; a list that is long is cut; the error can be shipped."""
    counted = failures(allowed=1)
    counted.check({}, 10)
    for n in range(12):
        counted.died(f"u{n:02d}", StageError(f"error {n}\nmore"))
    with pytest.raises(UnitsSetAsideError, match=r"12 unit\(s\) failed 1 time\(s\) each .* other 3 are") as caught:
        counted.check({f"u{n:02d}": f"in/{n}.txt" for n in range(12)}, 3)
    assert "u07 (in/7.txt): error 7\n" in caught.value.message
    assert "and 2 more" in caught.value.message
    assert caught.value.data["units"]["u11"] == "error 11\nmore"
    assert caught.value.exit_status == 1
    assert pickle.loads(pickle.dumps(caught.value)).data == caught.value.data


def test_code_that_fails_on_the_first_three_units_ends_the_stage_at_once():
    """The third distinct unit raises its own error; the same unit failing again does not count as another."""
    counted = failures(succeeded=False)
    assert counted.raised("a", BAD) is Next.AGAIN
    assert counted.raised("a", BAD) is Next.AGAIN
    assert counted.raised("b", BAD) is Next.AGAIN
    with pytest.raises(UserCodeError) as caught:
        counted.raised("c", BAD)
    assert caught.value is BAD


@pytest.mark.parametrize("units", [1, 2])
def test_with_fewer_units_than_three_all_of_them_must_fail(units):
    """One unit, and it raises: that is all there is to know."""
    counted = failures(units=units, succeeded=False)
    for n in range(units - 1):
        assert counted.raised(str(n), BAD) is Next.AGAIN
    with pytest.raises(UserCodeError):
        counted.raised("last", BAD)


def test_one_success_and_every_unit_is_on_its_own():
    """After it, any number of units may fail without ending the stage."""
    counted = failures(succeeded=False)
    counted.raised("a", BAD)
    counted.success()
    for n in range(20):
        assert counted.raised(str(n), BAD) is Next.AGAIN


@pytest.mark.parametrize(
    "error",
    [FencedError("taken over"), StoreTimeoutError("no answer"), JobError("wrong")],
    ids=lambda e: type(e).__name__,
)
def test_what_is_not_the_units_fault_ends_the_stage(error):
    """The lease, the store, the declaration, too many bad rows in all: raised as they are, nothing is counted."""
    counted = failures()
    with pytest.raises(type(error)) as caught:
        counted.raised("a", error)
    assert caught.value is error
    assert counted.raised("a", DataError("ragged")) is Next.AGAIN
    assert counted.raised("a", BadRowError("row 5")) is Next.AGAIN


def test_units_that_were_counted_elsewhere_are_given_up():
    """Three of them by an exception, none done: the code's error. Deaths say nothing of the code."""
    counted = failures(succeeded=False)
    counted.give_up("a", BAD, died=False)
    for n in range(5):
        counted.give_up(str(n), StageError("died"), died=True)
    counted.give_up("b", BAD, died=False)
    assert len(counted.set_aside) == 7
    with pytest.raises(UserCodeError):
        counted.give_up("c", BAD, died=False)
