"""What the measurements share: a world of their own, bounded child processes, the shape of the work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpupipe.cluster.connect import cluster_down, cluster_up
from tpupipe.cluster.fake import FakeClusterSpec
from tpupipe.hardware.slices import SliceSpec
from tpupipe.local.server import embedded_store
from tpupipe.stop import terminated_as_interrupted

REPOSITORY = Path(__file__).resolve().parents[1]
SLICE = SliceSpec("v6e", "2x4", chips_per_vm=4)
CPUS_PER_HOST = 8
LOCAL_ROOT = ".tpupipe"
ENDED_S = 10.0
NOT_QUIET = "The machine was busy with other work (or does not say): do not compare these numbers, repeat when quiet."


@dataclass(frozen=True)
class Work:
    """What every contender does: the same model, rows, batch size, steps and saves.

    Args:
        steps: Optimiser steps.
        save_every: Steps between saves; rates are taken from the first save to the last.
        batch_size: Rows of a global batch.
        width, layers, heads, seq_len, seed: Of the model, as in ``jobs.stdlib_lm``.
    """

    steps: int = 120
    save_every: int = 20
    batch_size: int = 32
    width: int = 64
    layers: int = 2
    heads: int = 4
    seq_len: int = 128
    seed: int = 0

    @property
    def interval_rows(self) -> int:
        """Rows from one save to the next."""
        return self.save_every * self.batch_size

    def rate(self, measured: Measured) -> float:
        """Rows per second over all intervals."""
        return self.interval_rows * len(measured.intervals_s) / measured.seconds

    def best_rate(self, measured: Measured) -> float:
        """Rows per second of the fastest interval: the one in which the machine did least else."""
        return self.interval_rows / min(measured.intervals_s)

    def to_json(self) -> str:
        """What the peers' processes are started with."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Reads what ``to_json`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Measured:
    """One contender, once.

    Args:
        intervals_s: Seconds from the end of one save to the end of the next: the steps between and the wait for one save.
        blocked_s: Of all intervals, seconds the loop waited for saves.
        startup_s: From the call that starts the training to the end of the first step.
        loss: Of the last step, to see that the same was computed.
    """

    intervals_s: Sequence[float]
    blocked_s: float
    startup_s: float
    loss: float

    @property
    def seconds(self) -> float:
        """All intervals."""
        return sum(self.intervals_s)


class Deadline:
    """One bound for the whole measurement."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; never below one, so that a time-out can be made of it."""
        return max(1.0, self._ends - time.monotonic())


class BenchmarkError(RuntimeError):
    """A measurement could not be taken; the message ends with the child's last lines."""


@dataclass(frozen=True)
class World:
    """A faked slice and an embedded store in a folder of their own.

    Args:
        base: The folder; everything below it is removed at the end.
        address: Ray's address.
        endpoint: URL of the embedded Cloud Storage.
    """

    base: Path
    address: str
    endpoint: str


@contextlib.contextmanager
def world() -> Iterator[World]:
    """Starts the slice and the store, and stops them however the measurement ends."""
    with tempfile.TemporaryDirectory(prefix="tpupipe-bench-") as folder, terminated_as_interrupted():
        base = Path(folder)
        with embedded_store(base / LOCAL_ROOT) as endpoint:
            try:
                state = cluster_up(FakeClusterSpec((SLICE,), CPUS_PER_HOST), base, LOCAL_ROOT, say)
                yield World(base, state.address, endpoint)
            finally:
                cluster_down(base / LOCAL_ROOT)


def run_python(
    commands: Sequence[Sequence[str]], *, timeout_s: float, variables: Sequence[Mapping[str, str]] = ()
) -> list[str]:
    """Runs Python processes side by side to their end; gives what each wrote to stdout.

    Args:
        commands: Arguments of the interpreter, per process.
        timeout_s: Bound for all of them.
        variables: Environment of each, beside this process's own.

    Raises:
        BenchmarkError: One failed or did not end in time. None is left running.
    """
    ends = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        processes = []
        for index, command in enumerate(commands):
            more = variables[index] if variables else {}
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            out = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and scripts
                [sys.executable, *command],
                cwd=REPOSITORY,
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_end, process)
            processes.append((process, out, log))
        outputs = []
        for process, out, log in processes:
            try:
                status = process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"Not done after {timeout_s:.0f} s:\n{_tail(log)}") from None
            if status:
                raise BenchmarkError(f"Ended with status {status}:\n{_tail(log)}")
            out.seek(0)
            outputs.append(out.read())
        return outputs


def last_json(output: str) -> dict[str, Any]:
    """The last line of an output that is a JSON object; libraries may print after it.

    Raises:
        BenchmarkError: There is none.
    """
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise BenchmarkError(f"No JSON object in the output:\n{output[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _tail(log: Any) -> str:
    log.seek(0)
    return "\n".join(log.read().splitlines()[-25:])


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends one process that we started, with its children; does nothing if it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)


def busy_share(seconds: float = 2.0) -> float | None:
    """Share of the machine's cores that is in use now, 0 to 1; ``None`` where the system does not say (no /proc)."""
    before = _ticks()
    if before is None:
        return None
    time.sleep(seconds)
    after = _ticks() or before
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return 1 - idle / total if total > 0 else None


def _ticks() -> list[int] | None:
    stat = Path("/proc/stat")
    return [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:]] if stat.exists() else None


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
