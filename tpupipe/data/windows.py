"""A unit in windows: so many rows and bytes at a time, in input order, with what is needed to say where a row came from.

What one process holds of a unit is bounded by this, whatever the unit's size. A single row cannot be cut.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpupipe.data.chunks import decode_unit, object_file
from tpupipe.data.read import parquet_batches, parse_json, read_parts, read_unit, rows_of_files, unpacked_stream
from tpupipe.data.sources import COMPRESSED, Files, JsonLines, Part, Source, Unit
from tpupipe.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from tpupipe.store.objects import Store

WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 << 20
_UNPACKED = 8  # a compressed file is taken to be this many times as large unpacked


@dataclass(frozen=True)
class Origin:
    """Where consecutive rows come from.

    Attributes:
        path: The file (or object).
        start: Byte of the file at which the piece begins that ``row`` counts from; 0 for whole files and for Parquet.
        row: Number of the first of the rows in that piece, from 0.
        rows: How many.
    """

    path: str
    start: int
    row: int
    rows: int


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a unit.

    Attributes:
        table: The rows.
        first_row: Number of the first one in the unit.
        origins: Where they come from, in order; adds up to the rows.
    """

    table: pa.Table
    first_row: int
    origins: tuple[Origin, ...]

    def origin(self, row: int) -> Origin:
        """Where row ``row`` of the window comes from (``rows`` is 1).

        Raises:
            DataError: The window has no such row.
        """
        left = row
        for origin in self.origins:
            if left < origin.rows:
                return Origin(origin.path, origin.start, origin.row + left, 1)
            left -= origin.rows
        raise DataError(f"A window of {self.table.num_rows} rows has no row {row}.")


def read_windows(
    source: Source,
    unit: Unit,
    *,
    rows: int = WINDOW_ROWS,
    size_bytes: int = WINDOW_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Window]:
    """Reads a unit window by window.

    Args:
        source: The source whose ``units()`` (or a sample of them) gave ``unit``.
        unit: What to read.
        rows: Rows of a window at most.
        size_bytes: Bytes of input, and of decoded rows, that a window has about at most.
        storage_options: Arguments for the paths' file system.

    Returns:
        At least one window; a unit without rows gives one without rows, which carries the schema.

    Raises:
        DataError: A file is gone, changed since it was listed, or cannot be parsed, or the columns of two windows do
            not go together.
        StoreError: A file cannot be read.
    """
    pieces = _pieces(source, unit, rows, size_bytes, storage_options)
    return _windows(unit.id, pieces, rows, size_bytes)


def committed_windows(
    store: Store, name: str, unit: str, *, total_bytes: int, rows: int = WINDOW_ROWS, size_bytes: int = WINDOW_BYTES
) -> Iterator[Window]:
    """The same of a unit that an earlier stage committed.

    Args:
        store: Where it is.
        name: Its object.
        unit: Its id.
        total_bytes: Size of the object.
        rows: See :func:`read_windows`.
        size_bytes: See :func:`read_windows`.
    """
    return _windows(unit, _committed_pieces(store, name, total_bytes, size_bytes), rows, size_bytes)


# -- cutting --------------------------------------------------------------------------------

_Piece = tuple["pa.Table", Sequence[Origin]]


def _windows(unit: str, pieces: Iterable[_Piece], rows: int, size_bytes: int) -> Iterator[Window]:
    first = 0
    schema: pa.Schema | None = None
    empty = True
    for read, origins in pieces:
        table = read if schema is None else _conform(unit, read, schema)
        schema = table.schema
        step = _step(table, rows, size_bytes)
        for at in range(0, table.num_rows, step):
            part = table.slice(at, step)
            yield Window(part, first, _cut(origins, at, part.num_rows))
            empty = False
            first += part.num_rows
    if empty and schema is not None:
        yield Window(schema.empty_table(), 0, ())


def _step(table: pa.Table, rows: int, size_bytes: int) -> int:
    """Rows of a window: as many as were asked for, fewer where they are large."""
    per_row = max(int(table.nbytes) // max(int(table.num_rows), 1), 1)
    return max(1, min(rows, size_bytes // per_row))


def _cut(origins: Sequence[Origin], at: int, rows: int) -> tuple[Origin, ...]:
    found = []
    begin = 0
    for origin in origins:
        start, stop = max(at, begin), min(at + rows, begin + origin.rows)
        if start < stop:
            found.append(Origin(origin.path, origin.start, origin.row + start - begin, stop - start))
        begin += origin.rows
    return tuple(found)


def _conform(unit: str, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A later window's rows in the types of the earlier ones: types that are inferred may differ from window to window.

    Raises:
        DataError: A value does not go into the type.
    """
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    try:
        for column in schema:
            at = table.schema.get_field_index(column.name)
            if at < 0:
                table = table.append_column(column, pa.nulls(table.num_rows, column.type))
            elif not pa.types.is_null(column.type):
                table = table.set_column(at, column, table.column(at).cast(column.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise DataError(
            f"Unit {unit} is read in several windows, and column {column.name!r} is {column.type} in the first and "
            f"{table.schema.field(column.name).type} in a later one: {error}.",
            hint="A column must have one type in a file; with smaller units (unit_bytes=) each unit has its own.",
            unit=unit,
            column=column.name,
        ) from error
    added = [name for name in table.schema.names if name not in schema.names]
    return table.select([*schema.names, *added])


# -- pieces of about a window each ----------------------------------------------------------


def _pieces(
    source: Source, unit: Unit, rows: int, size_bytes: int, storage_options: Mapping[str, Any] | None
) -> Iterator[_Piece]:
    if isinstance(source, Files):
        for parts in _groups(unit.parts, size_bytes):
            table, kept = rows_of_files(source, parts, None, storage_options)
            yield table, [Origin(part.path, part.start, 0, 1) for part in kept]
    elif isinstance(source, JsonLines):
        for parts in _groups(_lines(unit.parts, size_bytes), size_bytes):
            if _unpacks_large(parts[0], size_bytes):
                yield from _unpacked(parts[0], size_bytes, storage_options)
            else:
                yield _json(unit, parts, storage_options)
    elif unit.size_bytes * 2 <= size_bytes or not unit.parts:  # compressed pages: about twice as large in memory
        table = read_unit(source, unit, storage_options=storage_options)
        yield table, [Origin(p.path, 0, p.start, p.stop - p.start) for p in unit.parts]
    else:
        for part in unit.parts:
            at = part.start
            for batch in parquet_batches(source, part, rows, storage_options):
                yield batch, [Origin(part.path, 0, at, batch.num_rows)]
                at += batch.num_rows


def _groups(parts: Iterable[Part], size_bytes: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    size = 0
    for part in parts:
        cost = part.size_bytes * (_UNPACKED if part.path.endswith(COMPRESSED) else 1)
        if group and size + cost > size_bytes:
            yield group
            group, size = [], 0
        group.append(part)
        size += cost
    if group:
        yield group


def _lines(parts: Iterable[Part], size_bytes: int) -> Iterator[Part]:
    """Cuts large ranges of lines; a line belongs to the piece that it begins in."""
    for part in parts:
        pieces = -(-part.size_bytes // size_bytes) if part.kind == "bytes" else 1
        if pieces <= 1:
            yield part
            continue
        bounds = [part.start + part.size_bytes * i // pieces for i in range(pieces + 1)]
        for start, stop in pairwise(bounds):
            yield part._replace(start=start, stop=stop, size_bytes=stop - start)


def _unpacks_large(part: Part, size_bytes: int) -> bool:
    return part.path.endswith(COMPRESSED) and part.size_bytes * _UNPACKED > size_bytes


def _json(unit: Unit, parts: Sequence[Part], storage_options: Mapping[str, Any] | None) -> _Piece:
    contents = read_parts(parts, None, storage_options, unpack=True)
    table = parse_json(unit.id, parts, contents)
    return table, _json_origins(table, parts, contents)


def _json_origins(table: pa.Table, parts: Sequence[Part], contents: Sequence[bytes]) -> list[Origin]:
    counts = [data.count(b"\n") + (not data.endswith(b"\n") and bool(data)) for data in contents]
    if sum(counts) != table.num_rows:  # blank lines are no rows
        counts = [sum(1 for line in io.BytesIO(data) if line.strip()) for data in contents]
    return [Origin(part.path, part.start, 0, count) for part, count in zip(parts, counts, strict=True)]


def _unpacked(part: Part, size_bytes: int, storage_options: Mapping[str, Any] | None) -> Iterator[_Piece]:
    """A compressed file, unpacked piece by piece."""
    row = 0
    left = b""
    with unpacked_stream(part, storage_options) as stream:
        while True:
            read = stream.read(size_bytes)
            data = left + read
            cut = data.rfind(b"\n") + 1 if read else len(data)
            left = data[cut:]
            if cut or not read:
                table = parse_json(part.path, [part], [data[:cut]])
                if table.num_rows or (not read and not row):
                    yield table, [Origin(part.path, 0, row, table.num_rows)]
                row += table.num_rows
            if not read:
                return


def _committed_pieces(store: Store, name: str, total_bytes: int, size_bytes: int) -> Iterator[_Piece]:
    import pyarrow.parquet as pq

    if total_bytes * 2 <= size_bytes:
        table = decode_unit(store.read(name))
        yield table, [Origin(store.uri(name), 0, 0, table.num_rows)]
        return
    groups = pq.ParquetFile(object_file(store, name, total_bytes)).num_row_groups
    at = 0
    for group in range(groups):
        # A file of its own each time: it remembers what it has read.
        file = pq.ParquetFile(object_file(store, name, total_bytes), page_checksum_verification=True)
        table = file.read_row_group(group, use_threads=False)
        yield table, [Origin(store.uri(name), 0, at, table.num_rows)]
        at += table.num_rows
    if not groups:
        yield pq.ParquetFile(object_file(store, name, total_bytes)).schema_arrow.empty_table(), []
