"""The event log outlives an outage of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpupipe.ledger.events import EventLog, read_events
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store


def test_events_of_an_outage_are_kept_when_the_store_is_back(tmp_path: Path) -> None:
    """What could not be written is part of the next segment, in order."""
    store, paths = open_store(f"file://{tmp_path}/runs"), RunPaths("job", "a")
    with EventLog(store, paths, 1) as log:
        log.emit("first")
        blocker = tmp_path / "runs" / paths.events
        blocker.parent.mkdir(parents=True, exist_ok=True)
        blocker.write_text("a file where the folder should be")
        log.flush()
        log.emit("second")
        blocker.unlink()
    assert [e["kind"] for e in read_events(store, paths)] == ["first", "second"]


def test_events_that_cannot_be_kept_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end there is no next segment: a warning says so, and nothing is raised."""
    store, paths = open_store(f"file://{tmp_path}/runs"), RunPaths("job", "a")
    blocker = tmp_path / "runs" / paths.events
    blocker.parent.mkdir(parents=True)
    blocker.write_text("a file where the folder should be")
    with caplog.at_level("WARNING", logger="tpupipe"), EventLog(store, paths, 1) as log:
        log.emit("lost")
    assert "Some events were not kept" in caplog.text
