"""What a signal does to a run: where nobody looks for it, where somebody does, and on the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tpupipe.errors import InterruptedRunError
from tpupipe.stop import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """One that listens."""
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().on_signals() as listening:
        yield listening
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_first_signal_interrupts_where_nobody_looks(stop: StopRequest) -> None:
    """Not with an error of our own: Ray drops those, and a store would try its operation again."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert str(stop.interruption()) == "Interrupted by SIGTERM."
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        stop.check()


def test_what_nothing_makes_more_of_is_an_error_of_the_run() -> None:
    """A signal while inputs are listed: whoever calls ``run`` gets one of its errors."""
    with pytest.raises(InterruptedRunError, match="Interrupted by Ctrl-C"), StopRequest().on_signals():
        signal.raise_signal(signal.SIGINT)


def test_where_somebody_looks_the_second_one_forces(stop: StopRequest) -> None:
    """The first is only noted, also on the way out of a block within the block."""
    with stop.handled():
        with stop.handled():
            pass
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        assert stop.reason == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert "at once" in str(stop.interruption())


def test_on_the_way_out_a_first_signal_changes_nothing(stop: StopRequest) -> None:
    """The error that a run ends with stays; the next connection of the same process listens again."""
    stop.ending()
    signal.raise_signal(signal.SIGTERM)
    again = StopRequest()
    with again.on_signals():
        again.ending()
        again.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_that_nobody_asked_for_is_told_as_one_at_once() -> None:
    """A ``KeyboardInterrupt`` of the job's own, or of a program around the run."""
    assert "at once" in str(StopRequest().interruption())
