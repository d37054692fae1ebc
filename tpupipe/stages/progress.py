"""How far a stage of units is, for people who wait: when units were done, and from time to time that it still lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from tpupipe.stages.base import StageRun
from tpupipe.stages.units import Committed

EVERY_S = 2.0
STILL_EVERY_S = 60.0


class UnitProgress:
    """Tells of one stage's units.

    Args:
        run: Has the event log.
        stage: The stage.
        total: Units to do.
        clock: Monotonic seconds.
    """

    def __init__(self, run: StageRun, stage: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._stage, self._total, self._clock = run, stage, total, clock
        self._began = self._told_s = clock()
        self._units = self._rows = self._told_units = 0

    def add(self, committed: Committed) -> None:
        """Counts a unit."""
        self._units += 1
        self._rows += committed.footer.rows

    def tell(self) -> None:
        """Emits an event if there is news, or none for long. Cheap: call it often."""
        now = self._clock()
        news = self._units > self._told_units
        if now - self._told_s < (EVERY_S if news else STILL_EVERY_S):
            return
        self._told_s, self._told_units = now, self._units
        text = f"{self._stage}: {self._units} of {self._total} units"
        if self._units:
            passed_s = now - self._began
            left_s = passed_s / self._units * (self._total - self._units)
            text += f", {self._rows} rows, {self._rows / passed_s:,.0f} rows/s, about {_told(left_s)} left"
        self._run.log.emit("progress", text, stage=self._stage, units=self._units, rows=self._rows)


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
