"""What faults are asked for: ``ACTION@POINT=VALUE,key=value``. Pure parsing and matching."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tpupipe.errors import UsageError
from tpupipe.faults.points import POINTS

_OPTIONS = {"seconds": float, "times": int}
_FACTS = ("rank", "stage", "unit")
_NUMBERS = ("rank", "step", "index", "epoch", "hosts")


class Action(StrEnum):
    """What happens at a fault point."""

    KILL_WORKER = "kill-worker"  # SIGKILL to the process that passes the point
    KILL_DRIVER = "kill-driver"  # SIGKILL to the driver
    KILL_HOST = "kill-host"  # SIGKILL to the raylet of the host that passes the point, and so to all on it
    RAISE = "raise"  # an exception, as if the job's own code had raised it
    HANG = "hang"  # the process stops making progress
    SLOW = "slow"  # a pause of `seconds`


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        action: What happens.
        point: Where.
        when: Facts that must be equal, as text.
        seconds: For ``slow``.
        times: How often it fires in the whole run, over all processes and restarts.
        text: As it was written.
    """

    action: Action
    point: str
    when: tuple[tuple[str, str], ...]
    seconds: float
    times: int
    text: str

    def matches(self, point: str, facts: Mapping[str, Any]) -> bool:
        """Whether passing ``point`` with these facts sets it off (if it has not fired ``times`` times)."""
        return point == self.point and all(str(facts.get(key)) == value for key, value in self.when)


def parse_fault(text: str) -> Fault:
    """Reads one fault.

    Example:
        >>> parse_fault("kill-worker@train.step=40,rank=1").when
        (('step', '40'), ('rank', '1'))

    Raises:
        UsageError: Unknown action, point or key; the message lists what there is.
    """
    head, *rest = [part.strip() for part in text.split(",")]
    action_text, at, place = head.partition("@")
    point, has_value, value = place.partition("=")
    if not at:
        raise UsageError(f"Fault {text!r} has no '@'.", hint="ACTION@POINT=VALUE, as kill-worker@train.step=40,rank=1.")
    if action_text not in list(Action):
        raise UsageError(f"Fault {text!r}: no action {action_text!r}.", hint=f"Actions: {', '.join(Action)}.")
    if point not in POINTS:
        near = difflib.get_close_matches(point, POINTS, n=1)
        raise UsageError(
            f"Fault {text!r}: there is no fault point {point!r}.",
            hint=f"{f'Did you mean {near[0]}? ' if near else ''}Points: {', '.join(POINTS)}.",
        )
    when: list[tuple[str, str]] = []
    if has_value:
        when.append((POINTS[point].fact, _checked(text, POINTS[point].fact, value)))
    options: dict[str, Any] = {"seconds": 1.0, "times": 1}
    for part in rest:
        key, equals, setting = part.partition("=")
        if equals and key in _OPTIONS:
            try:
                options[key] = _OPTIONS[key](setting)
            except ValueError as error:
                raise UsageError(f"Fault {text!r}: {key}={setting!r} is not a number.") from error
        elif equals and key in (*_FACTS, POINTS[point].fact):
            when.append((key, _checked(text, key, setting)))
        else:
            allowed = dict.fromkeys((POINTS[point].fact, *_FACTS, *_OPTIONS))
            raise UsageError(f"Fault {text!r}: {part!r} is not known.", hint=f"key=value with {', '.join(allowed)}.")
    if options["times"] < 1 or not 0 <= options["seconds"] < math.inf:
        raise UsageError(f"Fault {text!r}: times is at least 1, seconds at least 0; it could never fire.")
    return Fault(Action(action_text), point, tuple(when), options["seconds"], options["times"], text)


def _checked(text: str, fact: str, value: str) -> str:
    """A fault that could never fire would look like one that was survived."""
    if not value.strip():
        raise UsageError(f"Fault {text!r}: {fact}= has no value.", hint=f"{fact}=40, or leave it out for any.")
    if fact in _NUMBERS and not value.isdigit():
        raise UsageError(f"Fault {text!r}: {fact}={value!r} must be a whole number of at least 0.")
    return value


def parse_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """Reads several; each keeps its place, which is its identity for counting."""
    return tuple(parse_fault(text) for text in texts)
