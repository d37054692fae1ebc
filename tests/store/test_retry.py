"""The retry loop on a clock of its own."""

import pickle
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpupipe.errors import StoreDeniedError, StoreTimeoutError, StoreUnavailableError, UsageError
from tpupipe.store.retry import AttemptError, Failure, RetryPolicy, run, within

AGAIN = Failure(StoreUnavailableError, "the store answered 503", again=True)
NEVER = Failure(StoreDeniedError, "the store answered 403")


@dataclass
class Clock:
    now_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def attempt_with(failures, clock=None, takes_s=0.0):
    """An operation that fails as listed, then gives the number of the attempt."""
    left = list(failures)

    def attempt(limit):
        if clock is not None:
            clock.now_s += min(takes_s, limit.timeout_s)
        if left:
            raise AttemptError(left.pop(0))
        return limit.number

    return attempt


def run_it(policy, attempt):
    return run(policy, "create", "gs://b/x", attempt, lambda _: None)


@settings(deadline=None)  # the machine may be busy
@given(
    attempts=st.integers(1, 8),
    timeout_s=st.floats(0.1, 100),
    takes_s=st.floats(0, 100),
    jitter=st.floats(0, 0.999),
    asked_s=st.none() | st.floats(0, 1000),
)
def test_every_operation_is_bounded(attempts, timeout_s, takes_s, jitter, asked_s):
    """However long attempts take and whatever the server asks for: attempts and total time stay within the limits."""
    clock = Clock()
    policy = RetryPolicy(timeout_s, attempts, clock=clock, sleep=clock.sleep, draw=lambda: jitter)
    failure = Failure(StoreUnavailableError, "503", again=True, asked_s=asked_s)
    with pytest.raises(StoreUnavailableError) as caught:
        run_it(policy, attempt_with([failure] * 100, clock, takes_s))
    assert 1 <= caught.value.data["attempts"] <= attempts
    assert len(clock.slept) == caught.value.data["attempts"] - 1
    assert clock.now_s <= 2 * timeout_s


@settings(deadline=None)  # the machine may be busy
@given(failures=st.integers(0, 4), jitter=st.floats(0, 0.999))
def test_pauses_grow_and_outlast_the_write_limit(failures, jitter):
    """With time enough, so many failures mean so many pauses; four of them together are over one second."""
    clock = Clock()
    policy = RetryPolicy(60, 5, clock=clock, sleep=clock.sleep, draw=lambda: jitter)
    assert run_it(policy, attempt_with([AGAIN] * failures)) == (failures + 1, failures + 1)
    assert clock.slept == sorted(clock.slept)
    assert len(clock.slept) == failures
    assert failures < 4 or sum(clock.slept) > 1


def test_a_final_failure_ends_it():
    """After a failure that may not be repeated there is no pause and no further attempt."""
    clock = Clock()
    policy = RetryPolicy(60, 5, clock=clock, sleep=clock.sleep)
    with pytest.raises(StoreDeniedError, match=r"create of gs://b/x failed after 2 attempts in .* 403") as caught:
        run_it(policy, attempt_with([AGAIN, NEVER]))
    assert caught.value.data == {"operation": "create", "uri": "gs://b/x", "attempts": 2}
    assert len(clock.slept) == 1


def test_a_bug_is_not_a_storage_failure():
    """An exception that is not about storage comes out as it is, at once."""
    calls = []

    def attempt(limit):
        calls.append(limit.number)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_it(RetryPolicy(60, 5), attempt)
    assert calls == [1]


def test_work_that_hangs_is_given_up():
    """The caller waits for its time-out, not for the work."""
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"no answer within 0\.2 s"):
        run_it(RetryPolicy(0.2, 1), lambda _: release.wait(60))
    assert time.monotonic() - started < 30
    release.set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_the_work_raises_arrives(error):
    """Exceptions of every kind cross from the thread to the caller."""

    def work():
        raise error

    with pytest.raises(error):
        within(5, work)


@pytest.mark.parametrize(("timeout_s", "attempts"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_limits_are_positive(timeout_s, attempts):
    """A policy without time or attempts is a usage error."""
    with pytest.raises(UsageError, match="must be positive"):
        RetryPolicy(timeout_s, attempts)


def test_a_policy_travels():
    """The default policy can be pickled, with its clock and its jitter."""
    assert pickle.loads(pickle.dumps(RetryPolicy(7, 3))) == RetryPolicy(7, 3)
