"""Whole runs against the real server behind a proxy: what the store does to them is told, or survived.

It blocks, refuses, cannot be listed and loses answers; bad units and killed workers of inference meet it there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.harness import Runner, World
from tests.e2e.test_reservations import nothing_is_held
from tpupipe.checkpoint.verify import list_checkpoints
from tpupipe.errors import (
    BudgetExceededError,
    CheckpointSaveError,
    NoIntactCheckpointError,
    UnitsSetAsideError,
)
from tpupipe.faults.store_proxy import StoreProxy, store_proxy
from tpupipe.run import RunResult


class ProxiedRunner:
    """Runs the small job against the proxy, with a time-out of 3 s unless told otherwise."""

    def __init__(self, runner: Runner, proxy: StoreProxy) -> None:
        self.direct = runner  # looks at the store as it is
        self.proxy = proxy

    def __call__(self, *store_faults: str, store: dict[str, Any] | None = None, **options: Any) -> RunResult:
        place = {"uri": "gs://tests/runs", "embedded": False, "root": str(self.direct.world.root), "timeout_s": 3}
        self.proxy.set(store_faults)
        try:
            return self.direct("a", store={**place, **(store or {})}, **options)
        finally:
            self.proxy.set()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return self.direct.events("a", kind)

    def outputs(self, stage: str) -> dict[str, list[Any]]:
        return self.direct.outputs("a", stage)

    def written(self) -> dict[str, str]:
        """Every object of the stages, with its generation."""
        below = self.direct.paths("a").root + "/stages/"
        return {i.name: i.generation for i in self.direct.store.list(below)}

    def checkpoints(self) -> dict[int, bool]:
        """Step to whether it is committed, newest first."""
        found = list_checkpoints(self.direct.store, self.direct.paths("a"), "fit")
        return {f.step: f.committed for f in reversed(found)}


@pytest.fixture(scope="module")
def proxy(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    with (
        store_proxy(world.endpoint, root=tmp_path_factory.mktemp("proxy")) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("STORAGE_EMULATOR_HOST", running.endpoint)  # as a user's own emulator is said
        yield running


@pytest.fixture
def proxied(runner: Runner, proxy: StoreProxy) -> ProxiedRunner:
    return ProxiedRunner(runner, proxy)


@pytest.mark.soak
def test_a_store_that_blocks_on_writes_ends_the_run_in_time_and_frees_the_slice(proxied: ProxiedRunner) -> None:
    """Writes of checkpoints are never answered, time-out 3 s: in under 6 s an error that names what was written."""
    fault = "block@create,name=/checkpoints/"
    with pytest.raises(CheckpointSaveError, match=r"step 5 .*/checkpoints/0000000005-\d+/arrays") as caught:
        proxied(fault)
    assert caught.value.data["result"].status == "failed"
    blocked_s = min(f.at_s for f in proxied.proxy.counts().log if f.fault == fault)
    assert min(e["time_s"] for e in proxied.events("worker_error")) - blocked_s < 6
    assert not any(proxied.checkpoints().values())
    assert len(proxied.events("train_start")) == 1, "not tried again"
    nothing_is_held(proxied.direct.world)


@pytest.mark.soak
def test_a_failed_background_save_ends_the_run(proxied: ProxiedRunner) -> None:
    """The record of step 5 is refused: the run fails before step 10. Then only the last one: the run fails too."""
    # Rank 1 waits at step 7, so that the save has failed before the steps are over.
    with pytest.raises(CheckpointSaveError, match=r"step 5 .*COMMIT\.json.*403"):
        proxied("403@create,name=COMMIT.json", faults=("slow@train.step=7,seconds=4",))
    assert max(e["step"] for e in proxied.events("at")) < 10
    assert proxied.checkpoints() == {5: False}
    with pytest.raises(CheckpointSaveError, match=r"step 10 .*COMMIT\.json.*403") as caught:
        proxied("403@create,name=COMMIT.json,after=1")
    result = caught.value.data["result"]
    assert (result.status, result.stages["fit"]["status"]) == ("failed", "failed")
    assert proxied.events("trained") == []


def test_a_store_that_cannot_be_listed_is_not_a_store_without_checkpoints(proxied: ProxiedRunner) -> None:
    """The listing of checkpoints fails: an error and not one step, however often; the back-off is told."""
    with pytest.raises(
        BudgetExceededError, match=r"list of .*/checkpoints.*2 failure\(s\) of kind store_failures"
    ) as caught:
        proxied("503@list,name=/checkpoints/", store={"attempts": 2}, budgets={"store_failures": 1})
    assert caught.value.exit_status == 1
    assert [e["after_s"] for e in proxied.events("back_off")] == [1]
    assert proxied.events("train_start") == []
    assert proxied.events("at") == []
    assert proxied.checkpoints() == {}


@pytest.fixture(scope="module")
def trained(make_runner: Callable[[str], Runner], proxy: StoreProxy) -> tuple[ProxiedRunner, RunResult]:
    """A finished run of 20 steps with the checkpoints 10 and 20, that met a store that was away for a while."""
    runner = ProxiedRunner(make_runner("trained-"), proxy)
    return runner, runner("503@list,name=/checkpoints/,times=2", store={"attempts": 2}, job={"steps": 20, "every": 10})


@pytest.mark.soak
def test_a_store_that_comes_back_costs_a_wait(trained: tuple[ProxiedRunner, RunResult]) -> None:
    """The first look for checkpoints failed with all its attempts: charged, tried again after 1 s, and only then fresh."""
    runner, result = trained
    assert result.status == "done"
    assert [e["failure"]["kind"] for e in runner.events("failure")] == ["store_failures"]
    assert ["trying again in 1 s" in e["message"] for e in runner.events("back_off")] == [True]
    assert [e["step"] for e in runner.events("train_start")] == [0]


@pytest.mark.soak
def test_a_driver_that_cannot_beat_for_longer_than_a_lease_lives_goes_on(
    proxied: ProxiedRunner, undisturbed: RunResult, caplog: pytest.LogCaptureFixture
) -> None:
    """No beat gets through for 40 s of a step that takes 45: nobody took the run, so it is finished by the same driver."""
    mute = "outage@create,name=beat.json,seconds=40,after=2"
    faults = ("slow@train.step=7,rank=0,seconds=45",)
    result = proxied(mute, faults=faults, store={"timeout_s": 60}, job={"score": False})
    assert "others may take the run" in caplog.text
    assert result.attempt == 1
    assert result.stages["fit"]["params_digest"] == undisturbed.stages["fit"]["params_digest"]


@pytest.mark.soak
def test_an_unreadable_newest_checkpoint_costs_ten_steps_and_two_of_them_the_run(
    trained: tuple[ProxiedRunner, RunResult],
) -> None:
    """Steps 10 and 20; an array object of 20 is gone: resumed at 10. Of both: an error, and nothing is deleted."""
    runner, before = trained
    store, paths = runner.direct.store, runner.direct.paths("a")
    job = {"steps": 20, "every": 10}

    def lose_an_array(step: int) -> None:
        found = next(f for f in list_checkpoints(store, paths, "fit") if f.step == step)  # the newest of that step
        store.delete(f"{found.folder}/{max(n for n in found.objects if '/d/' in n)}", missing_ok=False)

    def forget_the_end() -> None:
        """As if the driver had died before it wrote that training is over."""
        store.delete(paths.manifest("fit"), missing_ok=False)
        store.delete_prefix(paths.stage("scores") + "/")

    lose_an_array(20)
    forget_the_end()
    result = runner(job=job)
    assert result.stages["fit"]["resumed_from"] == 10
    assert result.stages["fit"]["params_digest"] == before.stages["fit"]["params_digest"]
    assert [e["step"] for e in runner.events("checkpoint_damaged")] == [20]

    lose_an_array(10)
    lose_an_array(20)
    forget_the_end()
    there = {info.name for info in store.list(paths.checkpoints("fit") + "/")}
    with pytest.raises(NoIntactCheckpointError, match="Nothing was deleted"):
        runner(job=job)
    assert {info.name for info in store.list(paths.checkpoints("fit") + "/")} == there


@pytest.mark.soak
def test_inference_workers_killed_around_the_commit_give_each_row_once(proxied: ProxiedRunner) -> None:
    """ray#61012: 1,000 rows, killed before and after a commit, and the answer to a commit is lost; run again: 1,000 unique.

    A stage without rows succeeds with 0 rows and keeps its schema; running again touches nothing.
    """
    faults = ("kill-worker@unit.before_commit=3,stage=scores", "kill-worker@unit.after_commit=5,stage=scores")
    lost = "lost@create,name=/scores/units/,times=1"
    job = {"rows": 1000, "steps": 1, "every": 1, "with_empty": True}
    result = proxied(lost, faults=faults, job=job)
    assert len(proxied.events("fault")) == 2
    assert proxied.proxy.counts().fired[lost] == 1
    assert (result.stages["nothing"]["status"], result.stages["nothing"]["rows_out"]) == ("done", 0)
    assert set(proxied.outputs("nothing")) == {"unit", "row", "id", "score"}
    written = proxied.written()
    for _ in range(2):
        scores = proxied.outputs("scores")
        assert scores["id"] == list(range(1000))
        assert len(set(zip(scores["unit"], scores["row"], strict=True))) == 1000
        again = proxied(job=job)
        assert again.stages["scores"]["rows_out"] == result.stages["scores"]["rows_out"] == 1000
    assert proxied.written() == written


@pytest.mark.soak
def test_a_unit_that_fails_again_and_again_is_set_aside_and_the_rest_is_done(proxied: ProxiedRunner) -> None:
    """marin#4575: one unit's map raises, another's kills its process: both are named, all others are committed.

    The same run with them mended does those two units only, and each row is there once.
    """
    one_step = {"rows": 100, "steps": 1, "every": 1}
    budgets = {"unit_failures": 2}
    with pytest.raises(UnitsSetAsideError) as caught:
        proxied(job={**one_step, "bad_id": 57, "die_id": 93}, budgets=budgets)
    message = caught.value.message
    assert "row 7 of unit" in message
    assert "part-05.jsonl" in message
    assert "died" in message
    assert caught.value.exit_status == 1
    assert len(caught.value.data["units"]) == 2
    done = [i for i in range(100) if i // 10 not in (5, 9)]
    assert proxied.outputs("scores")["id"] == done
    assert caught.value.data["result"].stages["scores"]["status"] == "failed"
    result = proxied(job=one_step, budgets=budgets, allow_change=True)
    assert result.stages["scores"]["resumed_from"] == 8
    assert proxied.outputs("scores")["id"] == list(range(100))
