"""Requests to Cloud Storage, one at a time, with failures this room can judge."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import threading
import time
import urllib.error
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from tpupipe.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreDeniedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tpupipe.local.server import ensure_bucket
from tpupipe.store.objects import crc32c_of
from tpupipe.store.retry import Attempt, AttemptError, Failure
from tpupipe.store.wiring import Endpoint

if TYPE_CHECKING:
    from requests import Response, Session

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOGIN = "gcloud auth application-default login, or give the workload an identity"
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_CONNECT_S = 10.0
_PIECE_BYTES = 1 << 20


@final
class Connection:
    """The session to one bucket, made anew in every process that uses it.

    Args:
        endpoint: Where Cloud Storage is.
        bucket: Name of the bucket.
        make_bucket: Whether a missing bucket is made on first use (emulators only).
    """

    def __init__(self, endpoint: Endpoint, bucket: str, *, make_bucket: bool) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.make_bucket = make_bucket
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._pid = os.getpid()
        self.bucket_seen = False

    def __getstate__(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "bucket": self.bucket, "make_bucket": self.make_bucket}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def session(self) -> Session:
        """The session of this process; sockets are never shared with a forked child."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._session is None:
                self._session = _open_session(self.endpoint)
            return self._session

    def request(self, method: str, path: str, limit: Attempt, **options: Any) -> Response:
        """One request; the answer's status is checked, its body is not read.

        Raises:
            AttemptError: The status is not a success.
        """
        if self.make_bucket and not self.bucket_seen:
            ensure_bucket(self.endpoint.base_url, self.bucket, timeout_s=limit.timeout_s)
            self.bucket_seen = True
        response = self.session().request(
            method,
            self.endpoint.base_url + path,
            timeout=(min(_CONNECT_S, limit.timeout_s), limit.timeout_s),
            stream=True,
            allow_redirects=False,
            **options,
        )
        if not 200 <= response.status_code < 300:
            with response:
                raise AttemptError(_refused(response.status_code, response.reason, _reason(response), response.headers))
        self.bucket_seen = True
        return response

    def json(self, method: str, path: str, limit: Attempt, **options: Any) -> dict[str, Any]:
        """One request whose answer is a JSON object."""
        body = whole_body(self.request(method, path, limit, **options), limit)
        try:
            value = json.loads(body)
        except ValueError as error:
            raise AttemptError(
                Failure(StoreUnavailableError, f"the answer of {len(body)} bytes is not JSON", again=True)
            ) from error
        if not isinstance(value, dict):
            raise AttemptError(Failure(StoreUnavailableError, "the answer is not a JSON object", again=True))
        return value


@final
class PastTheEnd(Failure):
    """416: the range starts behind the end of the object."""


def _open_session(endpoint: Endpoint) -> Session:
    import requests
    from requests.adapters import HTTPAdapter

    session: Session
    if endpoint.emulated:
        session = requests.Session()
        # A proxy that the environment names is for the outside world; the emulator is on this machine.
        session.trust_env = False
    else:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        credentials, _ = google.auth.default(scopes=[_SCOPE])
        session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call] # google-auth has no types here
    adapter = HTTPAdapter(pool_maxsize=32, max_retries=0)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    return session


def whole_body(response: Response, limit: Attempt) -> bytes:
    """The whole body; the attempt ends when its time does, even if a trickle keeps the socket alive."""
    ends = time.monotonic() + limit.timeout_s
    pieces: list[bytes] = []
    with response:
        for piece in response.iter_content(_PIECE_BYTES):
            pieces.append(piece)
            if time.monotonic() > ends:
                raise AttemptError(
                    Failure(StoreTimeoutError, f"the answer was not complete after {limit.timeout_s:.1f} s", again=True)
                )
    body = b"".join(pieces)
    announced = response.headers.get("content-length")
    if announced is not None and len(body) != int(announced) and "content-encoding" not in response.headers:
        raise AttemptError(Failure(StoreUnavailableError, f"{len(body)} of {announced} bytes arrived", again=True))
    return body


def verify_crc32c(body: bytes, hashes: str) -> None:
    """Compares ``body`` with the crc32c of an ``x-goog-hash`` header.

    Raises:
        AttemptError: They differ.
    """
    for item in hashes.split(","):
        kind, _, value = item.strip().partition("=")
        if kind == "crc32c" and decode_crc32c(value) != crc32c_of(body):
            raise AttemptError(
                Failure(
                    StoreUnavailableError,
                    f"the {len(body)} bytes that arrived do not have the stored crc32c {value}",
                    again=True,
                    hint="the object is damaged, or the connection damages what it carries",
                )
            )


def encode_crc32c(value: int) -> str:
    """The base64 of a crc32c, as the JSON API writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def decode_crc32c(text: str) -> int:
    """A crc32c from the base64 of the JSON API."""
    return int.from_bytes(binascii.a2b_base64(text), "big")


def _refused(status: int, reason: str | None, more: str, headers: Mapping[str, str]) -> Failure:
    """Failure for an answer that is not a success."""
    detail = f"the store answered {status} {reason or ''}".rstrip() + more
    if status == 404:
        return Failure(ObjectNotFoundError, detail)
    if status == 412:
        return Failure(ObjectExistsError, "an object of that name exists")
    if status == 416:
        return PastTheEnd(StoreError, detail)
    if status in (401, 403):
        return Failure(StoreDeniedError, detail)
    if status in _PASSING:
        asked = headers.get("retry-after", "")
        return Failure(StoreUnavailableError, detail, again=True, asked_s=float(asked) if asked.isdigit() else None)
    return Failure(StoreError, detail)


def _reason(response: Response) -> str:
    """What the body says about the failure, in one line; the body may be anything."""
    import urllib3

    try:
        text = response.raw.read(2048, decode_content=True).decode(errors="replace")
    except (urllib3.exceptions.HTTPError, OSError):
        return ""  # the status is the news; that its explanation got lost does not change it
    with contextlib.suppress(ValueError, KeyError, TypeError):  # may be a proxy's page, not the JSON of the API
        text = json.loads(text)["error"]["message"]
    line = " ".join(str(text).split())[:200]
    return f" ({line})" if line and line != response.reason else ""


def failure_of(error: Exception) -> Failure | None:
    """Failure for an exception of requests, urllib, urllib3 or google-auth; ``None`` for anything else."""
    import requests
    import urllib3
    from google.auth import exceptions as auth

    if isinstance(error, urllib.error.HTTPError):
        return _refused(error.code, error.reason, "", dict(error.headers))
    # First match counts: the later kinds are bases of the earlier ones.
    kinds: list[tuple[tuple[type[Exception], ...], type[StoreError], str, bool]] = [
        (
            (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError),
            StoreTimeoutError,
            "no answer in time",
            True,
        ),
        (
            (
                requests.ConnectionError,
                requests.exceptions.ChunkedEncodingError,
                ConnectionError,
                urllib.error.URLError,
            ),
            StoreUnavailableError,
            "the connection broke",
            True,
        ),
        ((auth.TransportError,), StoreUnavailableError, "the credentials could not be fetched", True),
        ((auth.GoogleAuthError,), StoreDeniedError, "no usable credentials", False),
        ((requests.RequestException, urllib3.exceptions.HTTPError), StoreUnavailableError, "the request failed", True),
    ]
    for types, leaf, detail, again in kinds:
        if isinstance(error, types):
            hint = _LOGIN if leaf is StoreDeniedError else ""
            return Failure(leaf, f"{detail} ({_cause(error)})", again, hint=hint)
    return None


def _cause(error: BaseException) -> str:
    """The innermost reason, which says more than the layers of wrapping around it."""
    reason: Any = error
    while True:
        inner = getattr(reason, "reason", None) or next(
            (part for part in getattr(reason, "args", ()) if isinstance(part, BaseException)), None
        )
        if not isinstance(inner, BaseException) or inner is reason:
            return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
        reason = inner
