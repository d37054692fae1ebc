"""What the tests share: one warm faked cluster and one embedded store for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import SLICES, World
from tpupipe.cluster.connect import cluster_down, cluster_up
from tpupipe.cluster.fake import FakeClusterSpec
from tpupipe.local.server import embedded_store


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("world")
    root = base / ".tpupipe"
    with embedded_store(root) as endpoint:
        try:
            yield World(base, cluster_up(FakeClusterSpec(SLICES, cpus_per_host=8), base, ".tpupipe", print), endpoint)
        finally:
            cluster_down(root)
