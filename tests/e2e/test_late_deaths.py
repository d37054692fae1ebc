"""A process that dies when everything is committed undoes nothing."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Runner
from tpupipe.run import RunResult


@pytest.mark.soak
def test_a_worker_that_dies_after_the_last_commit_does_not_undo_its_stage(
    runner: Runner, undisturbed: RunResult
) -> None:
    """Killed between the last checkpoint's record and the word to the driver: started again, with no step to do.

    Killed after that word, in training, or after the last unit's commit, in inference: the stage is done.
    """
    faults = (
        "kill-worker@save.after_commit=10,rank=0",
        "kill-worker@train.trained=10,rank=0",
        "kill-worker@unit.after_commit=9,stage=scores",
    )
    result = runner("a", faults=faults)
    assert len(runner.events("a", "fault")) == 3
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    assert [e["step"] for e in runner.events("a", "train_start")] == [0, 10]
    assert [e["step"] for e in runner.events("a", "checkpoint")] == [5], "step 10 is committed, and not saved twice"
    assert runner.outputs("a", "scores")["id"] == list(range(100))
    kinds = [(e["stage"], e["failure"]["kind"]) for e in runner.events("a", "failure")]
    assert kinds == [("fit", "worker_failures"), ("scores", "worker_failures")]
