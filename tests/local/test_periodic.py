"""Beside the work of a block."""

from __future__ import annotations

import threading

import pytest

from tpupipe.local.periodic import periodically


def test_it_acts_while_the_block_runs_and_never_after():
    """Waited for by an event, not by time; the thread is gone when the block is left."""
    acted, enough = [], threading.Event()

    def act():
        acted.append(1)
        if len(acted) == 3:
            enough.set()

    with periodically(0.01, act, name="test-periodic"):
        assert enough.wait(60)
    after = len(acted)
    assert not [t for t in threading.enumerate() if t.name == "test-periodic"]
    assert len(acted) == after >= 3


def test_an_error_of_the_block_ends_it_too():
    with pytest.raises(KeyError), periodically(60, lambda: None, name="test-periodic"):
        raise KeyError("x")
    assert not [t for t in threading.enumerate() if t.name == "test-periodic"]
