"""The order rows are trained on: a pure function of (manifest, seed, step).

There is no cursor. Chunks are permuted per data epoch by a counter-based generator from
(seed, data epoch), rows inside a chunk by (seed, data epoch, chunk), and global batch *b*
is rows [b * B, (b + 1) * B) of that endless stream. The state is the step, so any number
of hosts resumes exactly, and no row is dropped without being counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tpupipe.errors import DataError, UsageError

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]
Bool: TypeAlias = NDArray[np.bool_]

_CACHED_EPOCHS = 3
_CACHED_CHUNKS = 64
_MAX_INT32 = 2**31 - 1
_MASK64 = 2**64 - 1

# One Philox object per thread, re-keyed for every use: making one costs more than its words.
_LOCAL = threading.local()
_EMPTY_BUFFER = np.zeros(4, np.uint64)


def _permutation(seed: int, data_epoch: int, lane: int, count: int) -> Int32:
    """A permutation of ``range(count)``: the stable argsort of raw Philox 4x64 words.

    Raw words, because numpy promises those for ever and ``Generator.permutation`` only within a
    version. ``lane`` 0 is the order of chunks, ``lane`` c + 1 that of the rows of chunk c.
    """
    philox = getattr(_LOCAL, "philox", None)
    if philox is None:
        philox = _LOCAL.philox = np.random.Philox(key=0)
    philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([0, lane, 0, 0], np.uint64),
            "key": np.array([seed, data_epoch], np.uint64),
        },
        "buffer": _EMPTY_BUFFER,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    words: NDArray[np.uint64] = philox.random_raw(count)
    return words.argsort(kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """Which rows a global batch, or a contiguous part of one, is made of.

    Attributes:
        step: The step that consumes it.
        chunk: ``int32[B]``, chunk number in manifest order.
        row: ``int32[B]``, row inside the chunk.
        sample_id: ``int64[B]``, row number over the whole manifest; -1 where padded.
        position: ``int64[B]``, position in the global batch.
        mask: ``bool[B]``, False where padded. Padding repeats the batch's last real row.
    """

    step: int
    chunk: Int32
    row: Int32
    sample_id: Int64
    position: Int64
    mask: Bool

    def __len__(self) -> int:
        return len(self.chunk)

    def digest(self) -> int:
        """:func:`digest` of these rows."""
        return digest(self.step, self.position, self.sample_id, self.mask)


@dataclass(frozen=True, slots=True)
class _Epoch:
    order: Int32  # chunk at each slot
    ends: Int64  # stream position, within the data epoch, at which each slot ends


class Stream:
    """Global batches of a prepared data set, by step.

    Safe to use from several threads; pickles as its arguments.

    Args:
        chunk_rows: Rows of every chunk, in manifest order.
        seed: Decides the order; 0 to 2**64 - 1.
        batch_size: Rows of a global batch.
        epochs: Passes over the data; the last batch may be short.
        steps: Number of batches, all full, over as many data epochs as that takes. Give
            exactly one of ``epochs`` and ``steps``.
        shuffle: False keeps manifest order in every data epoch.
        tail: What becomes of a short last batch: ``"pad"`` it and mask the padding, or
            ``"drop"`` it and count its rows in ``rows_dropped``.

    Raises:
        DataError: There are no rows, too many rows in a chunk, or dropping would leave nothing.
        UsageError: Another argument is not valid.
    """

    def __init__(
        self,
        chunk_rows: Sequence[int] | Int64,
        seed: int,
        batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        tail: Literal["pad", "drop"] = "pad",
    ) -> None:
        rows = np.array(chunk_rows, dtype=np.int64).reshape(-1)
        if rows.size and (rows.min() < 0 or rows.max() > _MAX_INT32 or rows.size > _MAX_INT32):
            raise DataError(
                f"Chunks of {rows.min()} to {rows.max()} rows; allowed: 0 to {_MAX_INT32} rows, as many chunks."
            )
        if not rows.sum():
            raise DataError("There are no rows to train on.", chunks=int(rows.size))
        _check(seed=(seed, 0, _MASK64), batch_size=(batch_size, 1, _MAX_INT32))
        if (epochs is None) == (steps is None):
            raise UsageError(f"epochs={epochs!r} and steps={steps!r}: give exactly one of them.")
        _check(**{"epochs": (epochs, 1, _MAX_INT32)} if steps is None else {"steps": (steps, 1, 2**62 // batch_size)})
        if tail not in ("pad", "drop"):
            raise UsageError(f'tail={tail!r} is not known; allowed: "pad", "drop".')
        self._arguments = (rows, seed, batch_size, epochs, steps, shuffle, tail)
        self._rows = rows
        self._starts = np.cumsum(rows) - rows
        self._seed, self._shuffle = seed, shuffle
        self._lock = threading.Lock()
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._orders: OrderedDict[tuple[int, int], Int32] = OrderedDict()
        self.batch_size = batch_size
        self.rows_per_epoch = int(rows.sum())
        """Rows of one pass over the data."""
        if steps is not None:
            self.steps = steps
            """Number of batches."""
            self.rows = steps * batch_size
            """Rows fed over all steps, padding not counted."""
            self.rows_dropped = 0
            """Rows of the asked-for epochs that no batch holds."""
        else:
            total = self.rows_per_epoch * (epochs or 0)
            self.steps = -(-total // batch_size) if tail == "pad" else total // batch_size
            self.rows = total if tail == "pad" else self.steps * batch_size
            self.rows_dropped = total - self.rows
            if not self.steps:
                raise DataError(
                    f"tail='drop' would drop all {total} rows: a batch is {batch_size} rows.",
                    hint="Use tail='pad', a smaller batch_size or more epochs.",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._arguments

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> BatchIndex:
        """Rows of the batch that ``step`` (0-based) consumes.

        Args:
            step: 0 to ``steps`` - 1.
            start: First position of the global batch to give: a host asks for its own part.
            stop: One past the last position; the whole batch by default.

        Returns:
            Arrays of ``stop - start`` entries; O(stop - start) work and memory.

        Raises:
            UsageError: ``step`` or the range is outside.
        """
        stop = self.batch_size if stop is None else stop
        if not 0 <= step < self.steps:
            raise UsageError(f"step {step} is outside the stream; allowed: 0 to {self.steps - 1}.", step=step)
        if not 0 <= start <= stop <= self.batch_size:
            raise UsageError(f"positions {start} to {stop} are outside a batch of {self.batch_size} rows.", step=step)
        origin = step * self.batch_size
        position = np.arange(start, stop, dtype=np.int64)
        real = min(stop, self.rows - origin) - start
        if real >= stop - start:
            chunk, row = self._segment(origin + start, origin + stop)
        elif real > 0:
            chunk, row = self._segment(origin + start, origin + start + real)
        else:  # only padding here: repeat the last row of the stream, which another host reads too
            chunk, row = self._segment(self.rows - 1, self.rows)
            chunk, row, real = chunk[: stop - start], row[: stop - start], 0
        padding = stop - start - len(chunk)
        if padding:
            chunk = np.concatenate([chunk, np.repeat(chunk[-1:], padding)])
            row = np.concatenate([row, np.repeat(row[-1:], padding)])
        mask = position < start + real
        sample_id = self._starts[chunk] + row
        if real < stop - start:
            sample_id[~mask] = -1
        return BatchIndex(step, chunk, row, sample_id, position, mask)

    def _segment(self, start: int, stop: int) -> tuple[Int32, Int32]:
        """(chunk, row) of stream positions [start, stop)."""
        chunks: list[Int32] = []
        rows: list[Int32] = []
        while start < stop:
            data_epoch, offset = divmod(start, self.rows_per_epoch)
            length = min(stop - start, self.rows_per_epoch - offset)
            self._epoch_segment(data_epoch, offset, offset + length, chunks, rows)
            start += length
        if not chunks:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        return (chunks[0], rows[0]) if len(chunks) == 1 else (np.concatenate(chunks), np.concatenate(rows))

    def _epoch_segment(self, data_epoch: int, start: int, stop: int, chunks: list[Int32], rows: list[Int32]) -> None:
        epoch = self._epoch(data_epoch)
        first = int(epoch.ends.searchsorted(start, side="right"))
        last = int(epoch.ends.searchsorted(stop - 1, side="right"))
        touched = epoch.order[first : last + 1]
        ends = epoch.ends[first : last + 1]
        sizes = self._rows[touched]
        begins = ends - sizes
        counts = np.minimum(ends, stop) - np.maximum(begins, start)
        row = (np.arange(start, stop, dtype=np.int64) - np.repeat(begins, counts)).astype(np.int32)
        if self._shuffle:
            # Once per chunk touched, not per row: most batches lie in one or two chunks.
            done = 0
            for chunk, size, count in zip(touched.tolist(), sizes.tolist(), counts.tolist(), strict=True):
                if size > 1 and count:
                    piece = row[done : done + count]
                    piece[:] = self._row_order(data_epoch, chunk, size)[piece]
                done += count
        chunks.append(np.repeat(touched, counts))
        rows.append(row)

    def _epoch(self, data_epoch: int) -> _Epoch:
        with self._lock:
            epoch = self._epochs.get(data_epoch)
            if epoch is None:
                count = len(self._rows)
                if self._shuffle:
                    order = _permutation(self._seed, data_epoch, 0, count)
                else:
                    order = np.arange(count, dtype=np.int32)
                epoch = self._epochs[data_epoch] = _Epoch(order, np.cumsum(self._rows[order]))
                if len(self._epochs) > _CACHED_EPOCHS:
                    self._epochs.popitem(last=False)
            else:
                self._epochs.move_to_end(data_epoch)
            return epoch

    def _row_order(self, data_epoch: int, chunk: int, size: int) -> Int32:
        key = (data_epoch, chunk)
        with self._lock:
            order = self._orders.get(key)
            if order is None:
                order = self._orders[key] = _permutation(self._seed, data_epoch, chunk + 1, size)
                if len(self._orders) > _CACHED_CHUNKS:
                    self._orders.popitem(last=False)
            else:
                self._orders.move_to_end(key)
            return order


def _rebuild(  # noqa: PLR0917 - pickle calls it with a tuple
    rows: Int64,
    seed: int,
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    shuffle: bool,
    tail: Literal["pad", "drop"],
) -> Stream:
    return Stream(rows, seed, batch_size, epochs=epochs, steps=steps, shuffle=shuffle, tail=tail)


def _check(**values: tuple[Any, int, int]) -> None:
    for name, (value, low, high) in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise UsageError(f"{name}={value!r} must be a whole number from {low} to {high}.")


# -- digest ---------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection that spreads every bit."""
    words = words + _GOLDEN
    words = (words ^ (words >> _S30)) * _MIX_A
    words = (words ^ (words >> _S27)) * _MIX_B
    return words ^ (words >> _S31)


def digest(
    step: int | Int64, position: NDArray[np.integer[Any]], sample_id: NDArray[np.integer[Any]], mask: Bool | None = None
) -> int:
    """An additive hash over (step, position in the global batch, sample id).

    Parts of a batch, and batches, add up modulo 2**64 whatever the split, so hosts digest what
    they fed and the sum does not depend on their number. Redone steps must be counted once:
    keep the running sum in the checkpoint.

    Args:
        step: The step, or ``int64[B]``.
        position: ``int[B]``, position in the global batch.
        sample_id: ``int[B]``.
        mask: ``bool[B]``; False entries do not count.

    Returns:
        0 to 2**64 - 1; 0 for no rows.
    """
    steps = np.atleast_1d(np.asarray(step)).astype(np.uint64)
    words = _mix(steps)
    words = _mix(words ^ np.asarray(position).astype(np.uint64))
    words = _mix(words ^ np.asarray(sample_id).astype(np.uint64))
    if mask is not None:
        words = words[np.asarray(mask)]
    return int(words.sum(dtype=np.uint64))


def add_digests(*parts: int) -> int:
    """Sum of digests modulo 2**64."""
    return sum(parts) & _MASK64
