"""Events: what happened, in which process, when. Kept in the run's folder and told on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

logger = logging.getLogger("tpupipe")

FLUSH_EVERY_S = 5.0


def event(kind: str, **facts: Any) -> dict[str, Any]:
    """One event: ``kind``, ``time_s`` (seconds since 1970) and facts that JSON can hold."""
    return {"kind": kind, "time_s": time.time(), **facts}


class EventLog:
    """The driver's event log: lines on stderr now, immutable segments in the store every few seconds.

    A segment that cannot be written is part of the next one. What cannot be written at the end is reported; it does not
    stop the run.

    Args:
        store: The run's store; ``None`` keeps events in memory only.
        paths: The run.
        epoch: Lease epoch, part of the segments' names.
    """

    def __init__(self, store: Store, paths: RunPaths, epoch: int) -> None:
        self._store = store
        self._paths = paths
        self._epoch = epoch
        self._sequence = 0
        self._pending: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._done = threading.Event()
        self._failed = ""
        self._see: Callable[[Mapping[str, Any]], None] = lambda _record: None
        self._thread = threading.Thread(target=self._flush_forever, name="event-log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        self.flush()
        if self._failed:
            logger.warning("Some events were not kept in the run's folder: %s", self._failed)

    def add(self, record: Mapping[str, Any]) -> None:
        """Keeps an event that was made elsewhere."""
        with self._lock:
            self._pending.append(dict(record))
        self._see(record)

    def watch(self, see: Callable[[Mapping[str, Any]], None]) -> None:
        """Shows every event to ``see`` from now on, after it was added, in the thread that adds it."""
        self._see = see

    def emit(self, kind: str, message: str = "", *, level: int = logging.INFO, **facts: Any) -> None:
        """Keeps an event and tells it."""
        self.add(event(kind, message=message, **facts) if message else event(kind, **facts))
        if message:
            logger.log(level, message, extra={"facts": {"kind": kind, **facts}})

    def _flush_forever(self) -> None:
        while not self._done.wait(FLUSH_EVERY_S):
            self.flush()

    def flush(self) -> None:
        """Writes what was added so far; returns when it is in the store (or noted as failed)."""
        with self._flushing:  # what another thread is writing was added before, so it is waited for
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
            if not pending:
                return
            self._sequence += 1
            name = self._paths.event_segment(self._epoch, self._sequence)
        lines = "".join(json.dumps(record, default=str) + "\n" for record in pending)
        try:
            self._store.create(name, lines.encode())
        except OSError as error:
            self._failed = str(error)
            with self._lock:  # the next segment has them, under a name of its own: this one may have come through
                self._pending = [*pending, *self._pending]
        else:
            self._failed = ""


class Seconds:
    """Seconds of one stage by kind: waiting, starting, compiling, working, saving."""

    KINDS = ("waiting", "starting", "compiling", "working", "saving")

    def __init__(self) -> None:
        self._by_kind = dict.fromkeys(self.KINDS, 0.0)

    def add(self, kind: str, seconds: float) -> None:
        """Adds to one kind.

        Raises:
            KeyError: No such kind.
        """
        self._by_kind[kind] += max(0.0, seconds)

    @contextlib.contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Adds the time spent inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, time.monotonic() - began)

    def rounded(self) -> dict[str, float]:
        """By kind, to the millisecond."""
        return {kind: round(seconds, 3) for kind, seconds in self._by_kind.items()}


def read_events(store: Store, paths: RunPaths) -> Iterator[dict[str, Any]]:
    """All events of a run, in the order they were kept.

    Raises:
        StoreError: Listing or reading failed.
    """
    for info in store.list(paths.events + "/"):
        for line in store.read(info.name).splitlines():
            record: dict[str, Any] = json.loads(line)
            yield record
