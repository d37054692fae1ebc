"""Inputs, and how they are cut into work units.

Declarations only: a job module imports this file, so nothing heavier than the standard
library is loaded until ``units()`` lists the inputs.
"""

from __future__ import annotations

import hashlib
import itertools
import marshal
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from tpupipe.data.acyclic import acyclic
from tpupipe.data.listing import InputFile, input_errors, list_files, open_filesystem
from tpupipe.errors import DataError, JobError

PartKind: TypeAlias = Literal["file", "bytes", "rows"]

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_MIN_FILE_COST = 1024  # bytes a file counts for at least, so that a unit never holds a million empty files
_FOOTER_THREADS = 16
_BLOCK = 1024  # units
_ID_DIGITS = 6


class Part(NamedTuple):
    """A piece of one input file. A plain tuple: there may be a million.

    Attributes:
        path: Absolute local path, or a URI such as ``gs://bucket/key``.
        start: First byte (``file``, ``bytes``) or row (``rows``).
        stop: One past the last byte or row.
        kind: ``file``: the whole file, not to be cut. ``bytes``: every line that *begins* in
            ``[start, stop)``, to its end. ``rows``: rows of a Parquet file.
        size_bytes: How much of the input it is; an estimate for ``rows``.
        file_bytes: Size of the file when it was listed.
        version: Generation, etag or modification time of the file.
    """

    path: str
    start: int
    stop: int
    kind: PartKind
    size_bytes: int
    file_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece of resumable work.

    Attributes:
        id: ``000012-ab12cd34``: position in input order and a hash of what it covers. Sorting
            ids sorts units in input order. Rows are named by (unit id, row index).
        parts: What to read, in order.
        fingerprint: Changes when the content of a part's file does (size, generation or
            modification time), while ``id`` stays.
    """

    id: str
    parts: tuple[Part, ...]
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        """Input bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


_Packed: TypeAlias = tuple[str, str, list[tuple[Any, ...]]]  # id, fingerprint, parts


class Units(Sequence[Unit]):
    """Work units in input order, packed: of a million, those of one block at a time are objects.

    Args:
        packed: The units as tuples, taken one by one; see ``make_units``.
    """

    def __init__(self, packed: Iterable[_Packed]) -> None:
        self._blocks: list[tuple[bytes, bytes]] = []  # ids and fingerprints; parts
        self._length = 0
        self._open: tuple[int, list[Unit]] = (-1, [])
        iterator = iter(packed)
        while block := list(itertools.islice(iterator, _BLOCK)):
            ids, fingerprints, parts = zip(*block, strict=True)
            # Hashes do not compress; paths do.
            self._blocks.append((marshal.dumps((ids, fingerprints)), zlib.compress(marshal.dumps(parts), 1)))
            self._length += len(block)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Unit: ...

    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...

    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        place = range(self._length)[index]
        number, rest = divmod(place, _BLOCK)
        if self._open[0] != number:
            self._open = number, self._block(number)
        return self._open[1][rest]

    def __iter__(self) -> Iterator[Unit]:
        for number in range(len(self._blocks)):
            yield from self._block(number)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Units):
            return self._blocks == other._blocks or list(self) == list(other)
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # as of a list

    def names(self) -> Iterator[tuple[str, str]]:
        """``(id, fingerprint)`` of every unit, in order; cheaper than the units."""
        for named, _ in self._blocks:
            yield from zip(*_loaded(named), strict=True)

    def _block(self, number: int) -> list[Unit]:
        named, parts = self._blocks[number]
        return [
            Unit(unit, tuple(Part(*part) for part in its), fingerprint)
            for unit, fingerprint, its in zip(*_loaded(named), _loaded(zlib.decompress(parts)), strict=True)
        ]


def _loaded(packed: bytes) -> tuple[Any, ...]:
    values: tuple[Any, ...] = marshal.loads(packed)  # noqa: S302 - packed by this process
    return values


def make_units(groups: Iterable[Sequence[Part]]) -> Units:
    """Numbers groups of parts as units.

    Args:
        groups: The parts of each unit, in input order; taken one by one.
    """
    units = Units(_numbered(groups, _ID_DIGITS))
    if len(units) > 10**_ID_DIGITS:  # known only now; ids must sort in input order
        units = Units(_numbered((unit.parts for unit in units), len(str(len(units) - 1))))
    return units


def _numbered(groups: Iterable[Sequence[Part]], width: int) -> Iterator[_Packed]:
    for index, parts in enumerate(groups):
        covers = "\n".join([f"{p.path}\t{p.start}\t{p.stop}\t{p.kind}" for p in parts])
        content = covers + "\n" + "\n".join([f"{p.file_bytes}\t{p.version}" for p in parts])
        yield f"{index:0{width}d}-{_hash(covers, 4)}", _hash(content, 16), [tuple(part) for part in parts]


def unit_names(units: Iterable[Unit]) -> Iterator[tuple[str, str]]:
    """``(id, fingerprint)`` of every unit, in order."""
    return units.names() if isinstance(units, Units) else ((unit.id, unit.fingerprint) for unit in units)


def fingerprint_units(units: Iterable[Unit]) -> str:
    """One fingerprint for all inputs: equal exactly when ids and fingerprints all are."""
    digest = hashlib.blake2b(digest_size=16)
    for unit, fingerprint in unit_names(units):
        digest.update(f"{unit}\t{fingerprint}\n".encode())
    return digest.hexdigest()


class Source(ABC):
    """Something that gives rows, cut into units."""

    pattern: tuple[str, ...]

    @abstractmethod
    def units_of(
        self, files: Sequence[InputFile], filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
    ) -> Sequence[Unit]:
        """Cuts listed files, sorted by path, into work units; the same files always give the same list."""

    def units(self, filesystem: Any = None, *, storage_options: Mapping[str, Any] | None = None) -> Sequence[Unit]:
        """Lists the inputs as work units, sorted by path; the same inputs always give the same list.

        Args:
            filesystem: An fsspec filesystem to list with; by default the one of the pattern's scheme.
            storage_options: Arguments for that default filesystem.

        Raises:
            DataError: A pattern matches no file, or a file is not what the source reads.
            StoreError: The inputs cannot be listed.
        """
        return self.units_of(list_files(self.pattern, filesystem, storage_options), filesystem, storage_options)


@dataclass(frozen=True, init=False)
class Files(Source):
    """Text or binary files. A row is ``{path: str, text: str}`` or ``{path: str, data: bytes}``.

    Args:
        pattern: A glob, a folder (all files below it) or a list of those; local or ``gs://``.
            Names that begin with a dot are skipped unless the pattern spells one out.
        unit_bytes: Small files are packed into units of about this size. A text file larger
            than this becomes several rows, cut at line ends; a binary file is always one row.
        mode: ``"text"`` decodes UTF-8 (bytes that are not UTF-8 become U+FFFD) and unpacks
            ``.gz``, ``.bz2``, ``.xz``, ``.zst``; ``"binary"`` gives the bytes as they are.

    Raises:
        JobError: An argument is not valid.
    """

    pattern: tuple[str, ...]
    unit_bytes: int
    mode: Literal["text", "binary"]

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        unit_bytes: int = 4_000_000,
        mode: Literal["text", "binary"] = "text",
    ) -> None:
        if mode not in ("text", "binary"):
            raise JobError(f'Files(mode={mode!r}) is not known; allowed: "text", "binary".')
        object.__setattr__(self, "pattern", _patterns("Files", pattern))
        object.__setattr__(self, "unit_bytes", _positive("Files", "unit_bytes", unit_bytes))
        object.__setattr__(self, "mode", mode)

    def units_of(
        self,
        files: Sequence[InputFile],
        filesystem: Any = None,  # noqa: ARG002 - only Parquet opens files to cut them
        storage_options: Mapping[str, Any] | None = None,  # noqa: ARG002 - as above
    ) -> Sequence[Unit]:
        """See :meth:`Source.units_of`."""
        return _packed_units(files, self.unit_bytes, splittable=self.mode == "text")


@dataclass(frozen=True, init=False)
class JsonLines(Source):
    """JSON lines: a row is a line; columns and types are inferred per unit. Blank lines are skipped.

    Args:
        pattern: As for ``Files``.
        unit_bytes: Files are packed, or cut at line ends, into units of about this size.
            Compressed files (``.gz``, ``.bz2``, ``.xz``, ``.zst``) are never cut.

    Raises:
        JobError: An argument is not valid.
    """

    pattern: tuple[str, ...]
    unit_bytes: int

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        unit_bytes: int = 4_000_000,
    ) -> None:
        object.__setattr__(self, "pattern", _patterns("JsonLines", pattern))
        object.__setattr__(self, "unit_bytes", _positive("JsonLines", "unit_bytes", unit_bytes))

    def units_of(
        self,
        files: Sequence[InputFile],
        filesystem: Any = None,  # noqa: ARG002 - only Parquet opens files to cut them
        storage_options: Mapping[str, Any] | None = None,  # noqa: ARG002 - as above
    ) -> Sequence[Unit]:
        """See :meth:`Source.units_of`."""
        return _packed_units(files, self.unit_bytes, splittable=True)


@dataclass(frozen=True, init=False)
class Parquet(Source):
    """Parquet files, cut by row groups. ``units()`` reads the footer of every file.

    Args:
        pattern: As for ``Files``.
        row_groups_per_unit: Row groups of one file that make a unit.
        columns: Columns to read; all by default.

    Raises:
        JobError: An argument is not valid.
    """

    pattern: tuple[str, ...]
    row_groups_per_unit: int
    columns: tuple[str, ...] | None

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        row_groups_per_unit: int = 1,
        columns: Sequence[str] | None = None,
    ) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise JobError(f"Parquet(columns={columns!r}) must be a list of at least one column name, or None for all.")
        object.__setattr__(self, "pattern", _patterns("Parquet", pattern))
        object.__setattr__(
            self, "row_groups_per_unit", _positive("Parquet", "row_groups_per_unit", row_groups_per_unit)
        )
        object.__setattr__(self, "columns", None if columns is None else tuple(columns))

    def units_of(
        self, files: Sequence[InputFile], filesystem: Any = None, storage_options: Mapping[str, Any] | None = None
    ) -> Sequence[Unit]:
        """See :meth:`Source.units_of`. Raises ``DataError`` for a file that is not Parquet."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            groups = pool.map(lambda file: self._file_groups(file, filesystem, storage_options), files)
            return make_units((part,) for parts in groups for part in parts)

    def _file_groups(self, file: InputFile, filesystem: Any, storage_options: Mapping[str, Any] | None) -> list[Part]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fs = open_filesystem(file.path, filesystem, storage_options)
        with input_errors("read", file.path):
            try:
                with fs.open(file.path, "rb") as handle:
                    metadata = pq.ParquetFile(handle).metadata
            except pa.ArrowInvalid as error:
                raise DataError(f"{file.path} is not a Parquet file: {error}.", path=file.path) from error
        sizes, rows = [], []
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            columns = (group.column(c) for c in range(group.num_columns))
            wanted = [c for c in columns if not self.columns or c.path_in_schema.partition(".")[0] in self.columns]
            sizes.append(sum(c.total_compressed_size for c in wanted))
            rows.append(group.num_rows)
        parts, start = [], 0
        for first in range(0, len(rows), self.row_groups_per_unit):
            last = first + self.row_groups_per_unit
            stop = start + sum(rows[first:last])
            parts.append(Part(file.path, start, stop, "rows", sum(sizes[first:last]), file.size_bytes, file.version))
            start = stop
        # A file without rows still gives one unit, so that its schema reaches the output.
        return parts or [Part(file.path, 0, 0, "rows", 0, file.size_bytes, file.version)]


# -- cutting --------------------------------------------------------------------------------


def _packed_units(files: Sequence[InputFile], unit_bytes: int, *, splittable: bool) -> Units:
    with acyclic():  # nothing is read here
        return make_units(_pack(files, unit_bytes, splittable))


def _pack(files: Sequence[InputFile], unit_bytes: int, splittable: bool) -> Iterator[tuple[Part, ...]]:
    current: list[Part] = []
    cost = 0
    for file in files:
        cuttable = splittable and not file.path.endswith(COMPRESSED)
        pieces = -(-file.size_bytes // unit_bytes) if cuttable else 1
        if pieces > 1:
            if current:
                yield tuple(current)
                current, cost = [], 0
            bounds = [file.size_bytes * i // pieces for i in range(pieces + 1)]
            yield from ((_part(file, "bytes", a, b),) for a, b in pairwise(bounds))
            continue
        file_cost = max(file.size_bytes, _MIN_FILE_COST)
        if current and cost + file_cost > unit_bytes:
            yield tuple(current)
            current, cost = [], 0
        current.append(_part(file, "bytes" if cuttable else "file", 0, file.size_bytes))
        cost += file_cost
    if current:
        yield tuple(current)


def _part(file: InputFile, kind: PartKind, start: int, stop: int) -> Part:
    size_bytes = stop - start if start else stop  # of whole files the same object: there may be a million
    return Part(file.path, start, stop, kind, size_bytes, file.size_bytes, file.version)


# -- small checks ---------------------------------------------------------------------------


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size).hexdigest()


def _patterns(kind: str, pattern: Any) -> tuple[str, ...]:
    items: Any = [pattern] if isinstance(pattern, (str, os.PathLike)) else pattern
    if not isinstance(items, (list, tuple)) or not items:
        raise JobError(f"{kind}({pattern!r}): the pattern must be a glob, a folder or a non-empty list of those.")
    result = []
    for item in items:
        if not isinstance(item, (str, os.PathLike)) or not os.fspath(item):
            raise JobError(f"{kind}({pattern!r}): {item!r} is not a glob or a folder.")
        result.append(str(os.fspath(item)))
    return tuple(result)


def _positive(kind: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"{kind}({name}={value!r}) must be a whole number of at least 1.")
    return value
