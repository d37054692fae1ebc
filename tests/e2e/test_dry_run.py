"""``tpupipe dry-run``: a production configuration rehearsed on the warm faked slice."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.harness import World, write_ids
from tpupipe.dry_run.record import find_dry_runs
from tpupipe.store.objects import open_store


def test_a_production_configuration_is_checked_compiled_run_small_and_judged(world: World, tmp_path: Path) -> None:
    """v6e 2x4 with 200 steps: 24 are run, a worker is killed, the verdict is found again by the configuration's hash."""
    config = tmp_path / "production.yaml"
    store = {"uri": "gs://tests/runs", "embedded": True, "root": str(world.root)}
    cluster = {"kind": "tpu", "generation": "v6e", "topology": "2x4", "chips_per_vm": 4}
    job = {"inputs": write_ids(tmp_path / "in", 100), "batch_size": 8, "steps": 200, "every": 100}
    section = {"sample": "100%", "store": store, "job": {"steps": 24}}
    config.write_text(json.dumps({"store": store, "cluster": cluster, "job": job, "dry_run": section}))  # JSON is YAML

    done = world.command("dry-run", "tests.e2e.small", "-c", str(config), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["verdict"] == "PASS"
    found = {finding["check"]: finding for finding in report["findings"]}
    assert "v6e 2x4 (8 devices)" in found["aot.fit"]["message"]
    assert "recovery" in found["run.killed"]["message"]
    account = report["account"]
    assert (account["fired"], account["rows"]["scores"]) == (2, [100, 100])
    assert account["restore_s"] > 0
    assert account["saves"] >= 3
    assert [e > 0 for e in account["recovery_s"]] == [True]
    assert "fit: 24 steps instead of 200 steps" in report["notes"]

    [kept] = find_dry_runs(open_store("gs://tests/runs", endpoint=world.endpoint), "small", report["config_hash"])
    assert (kept.verdict, kept.run) == ("passed", report["run"])
    assert kept.report["account"] == account
