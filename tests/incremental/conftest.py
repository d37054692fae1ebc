from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.incremental.world import World
from tpupipe.local.server import embedded_store


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real embedded server."""
    with embedded_store(tmp_path_factory.mktemp("embedded")) as url:
        yield url


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty dataset on a file system."""
    return World(tmp_path / "in", f"file://{tmp_path}/store", None)
