"""Points every storage client of a process at the same place.

gcsfs, TensorStore (Orbax), google-cloud-storage and pyarrow each have their own switch for an
emulator. They are all set here, so no two of them can look at different stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tpupipe.errors import ConfigError
from tpupipe.store.uri import StoreURI

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

GCS_URL = "https://storage.googleapis.com"


@dataclass(frozen=True)
class Endpoint:
    """Which Cloud Storage is spoken to.

    Args:
        url: ``http://host:port`` of an emulator such as the embedded server; ``None`` is the real one.

    Raises:
        ConfigError: ``url`` is not an http(s) URL without a path.
    """

    url: str | None = None

    def __post_init__(self) -> None:
        if self.url is None:
            return
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
            raise ConfigError(f"{self.url!r} is not a storage endpoint; allowed: http://host:port.", endpoint=self.url)
        object.__setattr__(self, "url", f"{parts.scheme}://{parts.netloc}")

    @property
    def emulated(self) -> bool:
        """Whether this is an emulator: no credentials, and buckets may be made on first use."""
        return self.url is not None

    @property
    def base_url(self) -> str:
        """URL to put API paths behind, without a trailing '/'."""
        return self.url or GCS_URL


def process_environment(endpoint: Endpoint | str | None, timeout_s: float = 60.0) -> dict[str, str]:
    """The variables that every process touching storage needs, before it first does.

    Args:
        endpoint: The emulator, or ``None`` for the real Cloud Storage.
        timeout_s: Seconds after which TensorStore gives up on a transfer that does not move.

    Returns:
        Name to value. For the real Cloud Storage only settings that keep clients from blocking.
    """
    endpoint = _endpoint(endpoint)
    variables = {
        # With it on, gcsfs asks a gRPC control plane for the type of each bucket and blocks for 60 s on an emulator.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # TensorStore waits for ever on a connection that stays open and silent, unless told what "silent" is.
        "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(max(1, round(timeout_s))),
        "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    }
    if endpoint.url is not None:
        variables |= {
            "STORAGE_EMULATOR_HOST": endpoint.url,
            "TENSORSTORE_GCS_HTTP_URL": endpoint.url,
            # Without it TensorStore looks for real credentials, and asks the metadata server for them.
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        }
    return variables


def fsspec_options(uri: StoreURI | str, endpoint: Endpoint | str | None) -> dict[str, Any]:
    """``storage_options`` for fsspec and pandas-like readers of ``uri``; empty for local paths."""
    endpoint = _endpoint(endpoint)
    if StoreURI.parse(uri).scheme != "gs" or endpoint.url is None:
        return {}
    return {"endpoint_url": endpoint.url, "token": "anon"}


def pyarrow_filesystem(
    uri: StoreURI | str, endpoint: Endpoint | str | None, timeout_s: float = 60.0
) -> tuple[FileSystem, str]:
    """The filesystem of pyarrow itself for ``uri``, and the path of ``uri`` on it.

    Args:
        uri: A ``gs://`` URI or a local path.
        endpoint: The emulator, or ``None`` for the real Cloud Storage.
        timeout_s: Seconds that pyarrow may spend on retries of one operation.
    """
    from datetime import timedelta

    from pyarrow import fs

    endpoint, place = _endpoint(endpoint), StoreURI.parse(uri)
    if place.scheme == "file":
        return fs.LocalFileSystem(), place.path
    limit = timedelta(seconds=timeout_s)
    path = f"{place.bucket}/{place.path}" if place.path else place.bucket
    if endpoint.url is None:
        return fs.GcsFileSystem(retry_time_limit=limit), path
    parts = urlsplit(endpoint.url)
    return (
        fs.GcsFileSystem(anonymous=True, scheme=parts.scheme, endpoint_override=parts.netloc, retry_time_limit=limit),
        path,
    )


def _endpoint(value: Endpoint | str | None) -> Endpoint:
    return value if isinstance(value, Endpoint) else Endpoint(value)
