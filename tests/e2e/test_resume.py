"""Promise 1 (same answer) and 2 (exactly once), with real processes killed by real signals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.e2e.harness import ALL_IDS, REPOSITORY, Runner, same_answer
from tpupipe.checkpoint.verify import list_checkpoints, read_commit
from tpupipe.errors import InterruptedRunError
from tpupipe.run import RunResult

FIT_ONLY = {"score": False}  # for what is about training


def test_an_undisturbed_run_feeds_every_row_in_order_and_scores_it_once(
    undisturbed: RunResult, make_runner: Callable[[str], Runner]
) -> None:
    """100 ids, batch 10, 10 steps: step n is fed ids 10n to 10n+9, and each id is scored once, in input order."""
    runner = make_runner("reference-")
    assert runner.order("a") == ALL_IDS
    scores = runner.outputs("a", "scores")
    assert scores["id"] == list(range(100))
    assert scores["score"] == [2.0 * i for i in range(100)]
    assert undisturbed.stages["fit"]["done"] == undisturbed.stages["fit"]["total"] == 10


def test_a_killed_worker_resumes_at_the_exact_row(runner: Runner, undisturbed: RunResult) -> None:
    """Killed at step 6 with the last checkpoint at step 5, the resumed ids are exactly 50 to 99."""
    # Rank 1 waits at that step until rank 0 dies, which is when the save of step 5 is committed.
    faults = ("slow@train.step=6,rank=1,seconds=60", "kill-worker@save.after_commit=5,rank=0")
    result = runner("a", faults=faults, job=FIT_ONLY)
    same_answer(undisturbed, result)
    assert runner.order("a") == ALL_IDS
    firsts = [e["metrics"]["first_id"] for e in runner.events("a", "metrics") if e["step"] == 6]
    assert firsts == [50.0], "the first step after the restore is fed id 50 first"
    restored = runner.events("a", "restored")
    assert [e["step"] for e in restored if "seconds" in e] == [5]


@pytest.mark.soak
def test_kills_around_a_save_leave_exactly_the_committed_files(runner: Runner, undisturbed: RunResult) -> None:
    """Killed between arrays and commit, then again in the restore: the commits list what is there."""
    faults = (
        "kill-worker@save.arrays_written=5,rank=0",
        "kill-worker@save.before_commit=10,rank=0",
        "kill-worker@restore.start=5,rank=1",
    )
    result = runner("a", faults=faults, job=FIT_ONLY)
    same_answer(undisturbed, result)
    assert len(runner.events("a", "fault")) == 3
    everything = list_checkpoints(runner.store, runner.paths("a"), "fit")
    assert not all(found.committed for found in everything), "what the dead starts left is still there, by itself"
    for found in (f for f in everything if f.committed):
        commit = read_commit(runner.store, found)
        listed = {name for name in found.objects if name.startswith(commit.arrays + "/")}
        assert listed == {o.name for o in commit.objects}


def test_killed_drivers_lose_nothing(runner: Runner, undisturbed: RunResult) -> None:
    """The driver is killed in preprocess (while Ray Data has no row for it), training and inference.

    The same command goes on.
    """
    config = runner.folder / "world.yaml"
    config.write_text(runner.config({}).model_dump_json(exclude_none=True))  # JSON is YAML
    command = [sys.executable, "-m", "tests.e2e.small", "-c", str(config), "--run", runner.name + "a", "--json"]
    for faults in (
        ["kill-driver@unit.before_commit=0,stage=ids"],
        ["kill-driver@save.after_commit=5"],
        ["kill-driver@unit.after_commit=3,stage=scores"],
    ):
        killed = subprocess.run(
            [*command, *(part for fault in faults for part in ("--fault", fault))],
            cwd=REPOSITORY,
            env=runner.world.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert killed.returncode == -9, killed.stderr[-2000:]
    result = runner("a")
    same_answer(undisturbed, result)
    scores = runner.outputs("a", "scores")
    assert scores["id"] == list(range(100))
    starts = [e["step"] for e in runner.events("a", "train_start")]
    assert starts[:2] == [0, 5]
    assert result.attempt == 4
    lost, back = runner.events("a", "driver_lost"), runner.events("a", "driver_recovered")
    assert [(e["attempt"], e["stage"]) for e in lost] == [(1, "ids"), (2, "fit"), (3, "scores")]
    assert [(e["attempt"], e["stage"]) for e in back] == [(1, "ids"), (2, "fit"), (3, "scores")]
    assert back[1]["lost_steps"] == lost[1]["step"] - 5
    assert all(0 < e["seconds"] < 120 for e in back)
    compiled = [e["from_cache"] for e in runner.events("a", "compiling") if e["stage"] == "fit"]
    assert compiled == [False, False, True, True], "the second driver's processes compile nothing"


@pytest.mark.soak
def test_another_number_of_hosts_goes_on_at_the_same_row(runner: Runner) -> None:
    """Saved by 2 hosts at row 40 of 100, finished by 1: rows 40 to 99 are fed once each."""
    job = {**FIT_ONLY, "every": 4}
    with pytest.raises(InterruptedRunError):
        interrupt_at(runner, "a", 4, job)
    result = runner("a", job=job, cluster={"topology": "2x2", "chips_per_vm": None})
    assert 4 <= result.stages["fit"]["resumed_from"] < 10
    assert runner.order("a") == ALL_IDS


def interrupt_at(runner: Runner, name: str, step: int, job: dict[str, object]) -> None:
    """SIGTERM to this very driver once the checkpoint of ``step`` is committed; the next step waits for it."""
    import os
    import signal
    import threading

    from tpupipe.store.layout import COMMIT_NAME

    def watch() -> None:
        found = runner.paths(name).checkpoints("fit") + "/"
        while not any(i.name.endswith(COMMIT_NAME) for i in runner.store.list(found)):
            if stop.wait(0.1):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    stop = threading.Event()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        runner(name, job=job, faults=(f"slow@train.step={step},seconds=5",))
    finally:
        stop.set()
        thread.join()


@pytest.mark.soak
def test_sigterm_saves_and_a_damaged_newest_checkpoint_is_passed_over(runner: Runner, undisturbed: RunResult) -> None:
    """SIGTERM saves the step it interrupts; with that checkpoint damaged, the run goes on from the one before it.

    Nothing is deleted on the way, and the damage is told.
    """
    job = {**FIT_ONLY, "every": 3}
    with pytest.raises(InterruptedRunError) as interrupted:
        interrupt_at(runner, "a", 3, job)
    assert interrupted.value.exit_status == 130
    assert "--run" in interrupted.value.hint
    newest, *older = list_checkpoints(runner.store, runner.paths("a"), "fit")
    assert newest.committed
    assert newest.step > 3
    assert [f.step for f in older] == [3]
    victim = max((n for n in newest.objects if "/d/" in n), key=lambda n: newest.objects[n].size)
    on_disk = runner.world.root / "gcs" / "tests" / "runs" / newest.folder / victim
    on_disk.write_bytes(on_disk.read_bytes()[:-7])
    result = runner("a", job=job)
    same_answer(undisturbed, result)
    assert result.stages["fit"]["resumed_from"] == 3
    assert [e["step"] for e in runner.events("a", "checkpoint_damaged")] == [newest.step]


@pytest.mark.soak
def test_a_busy_machine_does_not_change_the_order(runner: Runner, undisturbed: RunResult) -> None:
    """Beside busy processes: the same sample digest and parameters as without."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        busy = runner("a", job=FIT_ONLY)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    same_answer(undisturbed, busy)
