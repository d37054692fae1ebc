"""Promise 6: however a run ends, nothing that it started is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import REPOSITORY, write_ids
from tests.processes import killed_at_the_end, until

CONFIG = """
store: {{uri: gs://tests/runs, embedded: true, root: "{root}"}}
cluster: {{kind: fake, generation: v6e, topology: 2x2, timeout_s: 60, cpus_per_host: 4}}
job: {{inputs: "{inputs}", steps: 4, every: 2, break_at: "{break_at}"}}
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run of the small job with a faked slice and a store of its own, marked so that all of it can be found."""
    with killed_at_the_end() as started:

        def begin(*arguments: str, break_at: str = "") -> subprocess.Popen[str]:
            config = tmp_path / f"world{len(started)}.yaml"
            inputs = write_ids(tmp_path / "in", 40)
            config.write_text(CONFIG.format(root=tmp_path / ".tpupipe", inputs=inputs, break_at=break_at))
            log = (tmp_path / f"log{len(started)}").open("w")
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.small", "-c", str(config), "--run", "a", *arguments],
                cwd=REPOSITORY,
                env={**os.environ, "TPUPIPE_TEST_MARK": str(tmp_path)},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append(process)
            return process

        yield begin
    for left in marked(tmp_path):
        left.kill()


def marked(mark: Path) -> list[psutil.Process]:
    """Live processes that inherited the mark from a run: its server, raylets, workers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TPUPIPE_TEST_MARK") == str(mark):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def nothing_is_left(mark: Path) -> None:
    until(lambda: not marked(mark), told=lambda: marked(mark))


def log_of(mark: Path, number: int = 0) -> str:
    return (mark / f"log{number}").read_text()


def until_said(words: str, process: subprocess.Popen[str], mark: Path) -> None:
    until(lambda: words in log_of(mark), of=process, told=lambda: log_of(mark)[-2000:])


@pytest.mark.soak
def test_a_users_exception_leaves_nothing(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Exit status 1, the job's own error on stderr, nothing left."""
    assert start(break_at="map").wait(150) == 1
    assert "the job's own mistake" in log_of(tmp_path)
    nothing_is_left(tmp_path)


def test_ctrl_c_leaves_nothing_and_says_how_to_resume(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Exit status 130."""
    process = start("--fault", "slow@train.step=2,seconds=6")
    until_said("checkpoint of step 2 committed", process, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130
    assert "--run a resumes" in log_of(tmp_path)
    nothing_is_left(tmp_path)


@pytest.mark.soak
def test_a_request_to_stop_before_the_first_step_is_heard(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The job's ``init`` takes for ever: SIGTERM ends that at once, for there is nothing to save."""
    process = start(break_at="init")
    until((tmp_path / "hangs").exists, of=process, told=lambda: log_of(tmp_path)[-2000:])
    process.terminate()
    asked = time.monotonic()
    assert process.wait(90) == 130, log_of(tmp_path)[-2000:]
    assert time.monotonic() - asked < 60, "no time-out was waited for"
    assert "stopping before the first step (SIGTERM)" in log_of(tmp_path)
    assert "--run a resumes" in log_of(tmp_path)
    nothing_is_left(tmp_path)


@pytest.mark.soak
def test_a_killed_driver_and_success_leave_nothing_and_lose_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """SIGKILL in training: all processes end by themselves; the same command starts at step 3 of 4 and finishes."""
    process = start("--fault", "slow@train.step=2,seconds=60")
    until_said("checkpoint of step 2 committed", process, tmp_path)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    nothing_is_left(tmp_path)
    assert start().wait(150) == 0, log_of(tmp_path, 1)[-2000:]
    assert "from the checkpoint of step 2" in log_of(tmp_path, 1)
    nothing_is_left(tmp_path)
