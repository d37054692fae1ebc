"""``tpupipe drill``: a job that keeps its promises passes; one of which a promise is broken on purpose fails by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.e2e.harness import World, write_ids

HELD = "slow@train.step=7,rank=1,seconds=10"  # the checkpoint of step 5 is committed by then


@pytest.fixture
def drill(world: World, tmp_path: Path) -> Any:
    """Runs a drill of a job with a plan; gives exit status, report, JUnit suite and stderr."""

    def run(module: str, scenarios: list[Mapping[str, Any]]) -> tuple[int, dict[str, Any], ET.Element, str]:
        config, plan, junit = (tmp_path / name for name in ("world.yaml", "plan.yaml", "junit.xml"))
        cluster = {"kind": "fake", "generation": "v6e", "topology": "2x4", "chips_per_vm": 4, "timeout_s": 60}
        store = {"uri": "gs://tests/runs", "embedded": True, "root": str(world.root)}
        job = {"inputs": write_ids(tmp_path / "in", 100)}
        config.write_text(json.dumps({"store": store, "cluster": cluster, "job": job}))  # JSON is YAML
        plan.write_text(json.dumps({"scenarios": scenarios}))
        options = ["-c", str(config), "--plan", str(plan), "--json", "--junit", str(junit), "--timeout", "600s"]
        done = world.command("drill", module, *options)
        assert done.returncode in (0, 1), done.stderr[-3000:]
        suite = ET.parse(junit).getroot().find("testsuite")
        assert suite is not None
        return done.returncode, json.loads(done.stdout), suite, done.stderr

    return run


@pytest.mark.soak
def test_a_job_that_keeps_its_promises_passes(drill: Any) -> None:
    """The driver is killed in training, a worker in inference: same digests, same rows, exit status 0."""
    faults = [HELD, "kill-driver@train.step=7,rank=1", "kill-worker@unit.before_commit=4,stage=scores"]
    status, report, suite, said = drill("tests.e2e.small", [{"name": "both", "faults": faults}])
    assert status == 0, said
    [verdict] = report["verdicts"]
    assert (report["status"], verdict["verdict"], verdict["failed"]) == ("passed", "passed", [])
    assert (verdict["fired"], verdict["faults"], verdict["attempts"]) == (3, 3, 2)
    assert (verdict["lost_steps"], verdict["allowed_steps"]) == ([2], 5)
    assert verdict["rows_redone"] == 2 * 10 + 10, "two steps of ten rows, and the unit"
    assert len(verdict["recoveries_s"]) in {1, 2}, "the other worker may have scored the unit before a new one is ready"
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert json.loads((Path(report["folder"]) / "drill.json").read_text()) == report
    assert "both: passed" in said


@pytest.mark.soak
def test_a_record_before_its_arrays_is_found_and_named(drill: Any) -> None:
    """The first of the three mutants of ``mutants.py``."""
    early = ["kill-worker@save.arrays_written=10,rank=0"]
    budgets = ["budgets.worker_failures=1", "budgets.store_failures=1"]
    scenario = {"name": "early-record", "faults": early, "set": budgets}
    status, report, suite, said = drill("tests.e2e.mutants", [scenario])
    assert status == 1, said
    assert (report["status"], suite.get("failures")) == ("failed", "1")
    [verdict] = report["verdicts"]
    assert len(verdict["failed"]) == 1
    assert "attempt 1 of 1 ended with exit status 1" in verdict["failed"][0]
    assert "arrays of step 10" in verdict["failed"][0]


def test_a_batch_and_a_row_left_out_are_found_and_named(drill: Any) -> None:
    """The other two mutants, told apart by stage; a fault that never fires proves nothing either."""
    faults = [HELD, "kill-worker@train.step=7,rank=1", "kill-worker@unit.before_commit=4,stage=scores"]
    scenario = {"name": "batch-and-row", "faults": [*faults, "raise@train.step=77"], "recovery_s": 300}
    status, report, suite, said = drill("tests.e2e.mutants", [scenario])
    assert status == 1, said
    assert (report["status"], suite.get("failures")) == ("failed", "1")
    [verdict] = report["verdicts"]
    unfired, params, samples, rows = verdict["failed"]
    assert "raise@train.step=77' did not fire" in unfired
    assert "params_digest differs from the reference: leaf ['order'][5, 0]: 60 instead of 50" in params
    assert "sample_digest differs from the reference: other rows" in samples
    assert "between step 5 and step 10" in samples
    assert "stage scores, unit 0000" in rows, "the killed unit, or one that was in flight beside it and done again"
    assert "row 0, column 'row': 1 instead of 0 (1 row(s) of the reference are missing)" in rows
