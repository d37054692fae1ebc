"""Preprocess alone: what it does while the store is away, and its stage that commits as a whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import shards
from tests.e2e.harness import World, write_ids
from tpupipe.cluster.connect import ship_by_value
from tpupipe.config import Config
from tpupipe.errors import BudgetExceededError
from tpupipe.faults.plan import parse_faults
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.ledger.events import read_events
from tpupipe.run import RunOptions, RunResult, run
from tpupipe.stages.finished import read_manifest
from tpupipe.stages.preprocess import AWAY_ENDS_PASS
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store

ship_by_value(shards)

# A refused connection is tried twice, which takes less than half a second: after that the unit is given back.
IMPATIENT = {"timeout_s": 10, "attempts": 2}
AWAY = "outage@create,name=/units/,seconds=4"


class Shards:
    """Runs the job under one name; ``ids`` are the rows in the order of the manifest."""

    def __init__(self, world: World, folder: Path, name: str) -> None:
        self.world, self.inputs = world, write_ids(folder, 100)
        self.paths = RunPaths("shards", name)

    def __call__(self, *faults: str, store: tuple[str, ...] = (), whole: bool = False, budget: int = 8) -> RunResult:
        config = Config.model_validate(
            {
                "store": {"uri": "gs://tests/runs", "embedded": True, "root": str(self.world.root), **IMPATIENT},
                "cluster": {"kind": "fake", "generation": "v6e", "topology": "2x2", "timeout_s": 60},
                "stages": {"ids": {"concurrency": 2}},
                "budgets": {"store_failures": budget},
                "job": {"inputs": self.inputs, "whole": whole},
            }
        )
        options = RunOptions(self.paths.run, parse_faults(faults), store_faults=StoreFaults.parse(*store))
        return run(shards.build(shards.Params(**config.job)), config, options)

    @property
    def store(self) -> Store:
        return open_store("gs://tests/runs", endpoint=self.world.endpoint)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.store, self.paths) if e["kind"] == kind]

    def charged(self) -> list[str]:
        return [e["failure"]["kind"] for e in self.events("failure")]

    def ids(self) -> list[int]:
        """Of the rows that count, in the order of the manifest."""
        import pyarrow.parquet as pq

        manifest = read_manifest(self.store, self.paths, "ids")
        objects = [self.paths.unit("ids", unit.unit) for unit in manifest.units] if manifest else []
        tables = [pq.read_table(io.BytesIO(self.store.read(name))) for name in objects]
        return [i for table in tables for i in table["id"].to_pylist()]


@pytest.fixture
def job(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Shards:
    return Shards(world, tmp_path / "in", "".join(c for c in request.node.name if c.isalnum())[-40:].lower())


def test_units_for_which_the_store_was_away_are_done_when_it_is_back(job: Shards) -> None:
    """No object of a unit can be created for 4 s: that is charged to the store, and each row is there once."""
    result = job(store=(AWAY,))
    assert result.stages["ids"]["rows_out"] == 100
    assert job.ids() == list(range(100))
    charged = job.charged()
    assert 1 <= len(charged) <= 4
    assert set(charged) == {"store_failures"}


def test_a_store_that_stays_away_ends_the_stage_and_the_same_command_finishes_it(job: Shards) -> None:
    """Two failures are allowed, the third ends it with what the store said; nothing is set aside for it.

    Three of the ten units try each time, and whichever are at work meanwhile: a long stage would try for hours.
    """
    with pytest.raises(
        BudgetExceededError, match=r"create of gs://tests.*3 failure\(s\) of kind store_failures"
    ) as caught:
        job(store=("outage@create,name=/units/,seconds=600",), budget=2)
    assert caught.value.data["kind"] == "store_failures"
    assert job.charged() == ["store_failures"] * 3
    assert [e["units_back"] for e in job.events("failure")] == [10] * 3
    assert 3 * AWAY_ENDS_PASS <= len(job.events("unit_away")) <= 3 * (AWAY_ENDS_PASS + 2)
    assert job.ids() == []
    assert job().stages["ids"]["rows_out"] == 100
    assert job.ids() == list(range(100))


def test_a_stage_that_commits_as_a_whole_survives_a_killed_process_and_an_absent_store(job: Shards) -> None:
    """A process dies before a block's commit, and then the store is away: each row is there once."""
    result = job("kill-worker@unit.before_commit=0", store=(AWAY,), whole=True)
    assert len(job.events("fault")) == 1
    assert "store_failures" in job.charged()
    assert (result.stages["ids"]["rows_in"], result.stages["ids"]["rows_out"]) == (100, 100)
    assert sorted(job.ids()) == list(range(100))
