"""A unit in windows: so many rows and bytes at a time, in input order, with what is needed to say where a row came from.

What one process holds of a unit is bounded by this, whatever the unit's size. A single row cannot be cut, nor can a page
of a Parquet file.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tpupipe.data.chunks import object_file
from tpupipe.data.parquet_rows import bounded_tables, no_rows
from tpupipe.data.read import join_tables, parquet_tables, parse_json, read_parts, rows_of_files, unpacked_stream
from tpupipe.data.sources import COMPRESSED, Files, JsonLines, Part, Source, Unit
from tpupipe.errors import DataError, TpupipeError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tpupipe.store.objects import Store

WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 << 20
_UNPACKED = 8  # a compressed file is taken to be this many times as large unpacked
_MIN_BUFFER_BYTES = 65_536


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
    return _windows(unit, _committed_pieces(store, name, total_bytes, rows, size_bytes), rows, size_bytes)


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
    else:
        yield from _parquet(source, unit, rows, size_bytes, storage_options)


def _parquet(
    source: Source, unit: Unit, rows: int, size_bytes: int, storage_options: Mapping[str, Any] | None
) -> Iterator[_Piece]:
    """The parts of a small unit together, as far as they are small decoded, too; one large part bit by bit."""
    together = len(unit.parts) > 1 and unit.size_bytes * 2 <= size_bytes
    held = _Held(unit)
    for part in unit.parts:
        at = part.start
        for table in parquet_tables(source, part, rows=rows, size_bytes=size_bytes, storage_options=storage_options):
            if held.tables and held.size_bytes + table.nbytes > size_bytes:
                yield held.taken()
            held.add(table, Origin(part.path, 0, at, table.num_rows))
            at += table.num_rows
            if not together:
                yield held.taken()
    if held.tables:
        yield held.taken()


@dataclass
class _Held:
    """Tables of one unit that become one piece."""

    unit: Unit
    tables: list[pa.Table] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, table: pa.Table, origin: Origin) -> None:
        self.tables.append(table)
        self.origins.append(origin)
        self.size_bytes += table.nbytes

    def taken(self) -> _Piece:
        """The piece, of which nothing is held any more."""
        tables, origins = self.tables, self.origins
        self.tables, self.origins, self.size_bytes = [], [], 0
        return join_tables(self.unit, tables), origins


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


def _committed_pieces(store: Store, name: str, total_bytes: int, rows: int, size_bytes: int) -> Iterator[_Piece]:
    import pyarrow as pa

    uri, at = store.uri(name), 0
    try:
        for file, end in _committed_files(store, name, total_bytes, size_bytes):
            for table in bounded_tables(file, at, end, rows=rows, size_bytes=size_bytes):
                yield table, [Origin(uri, 0, at, table.num_rows)]
                at += table.num_rows
            if not file.metadata.num_rows:
                yield no_rows(file), []
    except TpupipeError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"A unit's object of {total_bytes} bytes, {uri}, is not readable Parquet: {error}.", path=uri
        ) from error


def _committed_files(
    store: Store, name: str, total_bytes: int, size_bytes: int
) -> Iterator[tuple[pq.ParquetFile, int]]:
    """A unit's object opened to read the rows up to a number: up to the last, or of a large one up to the end of a chunk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if total_bytes * 2 <= size_bytes:
        file = pq.ParquetFile(pa.BufferReader(store.read(name)), page_checksum_verification=True)
        yield file, file.metadata.num_rows
        return
    source = object_file(store, name, total_bytes, remember=False)
    metadata = pq.read_metadata(source)
    # Of a large chunk there is a request per buffer, and a buffer per column; a small one is fetched at once.
    buffer_bytes = max(_MIN_BUFFER_BYTES, size_bytes // (4 * max(metadata.num_columns, 1)))
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if not groups:
        yield pq.ParquetFile(source, metadata=metadata), 0
    ends = accumulate(group.num_rows for group in groups)
    for group, end in zip(groups, ends, strict=True):
        packed_bytes = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        at_once = packed_bytes * 4 <= size_bytes
        file = pq.ParquetFile(
            source,
            metadata=metadata,
            pre_buffer=at_once,
            buffer_size=0 if at_once else buffer_bytes,
            page_checksum_verification=True,
        )
        yield file, end
