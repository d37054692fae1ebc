from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tpupipe.config import BudgetsConfig, Config
from tpupipe.data.sources import Files
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import acquire
from tpupipe.store.objects import Store, open_store
from tpupipe.store.owner import Owner


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job with one stage of each kind."""
    return Job(
        "job",
        [
            Preprocess("tokens", Files(f"{tmp_path}/*.txt"), map=lambda batch: batch),
            Train("lm", "tokens", init=lambda key: key, step=lambda state, _: (state, {}), batch_size=4, steps=10),
            Infer("score", "tokens", params="lm", apply=lambda _, batch: batch),
        ],
    )


@pytest.fixture
def run(store: Store, job: Job):
    """What stages look at of a run, without a cluster: the store, its names and a real lease."""
    paths = RunPaths("job", "run")
    config = Config.model_validate({"store": {"uri": str(store.root)}, "cluster": {"kind": "gpu", "gpus": 1}})
    assert config.budgets == BudgetsConfig()
    with acquire(store, paths, Owner.here()) as lease:
        yield SimpleNamespace(
            job=job, config=config, store=store, paths=paths, lease=lease, endpoint=None, input_options={}, sample=1
        )
