"""A store that fails as told: a proxy process in front of the embedded server, or of any other emulator.

``python -m tpupipe.faults.store_proxy --upstream URL --state FILE --fault 503@create,rate=0.2,seed=7`` runs one by
hand; ``store_proxy`` starts one, and stops it however its user ends. ``store_faults`` has what can be asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpupipe.errors import ClusterError, UsageError
from tpupipe.faults.store_faults import KINDS, OPERATIONS, StoreFaults
from tpupipe.faults.store_requests import CONTROL_PATH
from tpupipe.local.guard import Child, guarded
from tpupipe.store.wiring import Endpoint

_CONTROL_TIMEOUT_S = 10.0
# No proxies: ours is on this machine, whatever the environment says about the way out.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Fired:
    """One fault that hit one request.

    Attributes:
        at_s: When, in seconds since 1970.
        fault: The fault as it was written.
        operation: What the request asked for (``store_requests.Operation``).
        bucket: Its bucket.
        name: Its object, a listing's prefix, or a batch's objects, one a line.
    """

    at_s: float
    fault: str
    operation: str
    bucket: str
    name: str


@dataclass(frozen=True)
class StoreCounts:
    """What a proxy did since it started, over all faults that it was given.

    Attributes:
        requests: Operation to number of requests, retries included.
        fired: Fault as it was written to number of requests that it hit.
        log: The latest thousand of those, oldest first.
    """

    requests: Mapping[str, int]
    fired: Mapping[str, int]
    log: tuple[Fired, ...]


@dataclass(frozen=True)
class StoreProxy:
    """A running proxy. Picklable: workers may ask and change it too.

    Attributes:
        endpoint: ``http://127.0.0.1:PORT``, to be used like that of the store behind it.
    """

    endpoint: str

    def counts(self) -> StoreCounts:
        """What it did so far.

        Raises:
            ClusterError: The proxy does not answer.
        """
        answer = self._control()
        return StoreCounts(answer["requests"], answer["fired"], tuple(Fired(**entry) for entry in answer["log"]))

    def set(self, faults: StoreFaults | str | Sequence[str] = ()) -> None:
        """Replaces the faults from the next request on; nothing makes the store work again.

        Raises:
            UsageError: A fault cannot be read.
            ClusterError: The proxy does not answer.
        """
        self._control(json.dumps(_parsed(faults).texts).encode())

    def _control(self, body: bytes | None = None) -> dict[str, Any]:
        method = "GET" if body is None else "PUT"
        request = urllib.request.Request(self.endpoint + CONTROL_PATH, data=body, method=method)  # noqa: S310 - our own URL
        try:
            with _open(request, timeout=_CONTROL_TIMEOUT_S) as answer:
                value: dict[str, Any] = json.load(answer)
        except OSError as error:
            raise ClusterError(
                f"the store proxy at {self.endpoint} does not answer: {error}.", endpoint=self.endpoint
            ) from error
        return value


@contextlib.contextmanager
def store_proxy(
    endpoint: str, faults: StoreFaults | str | Sequence[str] = (), root: Path | str = ".", *, timeout_s: float = 20.0
) -> Iterator[StoreProxy]:
    """Runs a proxy in front of a store while the block runs; it ends with its user, even by SIGKILL.

    Args:
        endpoint: ``http://host:port`` of the store, such as ``embedded_store`` gives.
        faults: The faults to begin with, or their texts.
        root: Folder for the proxy's own files (``store-proxy/``); one proxy at a time per folder.
        timeout_s: Seconds until the proxy must answer.

    Yields:
        The proxy.

    Raises:
        UsageError: A fault cannot be read, or another proxy runs in ``root``.
        ConfigError: ``endpoint`` is not an http(s) URL.
        ClusterError: The proxy does not come up; with the end of its log.
    """
    upstream, wanted = Endpoint(endpoint).base_url, _parsed(faults)
    own = Path(root).absolute() / "store-proxy"
    state, token = own / "proxy.json", uuid.uuid4().hex

    def make() -> Child:
        state.unlink(missing_ok=True)  # what an earlier one wrote
        arguments = ["--upstream", upstream, "--state", str(state)]
        for text in wanted.texts:
            arguments += ["--fault", text]
        return Child([sys.executable, "-m", "tpupipe.faults.store_proxy", *arguments], {"token": token})

    with guarded(own, make, lambda _: _answers(state), timeout_s=timeout_s) as facts:
        if facts["token"] != token:
            raise UsageError(f"another store proxy runs in {own}, with faults of its own.", hint="give another root")
        yield StoreProxy(_endpoint_in(state))


def _parsed(faults: StoreFaults | str | Sequence[str]) -> StoreFaults:
    if isinstance(faults, StoreFaults):
        return faults
    return StoreFaults.parse(*([faults] if isinstance(faults, str) else faults))


def _endpoint_in(state: Path) -> str:
    return str(json.loads(state.read_text())["endpoint"])


def _answers(state: Path) -> bool:
    """Whether the proxy that wrote ``state`` is up."""
    try:
        with _open(_endpoint_in(state) + CONTROL_PATH, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _main(arguments: Sequence[str] | None = None) -> int:
    kinds = "\n".join(f"  {kind:<12} {meaning}" for kind, meaning in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tpupipe.faults.store_proxy",
        description="A proxy on 127.0.0.1 in front of a Cloud Storage emulator that fails as told.",
        epilog=f"KIND@OPERATION,key=value\noperations: {', '.join(OPERATIONS)}\nkinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="http://host:port of the store")
    parser.add_argument(
        "--state", required=True, type=Path, metavar="FILE", help="JSON file that says where it listens"
    )
    parser.add_argument("--fault", action="append", default=[], metavar="FAULT", help="may be repeated")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    given = parser.parse_args(arguments)
    try:
        upstream, faults = Endpoint(given.upstream).base_url, StoreFaults.parse(*given.fault)
    except UsageError as error:
        parser.error(str(error))

    from tpupipe.faults.store_server import serve

    with contextlib.suppress(KeyboardInterrupt):
        serve(upstream, given.state, faults, port=given.port)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
