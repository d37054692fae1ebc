"""Ticks of a scheduled inference job over a growing folder, on the warm slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ticks
from tests.e2e.harness import World
from tpupipe.config import Config
from tpupipe.faults.plan import parse_faults
from tpupipe.resolve import configured
from tpupipe.run import RunOptions, RunResult, run
from tpupipe.store.layout import GenerationPaths
from tpupipe.ticks import parse_tick

ONE, TWO, THREE, FOUR = (f"2026-11-{day}T02:00" for day in (27, 28, 29, 30))


class Nightly:
    """A dataset over a folder that grows."""

    def __init__(self, world: World, folder: Path, params: str) -> None:
        self.world, self.folder, self.params = world, folder, params
        folder.mkdir()

    def write(self, name: str, ids: range) -> None:
        (self.folder / name).write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))

    def config(self) -> Config:
        parameters = ticks.Params(inputs=f"{self.folder}/*.jsonl", params=self.params).model_dump()
        cluster = {"kind": "fake", "generation": "v6e", "topology": "2x4", "chips_per_vm": 4, "timeout_s": 120}
        store = {"uri": "gs://tests/runs", "embedded": True, "root": str(self.world.root)}
        return Config.model_validate({"store": store, "cluster": cluster, "mode": "incremental", "job": parameters})

    def __call__(self, tick: str, *faults: str) -> RunResult:
        config = self.config()
        job = configured(ticks.build(ticks.Params(**config.job)), config)
        return run(job, config, RunOptions("nightly", parse_faults(faults), as_of=parse_tick(tick)))

    @property
    def table(self) -> str:
        folder = GenerationPaths("ticks", "nightly", 1).table("scores")
        return str(self.world.root / "gcs" / "tests" / "runs" / folder)

    def rows(self) -> list[dict[str, Any]]:
        import pyarrow.dataset as ds

        return ds.dataset(self.table, format="parquet", partitioning="hive").to_table().to_pylist()


def written(nightly: Nightly) -> dict[str, int]:
    """Every object of the table, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in Path(nightly.table).rglob("*.parquet")}


def test_three_ticks_over_a_growing_folder_are_three_partitions_of_one_table(
    world: World, undisturbed: RunResult, tmp_path: Path
) -> None:
    """Each row once, by pyarrow, pandas and DuckDB, although a worker dies.

    ray#28505: a fourth tick has nothing new, which is a success with zero rows that touches nothing. kuberay#4849: the
    same tick again, with newer files there, is done already.
    """
    assert undisturbed.status == "done"
    nightly = Nightly(world, tmp_path / "in", "gs://tests/runs/small/reference-a/stages/fit")
    nightly.write("a.jsonl", range(60))
    first = nightly(ONE)
    assert (first.tick, first.generation, first.run) == (ONE, 1, "nightly")
    assert first.stages["scores"]["rows_out"] == 60
    assert first.stages["scores"]["uri"].endswith("/tables/scores")
    nightly.write("b.jsonl", range(60, 100))
    nightly(TWO, "kill-worker@unit.after_commit=0")
    nightly.write("c.jsonl", range(100, 130))
    nightly(THREE)

    by_date: dict[str, list[int]] = {}
    for row in nightly.rows():
        assert row["score"] == 2.0 * row["id"]
        by_date.setdefault(row["date"], []).append(row["id"])
    expected = {ONE: list(range(60)), TWO: list(range(60, 100)), THREE: list(range(100, 130))}
    assert {date: sorted(ids) for date, ids in by_date.items()} == expected

    before = written(nightly)
    file = tmp_path / "world.yaml"
    file.write_text(nightly.config().model_dump_json(exclude_none=True))  # JSON is YAML
    command = ["run", "tests.e2e.ticks", "-c", str(file), "--run", "nightly", "--as-of", FOUR, "--json"]
    fourth = world.command(*command)
    assert fourth.returncode == 0, fourth.stderr[-2000:]
    assert json.loads(fourth.stdout)["stages"]["scores"]["rows_out"] == 0
    assert "nothing to reserve" in fourth.stderr
    nightly.write("d.jsonl", range(130, 140))
    again = nightly(TWO)
    assert (again.status, again.stages["scores"]["rows_out"]) == ("done", 40)
    assert written(nightly) == before

    import pandas as pd

    assert sorted(pd.read_parquet(nightly.table)["id"]) == list(range(130))
    duckdb = pytest.importorskip("duckdb")
    counts = duckdb.sql(
        f"SELECT strftime(date::TIMESTAMP, '%Y-%m-%dT%H:%M'), count(*), count(DISTINCT id) "
        f"FROM read_parquet('{nightly.table}/*/*.parquet', hive_partitioning = true) GROUP BY date ORDER BY date"
    ).fetchall()
    assert counts == [(ONE, 60, 60), (TWO, 40, 40), (THREE, 30, 30)]
