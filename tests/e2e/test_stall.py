"""Promise 7: what makes no progress dumps its stacks, counts as a failure, and the run goes on or says why not."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Runner
from tpupipe.errors import BudgetExceededError
from tpupipe.run import RunResult


def stacks(runner: Runner) -> list[bytes]:
    return [runner.store.read(i.name) for i in runner.store.list(runner.paths("a").stage("fit") + "/stalls/")]


@pytest.mark.soak  # tests/stages/test_stall.py has the bounds of each phase
def test_a_hanging_step_and_a_hanging_restore_are_ended_told_and_done_again(
    runner: Runner, undisturbed: RunResult
) -> None:
    """Rank 0 hangs before step 6, and rank 1 in the restore that follows: the stacks are kept, the answer is the same."""
    result = runner(
        "a",
        faults=("hang@train.step=6,rank=0", "hang@restore.start=5,rank=1"),
        job={"score": False},
        stages={"fit": {"stall_timeout_s": 4, "restore_timeout_s": 5}},
    )
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    failures = [e["failure"] for e in runner.events("a", "failure")]
    assert [f["kind"] for f in failures] == ["stalls", "stalls"]
    assert "no progress in a step (stall_timeout_s 4)" in failures[0]["what"]
    assert "no progress while restoring (restore_timeout_s 5)" in failures[1]["what"]
    assert failures[1]["step"] == 5
    assert len([s for s in stacks(runner) if b"inject.py" in s]) >= 2


@pytest.mark.soak
def test_an_inference_worker_that_hangs_while_it_starts_is_ended_and_started_again(runner: Runner) -> None:
    """Once its parameters are loaded: charged to stalls with its stacks, and each row is there once."""
    runner(
        "a",
        faults=("hang@params.loaded,rank=1",),
        job={"steps": 1, "every": 1},
        stages={"scores": {"restore_timeout_s": 4}},
    )
    [failure] = [e["failure"] for e in runner.events("a", "failure")]
    assert failure["kind"] == "stalls"
    assert failure["what"] == "inference worker 1: no progress while restoring (restore_timeout_s 4)"
    assert b"inject.py" in runner.store.read(failure["stacks"].removeprefix("gs://tests/runs/"))
    assert runner.outputs("a", "scores")["id"] == list(range(100))


@pytest.mark.soak
def test_an_init_that_hangs_twice_is_not_started_a_third_time(runner: Runner) -> None:
    """Within the budget, but the same stall at the same step: the run ends, and the error leads to stacks and log."""
    with pytest.raises(
        BudgetExceededError, match=r"init or compilation \(compile_timeout_s 3\) \(repeats at step 0"
    ) as e:
        runner("a", job={"break_at": "init"}, stages={"fit": {"compile_timeout_s": 3}})
    assert (e.value.data["kind"], e.value.data["failures"]) == ("stalls", 2)
    assert e.value.data["stacks"] in str(e.value)
    assert e.value.data["log"] in str(e.value)
    name = e.value.data["stacks"].removeprefix("gs://tests/runs/")
    assert b"hang_for_ever" in runner.store.read(name)
    assert runner.events("a", "at") == []
