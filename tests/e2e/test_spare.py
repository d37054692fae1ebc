"""A second group of training processes, kept ready on the held slice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.util import placement_group_table

from tests.e2e import small
from tests.e2e.harness import Runner, World, connection, nothing_is_held
from tests.processes import until
from tpupipe.job import Train
from tpupipe.run import RunResult
from tpupipe.stages import train_group
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.store.layout import RunPaths


@pytest.fixture
def _always_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group, "SPARE_FROM_S", 0.0)


@pytest.mark.usefixtures("_always_a_spare")
@pytest.mark.soak
def test_the_spare_takes_over_and_compiles_nothing(runner: Runner, undisturbed: RunResult) -> None:
    """A worker dies at step 7 with a group ready behind it: that one goes on, with the same answer, from compiled steps."""
    settings = {"log_every_s": 0.001}
    result = runner("a", faults=("kill-worker@train.step=7,rank=1",), job={"score": False}, stages={"fit": settings})
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    [fault] = runner.events("a", "fault")
    ready = runner.events("a", "workers_up")
    assert len(ready) == 2
    began = [e["time_s"] for e in runner.events("a", "joining")]
    assert len(began) == 2
    assert began[0] < fault["time_s"] < began[1]
    after = [e for e in runner.events("a", "compiling") if e["stage"] == "fit" and e["time_s"] > began[1]]
    assert {e["rank"]: e["from_cache"] for e in after} == {0: True, 1: True}


@pytest.mark.usefixtures("_always_a_spare")
@pytest.mark.soak
def test_a_spare_that_is_not_needed_leaves_nothing(runner: Runner, undisturbed: RunResult) -> None:
    """Without a failure it is sent home: the answer is the same, and no placement group is left."""
    result = runner("a", job={"score": False}, stages={"fit": {"log_every_s": 0.001}})
    assert result.stages["fit"]["params_digest"] == undisturbed.stages["fit"]["params_digest"]
    assert len(runner.events("a", "joining")) == 1
    nothing_is_held(runner.world)


def test_a_group_that_waits_for_lost_hosts_is_ended(world: World) -> None:
    """It asks for a host that is gone, so it never hears that it is not needed: no thread is left, and no request once the driver is gone."""

    def states() -> list[str]:
        return [str(group["state"]) for group in placement_group_table().values()]

    train = next(stage for stage in small.build(small.Params(inputs="none")).stages if isinstance(stage, Train))
    lost = SimpleNamespace(hosts=("gone",), label_selectors=[{"ray.io/node-id": "f" * 56}])
    with connection(world):
        run = SimpleNamespace(paths=RunPaths("small", "gone"), reservation=lost, coordinator=CoordinatorHandle.create())
        before = states().count("PENDING")
        group = train_group.TrainGroup(train, run)  # type: ignore[arg-type] # what it needs of a run
        until(lambda: states().count("PENDING") > before, told=states)
        group.end()
        assert not group.running()
    with connection(world):
        until(lambda: states().count("PENDING") == before, told=states)
    nothing_is_held(world)
