"""Rows of a Parquet file in tables of bounded size, however wide the rows are and however well they are packed.

What is in memory besides is what the file's writer decided on: of each column a page, and a dictionary if it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_CAREFUL_ROWS = 64  # decoded at a time where their size is not known before
_SHARE = 8  # that many batches make a table, where rows are of one size
_WIDEST = 16  # bytes of a decoded number; a decimal is stored in fewer
_PER_VALUE = 8  # bytes of offset and validity
_SIZED = frozenset({"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"})  # others store repeated bytes once


def bounded_tables(
    file: pq.ParquetFile,
    start: int,
    stop: int,
    *,
    rows: int,
    size_bytes: int,
    columns: Collection[str] | None = None,
    use_threads: bool = False,
) -> Iterator[pa.Table]:
    """Rows ``[start, stop)`` of a file, in order.

    Args:
        file: The file. With ``pre_buffer`` all row groups that hold the rows are fetched first.
        start: First row.
        stop: One past the last row; the file has so many at least.
        rows: Rows of a table at most.
        size_bytes: Decoded bytes of a table at most; a single row cannot be cut.
        columns: Columns to read; all by default.
        use_threads: Decode columns side by side, where so many rows are decoded at a time that it pays.

    Returns:
        Tables with rows, none of which keeps memory alive that is much larger than ``size_bytes``. Dictionary columns
        are columns of their values.
    """
    groups, _ = covering_groups(file.metadata, start, stop)
    step = _batch_rows(file.metadata, groups, columns, rows, size_bytes)
    options = {
        "columns": None if columns is None else list(columns),
        "use_threads": use_threads and step == rows,
    }
    return _gathered(_decoded(file, start, stop, step, size_bytes, options), rows, size_bytes)


def no_rows(file: pq.ParquetFile, columns: Collection[str] | None = None) -> pa.Table:
    """A table like those of :func:`bounded_tables`, without rows."""
    return _plain(file.read_row_groups([], columns=None if columns is None else list(columns)))


def covering_groups(metadata: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows ``[start, stop)``, and how many rows of the first come before them."""
    groups: list[int] = []
    first = position = 0
    for index in range(metadata.num_row_groups):
        rows = metadata.row_group(index).num_rows
        if position < stop and position + rows > start:
            first = position if not groups else first
            groups.append(index)
        position += rows
    return groups, start - first


# -- decoding -------------------------------------------------------------------------------


def _decoded(  # noqa: PLR0917 - a range and its limits
    file: pq.ParquetFile, start: int, stop: int, step: int, size_bytes: int, options: Mapping[str, Any]
) -> Iterator[pa.Table]:
    """The rows in small tables, mostly. Begins anew with fewer rows at a time where they turn out to be too large."""
    import pyarrow as pa

    at = start
    while at < stop:
        groups, skip = covering_groups(file.metadata, at, stop)
        for batch in file.iter_batches(step, row_groups=groups, **options):
            whole = _plain(pa.Table.from_batches([batch]))
            table = whole.slice(skip, stop - at)
            skip = max(skip - batch.num_rows, 0)
            at += table.num_rows
            yield from _cut(table, size_bytes)
            if whole.nbytes > size_bytes // 2 and step > 1:  # two would not go into one table
                step = max(1, step * size_bytes // (_SHARE * whole.nbytes))
                break
            if at >= stop:
                break
        else:
            return


def _plain(table: pa.Table) -> pa.Table:
    """Dictionary columns as the values they stand for: each batch has a copy of the whole dictionary."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            values = field.with_type(field.type.value_type)
            table = table.set_column(index, values, table.column(index).cast(values.type))
    return table


def _cut(table: pa.Table, size_bytes: int) -> Iterator[pa.Table]:
    """Halves a table until its pieces are small enough; pieces are copies, so that none keeps the whole alive."""
    import numpy as np

    if table.nbytes <= size_bytes or table.num_rows <= 1:
        yield table
        return
    pieces = [(0, table.num_rows)]
    while pieces:
        begin, count = pieces.pop()
        if count > 1 and table.slice(begin, count).nbytes > size_bytes:
            pieces += [(begin + count // 2, count - count // 2), (begin, count // 2)]
        else:
            yield table.take(np.arange(begin, begin + count))


def _gathered(tables: Iterable[pa.Table], rows: int, size_bytes: int) -> Iterator[pa.Table]:
    """Joins small tables up to so many rows and bytes."""
    held: list[pa.Table] = []
    count = size = 0
    for read in tables:
        table = read
        if held and size + table.nbytes > size_bytes:
            yield _joined(held)
            count = size = 0
        while count + table.num_rows >= rows:
            held.append(table.slice(0, rows - count))
            table = table.slice(rows - count)
            yield _joined(held)
            count = size = 0
        if table.num_rows:
            held.append(table)
            count, size = count + table.num_rows, size + table.nbytes
    if held:
        yield _joined(held)


def _joined(held: list[pa.Table]) -> pa.Table:
    """One table of those held, which are held no more: nothing of it may stay behind while the next is read."""
    import pyarrow as pa

    tables = held.copy()
    held.clear()
    return pa.concat_tables(tables)


# -- how many rows at a time ----------------------------------------------------------------


def _batch_rows(
    metadata: pq.FileMetaData, groups: Iterable[int], columns: Collection[str] | None, rows: int, size_bytes: int
) -> int:
    """Rows to decode at a time: all that may go together where they surely fit, else a share of what seems to fit.

    A row group tells the sum over its rows and not the largest of them, and of long values that are repeated only what
    its dictionary takes. So rows with such columns are decoded a few at a time.
    """
    chosen = [metadata.row_group(index) for index in groups]
    total: int = max(sum(group.num_rows for group in chosen), 1)
    leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    even = uneven = 0
    surely = True
    for i, leaf in enumerate(leaves):
        if columns is not None and leaf.path.partition(".")[0] not in columns:
            continue
        if leaf.physical_type != "BYTE_ARRAY" and leaf.max_repetition_level == 0:
            even += _width(leaf)
            continue
        chunks = [group.column(i) for group in chosen]
        if leaf.physical_type != "BYTE_ARRAY":
            uneven += sum(chunk.num_values for chunk in chunks) * _width(leaf)
            continue
        uneven += sum(chunk.total_uncompressed_size + chunk.num_values * _PER_VALUE for chunk in chunks)
        surely = surely and all(_SIZED.issuperset(chunk.encodings) for chunk in chunks)
    if surely and even * total + uneven <= size_bytes:
        return rows
    fitting = size_bytes // (_SHARE * max(even + uneven // total, 1))
    return max(1, min(rows, fitting, _CAREFUL_ROWS if uneven else rows))


def _width(leaf: Any) -> int:
    """Bytes of a decoded value at most, for types of one size."""
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return _PER_VALUE + max(2 * _WIDEST, int(leaf.length))
    return _PER_VALUE + _WIDEST
