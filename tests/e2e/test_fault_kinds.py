"""Every kind of fault in a whole run: it does what it says, is in the events, and costs no answer."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.harness import REPOSITORY, Runner, same_answer
from tpupipe.errors import BudgetExceededError
from tpupipe.run import RunResult


def fired(runner: Runner, action: str) -> dict[str, Any]:
    """The event of the one fault of that action; it names its place and process."""
    (event,) = [e for e in runner.events("a", "fault") if e["action"] == action]
    assert event["text"].startswith(f"{action}@{event['point']}")
    assert int(event["pid"]) > 0
    return event


@pytest.mark.soak
def test_a_drained_host_saves_and_goes_on_elsewhere(runner: Runner, undisturbed: RunResult) -> None:
    """A notice of 15 s at step 4 of 10: what was done is saved although no save was due; a new reservation resumes it."""
    faults = ("drain-host@train.step=4,rank=1,deadline_s=15", "slow@train.step=6,rank=0,seconds=4")
    result = runner("a", faults=faults)
    same_answer(undisturbed, result)
    assert fired(runner, "drain-host")["rank"] == "1"
    (effect,) = runner.events("a", "fault_effect")
    assert effect["deadline_s"] == 15
    assert [e["failure"]["kind"] for e in runner.events("a", "failure")] == ["preemptions"]
    starts = [e["step"] for e in runner.events("a", "train_start")]
    assert starts[0] == 0
    assert starts[1] > 6, "saved at the notice, not only at step 5"
    assert [e["lost_steps"] for e in runner.events("a", "recovered")] == [0]
    assert len([e for e in runner.events("a", "say") if "reserved" in e["message"]]) == 2


@pytest.mark.soak
def test_a_host_that_is_drained_as_training_ends_is_left_before_inference(
    runner: Runner, undisturbed: RunResult
) -> None:
    """Ray would place nothing on it and say nothing: the slice is given back first, as a preemption."""
    result = runner("a", faults=("drain-host@train.trained,rank=1,deadline_s=60",))
    same_answer(undisturbed, result)
    assert runner.outputs("a", "scores")["id"] == list(range(100))
    [failure] = [e["failure"] for e in runner.events("a", "failure")]
    assert failure["kind"] == "preemptions"
    assert len([e for e in runner.events("a", "say") if "reserved" in e["message"]]) == 2


@pytest.mark.soak
def test_a_damaged_checkpoint_and_a_lost_slice(runner: Runner, undisturbed: RunResult) -> None:
    """At step 8 the checkpoint of step 6 is damaged and all hosts are lost: it is told, step 3 is restored, 5 are lost.

    The process that has just restored is killed once, too.
    """
    faults = (
        "slow@train.step=8,rank=1,seconds=5",  # the checkpoint of step 6 is committed by then
        "corrupt-checkpoint@train.step=8,rank=1,how=flip",
        "lose-slice@train.step=8,rank=1",
        "kill-worker@restore.done=3,stage=fit,rank=0",
    )
    before = runner.world.hosts("fake-v6e-2x4-0")
    result = runner("a", job={"every": 3}, faults=faults)
    same_answer(undisturbed, result)
    assert runner.outputs("a", "scores")["id"] == list(range(100))
    damage, loss = runner.events("a", "fault_effect")
    assert (damage["step"], damage["how"]) == (6, "flip")
    assert (loss["slice"], loss["hosts"]) == ("fake-v6e-2x4-0", 2)
    assert not set(before) & set(runner.world.hosts("fake-v6e-2x4-0")), "both hosts are other ones now"
    told = runner.events("a", "checkpoint_damaged")
    assert {e["step"] for e in told} == {6}
    assert damage["object"].startswith(told[0]["folder"])
    assert [e["step"] for e in runner.events("a", "train_start")] == [0, 3, 3]
    assert [e["failure"]["kind"] for e in runner.events("a", "failure")] == ["slice_failures", "worker_failures"]
    fired(runner, "kill-worker")
    assert [e["lost_steps"] for e in runner.events("a", "restored") if "lost_steps" in e] == [5]
    assert [e["lost_steps"] for e in runner.events("a", "recovered")] == [5]
    assert [e["step"] for e in runner.events("a", "restored") if "seconds" in e] == [3]


@pytest.mark.soak  # nine starts of a driver; the drill's plan has the same kills
def test_the_driver_killed_at_each_of_its_places_in_a_store_that_refuses(
    runner: Runner, undisturbed: RunResult
) -> None:
    """One run, killed at one place after the other; the last command finishes it with the same answer.

    One request of twenty is refused all the while, for driver and workers. Each kill is in the run's events although
    nothing of the driver survived it; what the store refused is told by the attempt that ends.
    """
    refuse = "503@any,rate=0.05,seed=9"
    config = runner.folder / "driver.yaml"
    config.write_text(runner.config({}).model_dump_json(exclude_none=True))
    command = [sys.executable, "-m", "tests.e2e.small", "-c", str(config), "--run", runner.name + "a"]
    places = (
        "run.identity",
        "run.lease_acquired",
        "run.reserved=2",
        "stage.manifest=ids",
        "stage.manifest=fit",
        "stage.done=fit",
        "stage.manifest=scores",
        "run.result",
    )
    for place in places:
        killed = subprocess.run(
            [*command, "--fault", f"kill-driver@{place}", "--store-fault", refuse],
            cwd=REPOSITORY,
            env=runner.world.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert killed.returncode == -9, (place, killed.stderr[-2000:])
    result = runner("a", store_faults=[refuse])
    same_answer(undisturbed, result)
    assert result.attempt == len(places) + 1
    assert runner.outputs("a", "scores")["id"] == list(range(100))
    assert [e["text"].partition("@")[2] for e in runner.events("a", "fault")] == list(places)
    (told,) = runner.events("a", "store_faults")
    assert told["fired"][refuse] > 0
    assert sum(told["requests"].values()) > told["fired"][refuse]


@pytest.mark.soak
def test_a_process_that_always_dies_at_one_step_is_given_up(runner: Runner) -> None:
    """Steps are short, so the first death does not tell the step; the second does, and the third is the same."""
    with pytest.raises(BudgetExceededError, match="repeats at step 7: not retried"):
        runner("a", faults=("kill-worker@train.step=7,rank=1,times=9",), job={"score": False})
    steps = [e["failure"]["step"] for e in runner.events("a", "failure")]
    assert steps in ([None, 7, 7], [7, 7]), "the latter where this machine takes half a second for a step"
    assert len(runner.events("a", "fault")) == len(steps)
