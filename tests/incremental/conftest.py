from __future__ import annotations

from collections.abc import Iterator

import pytest

from tpupipe.local.server import embedded_store


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real embedded server."""
    with embedded_store(tmp_path_factory.mktemp("embedded")) as url:
        yield url
