"""Units that fail: which are tried again, which are set aside, and when it is not worth going on. Pure decisions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tpupipe.data.bucket_lengths import spread
from tpupipe.data.sources import Unit
from tpupipe.errors import (
    BadRowError,
    CheckpointError,
    DataError,
    FencedError,
    StageError,
    StoreError,
    TpupipeError,
    UnitsSetAsideError,
    UsageError,
)

PROBES = 3
"""Units, spread over all, that are tried first: if each of them raises, it is the code, not the units."""

_SHOWN = 10


class Next(StrEnum):
    """What becomes of a unit that failed."""

    AGAIN = "again"
    SET_ASIDE = "set aside"


def is_the_units_own(error: TpupipeError) -> bool:
    """Whether an error says something about the unit; others (the store, the lease, the declaration) end the run."""
    if isinstance(error, BadRowError) and error.data.get("over_limit"):
        return False  # the stage can not succeed any more
    return not isinstance(error, (FencedError, StoreError, CheckpointError, UsageError)) or isinstance(error, DataError)


def trial_order(units: int) -> Iterator[int]:
    """Positions of units in the order in which they are tried: a few from all over, then the others.

    >>> list(trial_order(7))
    [0, 2, 4, 1, 3, 5, 6]
    """
    first = spread(range(units), PROBES)
    yield from first
    yield from (position for position in range(units) if position not in first)


def probes_of(units: Sequence[Unit]) -> frozenset[str]:
    """Ids of those that :func:`trial_order` has first."""
    return frozenset(unit.id for unit in spread(units, PROBES))


@dataclass
class UnitFailures:
    """Counts failures of one stage's units.

    Args:
        stage: The stage.
        allowed: Failures of a unit after which it is set aside.
        probes: Ids of the units that are tried first.
        succeeded: Whether some unit is committed already.
    """

    stage: str
    allowed: int
    probes: frozenset[str]
    succeeded: bool = False
    _counts: dict[str, int] = field(default_factory=dict)
    _raised: set[str] = field(default_factory=set)
    set_aside: dict[str, TpupipeError] = field(default_factory=dict)

    def success(self) -> None:
        """A unit was committed."""
        self.succeeded = True

    def raised(self, unit: str, error: TpupipeError) -> Next:
        """A unit's own code or data raised.

        Raises:
            TpupipeError: ``error`` itself: it is not about the unit, or every probe has raised and no unit succeeded.
        """
        self._check_code(unit, error)
        return self._count(unit, error)

    def give_up(self, unit: str, error: TpupipeError, *, died: bool) -> None:
        """A unit failed as often as it may, counted elsewhere. Raises as :meth:`raised`."""
        if not died:
            self._check_code(unit, error)
        self.set_aside[unit] = error

    def died(self, unit: str, error: TpupipeError) -> Next:
        """The process that worked on this unit, and on nothing else, died."""
        return self._count(unit, error)

    def _check_code(self, unit: str, error: TpupipeError) -> None:
        if not is_the_units_own(error):
            raise error
        self._raised.add(unit)
        if not self.succeeded and self.probes <= self._raised:
            raise error

    def _count(self, unit: str, error: TpupipeError) -> Next:
        self._counts[unit] = count = self._counts.get(unit, 0) + 1
        if count < self.allowed:
            return Next.AGAIN
        self.set_aside[unit] = error
        return Next.SET_ASIDE

    def check(self, where: Mapping[str, str], done: int) -> None:
        """To be called when all other units are done.

        Args:
            where: Unit to its first input, for the message.
            done: Units committed.

        Raises:
            UnitsSetAsideError: Units were set aside.
        """
        if self.set_aside:
            raise set_aside_error(self.stage, self.set_aside, where, self.allowed, done)


def set_aside_error(
    stage: str, units: Mapping[str, TpupipeError], where: Mapping[str, str], allowed: int, done: int
) -> UnitsSetAsideError:
    """The error that ends a stage some of whose units were set aside."""
    lines = [f"  {unit} ({where[unit]}): {_one_line(error)}" for unit, error in sorted(units.items())[:_SHOWN]]
    if len(units) > _SHOWN:
        lines.append(f"  and {len(units) - _SHOWN} more")
    return UnitsSetAsideError(
        f"Stage {stage!r}: {len(units)} unit(s) failed {allowed} time(s) each and were set aside; the other {done} are "
        "committed:\n" + "\n".join(lines),
        hint="The same command tries them again. budgets.unit_failures sets how often a unit may fail.",
        stage=stage,
        units={unit: error.message for unit, error in units.items()},
        done=done,
    )


def first_inputs(units: Iterable[Unit], wanted: Container[str]) -> dict[str, str]:
    """The first input of each of the wanted units."""
    return {unit.id: unit.parts[0].path if unit.parts else "?" for unit in units if unit.id in wanted}


def _one_line(error: TpupipeError) -> str:
    return next(iter(error.message.splitlines()), type(error).__name__)


def died_error(stage: str, unit: str, what: str) -> StageError:
    """What is said of a unit whose process died."""
    return StageError(f"The process that worked on unit {unit} of stage {stage!r} died: {what}", stage=stage, unit=unit)
