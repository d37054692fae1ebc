"""Promise 7: a step that makes no progress dumps its stacks, counts as a failure, and the run goes on."""

from __future__ import annotations

from tests.e2e.harness import Runner
from tpupipe.run import RunResult


def test_a_hanging_step_is_ended_told_and_done_again(runner: Runner, undisturbed: RunResult) -> None:
    """Rank 0 hangs before step 6: after stall_timeout_s the stacks are in the run's folder, and the answer is the same."""
    result = runner(
        "a", faults=("hang@train.step=6,rank=0",), job={"score": False}, stages={"fit": {"stall_timeout_s": 4}}
    )
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    stalls = [e for e in runner.events("a", "stalled") if e["stage"] == "fit"]
    assert stalls
    kept = [i.name for i in runner.store.list(runner.paths("a").stage("fit") + "/stalls/")]
    assert kept
    assert b"inject.py" in runner.store.read(kept[0]) or any(b"inject.py" in runner.store.read(n) for n in kept)
    assert [e["failure"]["kind"] for e in runner.events("a", "failure")] == ["worker_failures"]
