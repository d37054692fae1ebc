"""What the tests share: a warm faked cluster, an embedded server for the whole session, and empty stores."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.e2e.harness import SLICES, World
from tests.places import Place
from tpupipe.cluster.connect import cluster_down, cluster_up
from tpupipe.cluster.fake import FakeClusterSpec
from tpupipe.faults.store_proxy import StoreProxy, store_proxy
from tpupipe.local.server import embedded_store
from tpupipe.store.objects import Store

# Wall time of one example says nothing on a busy machine; the examples themselves stay the default number.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("world")
    root = base / ".tpupipe"
    with embedded_store(root) as endpoint:
        try:
            yield World(base, cluster_up(FakeClusterSpec(SLICES, cpus_per_host=8), base, ".tpupipe", print), endpoint)
        finally:
            cluster_down(root)


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real embedded server."""
    with embedded_store(tmp_path_factory.mktemp("embedded")) as url:
        yield url


@pytest.fixture(autouse=True)
def _log_lines_are_seen() -> Iterator[None]:
    """A command that sets up its logs keeps them from pytest: not for the tests after it."""
    yield
    logging.getLogger("tpupipe").propagate = True


@pytest.fixture
def file_place(tmp_path: Path) -> Place:
    """An empty folder."""
    return Place(f"file://{tmp_path}/store", None)


@pytest.fixture(params=["file", "gs"])
def place(request: pytest.FixtureRequest, file_place: Place) -> Place:
    """An empty place on each backend."""
    if request.param == "file":
        return file_place
    return Place(f"gs://bucket-{uuid.uuid4().hex[:12]}/some/prefix", request.getfixturevalue("endpoint"))


@pytest.fixture
def store(place: Place) -> Store:
    """An empty store on each backend."""
    return place.open()


@pytest.fixture(scope="session")
def running_proxy(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    """A proxy process in front of the embedded server."""
    with store_proxy(endpoint, root=tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: StoreProxy) -> Iterator[StoreProxy]:
    """The proxy, without faults at first and afterwards."""
    running_proxy.set()
    yield running_proxy
    running_proxy.set()
