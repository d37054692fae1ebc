"""One exception tree for everything tpupipe raises on purpose.

Every leaf also subclasses a builtin, so ``except FileNotFoundError`` keeps working,
carries its facts as data (``error.data["step"]``), survives pickling (Ray ships errors
between processes), and knows the exit status the command line ends with.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TpupipeError(Exception):
    """Base of every error raised on purpose.

    Args:
        message: What happened, the value, and what is allowed. One paragraph.
        hint: What to do about it, shown on its own line. May be empty.
        **data: The facts behind the message (``run``, ``step``, ``path``…), picklable.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = data

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.data)


def _rebuild(kind: type[TpupipeError], message: str, hint: str, data: dict[str, Any]) -> TpupipeError:
    return kind(message, hint=hint, **data)


# -- usage and configuration: exit 2, raised before anything is reserved or written ---------


class UsageError(TpupipeError, ValueError):
    """The command line or a call to the public API makes no sense."""

    exit_status = 2


class ConfigError(UsageError):
    """The configuration is not valid. ``data["problems"]`` lists every problem found."""


class JobError(UsageError):
    """The job declaration is not valid (names, references between stages, options)."""


class RunChangedError(UsageError):
    """The named run exists, and something that decides its result differs now.

    ``data["changes"]`` maps what differs to ``[then, now]``.
    """


class SliceError(UsageError):
    """The slice asked for cannot exist (generation, topology, chips per VM)."""


class CheckFailedError(TpupipeError):
    """A pre-flight check failed."""

    exit_status = 3


# -- ownership ------------------------------------------------------------------------------


class RunHeldError(TpupipeError, BlockingIOError):
    """Another driver owns the run. ``data`` names holder, host, started, last_beat."""

    exit_status = 4


class FencedError(TpupipeError, PermissionError):
    """This driver lost the run to one with a higher lease epoch; its writes are refused."""

    exit_status = 4


class InterruptedRunError(TpupipeError, InterruptedError):
    """Ctrl-C or SIGTERM: saved, released; the message says how to resume."""

    exit_status = 130


# -- storage --------------------------------------------------------------------------------


class StoreError(TpupipeError, OSError):
    """A storage operation failed for good. ``data``: ``operation``, ``uri``, ``attempts``."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The object (or the bucket) does not exist."""


class ObjectExistsError(StoreError, FileExistsError):
    """Create-if-absent found an object of that name with other content."""


class StoreDeniedError(StoreError, PermissionError):
    """401 or 403: never retried."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The operation did not finish within its time-out."""


class StoreUnavailableError(StoreError, ConnectionError):
    """429, 5xx or connection failures, and the retries are used up."""


# -- checkpoints ----------------------------------------------------------------------------


class CheckpointError(TpupipeError):
    """A checkpoint could not be saved, verified or restored."""


class CheckpointSaveError(CheckpointError, OSError):
    """A (background) save failed; the run must not go on as if it had not."""


class CheckpointReadError(CheckpointError, OSError):
    """The arrays of a checkpoint that was intact could not be read: it was damaged since, or the store was away."""


class NoIntactCheckpointError(CheckpointError, FileNotFoundError):
    """Committed checkpoints exist, but none is intact. Nothing was deleted."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The saved tree is not the tree to restore. ``data``: ``missing``, ``unexpected``."""


# -- cluster --------------------------------------------------------------------------------


class ClusterError(TpupipeError, RuntimeError):
    """No Ray cluster, or one that is not what the configuration describes."""


class ReservationError(TpupipeError, RuntimeError):
    """The slice could not be reserved. ``data``: ``wanted``, ``available``."""


class ReservationTimeoutError(ReservationError, TimeoutError):
    """The slice did not become free within ``cluster.timeout_s``."""


# -- stages ---------------------------------------------------------------------------------


class DataError(TpupipeError, ValueError):
    """Input or prepared data is not what the stage needs (empty, wrong schema, ragged)."""


class StageError(TpupipeError, RuntimeError):
    """A stage failed. ``data``: ``stage``, and ``step`` or ``unit`` where known."""


class UserCodeError(StageError):
    """The job's own function raised. The original traceback is in the message."""


class OutOfStepError(StageError):
    """Hosts that compute a model together were not given the same batch. ``data``: ``stage``, ``unit``."""


class RecompileError(StageError):
    """A function would be compiled anew after its first step. ``data``: ``stage``, ``function``, ``changes`` (one text each)."""


class BudgetExceededError(StageError):
    """A failure budget is used up. ``data``: ``kind``, ``failures``, ``allowed``."""


class UnitsSetAsideError(StageError):
    """Units failed too often and were set aside; all others are committed. ``data``: ``stage``, ``units`` (id to error)."""


class BadRowError(UserCodeError):
    """A row cannot be used. ``data``: ``stage``, ``unit``, ``row`` (of its input), ``path``, ``over_limit``."""
