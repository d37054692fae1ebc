"""Runs one attempt of a run in a process of its own, bounded, with its output in files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_S = 45.0
_ERROR_CHARS = 1500


@dataclass(frozen=True)
class Ended:
    """How the process of an attempt ended.

    Args:
        exit_status: Its own; negative for a signal; ``None`` if it did not end in time and was stopped.
        result: The JSON object that it printed; empty if it printed none.
        began_s: When it was started, seconds since 1970.
        ended_s: When its end was seen.
        log: File of its stderr.
    """

    exit_status: int | None
    result: dict[str, Any]
    began_s: float
    ended_s: float
    log: Path

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s

    @property
    def error(self) -> str:
        """Its error: what the result names, else the end of the log."""
        if self.exit_status == 0:
            return ""
        if self.result.get("error"):
            return f"{self.result.get('error_kind', 'error')}: {self.result['error']}"[:_ERROR_CHARS]
        said = self.log.read_text(encoding="utf-8", errors="replace")
        return " | ".join(said.strip().splitlines()[-3:])[-_ERROR_CHARS:]


def run_attempt(arguments: Sequence[str], log: Path, timeout_s: float) -> Ended:
    """Runs ``tpupipe`` with these arguments to its end.

    Args:
        arguments: From the command on.
        log: File for its stderr; its stdout goes beside it, to ``.json``.
        timeout_s: Seconds after which it is stopped.
    """
    began = time.time()
    output = log.with_suffix(".json")
    with log.open("wb") as errors, output.open("wb") as printed:
        # A session of its own: Ctrl-C is handled here, and the child is then asked to end.
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "tpupipe", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=errors,
            start_new_session=True,
        )
        exit_status: int | None
        try:
            exit_status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_status = None
        finally:
            _stop(process)
    return Ended(exit_status, _result(output), began, time.time(), log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that has not ended: asked first, so that it gives its slice back."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _result(output: Path) -> dict[str, Any]:
    """The last line that is a JSON object; a driver that was killed printed none."""
    for line in reversed(output.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}
