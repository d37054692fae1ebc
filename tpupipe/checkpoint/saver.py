"""Saves a sharded training state in the background; a checkpoint counts when its record is written.

Every process of the group has a ``Saver`` and calls ``save`` at the same steps. The arrays go to the store through
Orbax; when all of them are durable the primary process lists them, writes ``COMMIT.json`` and prunes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpupipe.checkpoint.commit import Commit, SavedObject
from tpupipe.checkpoint.prune import prune
from tpupipe.checkpoint.tree import checkpointer, leaves_of, save_args
from tpupipe.checkpoint.writing import Patience, array_bytes, repeated_requests
from tpupipe.errors import CheckpointSaveError, ObjectExistsError, StoreError, TpupipeError
from tpupipe.faults.points import point
from tpupipe.store.layout import ARRAYS, COMMIT_NAME, RunPaths
from tpupipe.store.lease import Fence
from tpupipe.store.objects import Store

logger = logging.getLogger("tpupipe")

_SAVING = "save-"  # what the names of background threads begin with
_LOOK_S = 0.2


@dataclass(frozen=True)
class SaveTarget:
    """Where one stage's checkpoints go and under whose authority.

    Args:
        store: The run's store.
        paths: The run.
        stage: The training stage.
        fence: Refuses the commit when another driver owns the run by now.
        restart: How often this driver has started the workers; keeps the arrays of a start that died half-way
            apart from those of the next one.
        keep: Committed checkpoints to keep.
        timeout_s: Bound on one background save.
        silence_s: Bound on the time in which nothing of it reaches the store, beside what its bytes may take.
    """

    store: Store
    paths: RunPaths
    stage: str
    fence: Fence
    restart: int
    keep: int
    timeout_s: float = 600.0
    silence_s: float = 105.0

    def folder(self, step: int) -> str:
        """Folder of the checkpoint of ``step`` that this start of the workers writes."""
        return self.paths.checkpoint(self.stage, step=step, epoch=self.fence.epoch, restart=self.restart)


class Saver:
    """Asynchronous saves of one process.

    Args:
        target: Where to.
        primary: Whether this process writes the records.
        combine: ``combine(step) -> int``: the sample digest of all processes, waiting for their parts; called on
            the primary in the background.
        on_commit: Called on the primary after a record is written, with the commit and the seconds from ``save``.
        on_problem: Called on the primary with what went wrong after a commit.
        on_progress: Called by whoever waits for a save, while that makes progress.
    """

    def __init__(
        self,
        target: SaveTarget,
        *,
        primary: bool,
        combine: Callable[[int], int],
        on_commit: Callable[[Commit, float], None],
        on_problem: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._primary = primary
        self._combine = combine
        self._on_commit = on_commit
        self._on_problem = on_problem
        self._on_progress = on_progress
        self._moves = 0  # grows while the save under way makes progress
        self._checkpointer = checkpointer(target.timeout_s)
        self._background: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._step = -1
        self._verified: set[str] = set()
        self._writing: threading.Thread | None = None
        self.retries = 0  # requests of the newest committed save that this process had to repeat

    @property
    def last_step(self) -> int:
        """The step of the newest save begun, or -1."""
        return self._step

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> float:
        """Begins the save of ``state`` after ``step`` steps; returns when the state may be donated again.

        Returns:
            Seconds the training loop was held up.

        Raises:
            CheckpointSaveError: This or an earlier save failed.
        """
        import jax

        began = time.monotonic()
        self.finish()
        target = self._target
        point("save.start", step=step)
        folder = target.folder(step)
        arrays = f"{folder}/{ARRAYS}"
        leaves, size_bytes = leaves_of(state), array_bytes(state)
        try:
            # Orbax copies to host memory here and writes behind; `force` clears what a dead try of this very start left.
            self._checkpointer.save(target.store.uri(arrays), args=save_args(state), force=True)
        except jax.errors.JaxRuntimeError:
            raise  # a process of the group went away: a failure of the group, not of the save
        except Exception as error:
            raise self._error(step, error) from error
        self._step = step
        self._background = threading.Thread(
            target=self._complete,
            args=(step, folder, leaves, size_bytes, dict(metrics), began),
            name=f"{_SAVING}{step}",
            daemon=True,
        )
        self._background.start()
        return time.monotonic() - began

    def check(self) -> None:
        """Raises what a background save failed with. Cheap: call it every step.

        Raises:
            CheckpointSaveError: A save failed since the last call.
        """
        if self._failure is not None:
            import jax

            failure, self._failure = self._failure, None
            if isinstance(failure, jax.errors.JaxRuntimeError):
                raise failure  # as in save()
            raise self._error(self._step, failure) from failure

    def finish(self) -> None:
        """Waits for the save under way, if any.

        Raises:
            CheckpointSaveError: It failed, or did not end in time.
        """
        thread = self._background
        if thread is not None:
            ends, moves = time.monotonic() + self._target.timeout_s * 2, -1
            while thread.is_alive() and time.monotonic() < ends:
                if self._moves != moves:
                    moves = self._moves
                    self._on_progress()
                thread.join(_LOOK_S)
            if thread.is_alive():
                raise CheckpointSaveError(
                    f"The save of step {self._step} did not end within {self._target.timeout_s * 2:.0f} s.",
                    hint="Look at the store's latency, or raise store.timeout_s.",
                    step=self._step,
                )
            self._background = None
        self.check()

    def close(self) -> None:
        """Waits for the save under way and frees Orbax's threads, unless they still write."""
        try:
            self.finish()
        finally:
            if self._writing is not None and self._writing.is_alive():
                self._checkpointer.cancel()  # closing would wait for what was given up on
            else:
                self._checkpointer.close()

    # -- in the background -------------------------------------------------------------------

    def _complete(  # noqa: PLR0917 - one save, handed to its thread
        self, step: int, folder: str, leaves: Any, size_bytes: int, metrics: dict[str, float], began: float
    ) -> None:
        try:
            before = repeated_requests()
            self._write(folder, size_bytes)
            self._moves += 1
            self.retries = repeated_requests() - before
            if self._primary:
                point("save.arrays_written", step=step)
                commit = self._commit(step, folder, leaves, metrics)
                self._on_commit(commit, time.monotonic() - began)
                self._moves += 1
                self._prune()
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to: the loop asks by check()
            self._failure = error

    def _write(self, folder: str, size_bytes: int) -> None:
        """Waits until the arrays are durable, as long as there is progress: Orbax's own wait is only bounded as a whole.

        Raises:
            StoreTimeoutError: Nothing new reached the store for too long.
            Exception: What Orbax raised.
        """
        target = self._target
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                self._checkpointer.wait_until_finished()
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

        self._writing = threading.Thread(target=wait, name="save-arrays", daemon=True)
        self._writing.start()
        patience = Patience(target.store, f"{folder}/{ARRAYS}/", target.silence_s, size_bytes)
        while self._writing.is_alive():
            self._writing.join(patience.interval_s)
            if self._writing.is_alive():
                patience.look()
                self._moves += 1  # it is patience that bounds this part
        if raised:
            raise raised[0]

    def _prune(self) -> None:
        target = self._target
        try:
            prune(target.store, target.paths, target.stage, target.keep, self._verified)
        except StoreError as error:  # the save itself is done; old checkpoints only take space
            logger.warning("stage %s: old checkpoints were not removed: %s", target.stage, error)
            self._on_problem(f"old checkpoints were not removed: {error.message}")

    def _commit(self, step: int, folder: str, leaves: Any, metrics: dict[str, float]) -> Commit:
        import jax

        target = self._target
        objects = _saved_objects(target.store, folder)
        self._moves += 1
        sample_digest = self._combine(step)
        self._moves += 1
        commit = Commit(
            step=step,
            lease_epoch=target.fence.epoch,
            arrays=ARRAYS,
            objects=objects,
            leaves=leaves,
            sample_digest=sample_digest,
            metrics=metrics,
            devices=jax.device_count(),
            created_s=time.time(),
        )
        target.fence.check()
        point("save.before_commit", step=step)
        name = f"{folder}/{COMMIT_NAME}"
        try:
            info = target.store.create(name, commit.to_json())
            self.retries += info.attempts - 1
        except ObjectExistsError as error:
            raise CheckpointSaveError(
                f"Step {step} is already committed under lease epoch {target.fence.epoch}: {target.store.uri(name)}.",
                step=step,
            ) from error
        point("save.after_commit", step=step)
        return commit

    def _error(self, step: int, error: BaseException) -> CheckpointSaveError:
        cause = error.message if isinstance(error, TpupipeError) else f"{type(error).__name__}: {error}"
        where = self._target.store.uri(self._target.paths.checkpoints(self._target.stage))
        return CheckpointSaveError(
            f"Saving step {step} to {where} failed: {cause}",
            hint="The checkpoints before it are untouched; the same command resumes from the newest one.",
            step=step,
            cause=type(error).__name__,
        )


def finish_saving(timeout_s: float) -> None:
    """Waits until no save of this process is under way, ``timeout_s`` at most: what is to end need not lose it."""
    ends = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name.startswith(_SAVING):
            thread.join(max(0.0, ends - time.monotonic()))


def _saved_objects(store: Store, folder: str) -> tuple[SavedObject, ...]:
    """What was really written, as the store lists it."""
    listed = []
    for info in store.list(f"{folder}/{ARRAYS}/"):
        crc32c = info.crc32c if info.crc32c is not None else store.checksum(info.name)
        listed.append(SavedObject(info.name.removeprefix(folder + "/"), info.size, crc32c))
    if not listed:
        raise CheckpointSaveError(f"The store lists no objects below {store.uri(folder)} after the save.")
    return tuple(listed)
