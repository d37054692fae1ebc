"""Processes that a test starts, which do not outlive it, and waiting for what they do."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def killed_at_the_end() -> Iterator[list[subprocess.Popen[str]]]:
    """A list for processes; those in it that still live, paused or not, are killed on the way out."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def until(
    condition: Callable[[], object],
    *,
    timeout_s: float = 90,
    of: subprocess.Popen[str] | None = None,
    told: Callable[[], object] = lambda: "waited in vain",
) -> None:
    """Waits for what will be: the bound is a broken program's, not a slow machine's.

    Args:
        condition: What is waited for.
        timeout_s: Seconds after which the test fails.
        of: The process that does it; the test fails when that ends before.
        told: What is said of a failure, the end of a log for example.
    """
    ends = time.monotonic() + timeout_s
    while not condition():
        assert of is None or of.poll() is None or condition(), told()
        assert time.monotonic() < ends, told()
        time.sleep(0.05)
