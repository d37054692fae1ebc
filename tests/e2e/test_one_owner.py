"""Promise 5 with a real driver that is paused, loses its run to another one, and wakes up."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import ALL_IDS, REPOSITORY, Runner, nothing_is_held, same_answer
from tests.processes import killed_at_the_end, until
from tpupipe.checkpoint.verify import list_checkpoints, read_commit
from tpupipe.run import RunResult
from tpupipe.stages.units import read_committed
from tpupipe.store.lease import read_standing

ONE_HOST = {"topology": "2x2", "chips_per_vm": None}  # there are two such slices: the paused driver keeps one
LATE = "stages/fit/checkpoints/0000000010-000001"  # what the paused driver wrote of the checkpoint of step 10


def training_processes(runner: Runner) -> list[psutil.Process]:
    """The processes on the warm cluster that train."""
    found = []
    for process in psutil.Process(runner.world.cluster.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "TrainWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def objects(runner: Runner) -> dict[str, str]:
    """Name in the run's folder to generation."""
    root = runner.paths("a").root + "/"
    return {info.name.removeprefix(root): info.generation for info in runner.store.list(root)}


@pytest.fixture
def runner(make_runner: Callable[[str], Runner], workers_too: bool) -> Runner:
    return make_runner(f"paused-{workers_too}-".lower())


@pytest.fixture
def driver(runner: Runner, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the small job on a slice of one host as a process; whatever is left of it goes on and is killed."""
    config = tmp_path / "world.yaml"
    config.write_text(runner.config({}, cluster=ONE_HOST).model_dump_json(exclude_none=True))  # JSON is YAML
    with killed_at_the_end() as started:

        def begin(*arguments: str) -> subprocess.Popen[str]:
            number = len(started)
            with (tmp_path / f"out{number}").open("w") as out, (tmp_path / f"log{number}").open("w") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.e2e.small",
                        "-c",
                        str(config),
                        "--run",
                        runner.name + "a",
                        *arguments,
                    ],
                    cwd=REPOSITORY,
                    env=runner.world.environment(),
                    stdout=out,
                    stderr=log,
                    text=True,
                )
            started.append(process)
            return process

        yield begin


@pytest.mark.parametrize(
    "workers_too",
    [
        pytest.param(False, id="the-driver"),
        pytest.param(True, id="driver-and-workers", marks=pytest.mark.soak),  # the same refusals, later
    ],
)
def test_a_paused_driver_that_lost_its_run_is_refused(
    runner: Runner,
    undisturbed: RunResult,
    driver: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    workers_too: bool,
) -> None:
    """Paused after the checkpoint of step 5, woken when another driver has the run: exit 4, and nothing it wrote counts.

    Workers that were not paused with their driver go on by themselves, and are refused without it.
    """
    logs = [tmp_path / "log0", tmp_path / "log1"]
    zombie = driver("--json", "--fault", "slow@train.step=6,seconds=20")
    until(lambda: "checkpoint of step 5 committed" in logs[0].read_text(), told=lambda: logs[0].read_text()[-3000:])
    workers = training_processes(runner)
    assert len(workers) == 1
    # Workers first: what is paused cannot commit before the other driver has the run. They go on when it has.
    for process in (*workers, zombie):
        process.send_signal(signal.SIGSTOP)
    try:
        successor = driver("--json", "--take-over")
        until(lambda: read_standing(runner.store, runner.paths("a")).epoch == 2, told=logs[1].read_text)
        if not workers_too:
            workers[0].send_signal(signal.SIGCONT)
        assert successor.wait(120) == 0, logs[1].read_text()[-2000:]
        if not workers_too:
            until(lambda: any(name.startswith(LATE) for name in objects(runner)), told=logs[0].read_text)
            until(lambda: not any(w.is_running() for w in workers), told=logs[0].read_text)
        before = objects(runner)
    finally:
        for process in (*workers, zombie):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    assert zombie.wait(60) == 4, logs[0].read_text()[-2000:]
    assert f"FencedError: this driver no longer owns run small/{runner.name}a (lease 1)" in logs[0].read_text()
    told = json.loads((tmp_path / "out0").read_text())
    assert (told["status"], told["error_kind"], told["exit_status"]) == ("failed", "FencedError", 4)

    # What it wrote: its last beat, events, and at most the arrays of a checkpoint that has no record.
    after = objects(runner)
    changed = {name for name in after if after[name] != before.get(name)}
    assert before.keys() <= after.keys()
    assert {name for name in changed if not name.startswith(("lease/000001.", "events/000001-", LATE))} == set()
    committed = [found for found in list_checkpoints(runner.store, runner.paths("a"), "fit") if found.committed]
    assert [(c.step, read_commit(runner.store, c).lease_epoch) for c in committed] == [(10, 2), (5, 1)]
    units = list(runner.store.list(runner.paths("a").units("scores") + "/"))
    assert {read_committed(runner.store, info).footer.lease_epoch for info in units} == {2}

    # What is read is what a run without all this gives.
    result = json.loads((tmp_path / "out1").read_text())
    assert json.loads(runner.store.read(runner.paths("a").result)) == result
    assert (result["attempt"], result["stages"]["fit"]["resumed_from"]) == (2, 5)
    same_answer(undisturbed, RunResult(**result))
    assert runner.order("a") == ALL_IDS
    scores = runner.outputs("a", "scores")
    assert scores["id"] == list(range(100))
    assert scores["score"] == [2.0 * i for i in range(100)]
    nothing_is_held(runner.world)
