"""``tpupipe drill`` on the command line: what makes no sense ends with status 2 before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpupipe.cli import app

WORLD = """
store: {uri: gs://tests/runs, embedded: true, root: never-made}
cluster: {kind: fake, generation: v6e, topology: 2x4, chips_per_vm: 4}
job: {inputs: "none/*.jsonl"}
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a drill of the small job in an empty folder, where nothing may appear."""
    config = tmp_path / "world.yaml"
    config.write_text(WORLD)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def run(*arguments: str):
        done = CliRunner().invoke(app, ["drill", "tests.e2e.small", "-c", str(config), *arguments])
        assert list(Path.cwd().iterdir()) == [], "nothing was started or written"
        return done

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "kill-wroker"], "Did you mean kill-worker"),
        (["--only", "kill-twice", "--set", "job.steps=0"], "steps=0"),
        (["--budget", "soon"], "'soon' is not a duration"),
        (["--timeout", "0"], "'0' is not a duration"),
        (["--plan", "none.yaml"], "'none.yaml' does not exist"),
        (["--junit", "no/such/folder/j.xml"], "there is no folder"),
        (["--set", "faults=[kill-worker@train.step]"], "the reference run must be undisturbed"),
        (["--set", "mode=incremental"], "compares whole runs"),
        (["--set", "store_faults=['503@create']"], "the reference run must be undisturbed"),
        (["--set", "cluster.topolgy=2x4"], "nearest: topology"),
        (["--only", "corrupt-flip"], "nothing to fall back to"),
    ],
)
def test_usage_errors_are_told_before_anything_starts(call, arguments, said):
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('faults: ["kill-worker@train.step=3,stage=fti"]', "no stage 'fti'; it has ids, fit, scores"),
        ('faults: ["kill-worker@train.step=3,rank=9"]', "no rank 9; allowed: 0 to 1"),
        ('faults: ["drain-host@unit.read=1,stage=ids"]', "prepared on the driver's host"),
        ('set: ["stages.fit.stall_timout_s=3"]', "stall_timeout_s"),
    ],
)
def test_a_plan_file_that_does_not_fit_the_job_is_refused(call, tmp_path, entry, said):
    """With the scenario's name, before anything starts."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"scenarios: [{{name: odd, {entry}}}]")
    done = call("--plan", str(plan))
    assert done.exit_code == 2, done.output
    assert "Scenario 'odd': " in done.stderr
    assert said in done.stderr


def test_with_json_the_error_is_one_object(call):
    done = call("--only", "nothing", "--json")
    assert json.loads(done.stdout)["error_kind"] == "UsageError"
    assert done.exit_code == 2
