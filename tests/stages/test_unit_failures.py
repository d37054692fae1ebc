"""Which units are tried again, which are set aside, and when a stage gives up."""

from __future__ import annotations

import pickle

import pytest

from tpupipe.data.sources import Unit
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
from tpupipe.stages.unit_failures import Next, UnitFailures, probes_of, trial_order

BAD = UserCodeError("map raised ValueError: 5\nTraceback ...")


def failures(allowed=3, probes="abc", succeeded=True):
    return UnitFailures("s", allowed, frozenset(probes), succeeded)


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


def test_code_that_fails_on_all_probes_ends_the_stage_at_once():
    """The last of the three raises its own error; the same unit failing again does not count as another."""
    counted = failures(succeeded=False)
    assert counted.raised("a", BAD) is Next.AGAIN
    assert counted.raised("a", BAD) is Next.AGAIN
    assert counted.raised("b", BAD) is Next.AGAIN
    with pytest.raises(UserCodeError) as caught:
        counted.raised("c", BAD)
    assert caught.value is BAD


@pytest.mark.parametrize("units", ["a", "ab"])
def test_with_fewer_units_than_three_all_of_them_must_fail(units):
    """One unit, and it raises: that is all there is to know."""
    counted = failures(probes=units, succeeded=False)
    for unit in units[:-1]:
        assert counted.raised(unit, BAD) is Next.AGAIN
    with pytest.raises(UserCodeError):
        counted.raised(units[-1], BAD)


def test_bad_units_side_by_side_do_not_end_the_stage():
    """The first five of ten raise: two of the probes lie elsewhere, so these may be the only bad ones."""
    units = [Unit(id=str(n), parts=(), fingerprint="") for n in range(10)]
    order = list(trial_order(len(units)))
    assert sorted(order) == list(range(10))
    assert probes_of(units) == {str(n) for n in order[:3]} == {"0", "3", "6"}
    counted = failures(probes=probes_of(units), succeeded=False)
    for n in range(5):
        assert counted.raised(str(n), BAD) is Next.AGAIN
    with pytest.raises(UserCodeError):
        counted.raised("6", BAD)


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
