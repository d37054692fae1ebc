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

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While inside, somebody looks at ``asked`` often: a signal need not interrupt what is under way."""
        self._handled = True
        try:
            yield
        finally:
            self._handled = False

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopRequest]:
        """Listens to Ctrl-C and SIGTERM while inside. Does nothing outside the main thread: it gets no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Takes the signals (back): connecting to Ray puts a handler of its own on SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.ask(name)
        logger.warning("%s: saving and ending; once more ends at once", name)
        if not self._handled:
            self.check()


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
