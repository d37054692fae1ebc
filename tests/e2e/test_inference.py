"""Promise 2 in the face of bad rows and lost hosts; the output read by others than us."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Runner
from tpupipe.cluster.connect import connected

ONE_STEP = {"rows": 100, "steps": 1, "every": 1}


def folder(runner: Runner, name: str) -> str:
    return str(runner.world.root / "gcs" / "tests" / "runs" / runner.paths("a").stage("scores") / name)


def test_a_bad_row_is_set_aside_and_the_output_reads_as_one_table_everywhere(runner: Runner) -> None:
    """ray#59194: 100 rows, 1 raises: 99 outputs and 1 error record that names its file and row.

    ray#55043: run again: the same 99 rows. pyarrow, pandas, DuckDB and Ray Data see the same table.
    """
    import duckdb
    import pandas as pd
    import ray

    job = {**ONE_STEP, "bad_id": 57, "quarantine": True}
    result = runner("a", job=job, faults=("kill-worker@unit.before_commit=6,stage=scores",))
    scores = result.stages["scores"]
    assert (scores["rows_in"], scores["rows_out"], scores["rows_quarantined"]) == (100, 99, 1)
    assert scores["metrics"]["compilations"] == scores["metrics"]["buckets"] == 1
    expected = [i for i in range(100) if i != 57]
    assert runner("a", job=job).stages["scores"]["rows_quarantined"] == 1
    assert runner.outputs("a", "scores")["id"] == expected
    units, errors = folder(runner, "units"), folder(runner, "errors")
    assert sorted(pd.read_parquet(units)["id"]) == expected
    assert [
        r[0] for r in duckdb.sql(f"select id from read_parquet('{units}/*.parquet') order by id").fetchall()
    ] == expected
    assert duckdb.sql(f"select count(*), count(distinct (unit, row)) from '{units}/*.parquet'").fetchall() == [(99, 99)]
    (bad,) = pd.read_parquet(errors).to_dict("records")
    assert bad["path"].endswith("part-05.jsonl")
    assert (bad["file_row"], bad["reason"], bad["error"]) == (7, "map", "ValueError: id 57 cannot be used")
    cluster = runner.config(job).cluster
    with connected(cluster, root=runner.world.root, worker_environment={}, say=lambda _: None):
        assert sorted(row["id"] for row in ray.data.read_parquet(units).iter_rows()) == expected


@pytest.mark.soak
def test_ten_rows_on_more_devices_than_divide_them_give_ten_rows(runner: Runner) -> None:
    """ray#63285: 10 rows on two hosts of four devices: all are trained on or told of, and each is scored once."""
    result = runner("a", job={"rows": 10, "steps": 1, "every": 1})
    assert result.stages["fit"]["rows_out"] + result.stages["fit"]["rows_dropped"] == 10
    assert result.stages["scores"]["rows_out"] == 10
    assert runner.outputs("a", "scores")["id"] == list(range(10))


def test_a_model_that_two_hosts_hold_together_survives_the_loss_of_one(runner: Runner) -> None:
    """In lockstep: a host is killed while a unit is read, the group starts anew, each row is there once."""
    job = {**ONE_STEP, "sharded": True}
    result = runner("a", job=job, faults=("kill-worker@unit.read=4,rank=1,stage=scores",))
    assert runner.outputs("a", "scores")["id"] == list(range(100))
    assert result.stages["scores"]["rows_out"] == 100
    starts = [e["rank"] for e in runner.events("a", "starting") if e["stage"] == "scores"]
    assert sorted(starts) == [0, 0, 1, 1]
    [failure] = [e for e in runner.events("a", "failure") if e["stage"] == "scores"]
    assert "died" in failure["message"]
