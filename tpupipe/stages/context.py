"""The stage context: what a training process has to restore, feed, save and report.

The declarative ``Train`` stage is written on it. A team with its own loop uses the same parts by hand.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpupipe.checkpoint.commit import Commit
from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.checkpoint.restore import restore
from tpupipe.checkpoint.saver import Saver, SaveTarget
from tpupipe.data.chunks import ChunkReader, Manifest
from tpupipe.data.stream import Stream, add_digests, digest
from tpupipe.ledger.events import event
from tpupipe.programs.recompile import Guarded, Recompile, changes, guarded_jit, recompile_error, signature_of
from tpupipe.programs.sharding import RowRange, global_array, row_range
from tpupipe.programs.train import MASK, abstract_batch, checked_columns
from tpupipe.stages.coordinator import CoordinatorHandle, Decision

PREFETCH_BATCHES = 3


@dataclass(frozen=True)
class Restorable:
    """The checkpoint a start of the workers begins from: its folder in the store and its record."""

    folder: str
    commit: Commit


@dataclass(frozen=True)
class FedBatch:
    """One global batch on the devices.

    Args:
        step: Its number; the state after the update has done ``step + 1`` steps.
        arrays: Column to ``jax.Array[B, ...]``, sharded over rows, and ``mask``: ``bool[B]``.
        digest: Sample digest of the rows this process accounts for.
    """

    step: int
    arrays: dict[str, Any]
    digest: int


class StageContext:
    """One training process's hands.

    Args:
        target: Where checkpoints go.
        policy: When they are saved.
        manifest: The prepared data.
        stream: The order of its rows.
        batch_size: Rows of a global batch.
        sharding: ``NamedSharding`` of the batch's rows.
        coordinator: Where to confer and report.
        start: The checkpoint to begin from, if any.
        preemption: ``() -> (preempted, notice_s)``; asked by all processes at the same steps.
        recompile: What becomes of batches, and of arguments of functions from :meth:`jit`, of another kind than the first.
        on_progress: Called while a save that is waited for makes progress.
    """

    def __init__(
        self,
        *,
        target: SaveTarget,
        policy: SavePolicy,
        manifest: Manifest,
        stream: Stream,
        batch_size: int,
        sharding: Any,
        coordinator: CoordinatorHandle,
        start: Restorable | None,
        preemption: Callable[[], tuple[bool, float | None]],
        recompile: Recompile = "forbid",
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        import jax

        self.rank = jax.process_index()
        self.world = jax.process_count()
        self.first_step = start.commit.step if start else 0
        self.last_step = stream.steps
        self.digest_part = start.commit.sample_digest if start and self.rank == 0 else 0
        self._target = target
        self._policy = policy
        self._stream = stream
        self._batch_size = batch_size
        self._sharding = sharding
        self._coordinator = coordinator
        self._start = start
        self._preemption = preemption
        self._recompile: Recompile = recompile
        self._rows: RowRange = row_range(sharding, batch_size)
        self._reader = ChunkReader(target.store, target.paths, manifest)
        self._columns = checked_columns(manifest.stage, manifest.empty_batch())
        self.confer_at = self.first_step + 1
        self._conferred = (self.first_step, time.monotonic())
        self._saver = Saver(
            target,
            primary=self.rank == 0,
            combine=lambda step: coordinator.digest(step, self.world, target.timeout_s),
            on_commit=self._committed,
            on_problem=lambda what: self.report(event("problem", what=what)),
            on_progress=on_progress,
        )

    # -- restoring and saving ------------------------------------------------------------------

    def restore(self, abstract: Any) -> Any | None:
        """The state to begin from, placed as ``abstract``'s shardings say; ``None`` for a fresh start.

        Raises:
            CheckpointMismatchError, CheckpointReadError: It is another tree, or cannot be read.
        """
        if self._start is None:
            return None
        return restore(self._target.store, self._start.folder, self._start.commit, abstract)

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> float:
        """Begins a save of the state after ``step`` steps; all processes call it at the same step.

        Returns:
            Seconds the loop was held up.

        Raises:
            CheckpointSaveError: This or an earlier save failed.
        """
        self._coordinator.add_digest(self._target.restart, step, self.rank, self.digest_part)
        blocked_s = self._saver.save(step, state, metrics)
        self.tell(event("save", step=step, blocked_s=blocked_s))
        return blocked_s

    def check(self) -> None:
        """Raises what a background save failed with."""
        self._saver.check()

    def finish(self) -> float:
        """Waits for the save under way; gives the seconds waited.

        Raises:
            CheckpointSaveError: It failed.
        """
        began = time.monotonic()
        self._saver.close()
        return time.monotonic() - began

    @property
    def saved_step(self) -> int:
        """The newest step of which a save was begun, in this start of the workers."""
        return self._saver.last_step

    def _committed(self, commit: Commit, seconds: float) -> None:
        self.report(
            event(
                "checkpoint",
                step=commit.step,
                seconds=seconds,
                size_bytes=commit.size_bytes,
                objects=len(commit.objects),
                retries=self._saver.retries,
            )
        )

    # -- conferring ----------------------------------------------------------------------------

    def due(self, step: int) -> Decision:
        """What to do after ``step`` steps. All processes get the same answer at the same step."""
        by_count = self._policy.due_at_step(step, self.last_step)
        if step < self.confer_at or step == self.last_step:
            return Decision(by_count, False, self.confer_at)
        before, when = self._conferred
        now = time.monotonic()
        preempted, notice_s = self._preemption()
        decision = self._coordinator.decide(
            restart=self._target.restart,
            step=step,
            seconds_per_step=(now - when) / max(1, step - before),
            policy=self._policy,
            preempted=preempted,
            notice_s=notice_s,
        )
        self._conferred = (step, now)
        self.confer_at = decision.next_step
        return Decision(decision.save or by_count, decision.stop, decision.next_step, decision.reason)

    def tell(self, *records: Mapping[str, Any]) -> None:
        """Hands events to the driver, once for all processes: only process 0 does."""
        if self.rank == 0:
            self.report(*records)

    def tell_now(self, record: Mapping[str, Any]) -> None:
        """As ``tell``, and waits until it is there: what comes next may be this process's end."""
        if self.rank == 0:
            self._coordinator.report_now({"rank": self.rank, **record})

    def report(self, *records: Mapping[str, Any]) -> None:
        """Hands events of this process to the driver."""
        self._coordinator.report(*({"rank": self.rank, **record} for record in records))

    # -- compiling -----------------------------------------------------------------------------

    def jit(self, function: Callable[..., Any], **options: Any) -> Guarded:
        """``jax.jit`` for a loop of one's own, guarded: a compilation after the first is an error that names what changed.

        Args:
            function: Called with positional arguments.
            **options: Of ``jax.jit``; ``static_argnames`` are compared by value.

        Raises:
            RecompileError: (when called) Arguments are of another shape, dtype, sharding or static value than at first, and
                ``recompile`` is ``"forbid"``. With ``"warn"`` that is told and compiled for.
        """
        return guarded_jit(
            function, self._target.stage, recompile=self._recompile, on_recompile=self.recompiled, **options
        )

    def recompiled(self, changes: Sequence[str]) -> None:
        """Tells of a compilation after the first, and why."""
        self.report(event("recompiled", changes=list(changes)))

    # -- feeding -------------------------------------------------------------------------------

    def abstract_batch(self) -> dict[str, Any]:
        """Shapes, dtypes and placement of every batch, for compiling ahead of the data."""
        return abstract_batch(self._columns, self._batch_size, self._sharding)

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[FedBatch]]:
        """Global batches from the restored position to the end; inside, they are read ahead in the background."""
        ready: queue.Queue[FedBatch | BaseException | None] = queue.Queue(PREFETCH_BATCHES)
        done = threading.Event()

        def put(item: FedBatch | BaseException | None) -> bool:
            while not done.is_set():
                try:
                    ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def produce() -> None:
            try:
                for step in range(self.first_step, self.last_step):
                    if not put(self._feed(step)):
                        return
                put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                put(error)

        expected = signature_of(self.abstract_batch(), weak_types=False)

        def take() -> Iterator[FedBatch]:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if self._recompile == "forbid":  # else the function that it is given to tells of it
                    found = signature_of(item.arrays, weak_types=False)
                    if found != expected and (different := changes("batch", expected, found)):
                        raise recompile_error(self._target.stage, f"step {item.step}", different)
                yield item

        thread = threading.Thread(target=produce, name="batches", daemon=True)
        thread.start()
        try:
            yield take()
        finally:
            done.set()
            thread.join()

    def _feed(self, step: int) -> FedBatch:
        rows = self._rows
        index = self._stream.batch(step, rows.start, rows.stop)
        columns = {**self._reader.rows(index.chunk, index.row), MASK: index.mask}
        own = slice(rows.own_start - rows.start, rows.own_stop - rows.start)
        return FedBatch(
            step,
            {
                name: global_array(self._sharding, self._batch_size, rows.start, values)
                for name, values in columns.items()
            },
            digest(step, index.position[own], index.sample_id[own], index.mask[own]),
        )

    def fed(self, batch: FedBatch) -> None:
        """Counts a batch as fed: call it once per update."""
        self.digest_part = add_digests(self.digest_part, batch.digest)
