"""A proxy that fails as told in front of the real server, and real racing processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpupipe.faults.store_proxy import StoreProxy

# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture
def asked(proxy: StoreProxy) -> Callable[[], int]:
    """How many requests reached the proxy since the last call."""
    seen = 0

    def since() -> int:
        nonlocal seen
        before, seen = seen, sum(proxy.counts().requests.values())
        return seen - before

    since()
    return since


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
