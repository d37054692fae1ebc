"""Processes that a test starts, and that do not outlive it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


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
