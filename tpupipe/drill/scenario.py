"""What a drill may do to a run, and what it must find afterwards. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault, parse_faults
from tpupipe.faults.points import POINTS
from tpupipe.store.layout import check_name

MAX_ATTEMPTS = 12
MAX_NAME = 32  # of a run's 63 characters the drill's own name takes the rest

_NO_FAILURE = (Action.SLOW, Action.CORRUPT_CHECKPOINT)  # nothing has to be recovered from


@dataclass(frozen=True)
class Scenario:
    """One disturbed run.

    Args:
        name: Names the scenario and its run; at most 32 of a-z 0-9 . _ -.
        attempts: The faults of each attempt. Every attempt but the last is ended by its last fault, which kills the
            driver; the same command is then given again with the next attempt's faults.
        store_faults: Faults of the store, in force in every attempt (but see ``first_status``).
        overrides: ``KEY=VALUE`` laid over the configuration, for this scenario only.
        intervals: How many checkpoint intervals of steps a failure may cost.
        must_fire: Whether a fault that does not fire is a failure of the scenario: what was not tried proves nothing.
        about: One line for the report.
        extra_s: Seconds that it takes beyond its failures' recoveries (a hang that is waited for).
        recovery_s: Bound on every recovery; ``None`` is what the reference run suggests.
        first_status: Exit status that the first attempt must end with, as nobody kills its driver: its store refuses
            something for good. From the second attempt on the store works.
    """

    name: str
    attempts: tuple[tuple[str, ...], ...] = ((),)
    store_faults: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    intervals: int = 1
    must_fire: bool = True
    about: str = ""
    extra_s: float = 0.0
    recovery_s: float | None = None
    first_status: int | None = None
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
        if self.first_status is not None and len(self.attempts) < 2:
            raise UsageError(
                f"Scenario {self.name!r}: its first attempt must end with status {self.first_status}, and there is no second.",
                hint="The second one, in which the store works, has to end well.",
            )
        object.__setattr__(self, "faults", tuple(fault for attempt in self.attempts for fault in attempt))

    def status_of(self, attempt: int) -> int | None:
        """Exit status that an attempt (from 0) must end with; ``None`` where its driver is to be killed."""
        if attempt == len(self.attempts) - 1:
            return 0
        return self.first_status if attempt == 0 else None

    def store_faults_of(self, attempt: int) -> tuple[str, ...]:
        """Faults of the store in an attempt (from 0)."""
        return self.store_faults if attempt == 0 or self.first_status is None else ()

    @property
    def failures_in_a_row(self) -> int:
        """Failures of one stage in one attempt, at most: where the next comes before any new work, they are one recovery."""
        most = 1
        for faults in map(parse_faults, self.attempts):
            failures = [fault for fault in faults if fault.action not in _NO_FAILURE]
            by_stage = Counter({"": 0})
            for fault in failures:
                by_stage[dict(fault.when).get("stage", "")] += fault.times
            anywhere = by_stage.pop("")  # it may come in any of the stages
            most = max(most, anywhere + max(by_stage.values(), default=0))
        return most


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
