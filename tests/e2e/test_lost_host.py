"""A host is lost: the reservation is given back, the slice waited for until it is whole, and the run goes on."""

from __future__ import annotations

from tests.e2e.harness import Runner
from tpupipe.run import RunResult


def test_a_lost_host_costs_a_new_reservation_and_no_answer(runner: Runner, undisturbed: RunResult) -> None:
    """The raylet of rank 1's host is killed at step 6, and another one in inference; the pool replaces them."""
    faults = (
        "slow@train.step=6,rank=1,seconds=12",  # the checkpoint of step 5 is committed by then
        "kill-host@train.step=6,rank=1",
        "kill-host@unit.before_commit=4,stage=scores",
    )
    result = runner("a", faults=faults)
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    scores = runner.outputs("a", "scores")
    assert scores["id"] == list(range(100))
    kinds = [(f["stage"], f["failure"]["kind"]) for f in runner.events("a", "failure")]
    assert kinds == [("fit", "host_failures"), ("scores", "host_failures")], "as what it is, although Ray's table lags"
    reserved = [e for e in runner.events("a", "say") if "reserved" in e["message"]]
    assert len(reserved) == 3
    assert [e["step"] for e in runner.events("a", "train_start")] == [0, 5]
