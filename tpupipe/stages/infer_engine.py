"""Batches of static shapes through the compiled model: compiled ahead, dispatched ahead, fetched late. Workers only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpupipe.data.buckets import PackedBatch
from tpupipe.errors import DataError, OutOfStepError, StageError
from tpupipe.job import Infer
from tpupipe.programs.infer import abstract_feed, check_outputs, lower_apply, row_multiple, unread_columns
from tpupipe.programs.infer_batches import ReadyWindow, Spec, feed_of, fitted, key_of, shapes_of, told
from tpupipe.programs.infer_rows import Columns, MappedWindow
from tpupipe.programs.sharding import put_whole
from tpupipe.programs.turns import Turns
from tpupipe.programs.user_code import user_code

IN_FLIGHT = 3  # batches dispatched and not fetched


@dataclass(frozen=True)
class Computed:
    """A window's outputs, in input order.

    Args:
        window: As it was given.
        outputs: Output name to ``ndarray[n, ...]``, or an object array of arrays for ragged outputs.
        values_fed: Values of the bucketed column (rows, without buckets) that were fed, padding included.
        values_real: Those that are real.
    """

    window: MappedWindow
    outputs: Columns
    values_fed: int
    values_real: int


@dataclass
class _Open:
    """A window at work."""

    ready: ReadyWindow
    done: Callable[[Any], None]
    left: int
    outputs: Columns = field(default_factory=dict)
    seen: int = 0
    fed: int = 0
    real: int = 0
    failed: bool = False


@dataclass
class _Flying:
    """A batch that was dispatched, or the end of a window without batches."""

    opened: _Open
    batch: PackedBatch | None
    lengths: NDArray[np.int32]
    outputs: Mapping[str, Any]
    together: Any = None  # whether all processes were at this batch; None where there is one


class InferEngine:
    """Runs ready windows through the model. For one thread.

    Args:
        stage: The declaration.
        params: On the devices.
        mesh: The devices; a batch's rows are split over its axis.
        rows: Sharding of a batch.
        compiling: ``with compiling(shapes, ahead)`` surrounds compilations.

    Where the devices are of several processes, all of them run this with the same pieces in the same order, and each has
    all of a batch's rows and gets all of its outputs. That they did go together is computed with every batch.
    """

    def __init__(
        self,
        stage: Infer,
        params: Any,
        mesh: Any,
        rows: Any,
        compiling: Callable[[str, bool], AbstractContextManager[None]],
    ) -> None:
        self._stage = stage
        self._params = params
        self._devices = row_multiple(stage, mesh)
        self._rows = rows
        self._turns = None if rows.is_fully_addressable else Turns(mesh)
        self._compiling = compiling
        self._spec: Spec | None = None
        self._unread: frozenset[str] = frozenset()
        self._programs: dict[Any, Any] = {}
        self._shapes: dict[str, Any] = {}
        self._flying: deque[_Flying] = deque()
        self.compilations = 0

    @property
    def spec(self) -> Spec | None:
        """What the first rows looked like, and so what programs were compiled for."""
        return self._spec

    @property
    def devices(self) -> int:
        """Devices that a batch is split over."""
        return self._devices

    # -- what the pipeline calls ----------------------------------------------------------------

    def submit(self, piece: ReadyWindow, done: Callable[[Any], None]) -> None:
        """See ``Engine.submit``."""
        if self._spec is not None:
            piece = fitted(piece, self._stage.keep, self._spec, self._unread)
        opened = _Open(piece, done, len(piece.batches) or 1)
        if not piece.batches:
            self._flying.append(_Flying(opened, None, np.empty(0, np.int32), {}))
        for batch in piece.batches:
            try:
                flying = self._dispatch(opened, batch)
            except Exception as error:  # noqa: BLE001 - it is that unit's
                self._fail(opened, error)
                return
            self._flying.append(flying)
            while len(self._flying) > IN_FLIGHT:
                self._land()
            if opened.failed:
                return

    def collect(self) -> bool:
        """See ``Engine.collect``."""
        if not self._flying:
            return False
        self._land()
        return True

    # -- compiling ------------------------------------------------------------------------------

    def _program(self, ready: ReadyWindow, rows: int, length: int) -> Any:
        if self._spec is None:
            shapes = shapes_of(self._stage, self._devices)
            self._compile(ready.spec, shapes, ahead=True)
            self._unread = unread_columns(self._stage, self._params, ready.spec, shapes[0], self._rows)
            self._spec = ready.spec
        key = (key_of(ready.spec), rows, length)
        if key not in self._programs:
            if self._stage.recompile == "forbid":
                raise self._other_shape(ready)
            self._compile(ready.spec, [(rows, length)], ahead=False)
        return self._programs[key]

    def _compile(self, spec: Spec, shapes: Sequence[tuple[int, int]], *, ahead: bool) -> None:
        """Compiles for some shapes: traced one after the other, compiled and loaded side by side."""

        def compile_one(each: Any, shape: tuple[int, int]) -> Any:
            program = each.compile()
            if self._turns is None:  # a program of several processes runs when all of them are at it
                self._load(program, spec, shape)
            return program

        with self._compiling(f"{shapes} of {told(spec)}", ahead):
            check_outputs(self._stage, self._params, spec, shapes[0], self._rows)
            lowered = lower_apply(self._stage, self._params, spec, shapes, self._rows, turns=self._turns)
            with ThreadPoolExecutor(min(len(shapes), os.cpu_count() or 1)) as pool:
                programs = list(pool.map(compile_one, lowered, shapes))
        for (rows, length), program in zip(shapes, programs, strict=True):
            self._programs[key_of(spec), rows, length] = program
        self.compilations += len(programs)

    def _load(self, program: Any, spec: Spec, shape: tuple[int, int]) -> None:
        """Runs a program once over padding: its first run loads it, and the first rows should not wait for that."""
        import jax

        padding = {
            name: np.zeros(value.shape, value.dtype)
            for name, value in abstract_feed(self._stage, spec, shape, self._rows).items()
        }
        with user_code("apply", self._stage.name):
            jax.block_until_ready(program(self._params, jax.device_put(padding, self._rows)))

    def _other_shape(self, ready: ReadyWindow) -> DataError:
        assert self._spec is not None  # noqa: S101 - something was compiled before
        return DataError(
            f"Stage {self._stage.name!r}: rows of unit {ready.unit} are {told(ready.spec)}; compiled is for "
            f"{told(self._spec)}, as the first rows were.",
            hint='Let map give one dtype and shape, or allow compilations on the way with recompile="warn".',
            stage=self._stage.name,
            unit=ready.unit,
        )

    # -- batches --------------------------------------------------------------------------------

    def _dispatch(self, opened: _Open, batch: PackedBatch) -> _Flying:
        import jax

        ready = opened.ready
        program = self._program(ready, batch.batch_rows, batch.bucket_length)
        feed, lengths = feed_of(self._stage, ready, batch)
        with user_code("apply", self._stage.name, unit=ready.unit):
            if self._turns is None:
                outputs, together = program(self._params, jax.device_put(feed, self._rows)), None
            else:
                placed = {name: put_whole(value, self._rows) for name, value in feed.items()}
                outputs, together = program(self._params, placed, self._turns.next(ready.unit, feed))
            for value in outputs.values():
                value.copy_to_host_async()
        opened.fed += batch.batch_rows * batch.bucket_length
        opened.real += int(lengths.sum()) if self._stage.buckets is not None else len(batch.rows)
        return _Flying(opened, batch, lengths, outputs, together)

    def _land(self) -> None:
        """Fetches the oldest batch and puts its rows in their places."""
        flying = self._flying.popleft()
        opened = flying.opened
        if opened.failed:
            return
        try:
            if flying.batch is None:
                opened.outputs = self._no_rows(opened.ready.spec)
            else:
                with user_code("apply", self._stage.name, unit=opened.ready.unit):
                    fetched = {name: np.asarray(value) for name, value in flying.outputs.items()}
                self._check_together(flying)
                self._put_back(opened, flying.batch, flying.lengths, fetched)
        except Exception as error:  # noqa: BLE001 - it is that unit's
            self._fail(opened, error)
            return
        opened.left -= 1
        if opened.left:
            return
        total = len(opened.ready.window.rows)
        if opened.seen != total:
            self._fail(opened, StageError(f"{total} rows went in, {opened.seen} came out: a batch was lost."))
        else:
            opened.done(Computed(opened.ready.window, opened.outputs, opened.fed, opened.real))

    def _check_together(self, flying: _Flying) -> None:
        if flying.together is None or flying.together:
            return
        unit = flying.opened.ready.unit
        raise OutOfStepError(
            f"Stage {self._stage.name!r}: the hosts of the slice had not the same batch, at unit {unit}.",
            hint="A map must give the same rows on every host; or an input could not be read on one of them.",
            stage=self._stage.name,
            unit=unit,
        )

    def _put_back(
        self, opened: _Open, batch: PackedBatch, lengths: NDArray[np.int32], fetched: Mapping[str, NDArray[Any]]
    ) -> None:
        total, rows = len(opened.ready.window.rows), batch.rows
        for name, value in fetched.items():
            if name in self._stage.ragged_outputs:
                if name not in opened.outputs:
                    opened.outputs[name] = np.empty(total, object)
                column = opened.outputs[name]
                for i, row in enumerate(rows.tolist()):
                    column[row] = value[i, : lengths[i]]
            else:
                if name not in opened.outputs:
                    opened.outputs[name] = np.empty((total, *value.shape[1:]), value.dtype)
                opened.outputs[name][rows] = value[: len(rows)]
        opened.seen += len(rows)

    def _no_rows(self, spec: Spec) -> Columns:
        """Outputs without rows, of the types that rows would have: the model is only traced."""
        shape = shapes_of(self._stage, self._devices)[0]
        shapes = check_outputs(self._stage, self._params, spec, shape, self._rows)
        outputs: Columns = {}
        for name, value in shapes.items():
            ragged = name in self._stage.ragged_outputs
            outputs[name] = np.empty((0,), object) if ragged else np.empty((0, *value.shape[1:]), value.dtype)
        return outputs

    def _fail(self, opened: _Open, error: Exception) -> None:
        if not opened.failed:
            opened.failed = True
            opened.done(error)
