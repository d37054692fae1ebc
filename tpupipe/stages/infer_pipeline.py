"""Three threads with short queues between them: one unit is read while another is computed and a third is written.

Knows nothing of models or stores. What is in memory is bounded by the depth of the queues, in pieces of a unit.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

DEPTH = 1  # pieces that wait between two threads


class Engine(Protocol):
    """Computes pieces; may have several at work, and gives them back in the order they came."""

    def submit(self, piece: Any, done: Callable[[Any], None]) -> None:
        """Begins a piece; ``done(computed, or the exception)`` is called for this or earlier pieces when they are done."""

    def collect(self) -> bool:
        """Waits for some of the work that was begun and calls its ``done``; false if there was none."""


class Sink(Protocol[Result_co]):
    """Where the computed pieces of one unit go."""

    def append(self, computed: Any) -> None:
        """Takes the next piece."""

    def finish(self) -> Result_co:
        """Ends the unit; its result."""

    def discard(self) -> None:
        """Gives the unit up. May come after a failed ``finish``."""


@dataclass
class _Ticket(Generic[Job, Result]):
    job: Job
    sink: Sink[Result]
    future: Future[Result] = field(default_factory=Future)
    error: BaseException | None = None
    at_work: int = 0  # pieces in the engine; the compute thread's own
    ended: bool = False  # all pieces were read; the compute thread's own

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error


_END = object()
_STOP = object()


class Pipeline(Generic[Job, Result]):
    """Reads, computes and writes units.

    Args:
        read: ``read(job)`` gives the pieces of a unit, in order.
        engine: Computes pieces.
        sink: ``sink(job)`` is where a unit's computed pieces go.
        progress: Called whenever something was done.
        lockstep: Other processes compute the same pieces with this one, so each that was read is computed, also of a
            unit that has failed further on.
    """

    def __init__(
        self,
        read: Callable[[Job], Iterator[Any]],
        engine: Engine,
        sink: Callable[[Job], Sink[Result]],
        progress: Callable[[], None] = lambda: None,
        *,
        lockstep: bool = False,
    ) -> None:
        self._lockstep = lockstep
        self._read = read
        self._engine = engine
        self._sink = sink
        self._progress = progress
        self._jobs: queue.Queue[Any] = queue.Queue()
        self._pieces: queue.Queue[Any] = queue.Queue(DEPTH)
        self._computed: queue.Queue[Any] = queue.Queue(DEPTH)
        loops = {"read": self._read_all, "compute": self._compute_all, "write": self._write_all}
        self._threads = [threading.Thread(target=loop, name=f"infer-{n}", daemon=True) for n, loop in loops.items()]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Result]:
        """Takes a unit; its future has the sink's result, or what was raised. Units end in the order they came."""
        ticket = _Ticket(job, self._sink(job))
        self._jobs.put(ticket)
        return ticket.future

    def close(self) -> None:
        """Ends the threads when all units that were submitted are done."""
        self._jobs.put(_STOP)
        for thread in self._threads:
            thread.join()

    # -- the three threads; each passes every ticket's end on, whatever happened to it -----------

    def _read_all(self) -> None:
        while (ticket := self._jobs.get()) is not _STOP:
            try:
                for piece in self._read(ticket.job):
                    self._progress()
                    if ticket.error is not None and not self._lockstep:  # it failed further on: nobody needs the rest
                        break
                    self._pieces.put((ticket, piece))
                    del piece  # the queue holds it now; the next one is read meanwhile
            except BaseException as error:  # noqa: BLE001 - it goes to the ticket's future
                ticket.fail(error)
            self._progress()
            self._pieces.put((ticket, _END))
        self._pieces.put((None, _STOP))

    def _compute_all(self) -> None:
        while True:
            try:
                ticket, piece = self._pieces.get_nowait()
            except queue.Empty:
                if self._engine.collect():
                    self._progress()
                    continue
                ticket, piece = self._pieces.get()
            if piece is _STOP:
                while self._engine.collect():
                    pass
                self._computed.put((None, _STOP))
                return
            if piece is _END:
                ticket.ended = True
                self._end_if_done(ticket)
            elif ticket.error is None or self._lockstep:
                ticket.at_work += 1
                self._engine.submit(piece, functools.partial(self._deliver, ticket))
                del piece
            self._progress()

    def _deliver(self, ticket: _Ticket[Any, Any], result: Any) -> None:
        ticket.at_work -= 1
        if isinstance(result, BaseException):
            ticket.fail(result)
        elif ticket.error is None:
            self._computed.put((ticket, result))
        self._end_if_done(ticket)

    def _end_if_done(self, ticket: _Ticket[Any, Any]) -> None:
        if ticket.ended and not ticket.at_work:
            self._computed.put((ticket, _END))

    def _write_all(self) -> None:
        while True:
            ticket, computed = self._computed.get()
            if computed is _STOP:
                return
            result = None
            try:
                if ticket.error is None:
                    if computed is _END:
                        result = ticket.sink.finish()
                    else:
                        ticket.sink.append(computed)
            except BaseException as error:  # noqa: BLE001 - it goes to the ticket's future
                ticket.fail(error)
            self._progress()
            if computed is not _END:
                continue
            if ticket.error is None:
                ticket.future.set_result(result)
            else:
                ticket.sink.discard()
                ticket.future.set_exception(ticket.error)
