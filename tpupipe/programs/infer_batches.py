"""What the model is fed of a window: which rows share a batch of a static shape, and the batch's arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpupipe.data.buckets import PackedBatch, plan_batches
from tpupipe.data.ragged import Ragged
from tpupipe.errors import DataError
from tpupipe.job import Infer
from tpupipe.programs.infer_buckets import buckets_of
from tpupipe.programs.infer_rows import Columns, MappedWindow

MASK, LENGTHS = "mask", "lengths"


@dataclass(frozen=True)
class FedColumn:
    """What a column looks like to the model.

    Args:
        dtype: As JAX has it.
        inner: Dimensions of a row; of a position, where the column is padded.
        padded: Whether rows are padded to the bucket's length.
    """

    dtype: np.dtype[Any]
    inner: tuple[int, ...]
    padded: bool

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Of a batch."""
        return (rows, length, *self.inner) if self.padded else (rows, *self.inner)

    def __str__(self) -> str:
        sides = ["rows", *(["length"] if self.padded else []), *map(str, self.inner)]
        return f"{self.dtype}[{', '.join(sides)}]"


Spec = dict[str, FedColumn]


@dataclass(frozen=True)
class ReadyWindow:
    """A mapped window, planned and laid out for padding.

    Args:
        unit: Its unit.
        window: Numbers, kept columns, counts.
        columns: What is fed, ragged columns laid end to end, in the model's dtypes. Of columns that only ``spec`` has,
            zeros are fed.
        spec: What the columns look like.
        batches: Which rows go together; each row once.
    """

    unit: str
    window: MappedWindow
    columns: Mapping[str, NDArray[Any] | Ragged]
    spec: Spec
    batches: Sequence[PackedBatch]


def ready_window(stage: Infer, unit: str, window: MappedWindow, devices: int, known: Spec | None) -> ReadyWindow:
    """Plans a window's batches and lays its columns out.

    Args:
        stage: The declaration.
        unit: Unit id.
        window: Its rows.
        devices: Rows of a batch are a multiple of this.
        known: What columns looked like before, for columns all of whose rows are empty here.

    Raises:
        DataError: A column is ragged without buckets, or its rows do not go together.
    """
    import jax

    columns: dict[str, NDArray[Any] | Ragged] = {}
    spec: Spec = {}
    buckets = stage.buckets
    for name, values in window.fed.items():
        deciding = buckets is not None and name == buckets.column
        if values.dtype != object and not (deciding and values.ndim >= 2):
            dtype = jax.dtypes.canonicalize_dtype(values.dtype)
            columns[name] = values.astype(dtype, copy=False)
            spec[name] = FedColumn(dtype, values.shape[1:], padded=False)
            continue
        if buckets is None:
            raise DataError(
                f"Stage {stage.name!r}: column {name!r} is ragged, and no buckets are declared.",
                hint="Infer(buckets=Buckets(lengths=(128, 256, 512))).",
                stage=stage.name,
            )
        rows = Ragged.of(list(values), name)
        if known and name in known and known[name].padded and not rows.values.size:
            spec[name] = known[name]
        else:
            given = rows.values.dtype if rows.values.size or values.size else np.dtype(np.int32)
            spec[name] = FedColumn(jax.dtypes.canonicalize_dtype(given), rows.values.shape[1:], padded=True)
        columns[name] = Ragged(rows.values.astype(spec[name].dtype, copy=False), rows.starts, rows.lengths, name)
    return ReadyWindow(unit, window, columns, spec, plan_window(stage, window, devices))


def fitted(ready: ReadyWindow, kept: Collection[str], spec: Spec, unread: Collection[str]) -> ReadyWindow:
    """A window for programs that were compiled for ``spec``.

    What a kept column holds does not matter to a program that does not look at it: it may have nulls here, and so be no
    numbers, and none there.

    Args:
        ready: The window.
        kept: Columns that go to the output.
        spec: What the columns of the first window looked like.
        unread: Of the kept columns in it, those that ``apply`` does not look at.
    """
    free = {name for name in kept if name in unread or name not in spec}
    own = {name: column for name, column in ready.spec.items() if name not in free}
    columns = {name: values for name, values in ready.columns.items() if name not in free}
    return replace(ready, columns=columns, spec=own | {name: spec[name] for name in unread})


def plan_window(stage: Infer, window: MappedWindow, devices: int) -> list[PackedBatch]:
    """Which rows of a window go together; every row once."""
    if (buckets := buckets_of(stage)) is not None:
        assert window.lengths is not None  # noqa: S101 - they are there with buckets
        return plan_batches(window.lengths, buckets, default_rows=stage.batch_rows, row_multiple=devices)
    ((size, _),) = shapes_of(stage, devices)
    total = len(window.rows)
    return [PackedBatch(1, np.arange(at, min(at + size, total)), size) for at in range(0, total, size)]


def shapes_of(stage: Infer, devices: int) -> list[tuple[int, int]]:
    """(rows, length) of every batch that a stage may have: one per bucket."""
    if (buckets := buckets_of(stage)) is None:
        return [(-(-stage.batch_rows // devices) * devices, 1)]
    rows = (buckets.rows_for(n, default=stage.batch_rows, multiple=devices) for n in buckets.lengths)
    return list(zip(rows, buckets.lengths, strict=True))


def feed_of(stage: Infer, ready: ReadyWindow, batch: PackedBatch) -> tuple[Columns, NDArray[np.int32]]:
    """A batch's arrays, padded, and the real lengths of its rows (1 for each, without buckets; 0 for padding rows)."""
    rows, size = batch.rows, batch.batch_rows
    lengths = np.zeros(size, np.int32)
    window = ready.window
    lengths[: len(rows)] = 1 if window.lengths is None else np.minimum(window.lengths[rows], batch.bucket_length)
    truncate = stage.buckets is not None and stage.buckets.too_long == "truncate"
    feed: Columns = {}
    for name, column in ready.spec.items():
        values = ready.columns.get(name)
        if values is None:
            feed[name] = np.zeros(column.shape(size, batch.bucket_length), column.dtype)
        elif isinstance(values, Ragged):
            feed[name] = values.pad(
                rows, batch.bucket_length, size, truncate=truncate, dtype=column.dtype, inner=column.inner
            )
        elif len(rows) == size:
            feed[name] = values[rows]
        else:
            feed[name] = np.zeros((size, *column.inner), column.dtype)
            feed[name][: len(rows)] = values[rows]
    if stage.buckets is not None:
        feed[LENGTHS] = lengths
    feed[MASK] = np.arange(size) < len(rows)
    return feed, lengths


def key_of(spec: Spec) -> tuple[Any, ...]:
    """Equal for columns that look the same."""
    return tuple(sorted((name, str(column)) for name, column in spec.items()))


def told(spec: Spec) -> str:
    """The columns for a message: ``tokens int32[rows, length]``."""
    return ", ".join(f"{name} {column}" for name, column in sorted(spec.items()))
