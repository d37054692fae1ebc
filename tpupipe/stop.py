"""The wish to end a run early: Ctrl-C or SIGTERM, as a value that is asked for and looked at."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from tpupipe.errors import InterruptedRunError

logger = logging.getLogger("tpupipe")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to save, release and end. The first signal asks, a second one forces."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._forced = False
        self._handled = False
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Asks."""
        self.reason = self.reason or reason
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits until somebody asks, at most ``timeout_s`` seconds; whether somebody did."""
        return self._asked.wait(timeout_s)

    def check(self) -> None:
        """Ends the stage here if somebody asked.

        Raises:
            InterruptedRunError: Somebody did.
        """
        if self.asked:
            raise InterruptedRunError(f"Interrupted by {self.reason}.", reason=self.reason)

    def interruption(self) -> InterruptedRunError:
        """What a ``KeyboardInterrupt`` that reached the run's end is told as: the signal that asked, or one that forced."""
        if self.asked and not self._forced:
            return InterruptedRunError(f"Interrupted by {self.reason}.", reason=self.reason)
        return InterruptedRunError("Interrupted at once, without saving.", reason="a second Ctrl-C")

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While inside, somebody looks at ``asked`` often: a first signal need not interrupt what is under way."""
        before, self._handled = self._handled, True
        try:
            yield
        finally:
            self._handled = before

    def ending(self) -> None:
        """From now on, until ``listen``, a first signal changes nothing: what is held is given back, and the run ends.

        It would take the place of the error that the run ends with, and leave things half given back.
        """
        self._handled = True

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopRequest]:
        """Listens to Ctrl-C and SIGTERM while inside. Does nothing outside the main thread: it gets no signals.

        Raises:
            InterruptedRunError: One came, and nothing inside has made more of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield self
        except KeyboardInterrupt as error:
            raise self.interruption() from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Takes the signals, and lets the first one interrupt."""
        self._handled = False
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        # Nothing but KeyboardInterrupt: what else a handler raises is dropped where Ray waits, and taken for a failure of
        # the store where an operation of it is tried again.
        if self.asked:
            self._forced = True
            raise KeyboardInterrupt
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.ask(name)
        logger.warning("%s: saving and ending; once more ends at once", name)
        if not self._handled:
            raise KeyboardInterrupt


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C while inside: on the way out everything that was started is ended."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
