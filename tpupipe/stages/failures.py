"""What to do about a failure: try again, and when, or give up. Pure decisions; the effects are in the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tpupipe.config import BudgetsConfig
from tpupipe.errors import (
    BudgetExceededError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DataError,
    FencedError,
    RecompileError,
    StoreDeniedError,
    StoreTimeoutError,
    StoreUnavailableError,
    TpupipeError,
    UsageError,
    UserCodeError,
)


class Kind(StrEnum):
    """Kinds of failure, each with a budget and a back-off of its own. The value is the key below ``budgets``."""

    WORKER = "worker_failures"  # a worker process died or aborted on a host that lives
    HOST = "host_failures"  # a host was lost without notice
    SLICE = "slice_failures"  # all hosts of a slice were lost at once
    PREEMPTED = "preemptions"  # a host was taken away with notice
    APP = "app_errors"  # the job's own code raised
    STORE = "store_failures"  # the store could not be reached, with all retries of the operation
    STALLED = "stalls"  # a worker made no progress for the time-out of what it did


@dataclass(frozen=True)
class BackOff:
    """How long to wait before trying again.

    Args:
        at_once: Failures of the kind after which nothing is waited for.
        first_s: Seconds after the next one; doubles from there.
        longest_s: No wait is longer.
    """

    at_once: int
    first_s: float
    longest_s: float

    def after_s(self, failures: int) -> float:
        """Seconds to wait after failure number ``failures`` of the kind, from 1.

        >>> [BackOff(at_once=1, first_s=1.0, longest_s=30.0).after_s(n) for n in (1, 2, 3, 4, 99)]
        [0.0, 1.0, 2.0, 4.0, 30.0]
        """
        waits = failures - self.at_once
        return 0.0 if waits < 1 else min(self.longest_s, self.first_s * 2.0 ** min(waits - 1, 60))


# A first loss is bad luck and costs no time; what comes again wants time to pass. After a preemption the wait for the
# next reservation is the back-off. A store that is away is away for a while: 8 failures wait for 4 minutes.
BACK_OFFS: Mapping[Kind, BackOff] = {
    Kind.WORKER: BackOff(at_once=1, first_s=1, longest_s=30),
    Kind.HOST: BackOff(at_once=1, first_s=1, longest_s=30),
    Kind.SLICE: BackOff(at_once=1, first_s=5, longest_s=60),
    Kind.PREEMPTED: BackOff(at_once=1_000_000, first_s=1, longest_s=1),
    Kind.APP: BackOff(at_once=0, first_s=1, longest_s=60),
    Kind.STORE: BackOff(at_once=0, first_s=1, longest_s=60),
    Kind.STALLED: BackOff(at_once=1, first_s=1, longest_s=30),
}

# What the job itself does wrong does it again at the same step. That the platform takes a host there twice, or the
# store is away twice, says nothing about the job.
REPEATING = (Kind.APP, Kind.WORKER, Kind.STALLED)


@dataclass(frozen=True)
class Failure:
    """One failure of a group of workers.

    Args:
        kind: Which budget it is charged to.
        step: Step (or unit index) at which it happened, where exactly known.
        what: One line: the error. Two failures are the same when this is equal, so it has no times and places in it.
        detail: What is shown when it is the last: a traceback or the remote error.
        stacks: Where the stacks of the workers are, if they were kept.
    """

    kind: Kind
    step: int | None
    what: str
    detail: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Retry:
    """Try again, ``after_s`` seconds from now."""

    after_s: float


@dataclass(frozen=True)
class GiveUp:
    """Do not try again, and ``why``."""

    why: str


def decide(allowed: BudgetsConfig, earlier: Sequence[Failure], failure: Failure) -> Retry | GiveUp:
    """What to do about a failure.

    Args:
        allowed: Failures of each kind that are retried.
        earlier: The failures of the stage before it, in this attempt.
        failure: The failure.
    """
    count = 1 + sum(e.kind is failure.kind for e in earlier)
    budget = int(getattr(allowed, failure.kind.value))
    if count > budget:
        return GiveUp(f"{count} failure(s) of kind {failure.kind.value}, allowed are {budget}")
    if failure.kind in REPEATING and failure.step is not None:
        this = (failure.kind, failure.step, failure.what)
        if any((e.kind, e.step, e.what) == this for e in earlier):
            return GiveUp(f"repeats at step {failure.step}: not retried")
    return Retry(BACK_OFFS[failure.kind].after_s(count))


@dataclass
class Budget:
    """Remembers the failures of one stage and says when it is enough.

    Args:
        allowed: Failures of each kind that are retried.
        stage: For the messages.
        log: Where the log of the run is, for the messages.
    """

    allowed: BudgetsConfig
    stage: str
    log: str = ""
    _earlier: list[Failure] = field(default_factory=list)

    def charge(self, failure: Failure) -> float:
        """Seconds to wait before trying again.

        Raises:
            BudgetExceededError: The budget of its kind is used up, or it repeats at the same step.
        """
        decision = decide(self.allowed, self._earlier, failure)
        self._earlier.append(failure)
        if isinstance(decision, Retry):
            return decision.after_s
        places = {"log": self.log, "stacks": failure.stacks}
        lines = [failure.detail, *(f"{name}: {place}" for name, place in places.items() if place)]
        raise BudgetExceededError(
            f"Stage {self.stage!r} failed: {failure.what} ({decision.why})."
            + "".join(f"\n{line}" for line in lines if line),
            hint=f"Committed work is kept; the same command resumes. budgets.{failure.kind.value} sets the budget.",
            stage=self.stage,
            kind=failure.kind.value,
            failures=sum(e.kind is failure.kind for e in self._earlier),
            allowed=int(getattr(self.allowed, failure.kind.value)),
            step=failure.step,
            **{name: place for name, place in places.items() if place},
        )


def unreachable(error: object) -> bool:
    """Whether an error says that the store could not be reached: it may be there again later.

    A refusal, a missing object and one that exists already are answers, and stay what they are.
    """
    return isinstance(error, (StoreUnavailableError, StoreTimeoutError))


def loss(hosts: Iterable[int], lost: Iterable[int]) -> tuple[Kind, str]:
    """What the loss of hosts is: kind, and one line.

    Args:
        hosts: Slice number of every host of the reservation.
        lost: Slice number of every host that is dead now; not empty.

    >>> loss([0, 0, 1, 1], [1])
    (<Kind.HOST: 'host_failures'>, '1 host(s) of the slice were lost')
    >>> loss([0, 0, 1, 1], [1, 1])
    (<Kind.SLICE: 'slice_failures'>, '1 slice(s) were lost with all their hosts, 2 in all')
    """
    size, dead = Counter(hosts), Counter(lost)
    whole = [index for index, count in dead.items() if count == size[index] > 1]
    if whole:
        return Kind.SLICE, f"{len(whole)} slice(s) were lost with all their hosts, {dead.total()} in all"
    return Kind.HOST, f"{dead.total()} host(s) of the slice were lost"


def final_error(errors: Sequence[TpupipeError]) -> TpupipeError | None:
    """The error among those that workers reported that no retry can mend, if there is one.

    A damaged checkpoint is not among them: an older one may be intact. Neither is a store that cannot be reached,
    except by a save: the run must not go on as if it had saved.
    """
    for error in errors:
        if isinstance(
            error,
            (
                UserCodeError,
                FencedError,
                CheckpointMismatchError,
                CheckpointSaveError,
                DataError,
                RecompileError,
                StoreDeniedError,
                UsageError,
            ),
        ):
            return error
    return None
