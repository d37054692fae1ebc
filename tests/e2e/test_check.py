"""``tpupipe check`` against a warm faked slice: the facts of the cluster, gathered with Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import World, connection
from tpupipe.cluster.reservation import Reservation
from tpupipe.hardware.slices import SliceSpec


def cluster_findings(world: World) -> dict[str, Any]:
    done = world.command("check", "jobs.stdlib_lm", "-c", "configs/local.yaml", "--only", "cluster", "--json")
    assert done.returncode == 0, done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.mark.soak
def test_a_warm_slice_is_there_and_free(world: World) -> None:
    """Every node answers with its versions, which are those here; libtpu is not needed on a faked host."""
    found = cluster_findings(world)
    assert found["cluster.connect"]["facts"]["tpu_nodes"] == 4
    assert found["cluster.slices"]["facts"]["free"] == 1
    assert {name: f["status"] for name, f in found.items()} == {
        "cluster.connect": "ok",
        "cluster.slices": "ok",
        "cluster.versions": "ok",
        "cluster.libtpu": "skipped",
    }


def test_who_holds_a_busy_slice_is_named(world: World) -> None:
    """A warning, for a run would wait for it."""
    spec = SliceSpec("v6e", "2x4", chips_per_vm=4)
    with connection(world), Reservation(spec, timeout_s=60, name="somebody", say=print):
        found = cluster_findings(world)["cluster.slices"]
    assert found["status"] == "warning"
    assert "fake-v6e-2x4-0 by somebody" in found["message"]
