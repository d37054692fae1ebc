"""A preemption notice: save while there is time, take another slice, go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.e2e.harness import Runner, World
from tpupipe.cluster.connect import cluster_down, cluster_up
from tpupipe.cluster.fake import FakeClusterSpec
from tpupipe.hardware.slices import SliceSpec
from tpupipe.local.server import embedded_store
from tpupipe.run import RunResult
from tpupipe.store.layout import COMMIT_NAME


@pytest.fixture
def two_slices(tmp_path: Path) -> Iterator[World]:
    """A world of its own with two slices of two hosts: one of them is going to be lost."""
    spec = FakeClusterSpec((SliceSpec("v6e", "2x4", chips_per_vm=4, slices=2),), cpus_per_host=4)
    with embedded_store(tmp_path / ".tpupipe") as endpoint:
        try:
            yield World(tmp_path, cluster_up(spec, tmp_path, ".tpupipe", print), endpoint)
        finally:
            cluster_down(tmp_path / ".tpupipe")


def drain_first_host(address: str) -> None:
    """Ray's own drain of one host of the slice in use, as the platform announces a preemption."""
    nodes = {n["Labels"].get("ray.io/tpu-slice-name"): n["NodeID"] for n in ray.nodes() if n["Resources"].get("TPU")}
    held = [n for n in ray.util.placement_group_table().values() if n["state"] == "CREATED"]
    used = {node for group in held for node in group["bundles_to_node_id"].values()}
    victim = next(node for node in nodes.values() if node in used)
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")),
            "drain-node",
            "--address",
            address,
            "--node-id",
            victim,
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "spot",
            "--deadline-remaining-seconds",
            "40",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_a_notice_saves_and_the_run_goes_on_on_another_slice(
    two_slices: World, undisturbed: RunResult, tmp_path: Path
) -> None:
    """Notice at step 3 of 10: the step after it is saved although none was due, no step is lost, the answer is the same."""
    runner = Runner(two_slices, tmp_path, "preempted-")
    drained = threading.Event()

    def watch() -> None:
        folder = runner.paths("a").checkpoints("fit") + "/"
        while not any(i.name.endswith(COMMIT_NAME) for i in runner.store.list(folder)):
            if drained.wait(0.1):
                return
        drain_first_host(two_slices.cluster.address)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = runner("a", job={"every": 3, "score": False}, faults=("slow@train.step=3,seconds=10",))
    finally:
        drained.set()
        thread.join()
    for digest in ("params_digest", "sample_digest"):
        assert result.stages["fit"][digest] == undisturbed.stages["fit"][digest]
    failures = [e["failure"]["kind"] for e in runner.events("a", "failure")]
    assert failures == ["preemptions"]
    starts = [e["step"] for e in runner.events("a", "train_start")]
    assert starts[0] == 0
    assert starts[1] > 3, "saved at the notice, not only at step 3"
    said = [e["message"] for e in runner.events("a", "say") if "reserved" in e["message"]]
    assert len(said) == 2
    assert said[0].split(":")[1].split(",")[0] != said[1].split(":")[1].split(",")[0], "another slice"
