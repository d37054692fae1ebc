"""What to do about a failure: retry or give up. Pure decisions; the effects are in the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tpupipe.config import BudgetsConfig
from tpupipe.errors import (
    BudgetExceededError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DataError,
    FencedError,
    StoreDeniedError,
    TpupipeError,
    UsageError,
    UserCodeError,
)


class Kind(StrEnum):
    """Kinds of failure, each with a budget of its own."""

    WORKER = "worker_failures"  # a worker process died or aborted on a host that lives
    HOST = "host_failures"  # a host was lost without notice
    PREEMPTED = "preemptions"  # a host was taken away with notice
    APP = "app_errors"  # the job's own code raised


@dataclass(frozen=True)
class Failure:
    """One failure of a group of workers.

    Args:
        kind: Which budget it is charged to.
        step: Step (or unit index) at which it happened, where known.
        what: One line: the error.
        detail: What is shown when it is the last: a traceback or the remote error.
    """

    kind: Kind
    step: int | None
    what: str
    detail: str = ""


def final_error(errors: Sequence[TpupipeError]) -> TpupipeError | None:
    """The error among those that workers reported that no retry can mend, if there is one.

    A damaged checkpoint is not among them: an older one may be intact.
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
                StoreDeniedError,
                UsageError,
            ),
        ):
            return error
    return None


@dataclass
class Budget:
    """Counts failures of one stage and says when it is enough.

    Args:
        allowed: Failures of each kind that are retried.
        stage: For the messages.
    """

    allowed: BudgetsConfig
    stage: str
    _counts: dict[Kind, int] = field(default_factory=dict)
    _last: Failure | None = None

    def charge(self, failure: Failure) -> None:
        """Returns if the failure is to be retried.

        Raises:
            BudgetExceededError: The budget of its kind is used up, or it repeats at the same step.
        """
        count = self._counts[failure.kind] = self._counts.get(failure.kind, 0) + 1
        allowed = int(getattr(self.allowed, failure.kind.value))
        last, self._last = self._last, failure
        repeats = (
            last is not None
            and failure.step is not None
            and (last.kind, last.step, last.what) == (failure.kind, failure.step, failure.what)
            and failure.kind in (Kind.APP, Kind.WORKER)
        )
        if not repeats and count <= allowed:
            return
        why = (
            f"repeats at step {failure.step}: not retried"
            if repeats and count <= allowed
            else f"{count} failure(s) of kind {failure.kind.value}, allowed are {allowed}"
        )
        raise BudgetExceededError(
            f"Stage {self.stage!r} failed: {failure.what} ({why})." + (f"\n{failure.detail}" if failure.detail else ""),
            hint=f"Committed work is kept; the same command resumes. budgets.{failure.kind.value} sets the budget.",
            stage=self.stage,
            kind=failure.kind.value,
            failures=count,
            allowed=allowed,
            step=failure.step,
        )
