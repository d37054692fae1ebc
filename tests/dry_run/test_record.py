"""A verdict is found again by the configuration's hash, and a submission can insist on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.dry_run.test_rehearsal import job
from tpupipe.config import Config, config_hash
from tpupipe.dry_run.record import FAILED, PASSED, DryRunRecord, find_dry_runs, keep, require_passed, run_prefix
from tpupipe.errors import ObjectExistsError, UsageError
from tpupipe.identity import code_fingerprint
from tpupipe.store.objects import open_store


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "store": {"uri": "gs://team/runs"},
            "cluster": {"kind": "tpu", "generation": "v6e", "topology": "2x2"},
            "dry_run": {"store": f"file://{tmp_path}/dry", "cluster": {"kind": "fake", "topology": "2x4"}},
        }
    )


def record(config: Config, verdict: str = PASSED, at: str = "2026-01-01T00:00:00", **more: Any) -> DryRunRecord:
    hashed = config_hash(config)
    run = f"{run_prefix(hashed)}{at[8:10]}"
    return DryRunRecord(hashed, code_fingerprint(job()), verdict, at, run, **more)


def test_the_newest_verdict_of_a_configuration_counts(config: Config, tmp_path: Path):
    """Passed, then failed, then passed again; another configuration has none."""
    store = open_store(f"file://{tmp_path}/dry")
    with pytest.raises(UsageError, match="no dry run of this configuration"):
        require_passed(job(), config)
    keep(store, "j", record(config, report={"verdict": "PASS"}))
    assert require_passed(job(), config).report == {"verdict": "PASS"}
    keep(store, "j", record(config, FAILED, "2026-01-02T00:00:00"))
    with pytest.raises(UsageError, match="failed"):
        require_passed(job(), config)
    keep(store, "j", record(config, at="2026-01-03T00:00:00"))
    assert require_passed(job(), config).at == "2026-01-03T00:00:00"
    assert [r.at[:10] for r in find_dry_runs(store, "j", config_hash(config))] == [
        "2026-01-03",
        "2026-01-02",
        "2026-01-01",
    ]
    other = config.model_copy(update={"sample": "50%"})
    with pytest.raises(UsageError, match="no dry run"):
        require_passed(job(), other)


def test_a_dry_run_of_other_code_does_not_count(config: Config, tmp_path: Path):
    store = open_store(f"file://{tmp_path}/dry")
    keep(store, "j", dataclasses.replace(record(config), code="other"))
    with pytest.raises(UsageError, match="other code"):
        require_passed(job(), config)


def test_a_verdict_is_never_overwritten(config: Config, tmp_path: Path):
    store = open_store(f"file://{tmp_path}/dry")
    keep(store, "j", record(config))
    with pytest.raises(ObjectExistsError):
        keep(store, "j", record(config, FAILED))


def test_keys_of_a_later_version_are_left_out(config: Config):
    text = record(config).to_json().replace(b'"verdict"', b'"added_later": 1, "verdict"')
    assert DryRunRecord.from_json(text) == record(config)
