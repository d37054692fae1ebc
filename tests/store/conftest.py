"""Real stores, a proxy that fails as told in front of the real server, and real racing processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tpupipe.local.server import embedded_store
from tpupipe.store.objects import Store, open_store


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real embedded server."""
    with embedded_store(tmp_path_factory.mktemp("embedded")) as url:
        yield url


@dataclass(frozen=True)
class Place:
    """Where a store is, to open it here or in another process."""

    uri: str
    endpoint: str | None

    def open(self, **options) -> Store:
        return open_store(self.uri, endpoint=self.endpoint, **options)

    @property
    def code(self) -> str:
        return f"open_store({self.uri!r}, endpoint={self.endpoint!r})"


@pytest.fixture(params=["file", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place on each backend."""
    if request.param == "file":
        return Place(f"file://{tmp_path}/store", None)
    url = request.getfixturevalue("endpoint")
    return Place(f"gs://bucket-{uuid.uuid4().hex[:12]}/some/prefix", url)


@pytest.fixture
def store(place: Place) -> Store:
    """An empty store on each backend."""
    return place.open(timeout_s=30)


# -- faults ----------------------------------------------------------------------------------------


@dataclass
class FaultProxy:
    """Forwards to a real server, except for the requests it was told to spoil.

    ``faults`` are used up one per request that ``matches``: a status, ``"block"``, ``"reset"`` (nothing reaches the
    server), ``"lost"`` (the server does it, the answer is lost), ``"truncate"`` (half of the body arrives),
    ``"damage"`` (one byte of the body differs), ``"trickle"`` (a byte now and then, for ever), ``"pass"``.
    """

    backend: str
    faults: list[int | str] = field(default_factory=list)
    matches: Callable[[str, str], bool] = lambda *_: True
    requests: list[str] = field(default_factory=list)
    writes_per_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    last_write: float = 0.0

    def next_fault(self, method: str, path: str) -> int | str:
        with self.lock:
            if not self.matches(method, path):
                return "pass"
            self.requests.append(f"{method} {path}")
            if self.writes_per_s is not None and method == "POST":
                now = time.monotonic()
                if now - self.last_write < 1 / self.writes_per_s:
                    return 429
                self.last_write = now
            return self.faults.pop(0) if self.faults else "pass"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.proxy.next_fault(self.command, self.path)
        self.close_connection = fault != "pass"
        if fault == "block":
            self.proxy.released.wait()
            return
        if fault == "reset":
            self.reset()
            return
        if isinstance(fault, int):
            answer = json.dumps({"error": {"message": "as told"}}).encode()
            self.answer(fault, {"content-type": "application/json", **self.proxy.headers}, answer)
            return
        connection = http.client.HTTPConnection(self.proxy.backend.removeprefix("http://"))
        with contextlib.closing(connection):
            headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
            kept = {key: value for key, value in response.getheaders() if key.lower() not in _HOP}
        if fault == "lost":
            self.reset()
        elif fault == "truncate":
            self.answer(response.status, kept, data[: len(data) // 2], announced=len(data))
        elif fault == "damage":
            self.answer(response.status, kept, bytes([data[0] ^ 1]) + data[1:])
        elif fault == "trickle":
            self.answer(response.status, kept, b"", announced=1 << 20)
            with contextlib.suppress(OSError):
                while not self.proxy.released.wait(0.1):
                    self.wfile.write(b".")
        else:
            self.answer(response.status, kept, data)

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - the base class looks for these names

    def answer(self, status: int, headers: dict[str, str], body: bytes, announced: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(body) if announced is None else announced))
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        # Lingering for no time at all makes closing send RST instead of FIN.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


_HOP = {"connection", "content-length", "transfer-encoding", "date", "server"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up on us is what these tests are about."""


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy in front of the embedded server that fails as told."""
    proxy = FaultProxy(endpoint)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


# -- processes -------------------------------------------------------------------------------------

_RACE = """
import json, os, sys, time
import google_crc32c, requests, tenacity, urllib3, google.auth.exceptions
from pathlib import Path
from tpupipe.errors import *
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Owner, acquire
from tpupipe.store.objects import open_store
{setup}
go, start = os.pipe()
results = Path({results!r})
children = []
for me in range({count}):
    child = os.fork()
    if child == 0:
        os.close(start)
        os.read(go, 1)  # returns in all of them at once, when the parent closes its end
        try:
            answer = attempt(me)
        except Exception as error:
            answer = type(error).__name__
        (results / str(me)).write_text(json.dumps(answer))
        os._exit(0)
    children.append(child)
os.close(start)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture
def race(tmp_path: Path) -> Callable[[str, int], list[object]]:
    """Runs ``attempt(me)`` of some code in so many processes at the same moment; gives what each returned or raised."""

    def run(setup: str, count: int) -> list[object]:
        results = tmp_path / "results"
        results.mkdir()
        code = _RACE.format(setup=setup, results=str(results), count=count)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=_environment())
        return [json.loads((results / str(me)).read_text()) for me in range(count)]

    return run


@pytest.fixture
def process() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts Python code in a process of its own; whatever is left of it is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_environment(),
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Polls a condition; fails the test if it does not come true in time."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def until() -> Callable[..., None]:
    """Polls a condition; fails the test if it does not come true in time."""
    return wait_until
