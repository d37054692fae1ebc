"""The store: named immutable objects, created at most once.

``open_store`` gives the right backend for a URI; everything above this room knows only ``Store``.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, final

from tpupipe.errors import ObjectNotFoundError, UsageError
from tpupipe.store.bucket import BucketInfo
from tpupipe.store.retry import RetryPolicy
from tpupipe.store.uri import StoreURI
from tpupipe.store.wiring import Endpoint

# Classes here have a method ``list``, inside which the builtin cannot be named in annotations.
Names = list[str]

Numbers = list[int]
Checksums = list[int | None]

TEMP_PREFIX = ".tmp-"
_PAGE = 1000
_SLICE_BYTES = 8 << 20


@final
@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store knows about an object.

    Attributes:
        name: Name relative to the store it was asked of.
        size: Bytes.
        crc32c: Checksum of the content, ``None`` where the store keeps none (``file://`` outside of writes; see
            ``Store.checksum``).
        generation: Changes with every write of the name; compare for equality only.
        updated_s: When it was written, seconds since 1970 on the store's clock.
        attempts: How many requests the operation that gave this took (not part of equality).
    """

    name: str
    size: int
    crc32c: int | None
    generation: str
    updated_s: float
    attempts: int = field(default=1, compare=False)


class Listing(NamedTuple):
    """A page of a listing as columns, see ``ObjectInfo``: no object per name, for there may be a million."""

    names: Names
    sizes: Numbers
    crc32c: Checksums
    generations: Names


class Store(abc.ABC):
    """A place with objects. Picklable; connections are made lazily, once per process.

    Names are relative to the store, '/'-separated, without leading '/'. Every operation ends within about twice the
    time-out, retries included, and a failure is a ``StoreError`` that names the object: ``ObjectNotFoundError``,
    ``ObjectExistsError``, ``StoreDeniedError`` (never retried), ``StoreTimeoutError``, ``StoreUnavailableError``.
    """

    def __init__(self, root: StoreURI, policy: RetryPolicy) -> None:
        self.root = root
        self.policy = policy

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r})"

    # -- what a backend gives ----------------------------------------------------------------

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> ObjectInfo:
        """Creates the object if there is none of that name; atomic, whoever else tries.

        A retry after an ambiguous failure that finds its own content (same size and crc32c) counts as created.

        Raises:
            ObjectExistsError: An object of that name exists.
        """

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Writes the object, replacing what was there; readers see the old or the new content, never a mixture."""

    @abc.abstractmethod
    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Content from byte ``start`` up to but not including ``end`` (default: all), cut at the object's end.

        A negative ``start`` without ``end`` gives the last ``-start`` bytes. Whole reads are verified against the
        stored crc32c, all reads against the announced length; a damaged transfer is retried, then an error.

        Raises:
            ObjectNotFoundError: No such object.
        """

    @abc.abstractmethod
    def info(self, name: str) -> ObjectInfo:
        """Size, checksum, generation and time of the object.

        Raises:
            ObjectNotFoundError: No such object.
        """

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose name starts with ``prefix``, sorted by name, fetched page by page while iterating.

        Raises (while iterating):
            ObjectNotFoundError: The bucket (the root folder) does not exist; a prefix without objects yields nothing.
        """

    def pages(self, prefix: str = "") -> Iterator[Listing]:
        """What ``list`` gives, a page at a time as columns. Raises the same."""
        infos = self.list(prefix)
        while page := [(info.name, info.size, info.crc32c, info.generation) for info in islice(infos, _PAGE)]:
            yield Listing(*map(list, zip(*page, strict=True)))

    @abc.abstractmethod
    def children(self, prefix: str) -> Names:
        """Names directly inside folder ``prefix``: objects and sub-folders with objects in them, sorted, bare.

        ``children("a")`` of ``a/x`` and ``a/b/y`` is ``["b", "x"]``.

        Raises:
            ObjectNotFoundError: The bucket (the root folder) does not exist; a missing folder has no children.
        """

    @abc.abstractmethod
    def delete(self, name: str, missing_ok: bool = True) -> None:
        """Removes the object.

        Raises:
            ObjectNotFoundError: No such object, and ``missing_ok`` is false.
        """

    @abc.abstractmethod
    def delete_prefix(self, prefix: str) -> int:
        """Removes every object inside folder ``prefix`` (``a`` means ``a/``, never ``ab``); gives how many."""

    @abc.abstractmethod
    def _at(self, root: StoreURI, policy: RetryPolicy) -> Store:
        """The same backend and connection for another root or policy."""

    @abc.abstractmethod
    def _require_root(self) -> None:
        """Raises ``ObjectNotFoundError`` when the bucket (the root folder) is missing."""

    # -- what follows from it ------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Whether the object exists; ``False`` only when the store said so.

        Raises:
            ObjectNotFoundError: The bucket (the root folder) itself does not exist.
        """
        try:
            self.info(name)
        except ObjectNotFoundError:
            # "No such bucket" and "no such object" are the same answer; only the second one means False.
            self._require_root()
            return False
        return True

    def checksum(self, name: str) -> int:
        """crc32c of the object's content, read in slices unless the store vouches for it.

        Raises:
            ObjectNotFoundError: No such object.
        """
        import google_crc32c

        size = self.info(name).size
        value = 0
        for start in range(0, size, _SLICE_BYTES):
            value = google_crc32c.extend(value, self.read(name, start, min(size, start + _SLICE_BYTES)))
        return value

    def bucket(self) -> BucketInfo | None:
        """What the bucket says of itself; ``None`` where there is none (``file://``).

        Raises:
            ObjectNotFoundError: There is no such bucket.
            StoreDeniedError: Its objects may be readable, its description is not.
        """
        return None

    def uri(self, name: str = "") -> str:
        """Where the object or folder is, as Orbax, TensorStore and pyarrow take it: ``gs://…`` or an absolute path."""
        return (self.root / name if name else self.root).native

    def sub(self, prefix: str) -> Store:
        """The store below folder ``prefix``; shares the connection."""
        return self._at(self.root / prefix, self.policy)

    def with_limits(self, *, timeout_s: float | None = None, attempts: int | None = None) -> Store:
        """The same store with another time-out per request or another number of attempts."""
        return self._at(self.root, self.policy.limited(timeout_s=timeout_s, attempts=attempts))


def open_store(
    uri: str | StoreURI,
    *,
    endpoint: str | Endpoint | None = None,
    timeout_s: float = 60.0,
    attempts: int = 5,
    make_root: bool | None = None,
) -> Store:
    """Opens a store; nothing is contacted before the first operation.

    Args:
        uri: ``gs://bucket/prefix``, ``file:///folder`` or a folder.
        endpoint: ``http://host:port`` of an emulator for ``gs://``; ``None`` is the real Cloud Storage.
        timeout_s: Seconds for one request; an operation with its retries takes at most about twice as long.
        attempts: Requests per operation, at most.
        make_root: Whether the bucket or root folder is made on first use when it is missing. By default it is for
            ``file://`` and on an emulator, never on the real Cloud Storage.

    Raises:
        ConfigError: The URI or endpoint is not valid.
        UsageError: ``timeout_s`` or ``attempts`` is not positive.
    """
    place = StoreURI.parse(uri)
    policy = RetryPolicy(timeout_s=timeout_s, attempts=attempts)
    if place.scheme == "file":
        from tpupipe.store.files import FileStore

        return FileStore(place, policy, base=place.path, make_root=make_root is not False)
    from tpupipe.store.connection import Connection
    from tpupipe.store.gcs import GcsStore

    where = endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
    wanted = where.emulated if make_root is None else make_root
    if wanted and not where.emulated:
        raise UsageError("buckets of the real Cloud Storage are not made by tpupipe.", hint="make the bucket first")
    return GcsStore(place, policy, Connection(where, place.bucket, make_bucket=wanted))


def check_object_name(name: str) -> str:
    """Gives ``name`` back when it can be an object's name on every backend.

    Raises:
        UsageError: Empty, over 1,024 bytes, a leading or trailing '/', an empty, '.', '..' or temporary part, a part
            over 255 bytes, or control characters.
    """
    parts = name.split("/")
    bad = (
        not name
        or len(name.encode()) > 1024
        or any(part in ("", ".", "..") or part.startswith(TEMP_PREFIX) or len(part.encode()) > 255 for part in parts)
        or any(ord(letter) < 32 or ord(letter) == 127 for letter in name)
    )
    if bad:
        raise UsageError(
            f"{name!r} is not an object name; allowed: '/'-separated parts that are not empty, '.', '..' or "
            f"'{TEMP_PREFIX}…', without control characters, at most 1,024 bytes.",
            name=name,
        )
    return name


def check_prefix(prefix: str) -> str:
    """Gives ``prefix`` back when it can start an object's name.

    Raises:
        UsageError: A leading '/', or an empty, '.' or '..' part before the last '/'.
    """
    folder, slash, _ = prefix.rpartition("/")
    if slash:
        check_object_name(folder)
    return prefix


def check_range(name: str, start: int, end: int | None) -> None:
    """Refuses a range that has no one meaning on every backend.

    Raises:
        UsageError: A negative ``end``, or a negative ``start`` together with an ``end``.
    """
    if end is not None and (start < 0 or end < 0):
        raise UsageError(
            f"read of {name!r} from {start} to {end}: allowed are 0 <= start with any end >= 0, or a negative start "
            "without an end.",
            name=name,
        )


def folder_of(prefix: str) -> str:
    """``prefix`` as a folder: with one trailing '/', or empty for the whole store."""
    folder = prefix.rstrip("/")
    return check_object_name(folder) + "/" if folder else ""


def require_folder(store: Store, prefix: str) -> str:
    """Like ``folder_of``, for deletions: the whole store is refused.

    Raises:
        UsageError: ``prefix`` is empty.
    """
    folder = folder_of(prefix)
    if not folder:
        raise UsageError(f"deleting all of {store.root} is refused; name a folder in it.", uri=str(store.root))
    return folder


def crc32c_of(data: bytes) -> int:
    """crc32c (Castagnoli) of ``data`` as an unsigned 32-bit number."""
    import google_crc32c

    value: int = google_crc32c.value(data)
    return value
