"""What a drill may do to a run, and what it must find afterwards. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault
from tpupipe.faults.points import POINTS
from tpupipe.store.layout import check_name

MAX_ATTEMPTS = 12
MAX_NAME = 32  # of a run's 63 characters the drill's own name takes the rest


@dataclass(frozen=True)
class Scenario:
    """One disturbed run.

    Args:
        name: Names the scenario and its run; at most 32 of a-z 0-9 . _ -.
        attempts: The faults of each attempt. Every attempt but the last is ended by its last fault, which kills the
            driver; the same command is then given again with the next attempt's faults.
        store_faults: Faults of the store, in force in every attempt.
        overrides: ``KEY=VALUE`` laid over the configuration, for this scenario only.
        intervals: How many checkpoint intervals of steps a failure may cost.
        must_fire: Whether a fault that does not fire is a failure of the scenario: what was not tried proves nothing.
        about: One line for the report.
        extra_s: Seconds that it takes beyond its failures' recoveries (a hang that is waited for).
    """

    name: str
    attempts: tuple[tuple[str, ...], ...] = ((),)
    store_faults: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    intervals: int = 1
    must_fire: bool = True
    about: str = ""
    extra_s: float = 0.0
    faults: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_name("scenario", self.name)
        if len(self.name) > MAX_NAME:
            raise UsageError(f"Scenario name {self.name!r} has {len(self.name)} characters; allowed: {MAX_NAME}.")
        if not 1 <= len(self.attempts) <= MAX_ATTEMPTS:
            raise UsageError(
                f"Scenario {self.name!r} has {len(self.attempts)} attempts; allowed: 1 to {MAX_ATTEMPTS}.",
                hint="Each kill of the driver begins one more.",
            )
        object.__setattr__(self, "faults", tuple(fault for attempt in self.attempts for fault in attempt))


def kills_driver(text: str) -> bool:
    """Whether a fault ends the driver, and so the attempt.

    >>> kills_driver("kill-driver@train.step=3"), kills_driver("kill-worker@train.step=3")
    (True, False)
    """
    fault = parse_fault(text)
    in_driver = POINTS[fault.point].where == "driver"
    return fault.action == Action.KILL_DRIVER or (fault.action == Action.KILL_WORKER and in_driver)


def split_attempts(faults: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Cuts a list of faults after each one that kills the driver: what has fired is not given again.

    >>> split_attempts(["slow@train.step=1", "kill-driver@train.step=3", "kill-worker@train.step=5"])
    (('slow@train.step=1', 'kill-driver@train.step=3'), ('kill-worker@train.step=5',))
    >>> split_attempts(["kill-driver@run.reserved"])
    (('kill-driver@run.reserved',), ())
    """
    attempts: list[tuple[str, ...]] = []
    given: list[str] = []
    for fault in faults:
        given.append(fault)
        if kills_driver(fault):
            attempts.append(tuple(given))
            given = []
    return (*attempts, tuple(given))


def unique_names(scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Gives the scenarios back.

    Raises:
        UsageError: Two have the same name.
    """
    found: dict[str, Scenario] = {}
    for scenario in scenarios:
        if scenario.name in found:
            raise UsageError(f"Two scenarios are named {scenario.name!r}.", hint="Each names a run of its own.")
        found[scenario.name] = scenario
    return tuple(found.values())
