"""A watchdog inside worker processes: what makes no progress says where it stands and ends.

The process that stalls is the one that can show its own stacks, on a cluster as on a laptop; its end is noticed like
any other death and charged to the workers' budget.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from tpupipe.errors import StoreError
from tpupipe.ledger.events import event
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

STALL_TIMEOUT_S = 600.0
EXIT_STATUS = 70


class Place(Protocol):
    """What a unit's or a checkpoint's target says of where it belongs."""

    @property
    def store(self) -> Store: ...  # noqa: D102 - see UnitTarget and SaveTarget

    @property
    def paths(self) -> RunPaths: ...  # noqa: D102

    @property
    def stage(self) -> str: ...  # noqa: D102


class Watchdog:
    """Ends this process when ``beat`` is not called for ``timeout_s``.

    Args:
        timeout_s: Seconds without progress.
        what: What is being done, for the message.
        place: Where the stacks are put.
        coordinator: Who is told.
        facts: Added to the event (``rank``, ``unit``).
    """

    def __init__(self, timeout_s: float, what: str, place: Place, coordinator: CoordinatorHandle, **facts: Any) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._place = place
        self._coordinator = coordinator
        self._facts = facts
        self._last = time.monotonic()
        self._done = threading.Event()

    def beat(self) -> None:
        """Says that there was progress. One assignment: call it every step."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watchdog]:
        """Watches while inside."""
        self.beat()
        thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._timeout_s / 4)):
            silent_s = time.monotonic() - self._last
            if silent_s > self._timeout_s:
                self._end(silent_s)

    def _end(self, silent_s: float) -> None:
        place = self._place
        name = place.paths.stacks(place.stage, f"{int(time.time())}-{os.getpid()}")
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        try:
            place.store.create(name, stacks)
            uri = place.store.uri(name)
        except StoreError as error:
            uri = f"(not kept: {error.message})"
        what = (
            f"{self._what} made no progress for {silent_s:.0f} s (stall_timeout_s {self._timeout_s:g}); stacks: {uri}"
        )
        self._coordinator.report_now(
            event("stalled", what=what, uri=uri, traceback=stacks.decode(errors="replace")[-3000:], **self._facts)
        )
        os._exit(EXIT_STATUS)
