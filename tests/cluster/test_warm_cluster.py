"""Which faked cluster is found, and ended, by what its server's state file says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tpupipe.cluster.connect import cluster_down, warm_cluster
from tpupipe.cluster.fake import FakeClusterState
from tpupipe.store.owner import Owner


def kept(root: Path, server: Owner) -> None:
    """A state file, as the server writes it."""
    state = FakeClusterState("127.0.0.2:1", "", server.pid, {}, {"slices": []}, asdict(server))
    (root / "cluster").mkdir()
    (root / "cluster" / "warm.json").write_text(json.dumps(asdict(state)))


def test_a_server_that_runs_is_found(tmp_path: Path) -> None:
    kept(tmp_path, Owner.here())
    found = warm_cluster(tmp_path)
    assert found is not None
    assert found.address == "127.0.0.2:1"


@pytest.mark.parametrize("gone", [{"pid_start": 1}, {"boot_id": "another boot"}, {"pid": 2**22 + 1}])
def test_another_process_with_the_number_of_a_killed_server_is_left_alone(
    tmp_path: Path, gone: dict[str, object]
) -> None:
    """The number was given away, or the machine started again: there is no cluster, and nothing is sent a signal."""
    kept(tmp_path, replace(Owner.here(), **gone))  # type: ignore[arg-type]
    assert warm_cluster(tmp_path) is None
    assert not cluster_down(tmp_path)
