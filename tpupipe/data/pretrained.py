"""Parameters that no run of ours trained: files in somebody else's format, and the function that reads them."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpupipe.data.listing import input_errors, open_filesystem
from tpupipe.errors import DataError, JobError


@dataclass(frozen=True, init=False)
class Pretrained:
    """Parameters read from files, for ``Infer(params=...)``. Standard library only until they are read.

    The parameters' fingerprint is that of the files' bytes, and ``load`` gets exactly the bytes that were
    fingerprinted. Each worker reads the files once, checks them against what the driver saw, and puts the result on
    its devices.

    Args:
        files: A path or URI, or several: the same on every host. A whole file is held in memory while it is read.
        load: ``load(*contents) -> params``: the bytes of each file, in the order of ``files``, to a pytree of
            arrays. Must be deterministic.

    Raises:
        JobError: An argument is not valid.
    """

    files: tuple[str, ...]
    load: Callable[..., Any]

    def __init__(
        self, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], load: Callable[..., Any]
    ) -> None:
        given: Any = [files] if isinstance(files, (str, os.PathLike)) else files
        paths = [os.fspath(f) for f in given if isinstance(f, (str, os.PathLike))] if _is_list(given) else []
        if not paths or len(paths) != len(given) or not all(isinstance(path, str) and path for path in paths):
            raise JobError(f"Pretrained(files={files!r}) must be a path or URI, or a list of at least one.")
        if not callable(load):
            raise JobError(f"Pretrained: load={load!r} is not callable.")
        try:
            inspect.signature(load).bind(*paths)
        except TypeError as error:
            raise JobError(
                f"Pretrained: load must take {len(paths)} positional argument(s): {error}.",
                hint="load(contents) -> params, with the bytes of each file as an argument.",
            ) from error
        except ValueError:  # a builtin without a signature: it is checked when called
            pass
        object.__setattr__(self, "files", tuple(str(path) for path in paths))
        object.__setattr__(self, "load", load)

    def read(self, storage_options: Mapping[str, Any] | None = None) -> tuple[list[bytes], str]:
        """Reads the files.

        Args:
            storage_options: fsspec's options for opening them.

        Returns:
            Their contents, and the fingerprint of those.

        Raises:
            DataError: A file does not exist.
            StoreError: A file cannot be read.
        """
        contents = []
        for path in self.files:
            filesystem = open_filesystem(path, storage_options=storage_options)
            with input_errors("read", path):
                contents.append(bytes(filesystem.cat_file(path)))
        return contents, _fingerprint(contents)

    def read_checked(self, fingerprint: str, storage_options: Mapping[str, Any] | None = None) -> list[bytes]:
        """Reads the files as they were when ``fingerprint`` was taken.

        Raises:
            DataError: They are others here, or one does not exist.
            StoreError: A file cannot be read.
        """
        contents, found = self.read(storage_options)
        if found != fingerprint:
            raise DataError(
                f"The parameters in {', '.join(self.files)} are not those the run started with: "
                f"fingerprint {found} here, {fingerprint} there.",
                hint="Every host needs the same files; they must not change during a run.",
                fingerprint=found,
            )
        return contents


def _fingerprint(contents: Sequence[bytes]) -> str:
    """sha256 (32 hex digits of it) over the files' own digests, so that bytes cannot move from one to the next."""
    digests = [hashlib.sha256(content).digest() for content in contents]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
