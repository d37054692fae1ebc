"""A watchdog inside worker processes: what makes no progress says where it stands and ends.

The process that stalls is the one that can show its own stacks, on a cluster as on a laptop; its end is noticed like
any other death and charged to the budget for stalls.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tpupipe.config import StageConfig
from tpupipe.errors import StoreError
from tpupipe.ledger.events import event
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

START_TIMEOUT_S = 600.0
STALL_TIMEOUT_S = 600.0
COMPILE_TIMEOUT_S = 1800.0
RESTORE_TIMEOUT_S = 1800.0
EXIT_STATUS = 70
PEERS_S, PEERS_EVERY_S = 4.0, 0.1  # for the others' stacks, which come within a second or so

logger = logging.getLogger("tpupipe")


class Place(Protocol):
    """What a unit's or a checkpoint's target says of where it belongs."""

    @property
    def store(self) -> Store: ...  # noqa: D102 - see UnitTarget and SaveTarget

    @property
    def paths(self) -> RunPaths: ...  # noqa: D102

    @property
    def stage(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class Phase:
    """Something that must make progress.

    Args:
        timeout_s: Seconds without progress after which it is a failure.
        doing: What is being done, for the message: ``"in a step"``.
        key: The configuration key that sets the seconds, for the message; empty where none does.
    """

    timeout_s: float
    doing: str = ""
    key: str = "stall_timeout_s"

    def __str__(self) -> str:
        bound = f"{self.key} {self.timeout_s:g}" if self.key else f"bound {self.timeout_s:g} s"
        return f"no progress {self.doing} ({bound})" if self.doing else f"no progress ({bound})"


@dataclass(frozen=True)
class Bounds:
    """How long each phase of a worker may be without progress, seconds.

    Args:
        stall_timeout_s: A step, or a unit.
        compile_timeout_s: ``init`` and compiling.
        restore_timeout_s: Reading the parameters.
    """

    stall_timeout_s: float = STALL_TIMEOUT_S
    compile_timeout_s: float = COMPILE_TIMEOUT_S
    restore_timeout_s: float = RESTORE_TIMEOUT_S

    @classmethod
    def of(cls, settings: StageConfig) -> Bounds:
        """What the configuration sets; what it does not is never shorter than a step may take."""
        stall_s = settings.stall_timeout_s or STALL_TIMEOUT_S
        compile_s = settings.compile_timeout_s or max(COMPILE_TIMEOUT_S, stall_s)
        return cls(stall_s, compile_s, settings.restore_timeout_s or max(RESTORE_TIMEOUT_S, stall_s))

    @property
    def starting(self) -> Phase:
        """From the process's start to its parameters: importing, joining the others, reading a manifest."""
        return Phase(START_TIMEOUT_S, "while starting", key="")

    @property
    def restoring(self) -> Phase:
        """Reading the parameters."""
        return Phase(self.restore_timeout_s, "while restoring", "restore_timeout_s")

    @property
    def compiling(self) -> Phase:
        """Tracing, compiling and the first state."""
        return Phase(self.compile_timeout_s, "in init or compilation", "compile_timeout_s")

    @property
    def stepping(self) -> Phase:
        """One step, with its batch and its save's beginning."""
        return Phase(self.stall_timeout_s, "in a step")

    @property
    def working(self) -> Phase:
        """A unit."""
        return Phase(self.stall_timeout_s)


class Watchdog:
    """Ends this process when ``beat`` is not called for the time-out of the phase it is in.

    Args:
        phase: The first phase, or its time-out in seconds.
        what: Who it is about, for the message.
        place: Where the stacks are put.
        coordinator: Who is told.
        step: The step that is reached at first, where there are steps.
        peers: A name and how many processes stall together under it: the end of one is that of all. So who has been
            silent for half of its bound when another one ends tells of its stacks and ends, too, and each waits a
            little until all have told.
        facts: Added to the event (``rank``, ``unit``).
    """

    def __init__(
        self,
        phase: Phase | float,
        what: str,
        place: Place,
        coordinator: CoordinatorHandle,
        *,
        step: int | None = None,
        peers: tuple[str, int] | None = None,
        **facts: Any,
    ) -> None:
        self._peers = peers
        self._phase = phase if isinstance(phase, Phase) else Phase(phase)
        self._what = what
        self._place = place
        self._coordinator = coordinator
        self._facts = facts
        self._step = step
        self._last = time.monotonic()
        self._done = threading.Event()

    def beat(self, step: int | None = None) -> None:
        """Says that there was progress, and the steps done. Two assignments: call it every step."""
        if step is not None:
            self._step = step
        self._last = time.monotonic()

    def enter(self, phase: Phase) -> None:
        """Says that something else begins."""
        self._last = time.monotonic()  # first: a shorter bound must not be compared with the old phase's silence
        self._phase = phase

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Something else is done inside; afterwards what was done before goes on."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def reached(self) -> Mapping[str, Any]:
        """The steps done, as a fact; empty where there are no steps."""
        return {} if self._step is None else {"step": self._step}

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
        while not self._done.wait(min(1.0, self._phase.timeout_s / 4)):
            phase = self._phase
            if self._silent(phase.timeout_s, phase) or (
                self._silent(phase.timeout_s / 2, phase) and self._peer_stalled()
            ):
                self._end(phase)

    def _silent(self, seconds: float, phase: Phase) -> bool:
        return time.monotonic() - self._last > seconds and phase is self._phase

    def _peer_stalled(self) -> bool:
        if self._peers is None:
            return False
        try:
            return self._coordinator.counted(self._peers[0]) > 0
        except Exception:
            logger.exception("the coordinator could not be asked for stalled peers")  # this process's own bound remains
            return False

    def _end(self, phase: Phase) -> None:
        try:
            self._tell(phase)
            self._wait_for_peers()
        except Exception:
            logger.exception("a stall could not be told of")  # into the worker's own log file
        finally:
            os._exit(EXIT_STATUS)

    def _wait_for_peers(self) -> None:
        if self._peers is None:
            return
        name, processes = self._peers
        self._coordinator.count(name)
        ends = time.monotonic() + PEERS_S
        while self._coordinator.counted(name) < processes and time.monotonic() < ends:
            time.sleep(PEERS_EVERY_S)

    def _tell(self, phase: Phase) -> None:
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
        self._coordinator.report_now(
            event(
                "stalled",
                what=f"{self._what}: {phase}; stacks: {uri}",
                phase=str(phase),
                uri=uri,
                traceback=stacks.decode(errors="replace")[-3000:],
                **self.reached(),
                **self._facts,
            )
        )
