"""From input rows to the columns a model is fed: the job's map, bad rows found by bisecting, and rows that are too long."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tpupipe.data.buckets import Buckets, row_lengths
from tpupipe.data.columns import as_array, is_numeric, to_numpy
from tpupipe.data.windows import Window
from tpupipe.errors import BadRowError, DataError, TpupipeError, UserCodeError
from tpupipe.job import Infer, Quarantine
from tpupipe.stages.infer_buckets import buckets_of

Columns = dict[str, NDArray[Any]]

MAP, TOO_LONG = "map", "too_long"


@dataclass(frozen=True)
class BadRow:
    """A row that was set aside.

    Args:
        input_row: Number of the input row in its unit; ``None`` where the map changed the number of rows.
        path: The file it comes from.
        start: Byte of the file that ``file_row`` counts from.
        file_row: Number of the row in the file from there; ``None`` as ``input_row``.
        row: Number of the mapped row in its unit; ``None`` if the map raised.
        reason: ``map`` or ``too_long``.
        error: What was wrong.
    """

    input_row: int | None
    path: str
    start: int
    file_row: int | None
    row: int | None
    reason: str
    error: str


ERRORS_SCHEMA = pa.schema(
    [
        ("unit", pa.string()),
        ("input_row", pa.int64()),
        ("path", pa.string()),
        ("start", pa.int64()),
        ("file_row", pa.int64()),
        ("row", pa.int64()),
        ("reason", pa.string()),
        ("error", pa.string()),
    ]
)


def errors_table(unit: str, bad: Sequence[BadRow]) -> pa.Table:
    """The error records of one unit; the same rows give the same table."""
    records = [{"unit": unit, **vars(row)} for row in bad]
    return pa.Table.from_pylist(records, schema=ERRORS_SCHEMA)


@dataclass(frozen=True)
class MappedWindow:
    """A window's rows as the model and the output need them.

    Args:
        fed: Columns with numbers, ``ndarray[n, ...]`` or object arrays of arrays.
        kept: Columns that go to the output as they are.
        rows: ``int64[n]``: number of each mapped row in its unit.
        lengths: ``int64[n]`` in the bucketed column, ``None`` without buckets.
        rows_in: Input rows.
        truncated: Rows longer than the longest bucket of which the beginning is fed.
    """

    fed: Columns
    kept: Columns
    rows: NDArray[np.int64]
    lengths: NDArray[np.int64] | None
    rows_in: int
    truncated: int


class UnitMapper:
    """Maps the windows of one unit, in order, and keeps what was set aside.

    Args:
        stage: The declaration.
        unit: Unit id.
        template: Mapped columns without rows, where they are known from elsewhere: for windows all of whose rows are bad.
    """

    def __init__(self, stage: Infer, unit: str, template: Columns | None = None) -> None:
        self._stage = stage
        self._unit = unit
        self._limit = stage.bad_rows.max if isinstance(stage.bad_rows, Quarantine) else 0
        self._mapped = 0
        self.template = template
        self.bad: list[BadRow] = []

    def map(self, window: Window) -> MappedWindow:
        """Maps a window and applies the length policy.

        Raises:
            BadRowError: A row may not be set aside (any more); names it.
            UserCodeError: The map raised, and no single row is to blame.
            DataError: The columns cannot be fed.
        """
        stage = self._stage
        columns, sources = self._columns(window)
        missing = [name for name in stage.keep if name not in columns]
        if missing:
            raise DataError(
                f"Stage {stage.name!r} keeps {', '.join(missing)}, but its rows have {', '.join(columns)}.",
                stage=stage.name,
                unit=self._unit,
            )
        fed = {name: values for name, values in columns.items() if self._is_fed(name, values)}
        if not fed:
            raise DataError(
                f"Stage {stage.name!r} has no column with numbers to feed: {', '.join(columns) or 'no columns'}.",
                hint="Give Infer a map that turns the rows into arrays.",
                stage=stage.name,
                unit=self._unit,
            )
        kept = {name: columns[name] for name in stage.keep}
        mapped = len(next(iter(fed.values())))
        rows = np.arange(self._mapped, self._mapped + mapped)
        self._mapped += mapped
        lengths, truncated = None, 0
        if (buckets := buckets_of(stage)) is not None:
            lengths = row_lengths(fed, buckets) if mapped else np.empty(0, np.int64)
            long = np.flatnonzero(lengths > buckets.lengths[-1])
            if buckets.too_long == "truncate":
                truncated = len(long)
            elif len(long):
                self._set_aside_long(window, buckets, [(sources[i], rows[i], lengths[i]) for i in long])
                good = np.setdiff1d(np.arange(mapped), long)
                fed = {name: values[good] for name, values in fed.items()}
                kept = {name: values[good] for name, values in kept.items()}
                rows, lengths = rows[good], lengths[good]
        return MappedWindow(fed, kept, rows, lengths, window.table.num_rows, truncated)

    def _is_fed(self, name: str, values: NDArray[Any]) -> bool:
        """Whether the model is fed a column. Objects without a row say nothing of themselves: they may be text."""
        if len(values) or values.dtype != object:
            return is_numeric(values)
        buckets = self._stage.buckets
        return buckets is not None and (name == buckets.column or (not buckets.column and name not in self._stage.keep))

    def _columns(self, window: Window) -> tuple[Columns, NDArray[np.int64]]:
        """The mapped columns, and the input row in the window that each mapped row comes from (-1: not known)."""
        stage, total = self._stage, window.table.num_rows
        batch = to_numpy(window.table)
        if (mapping := stage.map) is None:
            return _arrays(stage, batch), np.arange(total)
        before = len(self.bad)

        def call(rows: Mapping[str, Any]) -> Columns:
            return _arrays(stage, mapping(rows))

        def refuse(row: int, error: Exception) -> None:
            self._set_aside(_bad_row(window, row, None, MAP, f"{type(error).__name__}: {error}"), error)

        pieces = bisect(call, batch, total, refuse)
        if isinstance(pieces, Exception):  # no row of it fails alone
            rows = f"rows {window.first_row} to {window.first_row + total - 1} together, on none of them alone"
            lines = "".join(traceback.format_exception(pieces, limit=-3))
            raise UserCodeError(
                f"map of stage {stage.name!r} raised {type(pieces).__name__}: {pieces}, unit {self._unit}, "
                f"{rows if total else 'which has no rows'}.\n{lines}",
                stage=stage.name,
                unit=self._unit,
            ) from pieces
        if not pieces:  # every row is bad
            return self._no_columns(call, batch, before), np.empty(0, np.int64)
        columns = _joined(stage, [columns for _, _, columns in pieces])
        if any(stop > start for start, stop, _ in pieces):
            self.template = {name: values[:0] for name, values in columns.items()}
        sources = [_sources(start, stop, len(next(iter(part.values()), ()))) for start, stop, part in pieces]
        return columns, np.concatenate(sources)

    def _no_columns(self, call: Callable[[Mapping[str, Any]], Columns], batch: Columns, before: int) -> Columns:
        """Columns without rows for a window all of whose rows are bad: their names and types must come from somewhere."""
        if self.template is not None:
            return self.template
        try:
            return call({name: values[:0] for name, values in batch.items()})
        except Exception as error:
            found = self.bad[before]
            raise self._refused(
                found, " All rows read with it are bad, so the columns of the output are not known."
            ) from error

    def _set_aside_long(self, window: Window, buckets: Buckets, long: Sequence[tuple[int, int, int]]) -> None:
        for source, row, length in long:
            said = f"its length is {length}; the longest bucket is {buckets.lengths[-1]}"
            found = _bad_row(window, int(source), int(row), TOO_LONG, said)
            if buckets.too_long == "error":
                hint = 'Add a longer bucket, or too_long="truncate" or "quarantine".'
                raise self._refused(found, "", hint=hint)
            self._set_aside(found, None)

    def _set_aside(self, bad: BadRow, error: Exception | None) -> None:
        if len(self.bad) < self._limit:
            self.bad.append(bad)
            return
        if self._limit:
            more = f" {len(self.bad)} rows were set aside before it, which is all that bad_rows allows."
        else:
            more = "" if error is None else "\n" + "".join(traceback.format_exception(error, limit=-3)).rstrip()
        raise self._refused(bad, more) from error

    def _refused(self, bad: BadRow, more: str, *, hint: str = "") -> BadRowError:
        return refused(self._stage.name, self._unit, bad, more, hint=hint, over_limit=len(self.bad) >= self._limit > 0)


# -- the job's map --------------------------------------------------------------------------


Piece = tuple[int, int, Columns]


def bisect(
    call: Callable[[Mapping[str, Any]], Columns],
    batch: Columns,
    total: int,
    refuse: Callable[[int, Exception], None],
) -> list[Piece] | Exception:
    """Maps rows, and where that raises, halves of them, down to the rows that raise alone.

    Args:
        call: The map.
        batch: Columns with ``total`` rows.
        total: Rows.
        refuse: Called with each row that raises alone and its error, in order. May raise to end it.

    Returns:
        ``(first row, row after the last, mapped columns)`` of what was mapped, in order; or the error, if the whole
        raised and no row did so alone.
    """
    refused = 0

    def half(start: int, stop: int) -> list[Piece]:
        nonlocal refused
        rows = batch if stop - start == total else {name: values[start:stop] for name, values in batch.items()}
        try:
            return [(start, stop, call(rows))]
        except (TpupipeError, MemoryError):  # no statement about the rows
            raise
        except Exception as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                found = half(start, middle) + half(middle, stop)
                if stop - start == total and not refused:
                    raise _WholeError(error) from error
                return found
            if stop - start < 1:
                raise _WholeError(error) from error
            refused += 1
            refuse(start, error)
            return []

    try:
        return half(0, total)
    except _WholeError as whole:
        return whole.error


class _WholeError(Exception):
    """All rows together raise, none alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _arrays(stage: Infer, batch: Any) -> Columns:
    if not isinstance(batch, Mapping):
        raise DataError(f"map of stage {stage.name!r} returned {type(batch).__name__}, not a mapping of columns.")
    columns = {name: as_array(name, values) for name, values in batch.items()}
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) > 1:
        raise DataError(
            f"map of stage {stage.name!r} returned columns of different lengths: {counts}.", stage=stage.name
        )
    return columns


def _joined(stage: Infer, parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    names = {tuple(sorted(part)) for part in parts}
    if len(names) > 1:
        raise DataError(f"map of stage {stage.name!r} returned different columns for different rows: {sorted(names)}.")
    joined = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if any(c.dtype == object for c in columns) or len({c.shape[1:] for c in columns}) > 1:
            rows = [row for column in columns for row in column]
            joined[name] = np.empty(len(rows), object)
            joined[name][:] = rows
        else:
            joined[name] = np.concatenate(columns)
    return joined


def _sources(start: int, stop: int, mapped: int) -> NDArray[np.int64]:
    if mapped == stop - start:
        return np.arange(start, stop)
    return np.full(mapped, start if stop - start == 1 else -1)


def _bad_row(window: Window, source: int, row: int | None, reason: str, error: str) -> BadRow:
    if source < 0:
        paths = sorted({origin.path for origin in window.origins})
        return BadRow(None, ", ".join(paths[:3]), 0, None, row, reason, error)
    origin = window.origin(source)
    return BadRow(window.first_row + source, origin.path, origin.start, origin.row, row, reason, error)


def refused(stage: str, unit: str, bad: BadRow, more: str, *, hint: str = "", over_limit: bool = False) -> BadRowError:
    """The error that names a bad row; ``over_limit`` if no more may be set aside, so that the stage cannot succeed."""
    place = f"row {bad.row} after map" if bad.input_row is None else f"row {bad.input_row}"
    where = bad.path + (f", from byte {bad.start}" if bad.start else "")
    where += f", row {bad.file_row}" if bad.file_row is not None else ""
    what = f"map raised {bad.error}" if bad.reason == MAP else bad.error
    return BadRowError(
        f"Stage {stage!r}: {place} of unit {unit} ({where}): {what}.{more}",
        hint=hint or "Infer(bad_rows=Quarantine(max=...)) sets such rows aside.",
        stage=stage,
        unit=unit,
        row=bad.row if bad.input_row is None else bad.input_row,
        path=bad.path,
        over_limit=over_limit,
    )
