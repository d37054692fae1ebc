"""Bounded operations: a time-out on every attempt, a few attempts, and one clear error at the end.

The client libraries' own retry loops are not used: some retry for minutes, some for ever, and none
says which object it was about.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tpupipe.errors import StoreDeniedError, StoreError, StoreTimeoutError, StoreUnavailableError, UsageError

_log = logging.getLogger("tpupipe.store")

T = TypeVar("T")

# An operation ends within this many time-outs: one attempt that blocks and most of a second one.
_TOTAL_FACTOR = 1.75


def draw() -> float:
    """A jitter in [0, 1)."""
    return random.random()  # noqa: S311 - a pause, not a secret


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often.

    Attributes:
        timeout_s: Seconds for one attempt.
        attempts: Attempts per operation, at most.
        first_pause_s: Pause before the second attempt; doubles from there.
        longest_pause_s: No pause is longer.
        clock: Monotonic seconds (a test gives its own).
        sleep: Waits so many seconds (a test gives its own).
        draw: Jitter in [0, 1): a pause is between half and all of its nominal length, so that four of them together
            outlast the one second in which Cloud Storage lets an object be rewritten once.
    """

    timeout_s: float = 60.0
    attempts: int = 5
    first_pause_s: float = 0.25
    longest_pause_s: float = 8.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = draw

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.attempts < 1:
            raise UsageError(
                f"time-out {self.timeout_s} s and {self.attempts} attempts: both must be positive.",
                timeout_s=self.timeout_s,
                attempts=self.attempts,
            )

    @property
    def total_s(self) -> float:
        """Seconds for the whole operation, pauses included."""
        return self.timeout_s * _TOTAL_FACTOR

    def limited(self, *, timeout_s: float | None = None, attempts: int | None = None) -> RetryPolicy:
        """This policy with other limits."""
        return dataclasses.replace(
            self,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            attempts=self.attempts if attempts is None else attempts,
        )

    def pause_s(self, attempt: int, asked_s: float | None = None) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (from 1).

        Args:
            attempt: The attempt that failed.
            asked_s: What the server asked for (``Retry-After``), honoured up to ``longest_pause_s``.
        """
        nominal_s = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(attempt - 1, 60))
        jittered_s = nominal_s * (0.5 + 0.5 * self.draw())
        return max(jittered_s, min(asked_s or 0.0, self.longest_pause_s))


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        leaf: The error that is raised if it stays at that.
        detail: What happened, as the end of a sentence.
        again: Whether another attempt may help.
        asked_s: Pause the server asked for.
        hint: What the user can do.
    """

    leaf: type[StoreError]
    detail: str
    again: bool = False
    asked_s: float | None = None
    hint: str = ""


class AttemptError(Exception):
    """One attempt failed; stays inside this room."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


@dataclass(frozen=True)
class Attempt:
    """What an attempt is told: its ``number`` (from 1) and ``timeout_s``, the seconds it has."""

    number: int
    timeout_s: float


def run(
    policy: RetryPolicy,
    operation: str,
    uri: str,
    attempt: Callable[[Attempt], T],
    classify: Callable[[Exception], Failure | None],
) -> tuple[T, int]:
    """Runs ``attempt`` until it succeeds, may not be repeated, or the attempts or the time are used up.

    Args:
        policy: The limits.
        operation: Verb for messages, such as ``"create"``.
        uri: The object it is about.
        attempt: One try. It raises ``AttemptError``, or anything that ``classify`` knows.
        classify: Failure for an exception of the client library, ``None`` for one that is not about storage
            (it propagates unchanged).

    Returns:
        The result, and how many attempts it took.

    Raises:
        StoreError: The leaf that the last failure names, with ``operation``, ``uri`` and ``attempts`` as data.
    """
    import tenacity

    started = policy.clock()
    number = 0

    def once() -> T:
        nonlocal number
        number += 1
        left_s = min(policy.timeout_s, started + policy.total_s - policy.clock())
        try:
            return within(left_s, lambda: attempt(Attempt(number, left_s)))
        except AttemptError:
            raise
        except Exception as error:
            failure = classify(error)
            if failure is None:
                raise
            raise AttemptError(failure) from error

    def wait(state: tenacity.RetryCallState) -> float:
        return policy.pause_s(state.attempt_number, _failure(state).asked_s)

    def stop(state: tenacity.RetryCallState) -> bool:
        spent_s = policy.clock() - started + state.upcoming_sleep
        return state.attempt_number >= policy.attempts or spent_s >= policy.total_s

    def note(state: tenacity.RetryCallState) -> None:
        _log.warning(
            "%s of %s: attempt %d of %d failed, %s; next in %.1f s",
            operation, uri, number, policy.attempts, _failure(state).detail, state.upcoming_sleep,
        )  # fmt: skip

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, AttemptError) and error.failure.again),
        wait=wait,
        stop=stop,
        sleep=policy.sleep,
        before_sleep=note,
        reraise=True,
    )
    try:
        return retrying(once), number
    except AttemptError as error:
        failure = error.failure
        took_s = policy.clock() - started
        tries = f"{number} attempt{'' if number == 1 else 's'} in {took_s:.1f} s"
        raise failure.leaf(
            f"{operation} of {uri} failed after {tries}: {failure.detail}.",
            hint=failure.hint or _HINTS.get(failure.leaf, ""),
            operation=operation,
            uri=uri,
            attempts=number,
        ) from (error.__cause__ or error)


_HINTS: dict[type[StoreError], str] = {
    StoreDeniedError: "check the credentials and their permissions on the bucket or folder",
    StoreTimeoutError: "check the network, or give the store a longer time-out",
    StoreUnavailableError: "the same command resumes where this one stopped",
}


def _failure(state: object) -> Failure:
    outcome = getattr(state, "outcome", None)
    error = outcome.exception() if outcome is not None else None
    if not isinstance(error, AttemptError):
        raise TypeError(f"a retry without a failed attempt: {error!r}")
    return error.failure


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread of its own and waits at most ``timeout_s`` seconds for it.

    Socket time-outs bound each packet, not the whole answer, and a file on a dead network mount has none at all; this
    bounds both. Work that is given up on goes on in a daemon thread until its own limits end it.

    Raises:
        AttemptError: With a repeatable ``StoreTimeoutError`` as its failure; else whatever ``work`` raises.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def target() -> None:
        try:
            results.append(context.run(work))
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            errors.append(error)
        finally:
            done.set()

    if timeout_s > 0:
        threading.Thread(target=target, name="tpupipe-store", daemon=True).start()
    if timeout_s <= 0 or not done.wait(timeout_s):
        raise AttemptError(Failure(StoreTimeoutError, f"no answer within {max(timeout_s, 0):.1f} s", again=True))
    if errors:
        raise errors[0]
    return results[0]
