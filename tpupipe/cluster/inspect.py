"""Facts of a running cluster: one small task per node, and what Ray's own tables say."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpupipe.cluster.connect import open_connection, warm_cluster
from tpupipe.cluster.reservation import slice_states
from tpupipe.config import ClusterConfig
from tpupipe.preflight.cluster import ClusterFacts, HostFacts, SliceFacts

ANSWER_TIMEOUT_S = 60.0
_PACKAGES = ("ray", "jax", "jaxlib", "libtpu")


def cluster_to_ask(
    config: ClusterConfig, *, root: Path, ray_address: str | None = None
) -> Callable[[], ClusterFacts] | None:
    """How to ask the cluster that a run would use; ``None`` where a run would start one, or look for one by itself.

    Args:
        config: The ``cluster`` section.
        root: Folder of local state; a warm faked cluster is looked for below it.
        ray_address: ``RAY_ADDRESS``.
    """
    address = config.address or ray_address
    warm = warm_cluster(root) if config.kind == "fake" else None
    if address is None and warm is not None:
        address = warm.address
    if address is None:
        return None
    fixed = warm is not None and warm.address == address
    return lambda: cluster_facts(address, fixed=fixed)


def cluster_facts(address: str, *, fixed: bool = False, timeout_s: float = ANSWER_TIMEOUT_S) -> ClusterFacts:
    """Connects, asks every node, and disconnects.

    Args:
        address: ``host:port`` of Ray's control service.
        fixed: Whether nodes can never be added.
        timeout_s: Seconds that the nodes have to answer, all together; a first worker process takes some.

    Raises:
        ClusterError: No cluster answers there, or this process is connected already.
    """
    with open_connection(address, {}):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        answers = _answers([node["NodeID"] for node in nodes], timeout_s)
        free = ray.available_resources()
        return ClusterFacts(
            address=ray.get_runtime_context().gcs_address,
            hosts=tuple(_host(node, answers[node["NodeID"]]) for node in nodes),
            slices=tuple(SliceFacts(**{**state, "held_by": tuple(state["held_by"])}) for state in slice_states()),
            gpus=(ray.cluster_resources().get("GPU", 0.0), free.get("GPU", 0.0)),
            driver=versions(),
            fixed=fixed,
        )


def versions() -> dict[str, str]:
    """Version of Python and of each package that is installed where this runs. Imports none of them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not being there is the answer
            found[package] = importlib.metadata.version(package)
    return found


def _answers(nodes: list[str], timeout_s: float) -> dict[str, dict[str, str] | str]:
    """Each node's versions, or why there are none."""
    ask = ray.remote(num_cpus=0, max_retries=0)(versions)
    asked = {
        node: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    }
    _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    found: dict[str, dict[str, str] | str] = {}
    for node, answer in asked.items():
        if answer in late:
            ray.cancel(answer, force=True)
            found[node] = f"no answer within {timeout_s:g} s"
            continue
        try:
            found[node] = ray.get(answer)
        except ray.exceptions.RayError as error:
            found[node] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def _host(node: dict[str, Any], answer: dict[str, str] | str) -> HostFacts:
    return HostFacts(
        node=node["NodeID"],
        address=node["NodeManagerAddress"],
        chips=int(node.get("Resources", {}).get("TPU", 0)),
        slice_name=node.get("Labels", {}).get("ray.io/tpu-slice-name", ""),
        versions={} if isinstance(answer, str) else answer,
        error=answer if isinstance(answer, str) else "",
    )
