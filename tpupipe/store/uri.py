"""Where a store is: ``gs://bucket/prefix``, ``file:///folder`` or a plain path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tpupipe.errors import ConfigError

# Cloud Storage: 3-63 characters (dots allow up to 222), lower case, no leading or trailing punctuation.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_ALLOWED = "allowed: gs://bucket/prefix, file:///absolute/folder, or a folder"


@dataclass(frozen=True)
class StoreURI:
    """A place that holds objects.

    Attributes:
        scheme: ``"gs"`` or ``"file"``.
        bucket: Bucket name; empty for ``file``.
        path: For ``gs`` the prefix without leading or trailing ``/`` (may be empty); for ``file`` an absolute path.
    """

    scheme: str
    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str | Path | StoreURI) -> StoreURI:
        """Reads a URI or a path; a relative path is taken from the working directory.

        Raises:
            ConfigError: Another scheme, no bucket, a bad bucket name, or ``..`` and empty parts in the prefix.
        """
        if isinstance(text, StoreURI):
            return text
        value = str(text)
        if not value.strip() or value != value.strip() or any(ord(letter) < 32 for letter in value):
            raise ConfigError(f"{value!r} is not a store; {_ALLOWED}.", uri=value)
        if value.startswith("gs://"):
            return cls._parse_gs(value)
        if value.startswith("file://"):
            path = value.removeprefix("file://")
            if not path.startswith("/"):
                raise ConfigError(
                    f"{value!r} is not a store: a file:// URI needs an absolute path; {_ALLOWED}.",
                    hint=f"write file:///{path} or the plain path {path!r}",
                    uri=value,
                )
            return cls("file", "", str(Path(path).absolute()))
        if "://" in value:
            raise ConfigError(f"{value!r} is not a store: unknown scheme; {_ALLOWED}.", uri=value)
        return cls("file", "", str(Path(value).expanduser().absolute()))

    @classmethod
    def _parse_gs(cls, value: str) -> StoreURI:
        bucket, _, path = value.removeprefix("gs://").partition("/")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise ConfigError(
                f"{value!r} is not a store: {bucket!r} is not a bucket name "
                "(lower-case letters, digits, '-', '_', '.'; at least 3).",
                uri=value,
            )
        path = path.rstrip("/")
        if path and any(part in ("", ".", "..") for part in path.split("/")):
            raise ConfigError(f"{value!r} is not a store: empty, '.' and '..' parts are not allowed.", uri=value)
        return cls("gs", bucket, path)

    def __truediv__(self, name: str) -> StoreURI:
        """The place ``name`` below this one; ``name`` is relative and '/'-separated."""
        parts = [part for part in name.split("/") if part]
        if name.startswith("/") or any(part in (".", "..") for part in parts):
            raise ConfigError(f"{name!r} cannot be joined to {self}: it must be relative, without '.' and '..'.")
        return StoreURI(self.scheme, self.bucket, "/".join([self.path.rstrip("/"), *parts] if self.path else parts))

    def __str__(self) -> str:
        if self.scheme == "gs":
            return f"gs://{self.bucket}/{self.path}" if self.path else f"gs://{self.bucket}"
        return f"file://{self.path}"

    @property
    def native(self) -> str:
        """What Orbax, TensorStore and pyarrow take: the ``gs://`` URI, or the absolute path."""
        return str(self) if self.scheme == "gs" else self.path
