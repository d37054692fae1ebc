"""Rows of one unit, read from its input files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tpupipe.data.listing import InputFile, input_errors, of_the_network, open_filesystem, present_file
from tpupipe.data.parquet_rows import bounded_tables, covering_groups, no_rows
from tpupipe.data.sources import (
    COMPRESSED,
    Files,
    JsonLines,
    Parquet,
    Part,
    Source,
    Unit,
)
from tpupipe.errors import DataError, TpupipeError

if TYPE_CHECKING:
    import pyarrow as pa

_TAIL_BYTES = 65_536  # read past the end of a range in the same request: most lines end within it
_PAGE_BUFFER_BYTES = 65_536
_HEAD_ROWS = 1024
_ASKING_THREADS = 32
_PLAIN_NAME = re.compile(r"gs://[^/]+/\w[\w./=-]*")  # gcsfs takes the rest for a URL: "#", "?" and ":" would be its own


def read_unit(
    source: Source, unit: Unit, filesystem: Any = None, *, storage_options: Mapping[str, Any] | None = None
) -> pa.Table:
    """Reads the rows of one unit, in input order.

    Args:
        source: The source whose ``units()`` (or a sample of them) gave ``unit``.
        unit: What to read.
        filesystem: An fsspec filesystem; by default the one of the paths' scheme.
        storage_options: Arguments for that default filesystem.

    Returns:
        ``Files``: ``path: string`` and ``text: string`` (bytes that are not UTF-8 replaced by
        U+FFFD) or ``data: binary``. ``JsonLines``: the inferred columns. ``Parquet``: the
        file's columns. A row is named by (unit id, row index); no id column is added.

    Raises:
        DataError: A file is gone, changed since it was listed, or cannot be parsed.
        StoreError: A file cannot be read.
    """
    if isinstance(source, Files):
        return _read_files(source, unit, filesystem, storage_options)
    if isinstance(source, JsonLines):
        return _read_json(unit, filesystem, storage_options)
    if isinstance(source, Parquet):
        return _read_parquet(source, unit, filesystem, storage_options)
    raise DataError(f"read_unit cannot read a {type(source).__name__}; allowed: Files, JsonLines, Parquet.")


def _read_files(source: Files, unit: Unit, filesystem: Any, storage_options: Mapping[str, Any] | None) -> pa.Table:
    return rows_of_files(source, unit.parts, filesystem, storage_options)[0]


def rows_of_files(
    source: Files, parts: Sequence[Part], filesystem: Any, storage_options: Mapping[str, Any] | None
) -> tuple[pa.Table, list[Part]]:
    """Rows of some pieces of files, and the piece that each row is."""
    import pyarrow as pa

    contents = read_parts(parts, filesystem, storage_options, unpack=source.mode == "text")
    # A later piece of a file in which no line begins belongs to the row before it.
    kept = [(part, data) for part, data in zip(parts, contents, strict=True) if data or part.start == 0]
    paths = pa.array([part.path for part, _ in kept], pa.string())
    if source.mode == "binary":
        column = {"data": pa.array([data for _, data in kept], pa.binary())}
    else:
        column = {"text": pa.array([data.decode("utf-8", "replace") for _, data in kept], pa.string())}
    return pa.table({"path": paths, **column}), [part for part, _ in kept]


# -- JSON lines -----------------------------------------------------------------------------


def _read_json(unit: Unit, filesystem: Any, storage_options: Mapping[str, Any] | None) -> pa.Table:
    return parse_json(unit.id, unit.parts, read_parts(unit.parts, filesystem, storage_options, unpack=True))


def parse_json(unit: str, parts: Sequence[Part], contents: Sequence[bytes]) -> pa.Table:
    """The rows of some pieces of JSON lines, with one type per column over all of them.

    Args:
        unit: For messages.
        parts: Which pieces.
        contents: Their bytes.

    Raises:
        DataError: A piece cannot be parsed, or the types of two do not go together.
    """
    import pyarrow as pa

    try:
        return _parse_json(b"\n".join(contents))
    except pa.ArrowInvalid as error:
        for part, data in zip(parts, contents, strict=True):  # again one by one, to name the file
            try:
                _parse_json(data)
            except pa.ArrowInvalid as cause:
                raise DataError(
                    f"{part.path}, bytes {part.start} to {part.stop}, is not JSON lines: {cause}.",
                    path=part.path,
                    unit=unit,
                ) from cause
        paths = ", ".join(dict.fromkeys(part.path for part in parts))
        raise DataError(
            f"The files of unit {unit} have columns that do not go together: {error}. Files: {paths}.",
            hint="A column must have one type in all files.",
            unit=unit,
        ) from error


def _parse_json(data: bytes) -> pa.Table:
    import pyarrow as pa
    from pyarrow import json

    if not data.strip():
        return pa.table({})
    # One block: pyarrow infers types from the first block only and refuses a row larger than a block.
    options = json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**31 - 1))
    return json.read_json(io.BytesIO(data), read_options=options)


# -- Parquet --------------------------------------------------------------------------------


def _read_parquet(source: Parquet, unit: Unit, filesystem: Any, storage_options: Mapping[str, Any] | None) -> pa.Table:
    return join_tables(unit, [_read_rows(source, part, filesystem, storage_options) for part in unit.parts])


def join_tables(unit: Unit, tables: Sequence[pa.Table]) -> pa.Table:
    """One table of those of a unit's parts.

    Raises:
        DataError: The types of two do not go together.
    """
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        paths = ", ".join(part.path for part in unit.parts)
        raise DataError(f"The schemas of {paths} do not go together: {error}.", unit=unit.id) from error


def _read_rows(source: Parquet, part: Part, filesystem: Any, storage_options: Mapping[str, Any] | None) -> pa.Table:
    import pyarrow.parquet as pq

    with _parquet_handle(part, open_filesystem(part.path, filesystem, storage_options)) as handle:
        file = pq.ParquetFile(handle, pre_buffer=True)
        columns = _columns(source, part, file.schema_arrow)
        groups, skip, rows = _row_groups(part, file.metadata)
        wanted = part.stop - part.start
        if rows == skip + wanted or not groups:
            return file.read_row_groups(groups, columns=columns).slice(skip)
        return _read_head(handle, groups, columns, skip + wanted).slice(skip)


@contextmanager
def _parquet_handle(part: Part, fs: Any) -> Iterator[Any]:
    import pyarrow as pa

    with _opened(part, fs) as handle:
        try:
            yield handle
        except pa.ArrowInvalid as error:
            raise DataError(f"{part.path} is not a readable Parquet file: {error}.", path=part.path) from error


def _row_groups(part: Part, metadata: Any) -> tuple[list[int], int, int]:
    """The row groups that hold a part's rows, how many rows of the first come before them, and how many they have."""
    if part.stop > metadata.num_rows:
        raise _changed(part, f"it has {metadata.num_rows} rows")
    groups, skip = covering_groups(metadata, part.start, part.stop)
    return groups, skip, sum(metadata.row_group(index).num_rows for index in groups)


def parquet_tables(
    source: Source, part: Part, *, rows: int, size_bytes: int, storage_options: Mapping[str, Any] | None
) -> Iterator[pa.Table]:
    """A part of a Parquet file, so many rows and bytes at a time, page by page. Raises as :func:`read_unit`.

    Args:
        source: The source.
        part: What to read.
        rows: See :func:`tpupipe.data.parquet_rows.bounded_tables`.
        size_bytes: As ``rows``.
        storage_options: Arguments for the path's file system.

    Returns:
        At least one table; a part without rows gives one without rows, which carries the schema.
    """
    import pyarrow.parquet as pq

    with _parquet_handle(part, open_filesystem(part.path, None, storage_options)) as handle:
        metadata = pq.read_metadata(handle)
        groups, skip, count = _row_groups(part, metadata)
        # A small part is fetched at once: that takes a few requests and not one per page.
        at_once = part.size_bytes * 2 <= size_bytes and count == skip + part.stop - part.start
        file = pq.ParquetFile(
            handle, metadata=metadata, pre_buffer=at_once, buffer_size=0 if at_once else _PAGE_BUFFER_BYTES
        )
        columns = _columns(source, part, file.schema_arrow)
        if not groups:
            yield no_rows(file, columns)
        yield from bounded_tables(
            file, part.start, part.stop, rows=rows, size_bytes=size_bytes, columns=columns, use_threads=at_once
        )


def _read_head(handle: Any, groups: list[int], columns: list[str] | None, rows: int) -> pa.Table:
    """The first rows of some row groups, without fetching all their pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(handle, pre_buffer=False, buffer_size=_PAGE_BUFFER_BYTES)
    batches, got = [], 0
    for batch in file.iter_batches(
        batch_size=min(rows, _HEAD_ROWS), row_groups=groups, columns=columns, use_threads=False
    ):
        batches.append(batch)
        got += batch.num_rows
        if got >= rows:
            break
    return pa.Table.from_batches(batches).slice(0, rows)


def _columns(source: Source, part: Part, schema: pa.Schema) -> list[str] | None:
    if not isinstance(source, Parquet) or source.columns is None:
        return None
    missing = [name for name in source.columns if name not in schema.names]
    if missing:
        raise DataError(
            f"{part.path} has no column {', '.join(missing)}; it has {', '.join(schema.names)}.", path=part.path
        )
    return list(source.columns)


# -- bytes ----------------------------------------------------------------------------------


def read_parts(
    parts: Sequence[Part], filesystem: Any, storage_options: Mapping[str, Any] | None, *, unpack: bool
) -> list[bytes]:
    """Content of file and line ranges, fetched together where the file system can; unpacked if asked."""
    wanted = [part for part in parts if part.size_bytes > 0]  # an empty object refuses any range
    found: dict[Part, bytes] = {}
    unsure = {part for part in parts if part.size_bytes <= 0}
    if wanted:
        fs, paths = _addresses(wanted, filesystem, storage_options)
        unsure.update(part for part, path in zip(wanted, paths, strict=True) if path == part.path)
        # One byte before the range tells whether a line begins at its start.
        starts = [max(part.start - 1, 0) for part in wanted]
        stops = [
            min(part.stop + _TAIL_BYTES, part.file_bytes) if part.stop < part.file_bytes else part.stop
            for part in wanted
        ]
        whose = wanted[0].path if len(set(paths)) == 1 else f"{wanted[0].path} … {wanted[-1].path}"
        try:
            with input_errors("read", whose):
                contents = fs.cat_ranges(paths, starts, stops, on_error="raise")
            for part, path, start, stop, data in zip(wanted, paths, starts, stops, contents, strict=True):
                if len(data) != stop - start:
                    raise _changed(part, f"it ends at byte {start + len(data)}")
                found[part] = _whole_lines(fs, part, path, start, data)
        except DataError:  # a file is not there: none of its name, or not in the version that was listed
            _check_unchanged(wanted, filesystem, storage_options)
            raise
    _check_unchanged([part for part in parts if part in unsure], filesystem, storage_options)
    return [_unpack(part, found.get(part, b"")) if unpack else found.get(part, b"") for part in parts]


def _addresses(
    parts: Sequence[Part], filesystem: Any, storage_options: Mapping[str, Any] | None
) -> tuple[Any, list[str]]:
    """A file system and where the parts are on it: on Cloud Storage in the version that was listed, for no request more."""
    fs = open_filesystem(parts[0].path, filesystem, storage_options)
    if filesystem is not None or "gs" not in fs.protocol:
        return fs, [part.path for part in parts]
    fs = open_filesystem(parts[0].path, None, {**(storage_options or {}), "version_aware": True})
    return fs, [
        f"{part.path}#{part.version}" if part.version.isdigit() and _PLAIN_NAME.fullmatch(part.path) else part.path
        for part in parts
    ]


def _whole_lines(fs: Any, part: Part, path: str, start: int, data: bytes) -> bytes:
    """Cuts ``data``, which begins at byte ``start`` of the file ``path``, to the lines that begin in the part."""
    begin = 0
    if part.start > 0:
        newline = data.find(b"\n", 0, part.stop - start)
        # No newline before the last byte: no line begins inside.
        if newline < 0 or start + newline + 1 >= part.stop:
            return b""
        begin = newline + 1
    if part.stop >= part.file_bytes:
        return data[begin:]
    step = _TAIL_BYTES
    while True:
        end = data.find(b"\n", max(part.stop - 1 - start, 0))
        if end >= 0:
            return data[begin : end + 1]
        reached = start + len(data)
        if reached >= part.file_bytes:
            return data[begin:]
        step *= 2
        with input_errors("read", part.path):
            more = fs.cat_file(path, start=reached, end=min(reached + step, part.file_bytes))
        if not more:
            raise _changed(part, f"it ends at byte {reached}")
        data += more


def _unpack(part: Part, data: bytes) -> bytes:
    if part.kind != "file" or not part.path.endswith(COMPRESSED):
        return data
    with _unpacking(part, io.BytesIO(data)) as handle:
        return bytes(handle.read())


@contextmanager
def unpacked_stream(part: Part, storage_options: Mapping[str, Any] | None) -> Iterator[Any]:
    """A compressed file as a stream of what is in it.

    Raises:
        DataError: It changed since it was listed, or cannot be unpacked.
        StoreError: It cannot be read.
    """
    with (
        _opened(part, open_filesystem(part.path, None, storage_options)) as handle,
        _unpacking(part, handle) as stream,
    ):
        yield stream


@contextmanager
def _unpacking(part: Part, packed: Any) -> Iterator[Any]:
    import fsspec

    name = fsspec.utils.infer_compression(part.path)
    opener = fsspec.compression.compr.get(name)
    if opener is None:
        raise DataError(
            f"{part.path}: no library for {name} is installed.", hint="pip install zstandard", path=part.path
        )
    try:
        with opener(packed, mode="rb") as handle:
            yield handle
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, TpupipeError) or of_the_network(error):
            raise
        raise DataError(f"{part.path} cannot be unpacked: {error}.", path=part.path) from error


# -- files that change under a run ----------------------------------------------------------


@contextmanager
def _opened(part: Part, fs: Any) -> Iterator[Any]:
    """A part's file, which is the one that was listed: before it is read, and still when all has been.

    Raises:
        DataError: It is another one.
        StoreError: It cannot be read.
    """
    fs.invalidate_cache(part.path)  # a listing that this process made tells what was there then
    with input_errors("read", part.path), fs.open(part.path, "rb") as handle:
        # A remote file's handle has asked already.
        _check_same(part, present_file(fs, part.path, getattr(handle, "details", None)))
        try:
            yield handle
        except (DataError, OSError):  # half of one file and half of another are no readable file
            _check_same(part, present_file(fs, part.path))
            raise
        if part.version:
            _check_same(part, present_file(fs, part.path))


def _check_unchanged(parts: Iterable[Part], filesystem: Any, storage_options: Mapping[str, Any] | None) -> None:
    """Checks after reading: a file that is as it was listed now was so in between, for no version comes twice."""
    files = list({part.path: part for part in parts if part.version}.values())
    if not files:
        return
    fs = open_filesystem(files[0].path, filesystem, storage_options)

    def check(part: Part) -> None:
        with input_errors("read", part.path):
            _check_same(part, present_file(fs, part.path))

    if len(files) > 1 and getattr(fs, "async_impl", False):  # a request for each
        with ThreadPoolExecutor(min(_ASKING_THREADS, len(files))) as pool:
            list(pool.map(check, files))
    else:
        for part in files:
            check(part)


def _check_same(part: Part, now: InputFile) -> None:
    if now.size_bytes != part.file_bytes:
        raise _changed(part, f"it has {now.size_bytes} bytes")
    if part.version and now.version != part.version:
        raise _changed(part, f"it has version {now.version or 'unknown'}")


def _changed(part: Part, now: str) -> DataError:
    version = f" and version {part.version}" if part.version else ""
    return DataError(
        f"The input {part.path} changed since it was listed with {part.file_bytes} bytes{version}: {now}.",
        hint="Inputs must not change during a run; write new files instead. The next attempt lists them again.",
        path=part.path,
        version=part.version,
    )
