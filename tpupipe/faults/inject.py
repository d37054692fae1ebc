"""Carries faults out in the process that passes a point."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpupipe.errors import TpupipeError
from tpupipe.faults.plan import Action, Fault
from tpupipe.faults.points import arm

Effect = Callable[[Fault, int], None]


class InjectedError(TpupipeError, RuntimeError):
    """Raised by the ``raise`` action."""


def raylet_of_this_worker() -> int:
    """Process id of the raylet that started this worker: its parent.

    Raises:
        InjectedError: The parent is something else (the point was passed outside of a worker).
    """
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm").read_text().strip()
    if name != "raylet":
        raise InjectedError(f"A host can be lost in a Ray worker only; this process was started by {name!r}.")
    return parent


class Injection:
    """The faults of one process.

    Args:
        faults: All faults of the run.
        identity: Facts of this process (``rank``, ``stage``), added to those of each point.
        claim: ``claim(position, facts) -> bool``: whether the fault at that position may fire once more; counted in
            one place for the whole attempt, so a restarted worker is not killed again at the same step.
        kill_driver: How this process has the driver killed.
        effects: How this process carries out actions that need more than this module may know (Ray, the store):
            ``effect(fault, position)``.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        identity: Mapping[str, Any],
        claim: Callable[[int, Mapping[str, Any]], bool],
        kill_driver: Callable[[], None],
        effects: Mapping[Action, Effect] | None = None,
    ) -> None:
        self._faults = tuple(faults)
        self._identity = dict(identity)
        self._claim = claim
        self._kill_driver = kill_driver
        self._effects = dict(effects or {})

    def arm(self) -> None:
        """Makes this process's fault points call it; leaves them inert where there are no faults."""
        arm(self if self._faults else None)

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        """Fires what a passed point sets off."""
        known = {**self._identity, **facts}
        for position, fault in enumerate(self._faults):
            if fault.matches(name, known) and fault.drawn(position, known) and self._claim(position, known):
                self._fire(position, fault)

    def _fire(self, position: int, fault: Fault) -> None:
        match fault.action:
            case Action.KILL_WORKER:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.KILL_DRIVER:
                self._kill_driver()
                threading.Event().wait()  # the driver's end ends this process
            case Action.KILL_HOST:
                os.kill(raylet_of_this_worker(), signal.SIGKILL)
                threading.Event().wait()  # the worker ends with its host
            case Action.DRAIN_HOST | Action.LOSE_SLICE | Action.CORRUPT_CHECKPOINT:
                effect = self._effects.get(fault.action)
                if effect is None:
                    raise InjectedError(f"Fault {fault.text!r}: this process cannot do {fault.action}.")
                effect(fault, position)
                if fault.action is Action.LOSE_SLICE:
                    threading.Event().wait()  # the worker ends with its slice
            case Action.RAISE:
                raise InjectedError(f"Injected by fault {fault.text!r}.")
            case Action.HANG:
                threading.Event().wait()
            case Action.SLOW:
                time.sleep(fault.seconds)
