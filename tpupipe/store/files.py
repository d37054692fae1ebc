"""Objects as files of a (shared) file system.

An object is created by writing a temporary file next to its place and linking it there: the link either makes the
complete file appear, or fails because there is one. Half-written temporary files of killed writers are never listed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, final

from tpupipe.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreDeniedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tpupipe.store.objects import (
    TEMP_PREFIX,
    Names,
    ObjectInfo,
    Store,
    check_object_name,
    check_prefix,
    check_range,
    crc32c_of,
    folder_of,
    require_folder,
)
from tpupipe.store.retry import Attempt, AttemptError, Failure, RetryPolicy, run
from tpupipe.store.uri import StoreURI

T = TypeVar("T")
Entries = list[tuple[str, ObjectInfo | None]]

_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_PASSING = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EREMOTEIO, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    }
)  # fmt: skip
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@final
class FileStore(Store):
    """Objects below a folder.

    Args:
        root: The folder.
        policy: Limits per operation; a dead network mount ends in ``StoreTimeoutError``, not in waiting for ever.
        base: Folder that must exist (that of ``open_store``; stores made by ``sub`` keep it).
        make_root: Whether ``base`` is made on first use.
    """

    def __init__(self, root: StoreURI, policy: RetryPolicy, *, base: str, make_root: bool) -> None:
        super().__init__(root, policy)
        self._base = base
        self._make_root = make_root
        self._made = False

    def _at(self, root: StoreURI, policy: RetryPolicy) -> FileStore:
        return FileStore(root, policy, base=self._base, make_root=self._make_root)

    # -- writing -------------------------------------------------------------------------------

    def create(self, name: str, data: bytes) -> ObjectInfo:
        """See ``Store.create``."""
        checksum = crc32c_of(data)

        def attempt(limit: Attempt) -> ObjectInfo:
            try:
                return self._write(name, data, checksum, replace=False)
            except FileExistsError as error:
                # An earlier attempt of ours may have got through although it was given up on.
                if limit.number > 1 and self._holds(name, data):
                    return dataclasses.replace(self._info(name), crc32c=checksum)
                raise AttemptError(Failure(ObjectExistsError, "an object of that name exists")) from error

        return self._counted("create", name, attempt)

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """See ``Store.put``."""
        checksum = crc32c_of(data)
        return self._counted("put", name, lambda _: self._write(name, data, checksum, replace=True))

    def delete(self, name: str, missing_ok: bool = True) -> None:
        """See ``Store.delete``."""

        def attempt(limit: Attempt) -> None:
            self._require()
            try:
                self._path(name).unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                if not (missing_ok or limit.number > 1):
                    raise

        self._run("delete", check_object_name(name), attempt)

    def delete_prefix(self, prefix: str) -> int:
        """See ``Store.delete_prefix``; temporary files and folders that are empty then go too."""
        folder = require_folder(self, prefix)
        names = [info.name for info in self.list(folder)]
        for name in names:
            self.delete(name)
        self._run("delete", folder.rstrip("/"), lambda _: _sweep(self._path(folder)))
        return len(names)

    # -- reading -------------------------------------------------------------------------------

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """See ``Store.read``; a file system keeps no checksum, so only the length is verified."""
        check_range(name, start, end)

        def attempt(_: Attempt) -> bytes:
            with self._path(name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                first, last = slice(start, end).indices(size)[:2]
                file.seek(first)
                data = file.read(max(0, last - first))
            if len(data) != max(0, last - first):
                raise AttemptError(
                    Failure(StoreUnavailableError, f"{len(data)} of {last - first} bytes arrived", again=True)
                )
            return data

        return self._run("read", check_object_name(name), attempt)[0]

    def info(self, name: str) -> ObjectInfo:
        """See ``Store.info``; ``crc32c`` is ``None``, ask ``checksum`` for it."""
        return self._counted("info", name, lambda _: self._info(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See ``Store.list``; one folder is read at a time."""
        prefix = check_prefix(prefix)
        yield from self._walk(prefix.rpartition("/")[0], prefix)

    def children(self, prefix: str) -> Names:
        """See ``Store.children``."""
        folder = folder_of(prefix)
        names = []
        for name, info in self._scan(folder.rstrip("/")):
            if info is not None or next(self._walk(folder + name, folder), None) is not None:
                names.append(name)
        return sorted(names)

    # -- parts ---------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return Path(self.root.path, name)

    def _require_root(self) -> None:
        self._run("list", "", lambda _: self._require())

    def _require(self) -> None:
        """Makes the root folder the first time; after that a missing one is an error, not an empty store."""
        if self._make_root and not self._made:
            Path(self._base).mkdir(parents=True, exist_ok=True)
        elif not Path(self._base).is_dir():
            raise AttemptError(Failure(ObjectNotFoundError, f"the folder {self._base} of the store does not exist"))
        self._made = True

    def _run(self, operation: str, name: str, attempt: Callable[[Attempt], T]) -> tuple[T, int]:
        return run(self.policy, operation, self.uri(name), attempt, failure_of)

    def _counted(self, operation: str, name: str, attempt: Callable[[Attempt], ObjectInfo]) -> ObjectInfo:
        info, attempts = self._run(operation, check_object_name(name), attempt)
        return dataclasses.replace(info, attempts=attempts)

    def _info(self, name: str) -> ObjectInfo:
        path = self._path(name)
        status = path.stat()
        if not path.is_file():
            raise IsADirectoryError(errno.EISDIR, "a folder, not an object", str(path))
        return _described(name, status)

    def _holds(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        return path.is_file() and path.stat().st_size == len(data) and crc32c_of(path.read_bytes()) == crc32c_of(data)

    def _write(self, name: str, data: bytes, checksum: int, *, replace: bool) -> ObjectInfo:
        self._require()
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{TEMP_PREFIX}{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                status = os.fstat(file.fileno())
            if replace:
                temporary.replace(target)
            else:
                _link(temporary, target)
        except FileNotFoundError as error:
            # Somebody swept the folder between our making it and our using it.
            raise AttemptError(Failure(StoreUnavailableError, f"{target.parent} went away", again=True)) from error
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return dataclasses.replace(_described(name, status), crc32c=checksum)

    def _scan(self, folder: str) -> Entries:
        """Entries of one folder in the order of full names: ``(bare name, info)``; no info for a sub-folder."""

        def attempt(_: Attempt) -> Entries:
            self._require()
            try:
                with os.scandir(self._path(folder)) as entries:
                    found = list(entries)
            except (FileNotFoundError, NotADirectoryError):
                return []
            result: Entries = []
            for entry in found:
                if entry.name.startswith(TEMP_PREFIX):
                    continue
                try:
                    is_folder, status = entry.is_dir(), entry.stat()
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                name = f"{folder}/{entry.name}" if folder else entry.name
                result.append((entry.name, None if is_folder else _described(name, status)))
            # A folder sorts as its content does: behind the '/', which is after '-' and '.'.
            return sorted(result, key=lambda item: item[0] + ("/" if item[1] is None else ""))

        return self._run("list", folder, attempt)[0]

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        for name, info in self._scan(folder):
            full = f"{folder}/{name}" if folder else name
            if info is not None:
                if full.startswith(prefix):
                    yield info
            elif f"{full}/".startswith(prefix) or prefix.startswith(f"{full}/"):
                yield from self._walk(full, prefix)


def _described(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        name=name,
        size=status.st_size,
        crc32c=None,
        generation=f"{status.st_mtime_ns:x}-{status.st_ino:x}",
        updated_s=status.st_mtime,
    )


def _link(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise AttemptError(
            Failure(
                StoreError,
                f"the file system of {target.parent} has no hard links ({error.strerror}), so nothing can be created "
                "atomically there",
                hint="use a gs:// store, or another file system",
            )
        ) from error


def _sync_folder(folder: Path) -> None:
    """Makes the new name durable, not only the content."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Removes temporary files and empty folders; whatever holds an object stays."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            if name.startswith(TEMP_PREFIX):
                Path(path, name).unlink(missing_ok=True)
        try:
            Path(path).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def failure_of(error: Exception) -> Failure | None:
    """Failure for an error of the operating system; ``None`` for anything else."""
    if not isinstance(error, OSError):
        return None
    detail = f"{error.strerror or type(error).__name__}"
    if error.errno in _MISSING:
        return Failure(ObjectNotFoundError, detail)
    if error.errno in _DENIED:
        return Failure(StoreDeniedError, detail)
    if error.errno == errno.ETIMEDOUT:
        return Failure(StoreTimeoutError, detail, again=True)
    return Failure(StoreUnavailableError if error.errno in _PASSING else StoreError, detail, error.errno in _PASSING)
