"""Plan files and the choice of scenarios by name: everything wrong with them is said at once, before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpupipe.config import Problem
from tpupipe.config.problems import config_error, validation_problems
from tpupipe.config.reader import read_file
from tpupipe.drill.plan import Skipped
from tpupipe.drill.scenario import Scenario, split_attempts, unique_names
from tpupipe.errors import UsageError
from tpupipe.faults.plan import parse_fault
from tpupipe.faults.store_faults import StoreFault

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", re.IGNORECASE)


class _Entry(BaseModel):
    """One scenario of a plan file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    faults: list[str] = Field(default_factory=list)
    store_faults: list[str] = Field(default_factory=list)
    set: list[str] = Field(default_factory=list)
    intervals: int = Field(default=1, ge=0, le=1000)
    recovery_s: float | None = Field(default=None, gt=0, le=86_400, strict=False)
    first_status: int | None = Field(default=None, ge=1, le=255)
    about: str = ""


class _Plan(BaseModel):
    """A plan file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scenarios: list[_Entry] = Field(min_length=1)


def read_plan(path: Path) -> tuple[Scenario, ...]:
    """Reads a plan file.

    Raises:
        ConfigError: With every problem of the file.
    """
    raw, problems = read_file(path)
    if problems:
        raise config_error(problems)
    try:
        plan = _Plan.model_validate(raw)
    except ValidationError as error:
        raise config_error([_placed(p, path) for p in validation_problems(error, _Plan)]) from error
    scenarios = []
    for index, entry in enumerate(plan.scenarios):
        found = _entry_problems(entry, f"scenarios.{index}")
        problems += found
        if not found:
            try:
                scenarios.append(_scenario(entry))
            except UsageError as error:
                problems.append(Problem(f"scenarios.{index}.name", error.message, entry.name, error.hint))
    try:
        unique_names(scenarios)
    except UsageError as error:
        problems.append(Problem("scenarios", error.message))
    if problems:
        raise config_error([_placed(p, path) for p in problems])
    return tuple(scenarios)


def _placed(problem: Problem, path: Path) -> Problem:
    where = {name: getattr(problem, name) for name in ("path", "message", "value", "allowed", "nearest")}
    return Problem(**where, source=str(path))


def _entry_problems(entry: _Entry, at: str) -> list[Problem]:
    problems = []
    readers: tuple[tuple[str, Sequence[str], Any], ...] = (
        ("faults", entry.faults, parse_fault),
        ("store_faults", entry.store_faults, StoreFault.parse),
        ("set", entry.set, _override),
    )
    for key, texts, read in readers:
        for index, text in enumerate(texts):
            try:
                read(text)
            except UsageError as error:
                problems.append(Problem(f"{at}.{key}.{index}", error.message, text, error.hint))
    return problems


def _override(text: str) -> None:
    if not text.partition("=")[1]:
        raise UsageError(f"{text!r} is not KEY=VALUE.", hint="as --set takes it: budgets.app_errors=1")


def _scenario(entry: _Entry) -> Scenario:
    refused: tuple[tuple[str, ...], ...] = () if entry.first_status is None else ((),)
    return Scenario(
        entry.name,
        (*refused, *split_attempts(entry.faults)),
        tuple(entry.store_faults),
        tuple(entry.set),
        entry.intervals,
        about=entry.about,
        recovery_s=entry.recovery_s,
        first_status=entry.first_status,
    )


def chosen(
    scenarios: Sequence[Scenario], skipped: Sequence[Skipped], only: Sequence[str]
) -> tuple[tuple[Scenario, ...], tuple[Skipped, ...]]:
    """The scenarios that ``--only`` names, in the plan's order; all of them without any.

    Raises:
        UsageError: There is no such scenario, or the job has no place for it.
    """
    if not only:
        return tuple(scenarios), tuple(skipped)
    known = {s.name: s for s in scenarios}
    impossible = {s.name: s.why for s in skipped}
    for name in only:
        if name in impossible:
            raise UsageError(f"Scenario {name!r} cannot be run for this job: {impossible[name]}.", name=name)
        if name not in known:
            near = " or ".join(difflib.get_close_matches(name, [*known, *impossible], n=2))
            raise UsageError(
                f"There is no scenario {name!r}.",
                hint=f"{f'Did you mean {near}? ' if near else ''}There are: {', '.join(known)}.",
                name=name,
            )
    return tuple(s for s in scenarios if s.name in only), ()


def duration_s(text: str) -> float:
    """Seconds of a duration.

    >>> duration_s("10m"), duration_s("1h30m"), duration_s("90"), duration_s("45s")
    (600.0, 5400.0, 90.0, 45.0)

    Raises:
        UsageError: It is none, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if not match or total <= 0:
        raise UsageError(f"{text!r} is not a duration above 0.", hint="10m, 1h30m, 600s or 600.")
    return total
