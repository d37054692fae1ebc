"""Runs of the small job in this process, against the session's warm cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Runner, World
from tpupipe.run import RunResult


@pytest.fixture(scope="session")
def make_runner(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runner]:
    folder = tmp_path_factory.mktemp("inputs")
    return lambda name: Runner(world, folder, name)


@pytest.fixture
def runner(make_runner: Callable[[str], Runner], request: pytest.FixtureRequest) -> Runner:
    return make_runner("".join(c for c in request.node.name.lower() if c.isalnum() or c == "-")[:30] + "-")


@pytest.fixture(scope="session")
def undisturbed(make_runner: Callable[[str], Runner]) -> RunResult:
    """The small job run once without any failure: what every disturbed run must equal."""
    return make_runner("reference-")("a")
