"""Compares what two runs wrote, row by row and in order. Pure; tables come one unit at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    Units = Iterable[tuple[str, pa.Table]]

_SHOWN = 120


def first_difference(stage: str, wanted: Units, found: Units) -> str | None:
    """The first place in which two outputs differ, unit by unit; ``None`` if they are equal in every row and in order.

    Args:
        stage: For the message.
        wanted: Units of the reference, in manifest order.
        found: Units of the other run, in manifest order.
    """
    for ours, theirs in zip_longest(wanted, found):
        if theirs is None:
            return f"stage {stage}: unit {ours[0]} is missing"
        if ours is None:
            return f"stage {stage}: unit {theirs[0]} is one too many"
        if ours[0] != theirs[0]:
            return f"stage {stage}: unit {theirs[0]} stands where {ours[0]} should"
        difference = table_difference(ours[1], theirs[1])
        if difference is not None:
            return f"stage {stage}, unit {ours[0]}, {difference}"
    return None


def first_difference_joined(stage: str, wanted: Units, found: Units) -> str | None:
    """As ``first_difference``, for a stage whose units have names of their own in every run (``dataset=``)."""
    one, other = _joined(wanted), _joined(found)
    if one is None or other is None:
        return None if one is other else f"stage {stage}: one of the two has no units"
    difference = table_difference(one, other)
    return None if difference is None else f"stage {stage}, {difference}"


def _joined(units: Units) -> pa.Table | None:
    import pyarrow as pa

    tables = [table for _, table in units]
    return pa.concat_tables(tables, promote_options="permissive") if tables else None


def table_difference(wanted: pa.Table, found: pa.Table) -> str | None:
    """``row 3, column 'nll': 1.5 instead of 1.25``; ``None`` if two tables are equal. NaN equals NaN.

    Where the rows are the same ones in another order, or some are missing or too many, that is said too.
    """
    names = wanted.column_names
    if names != found.column_names:
        return f"columns {', '.join(found.column_names)} instead of {', '.join(names)}"
    for name in names:
        if wanted.schema.field(name).type != found.schema.field(name).type:
            return f"column {name!r}: type {found.schema.field(name).type} instead of {wanted.schema.field(name).type}"
    if wanted.num_rows == found.num_rows and all(_same(wanted.column(name), found.column(name)) for name in names):
        return None
    place = _first_place(wanted, found, names)
    if place is None and wanted.num_rows == found.num_rows:
        return None  # equal but for the sign of nothing: NaN beside NaN
    if place is None:
        rows = min(wanted.num_rows, found.num_rows)
        place = f"row {rows}: there are {found.num_rows} rows instead of {wanted.num_rows}"
    return place + _as_a_set(wanted, found)


def _same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    return bool(one.equals(other))


def _first_place(wanted: pa.Table, found: pa.Table, names: Sequence[str]) -> str | None:
    for row in range(min(wanted.num_rows, found.num_rows)):
        for name in names:
            one, other = wanted.column(name)[row].as_py(), found.column(name)[row].as_py()
            if _text(one) != _text(other):  # repr tells floats apart by their bits, and NaN is NaN
                return f"row {row}, column {name!r}: {_short(other)} instead of {_short(one)}"
    return None


def _as_a_set(wanted: pa.Table, found: pa.Table) -> str:
    one, other = Counter(_row_texts(wanted)), Counter(_row_texts(found))
    missing, extra = (one - other).total(), (other - one).total()
    if not missing and not extra:
        return " (the same rows in another order)"
    parts = [f"{missing} row(s) of the reference are missing"] if missing else []
    parts += [f"{extra} row(s) are too many"] if extra else []
    return f" ({', '.join(parts)})"


def _row_texts(table: pa.Table) -> Iterator[str]:
    for batch in table.to_batches():
        for row in batch.to_pylist():
            yield _text(row)


def _text(value: Any) -> str:
    return repr(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
