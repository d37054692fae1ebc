"""Which input files there are: patterns on any file system, listed once and in order. Standard library only until then."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tpupipe.errors import DataError, StoreDeniedError, StoreError, StoreUnavailableError, TpupipeError

_REMOTE_LIBRARIES = ("gcsfs", "aiohttp", "google", "requests")  # their errors are not all OSErrors
_BROKEN_OFF = (TimeoutError, ConnectionError)
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One listed input file.

    Attributes:
        path: Absolute local path, or a URI.
        size_bytes: Its size.
        version: Generation, etag or modification time.
        modified_s: When it was written, seconds since 1970, where the store tells (not part of equality).
    """

    path: str
    size_bytes: int
    version: str
    modified_s: float | None = field(default=None, compare=False)


def open_filesystem(path: str, filesystem: Any = None, storage_options: Mapping[str, Any] | None = None) -> Any:
    """The fsspec filesystem for ``path``; ``filesystem`` itself where given."""
    if filesystem is not None:
        return filesystem
    import fsspec

    return fsspec.core.url_to_fs(path, **(storage_options or {}))[0]


@contextmanager
def input_errors(operation: str, path: str) -> Iterator[None]:
    """Turns what a file system raises into the project's errors.

    Raises:
        DataError: The file does not exist.
        StoreUnavailableError: The store was asked again and again, and may be there later.
        StoreError: Anything else that went wrong between here and the file.
    """
    try:
        yield
    except TpupipeError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"The input {path} does not exist (any more).", path=path) from error
    except Exception as error:
        if not isinstance(error, OSError) and not of_the_network(error):
            raise
        # gcsfs makes a plain OSError of a 403, with this word in front.
        forbidden = isinstance(error, OSError) and error.errno is None and str(error).startswith("Forbidden: ")
        if forbidden or isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403):
            raise StoreDeniedError(
                f"Not permitted to {operation} the input {path}: {' '.join(str(error).split())}",
                hint="Check the credentials, and their right to list and read it (roles/storage.objectViewer on a bucket).",
                operation=operation,
                uri=path,
            ) from error
        away = isinstance(error, _BROKEN_OFF) or (of_the_network(error) and _worth_another_try(error))
        raise (StoreUnavailableError if away else StoreError)(
            f"Could not {operation} the input {path}: {type(error).__name__}: {' '.join(str(error).split())}",
            operation=operation,
            uri=path,
        ) from error


def of_the_network(error: Exception) -> bool:
    """Whether an error is about what is between here and a file, and not about the file's content."""
    library = type(error).__module__.partition(".")[0]
    return library in _REMOTE_LIBRARIES or isinstance(error, _BROKEN_OFF)


def _worth_another_try(error: Exception) -> bool:
    """Whether gcsfs asks again after this, as it has done when it raises it."""
    from gcsfs.retry import is_retriable

    return bool(is_retriable(error))


def list_files(
    patterns: Sequence[str],
    filesystem: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    none_ok: bool = False,
) -> list[InputFile]:
    """The files the patterns match, each once, sorted by path.

    Raises:
        DataError: A pattern matches nothing, and ``none_ok`` is false.
        StoreError: Listing failed.
    """
    found: dict[str, InputFile] = {}
    for pattern in patterns:
        fs = open_filesystem(pattern, filesystem, storage_options)
        with input_errors("list", pattern):
            matches = _match(fs, pattern)
        if not matches and not none_ok:
            raise DataError(
                f"The input pattern {pattern!r} matches no file.",
                hint="Give a glob, a folder or a file; names that begin with a dot are skipped.",
                pattern=pattern,
            )
        found.update((file.path, file) for file in matches)
    return [found[path] for path in sorted(found)]


def present_file(fs: Any, path: str, info: Mapping[str, Any] | None = None) -> InputFile:
    """A file as listing it now would give it.

    Args:
        fs: Its file system.
        path: Where it is, as it was listed.
        info: What the file system told of it a moment ago; by default it is asked.
    """
    if info is None:
        fs.invalidate_cache(path)  # it may hold what was listed
        info = fs.info(path)
    return _input_file(fs, path, info)


def _match(fs: Any, pattern: str) -> list[InputFile]:
    import fsspec

    root = str(fsspec.core.strip_protocol(pattern))
    magic = _MAGIC.search(root)
    fixed = root[: magic.start()].rpartition("/")[0] if magic else root
    try:
        infos = fs.glob(root, detail=True) if magic else fs.find(root, detail=True)
    except FileNotFoundError:  # a missing bucket or folder matches nothing, which the caller reports
        return []
    with_hidden = "/." in root[len(fixed) :]
    files = []
    for path, info in infos.items():
        is_file = info["type"] == "file" and not path.endswith("/")
        if is_file and (with_hidden or "/." not in path[len(fixed) :]):
            files.append(_input_file(fs, path, info))
    return files


def _input_file(fs: Any, path: str, info: Mapping[str, Any]) -> InputFile:
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    if protocol in ("file", "local"):
        modified_ns = Path(path).stat().st_mtime_ns
        return InputFile(path, int(info["size"]), str(modified_ns), modified_ns / 1e9)
    version = next((str(info[key]) for key in ("generation", "etag", "ETag", "mtime", "updated") if info.get(key)), "")
    return InputFile(str(fs.unstrip_protocol(path)), int(info["size"]), version, _modified_s(info))


def _modified_s(info: Mapping[str, Any]) -> float | None:
    value = next((info[key] for key in ("updated", "mtime", "LastModified", "last_modified") if info.get(key)), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else None
