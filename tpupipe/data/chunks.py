"""Prepared data: batches as Parquet, units as single objects, and rows back by chunk.

A unit is one Parquet object; a chunk is one of its row groups. What the unit was made from
stands in the object's own footer, so there is no second record that could disagree with it.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tpupipe.data.acyclic import acyclic
from tpupipe.data.columns import to_numpy, to_table
from tpupipe.data.schemas import merge_schemas
from tpupipe.data.unit_writer import FOOTER_KEY, FORMAT, UnitFooter, UnitWriter
from tpupipe.errors import DataError, UsageError

if TYPE_CHECKING:
    from tpupipe.store.layout import RunPaths
    from tpupipe.store.objects import Store

__all__ = [
    "ChunkReader", "Manifest", "ManifestUnit", "UnitFooter", "decode_footer", "decode_schema", "decode_unit",
    "encode_unit", "merge_schemas", "object_file", "to_numpy", "to_table",
]  # fmt: skip

_TAIL_BYTES = 65_536
_CACHED_UNITS = 256
_LOAD_THREADS = 8


# -- units ----------------------------------------------------------------------------------


def encode_unit(table: pa.Table, *, chunk_rows: int, footer: UnitFooter) -> bytes:
    """A unit's object: one Parquet file, one row group per chunk, the same bytes every time.

    Args:
        table: The rows; may have none, which keeps the schema and makes no chunk.
        chunk_rows: Rows per chunk; the last may be shorter.
        footer: What to record; ``rows`` and ``chunks`` are filled in here.

    Raises:
        UsageError: ``chunk_rows`` is not positive.
        DataError: Parquet has no type for a column.
    """
    writer = UnitWriter(footer.unit, chunk_rows)
    writer.append(table)
    return writer.finish(footer)


def decode_unit(data: bytes) -> pa.Table:
    """All rows of a unit's object.

    Raises:
        DataError: The object is damaged.
    """
    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"A unit's object of {len(data)} bytes is not readable Parquet: {error}.") from error


def decode_footer(source: bytes | io.IOBase) -> UnitFooter:
    """The footer of a unit's object, from its last bytes only.

    Args:
        source: The object, or a seekable file such as :func:`object_file` gives.

    Raises:
        DataError: It is not a unit's object, is damaged, or was written by a newer version.
    """
    return _footer(_metadata(source))


def decode_schema(source: bytes | io.IOBase) -> pa.Schema:
    """The schema of a unit's object, from its last bytes only. Raises as :func:`decode_footer`."""
    return _metadata(source).schema.to_arrow_schema()


def _metadata(source: bytes | io.IOBase) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(source) if isinstance(source, bytes) else source)
    except pa.ArrowException as error:
        raise DataError(f"Not a unit's object: {error}.") from error


def _footer(metadata: pq.FileMetaData) -> UnitFooter:
    value = (metadata.metadata or {}).get(FOOTER_KEY)
    if value is None:
        raise DataError("Not a unit's object: this Parquet file has no 'tpupipe' footer.")
    record = json.loads(value)
    if record.pop("format", None) != FORMAT:
        raise DataError(
            f"The unit's object has a footer format other than {FORMAT}.", hint="Upgrade tpupipe to read it."
        )
    record["chunks"] = tuple(record["chunks"])
    return UnitFooter(**record)


class _ObjectFile(io.RawIOBase):
    """A seekable view of an object that remembers what it read, so that bytes travel once.

    Args:
        read: Gives bytes [start, stop).
        size: Of the object.
        name: Of the object, for messages.
        remember: Whether to; if not, only the end is kept.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str, *, remember: bool = True) -> None:
        super().__init__()
        self._read, self._size, self._name, self._remember = read, size, name, remember
        self._segments: list[tuple[int, bytes]] = []
        self._at = 0

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), from memory or in one read."""
        for begin, data in self._segments:
            if begin <= start and stop <= begin + len(data):
                return data[start - begin : stop - begin]
        data = self._read(start, stop)
        if len(data) != stop - start:
            raise DataError(f"{self._name} is cut short: no bytes {start} to {stop}.", path=self._name)
        if self._remember or not self._segments:  # the end comes first
            self._segments.append((start, data))
        return data

    def fetch_tail(self) -> None:
        """Reads the end, where Parquet keeps its footer, in one go."""
        self.fetch(max(self._size - _TAIL_BYTES, 0), self._size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        data = self.fetch(self._at, stop)
        self._at = stop
        return data


def object_file(store: Store, name: str, size_bytes: int, *, remember: bool = True) -> io.RawIOBase:
    """An object as a seekable file whose end is already read: for :func:`decode_footer` without the body.

    Args:
        store: Where it is.
        name: Its name.
        size_bytes: Its size.
        remember: Whether what else is read stays in memory, so that it is not fetched again.
    """
    file = _ObjectFile(lambda start, stop: store.read(name, start, stop), size_bytes, name, remember=remember)
    file.fetch_tail()
    return file


# -- manifest -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ManifestUnit:
    """One committed unit of a complete stage.

    Attributes:
        unit: Unit id.
        rows: Its rows.
        chunks: Rows of its chunks.
        size_bytes: Size of its object.
        crc32c: Checksum of its object, where the store knows it.
    """

    unit: str
    rows: int
    chunks: tuple[int, ...]
    size_bytes: int
    crc32c: int | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything a complete stage wrote, in input order.

    Attributes:
        stage: Name of the stage.
        units: The units, sorted by id.
        schema: Arrow schema of the rows, see :func:`merge_schemas`.
        fingerprints: What it was made from, by name.

    Raises:
        DataError: Units are not sorted and unique, or rows and chunks disagree.
    """

    stage: str
    units: tuple[ManifestUnit, ...]
    schema: pa.Schema
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        last = ""
        for unit in self.units:
            if unit.unit <= last or unit.rows != sum(unit.chunks):
                raise DataError(
                    f"Manifest of stage {self.stage!r}: unit {unit.unit} after {last or 'nothing'} with {unit.rows} rows "
                    f"in chunks of {sum(unit.chunks)}; units must be sorted and unique, chunks must add up.",
                    unit=unit.unit,
                )
            last = unit.unit

    @property
    def rows(self) -> int:
        """Rows of all units."""
        return sum(unit.rows for unit in self.units)

    @cached_property
    def chunk_rows(self) -> NDArray[np.int64]:
        """``int64[C]``: rows of every chunk, in manifest order. What ``Stream`` is given."""
        return np.array([rows for unit in self.units for rows in unit.chunks], np.int64)

    @cached_property
    def chunk_units(self) -> NDArray[np.int64]:
        """``int64[C]``: index into ``units`` of every chunk."""
        return np.repeat(np.arange(len(self.units)), [len(unit.chunks) for unit in self.units])

    @cached_property
    def chunk_groups(self) -> NDArray[np.int64]:
        """``int64[C]``: row group of every chunk inside its unit's object."""
        counts = np.array([len(unit.chunks) for unit in self.units], np.int64)
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

    def empty_batch(self) -> dict[str, NDArray[Any]]:
        """Columns without rows, ``ndarray[0, ...]``: the dtypes and shapes of a row."""
        return to_numpy(self.schema.empty_table())

    def to_json(self) -> bytes:
        """The manifest as JSON; equal manifests give equal bytes."""
        return _dump(
            {
                "format": FORMAT,
                "stage": self.stage,
                "rows": self.rows,
                "columns": {column.name: str(column.type) for column in self.schema},
                "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
                "fingerprints": dict(self.fingerprints),
                # Lists, not objects: a stage may have a million units.
                "unit_fields": [f.name for f in dataclasses.fields(ManifestUnit)],
                "units": [[u.unit, u.rows, list(u.chunks), u.size_bytes, u.crc32c] for u in self.units],
            }
        )

    @classmethod
    @acyclic()
    def from_json(cls, data: bytes) -> Manifest:
        """Reads :meth:`to_json` back.

        Raises:
            DataError: Not a manifest, or one of a newer version.
        """
        try:
            record = json.loads(data)
            if record["format"] != FORMAT:
                raise DataError(f"The manifest has format {record['format']}; this version reads {FORMAT}.")
            units = tuple(
                ManifestUnit(u, rows, tuple(chunks), size, crc) for u, rows, chunks, size, crc in record["units"]
            )
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["schema"])))
            return cls(record["stage"], units, schema, record["fingerprints"])
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"Not a manifest: {type(error).__name__}: {error}.") from error


def _dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


# -- reading --------------------------------------------------------------------------------


class ChunkReader:
    """Rows of a complete stage by (chunk, row), with the last used chunks kept decoded.

    Reads the footer of a unit's object once, then only the byte range of a wanted chunk.
    Safe to use from several threads; pickles without its cache.

    Args:
        store: Where the run is.
        paths: Names of the run's objects.
        manifest: What the stage wrote.
        cache_chunks: Decoded chunks to keep. A batch may touch more.
    """

    def __init__(self, store: Store, paths: RunPaths, manifest: Manifest, *, cache_chunks: int = 16) -> None:
        if cache_chunks < 1:
            raise UsageError(f"cache_chunks={cache_chunks} must be at least 1.")
        self._store, self._paths, self._manifest, self._cache_chunks = store, paths, manifest, cache_chunks
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._units: OrderedDict[int, pq.FileMetaData] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_reader, (self._store, self._paths, self._manifest, self._cache_chunks)

    def rows(
        self,
        chunk_index: NDArray[np.integer[Any]] | Sequence[int],
        row_indices: NDArray[np.integer[Any]] | Sequence[int],
    ) -> dict[str, NDArray[Any]]:
        """The named rows, in the order given.

        Args:
            chunk_index: ``int[B]``, chunk of every row, in manifest order.
            row_indices: ``int[B]``, row inside the chunk.

        Returns:
            Column name to ``ndarray[B, ...]``; the caller may write to them.

        Raises:
            UsageError: A chunk or row does not exist.
            DataError: An object is damaged or is not what the manifest says.
            StoreError: An object cannot be read.
        """
        chunks, rows = np.asarray(chunk_index), np.asarray(row_indices)
        if not len(chunks):
            return self._manifest.empty_batch()
        sizes = self._manifest.chunk_rows
        if chunks.min() < 0 or chunks.max() >= len(sizes) or rows.min() < 0 or (rows >= sizes[chunks]).any():
            raise UsageError(f"A (chunk, row) is outside the {len(sizes)} chunks of stage {self._manifest.stage!r}.")
        if chunks[0] == chunks[-1] and (chunks == chunks[0]).all():
            arrays = self._decoded([int(chunks[0])])[int(chunks[0])]
            return {name: values[rows] for name, values in arrays.items()}
        # One gather per chunk and column, never per row.
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order], prepend=-1, append=-1))
        wanted = chunks[order][bounds[:-1]].tolist()
        decoded = self._decoded(wanted)
        first = decoded[wanted[0]]
        batch = {name: np.empty((len(chunks), *values.shape[1:]), values.dtype) for name, values in first.items()}
        for chunk, start, stop in zip(wanted, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            places = order[start:stop]
            for name, values in decoded[chunk].items():
                batch[name][places] = values[rows[places]]
        return batch

    def _decoded(self, wanted: Sequence[int]) -> dict[int, dict[str, NDArray[Any]]]:
        with self._lock:
            found = {chunk: self._chunks[chunk] for chunk in wanted if chunk in self._chunks}
            for chunk in found:
                self._chunks.move_to_end(chunk)
        missing = [chunk for chunk in wanted if chunk not in found]
        if not missing:
            return found
        # Outside the lock: two threads may load the same chunk, which costs time and nothing else.
        if len(missing) == 1:
            loaded = {missing[0]: self._load(missing[0])}
        else:
            with ThreadPoolExecutor(min(_LOAD_THREADS, len(missing))) as pool:
                loaded = dict(zip(missing, pool.map(self._load, missing), strict=True))
        with self._lock:
            self._chunks.update(loaded)
            while len(self._chunks) > self._cache_chunks:
                self._chunks.popitem(last=False)
        return found | loaded

    def _load(self, chunk: int) -> dict[str, NDArray[Any]]:
        index, group = int(self._manifest.chunk_units[chunk]), int(self._manifest.chunk_groups[chunk])
        unit = self._manifest.units[index]
        name = self._paths.unit(self._manifest.stage, unit.unit)
        file = _ObjectFile(lambda start, stop: self._store.read(name, start, stop), unit.size_bytes, name)
        metadata = self._unit_metadata(index, file, name)
        columns = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
        begins = [c.data_page_offset if not c.has_dictionary_page else c.dictionary_page_offset for c in columns]
        stop = max(begin + c.total_compressed_size for begin, c in zip(begins, columns, strict=True))
        file.fetch(min(begins), stop)  # before pyarrow sees the file: a store's error arrives as itself
        try:
            table = pq.ParquetFile(
                file, metadata=metadata, pre_buffer=False, page_checksum_verification=True
            ).read_row_group(group, use_threads=False)
            schema = self._manifest.schema
            if not table.schema.equals(schema):
                table = table.select(schema.names).cast(schema)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"Chunk {group} of {name} is damaged or not what the manifest says: {error}.", path=name
            ) from error
        return to_numpy(table.replace_schema_metadata(None))

    def _unit_metadata(self, index: int, file: _ObjectFile, name: str) -> pq.FileMetaData:
        with self._lock:
            if index in self._units:
                self._units.move_to_end(index)
                return self._units[index]
        file.fetch_tail()
        metadata = _metadata(file)
        unit, footer = self._manifest.units[index], _footer(metadata)
        if (footer.unit, footer.chunks) != (unit.unit, unit.chunks) or metadata.num_row_groups != len(unit.chunks):
            raise DataError(
                f"{name} holds unit {footer.unit} with {footer.rows} rows in {len(footer.chunks)} chunks; the manifest "
                f"says unit {unit.unit} with {unit.rows} rows in {len(unit.chunks)} chunks.",
                path=name,
            )
        with self._lock:
            self._units[index] = metadata
            if len(self._units) > _CACHED_UNITS:
                self._units.popitem(last=False)
        return metadata


def _rebuild_reader(store: Store, paths: RunPaths, manifest: Manifest, cache_chunks: int) -> ChunkReader:
    return ChunkReader(store, paths, manifest, cache_chunks=cache_chunks)
