"""One owner, with real drivers: processes of ``tpupipe run`` that race for one run, and a second one that comes later.

They are held right after they got the lease, by a fault, so no cluster is needed; a winner is ended by its process id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.places import Place
from tests.processes import killed_at_the_end, until
from tpupipe.errors import ObjectNotFoundError
from tpupipe.store.layout import RunPaths, parse_lease
from tpupipe.store.lease import Standing, read_standing

JOB = """
from tpupipe import Files, Job, Preprocess
def build():
    return Job("raced", [Preprocess("p", Files({pattern!r}), map=dict)])
"""
HANG = ("--fault", "hang@run.lease_acquired")
FORKED_PAIRS = 9  # on each backend, with a barrier

# Imports once, then forks two drivers for each line it reads. Both call the command line's own entry point; they wait for
# each other at the moment at which they would take the lease. Tells which ended first and how, then the same of the other.
SERVER = """
import json, os, signal, sys, time
import google_crc32c, requests, tenacity, urllib3, google.auth.exceptions
import tpupipe.cluster.connect, tpupipe.cluster.reservation, tpupipe.run
from tpupipe.cli import app

def drive(arguments, log, arrived, go):
    acquire = tpupipe.run.acquire
    def together(*positional, **named):
        os.write(arrived, b"x")
        os.read(go, 1)  # returns in both at once, when the parent closes its end
        return acquire(*positional, **named)
    tpupipe.run.acquire = together
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["tpupipe", *arguments]
    app()

def ended(children, timeout_s):
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return {"driver": children.index(pid), "pid": pid, "status": os.waitstatus_to_exitcode(status)}
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return {"hung": children}

for line in sys.stdin:
    arguments, logs = json.loads(line)
    (waiting, arrived), (go, start) = os.pipe(), os.pipe()
    children = []
    for log in logs:
        child = os.fork()
        if child == 0:
            os.close(start)
            try:
                drive(arguments, log, arrived, go)
            except SystemExit as end:
                status = end.code
            except BaseException:
                import traceback
                traceback.print_exc()
                status = 99
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    os.close(arrived)
    for _ in children:
        os.read(waiting, 1)  # empty, and at once, when one ended before
    os.close(waiting)
    os.close(go)
    os.close(start)
    print(json.dumps({"children": children}), flush=True)
    print(json.dumps(ended(children, 30)), flush=True)
    print(json.dumps(ended(children, 30)), flush=True)
"""


@dataclass(frozen=True)
class Raced:
    """A job and a world for drivers that get no further than their lease.

    Args:
        place: Where its store is.
        folder: Configuration, logs and the job's module.
    """

    place: Place
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), root])}
        return {**known, "STORAGE_EMULATOR_HOST": self.place.endpoint} if self.place.endpoint else known

    def arguments(self, run: str, *more: str) -> list[str]:
        return ["run", "raced_job", "-c", str(self.folder / "world.yaml"), "--run", run, *more]

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def standing(self, run: str) -> Standing | None:
        return read_standing(self.place.open(), RunPaths("raced", run))

    def epochs(self, run: str) -> list[int]:
        names = [info.name for info in self.place.open().list(RunPaths("raced", run).leases + "/")]
        return [epoch for name in names if (epoch := parse_lease(name)) is not None]

    def result(self, run: str) -> dict[str, object] | None:
        try:
            found: dict[str, object] = json.loads(self.place.open().read(RunPaths("raced", run).result))
        except ObjectNotFoundError:
            return None
        return found


@pytest.fixture
def raced(place: Place, tmp_path: Path) -> Raced:
    (tmp_path / "input.txt").write_text("a line\n")
    (tmp_path / "raced_job.py").write_text(JOB.format(pattern=str(tmp_path / "input.txt")))
    (tmp_path / "world.yaml").write_text(
        f"store: {{uri: '{place.uri}'}}\ncluster: {{kind: fake, generation: v6e, topology: 2x2}}\n"
    )
    return Raced(place, tmp_path)


@pytest.fixture
def drive(raced: Raced) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an unmodified driver with its output in a log of its own; whatever is left of it is killed at the end."""
    with killed_at_the_end() as started:

        def begin(log: str, run: str, *arguments: str) -> subprocess.Popen[str]:
            with (raced.folder / log).open("w") as output:
                driver = subprocess.Popen(
                    [str(Path(sys.executable).with_name("tpupipe")), *raced.arguments(run, *arguments)],
                    cwd=raced.folder,
                    env=raced.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            started.append(driver)
            return driver

        yield begin


def is_told_who_holds_the_run(said: str, run: str, pid: int) -> None:
    """Holder, host, start, last beat, and how to take over."""
    assert f"RunHeldError: run raced/{run} is held by another driver" in said
    assert f"{socket.gethostname()}, process {pid} (" in said
    assert "run raced_job -c" in said
    assert said.count(" UTC") == 2
    assert "started 20" in said
    assert "last beat 20" in said
    assert "--take-over" in said


def test_drivers_at_the_same_instant_have_one_winner_always(raced: Raced) -> None:
    """Nine pairs, on a new run and over the lease of a killed driver in turn: the other one exits 4 and knows why."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=raced.folder,
        env=raced.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout
    with server:
        for pair in range(FORKED_PAIRS):
            run, epoch = f"r{pair // 2}", pair % 2 + 1
            logs = [f"pair{pair}-{me}" for me in (0, 1)]
            order = [raced.arguments(run, *HANG), [str(raced.folder / log) for log in logs]]
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
            children = json.loads(server.stdout.readline())["children"]
            loser = json.loads(server.stdout.readline())
            assert "hung" not in loser, "both hold the run"
            winner = children[1 - loser["driver"]]
            try:
                assert loser["status"] == 4, raced.log(logs[loser["driver"]])
                is_told_who_holds_the_run(raced.log(logs[loser["driver"]]), run, winner)
                standing = raced.standing(run)
                assert standing is not None
                assert (standing.owner.pid, standing.epoch, standing.released) == (winner, epoch, False)
                assert raced.epochs(run) == list(range(1, epoch + 1))
            finally:
                os.kill(winner, signal.SIGKILL)
            held = json.loads(server.stdout.readline())
            assert (held["pid"], held["status"]) == (winner, -signal.SIGKILL), "it was still there"
        server.stdin.close()
        assert server.wait(60) == 0


def test_two_plain_commands_started_together_have_one_winner(
    raced: Raced, drive: Callable[..., subprocess.Popen[str]]
) -> None:
    """The command line as it is, twice at once: one exits 4, the other has the run."""
    drivers = [drive(f"log{me}", "a", *HANG) for me in (0, 1)]
    until(lambda: any(driver.poll() is not None for driver in drivers))
    (loser,) = [me for me in (0, 1) if drivers[me].poll() is not None]
    winner = drivers[1 - loser]
    assert drivers[loser].returncode == 4, raced.log(f"log{loser}")
    is_told_who_holds_the_run(raced.log(f"log{loser}"), "a", winner.pid)
    standing = raced.standing("a")
    assert standing is not None
    assert (standing.owner.pid, standing.epoch) == (winner.pid, 1)
    assert winner.poll() is None


@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_a_second_driver_is_refused_and_one_that_insists_has_the_run(
    raced: Raced, drive: Callable[..., subprocess.Popen[str]]
) -> None:
    """Exit 4 as text and as JSON; with --take-over it is the first one that ends with 4 and leaves the result alone."""
    first = drive("first", "a", *HANG)
    until(lambda: "attempt 1" in raced.log("first"))
    assert drive("text", "a").wait(60) == 4
    is_told_who_holds_the_run(raced.log("text"), "a", first.pid)
    assert drive("json", "a", "--json").wait(60) == 4
    told = next(json.loads(line) for line in raced.log("json").splitlines() if line.startswith("{"))
    assert (told["error_kind"], told["exit_status"]) == ("RunHeldError", 4)
    assert f"process {first.pid}" in told["error"]
    assert raced.epochs("a") == [1]

    second = drive("second", "a", "--take-over", *HANG)
    until(lambda: "attempt 2" in raced.log("second"))
    standing = raced.standing("a")
    assert standing is not None
    assert (standing.owner.pid, standing.epoch) == (second.pid, 2)
    first.terminate()
    assert first.wait(60) == 4, raced.log("first")
    assert "FencedError: this driver no longer owns run raced/a (lease 1)" in raced.log("first")
    assert raced.result("a") is None, "how the first one ended is not how the run stands"
    second.terminate()
    assert second.wait(60) == 130, raced.log("second")
    result = raced.result("a")
    assert result is not None
    assert (result["attempt"], result["status"]) == (2, "interrupted")


@pytest.mark.soak
@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_the_lease_of_a_paused_driver_expires(raced: Raced, drive: Callable[..., subprocess.Popen[str]]) -> None:
    """Paused for less than 30 s it keeps the run; after that the next driver has it without asking."""
    first = drive("first", "a", *HANG)
    until(lambda: "attempt 1" in raced.log("first"))
    first.send_signal(signal.SIGSTOP)
    assert drive("early", "a").wait(60) == 4
    taken: list[subprocess.Popen[str]] = []

    def taken_over() -> bool:
        driver = drive("next", "a", *HANG)
        until(lambda: driver.poll() is not None or "attempt 2" in raced.log("next"))
        taken.append(driver)
        return driver.poll() is None

    last = raced.standing("a")
    assert last is not None
    until(lambda: time.time() > last.said_s + 25)
    assert drive("late", "a").wait(60) == 4, "25 s are not enough"
    until(taken_over)
    assert time.time() > last.said_s + 30
    first.send_signal(signal.SIGCONT)
    until(lambda: "is lost" in raced.log("first"))
    first.terminate()
    assert first.wait(60) == 4, raced.log("first")
    taken[-1].terminate()
    assert taken[-1].wait(60) == 130
