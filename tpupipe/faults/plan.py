"""What faults are asked for: ``ACTION@POINT=VALUE,key=value``. Pure parsing, matching and drawing."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tpupipe.errors import UsageError
from tpupipe.faults.points import POINTS

HOW = ("flip", "truncate", "delete")

_OPTIONS = {"seconds": float, "times": int, "rate": float, "seed": int, "deadline_s": float, "how": str}
_FACTS = ("rank", "stage", "unit")
_NUMBERS = ("rank", "step", "index", "epoch", "hosts", "beat", "generation")


class Action(StrEnum):
    """What happens at a fault point."""

    KILL_WORKER = "kill-worker"  # SIGKILL to the process that passes the point
    KILL_DRIVER = "kill-driver"  # SIGKILL to the driver
    KILL_HOST = "kill-host"  # SIGKILL to the raylet of the host that passes the point, and so to all on it
    DRAIN_HOST = "drain-host"  # a preemption notice for the host that passes the point, `deadline_s` ahead of its end
    LOSE_SLICE = "lose-slice"  # SIGKILL to the raylets of all hosts of the (faked) slice that passes the point
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"  # damages the newest committed checkpoint of the run, `how`
    RAISE = "raise"  # an exception, as if the job's own code had raised it
    HANG = "hang"  # the process stops making progress
    SLOW = "slow"  # a pause of `seconds`


# They hit the host that passes the point, and the driver's is no TPU host.
ON_A_HOST = (Action.KILL_HOST, Action.DRAIN_HOST, Action.LOSE_SLICE)
_ONLY_FOR = {"deadline_s": Action.DRAIN_HOST, "how": Action.CORRUPT_CHECKPOINT}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        action: What happens.
        point: Where.
        when: Facts that must be equal, as text; numbers without leading zeros.
        seconds: For ``slow``.
        times: How often it fires at most in one attempt, over all processes and restarts.
        text: As it was written.
        deadline_s: For ``drain-host``: seconds until the host may go away.
        how: For ``corrupt-checkpoint``, one of ``HOW``.
        rate: Chance in (0, 1] that a pass that matches sets it off.
        seed: Decides which passes those are.
    """

    action: Action
    point: str
    when: tuple[tuple[str, str], ...]
    seconds: float
    times: int
    text: str
    deadline_s: float = 15.0
    how: str = "flip"
    rate: float = 1.0
    seed: int = 0

    def matches(self, point: str, facts: Mapping[str, Any]) -> bool:
        """Whether it is about passing ``point`` with these facts."""
        return point == self.point and all(str(facts.get(key)) == value for key, value in self.when)

    def drawn(self, position: int, facts: Mapping[str, Any]) -> bool:
        """Whether a pass that matches is one of those that ``rate`` picks.

        Depends on the seed, on the fault's place in the plan and on the facts, on nothing else: the same run meets the
        same faults, whatever its processes' speed, and a pass that is done again after a restart is drawn the same.
        """
        if self.rate >= 1:
            return True
        return fraction(self.seed, position, self.point, {k: str(v) for k, v in facts.items()}) < self.rate

    def may_fire(self, fired: Sequence[Mapping[str, str]], facts: Mapping[str, str]) -> bool:
        """Whether it may fire once more; pure.

        Args:
            fired: The facts of the passes at which it fired before.
            facts: Those of this pass.

        Returns:
            False after ``times``. With a ``rate`` also where it fired before: a pass that is done again after a restart
            is drawn the same, and would be hit until ``times`` is used up.
        """
        return len(fired) < self.times and (self.rate >= 1 or facts not in fired)


def fraction(*key: Any) -> float:
    """A number in [0, 1) that depends on ``key`` (JSON values) only."""
    text = json.dumps(key, sort_keys=True)
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 11) / 2.0**53


def parse_fault(text: str) -> Fault:
    """Reads one fault.

    Example:
        >>> parse_fault("kill-worker@train.step=40,rank=1").when
        (('step', '40'), ('rank', '1'))
        >>> parse_fault("kill-worker@train.step,rate=0.1,seed=7,times=3").rate
        0.1

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
    action = Action(action_text)
    if action in ON_A_HOST and POINTS[point].where == "driver":
        raise UsageError(
            f"Fault {text!r}: {action} is about the host that passes the point, and {point} is passed by the driver.",
            hint=f"Points of workers: {', '.join(name for name, info in POINTS.items() if info.where == 'worker')}.",
        )
    when: list[tuple[str, str]] = []
    if has_value:
        when.append((POINTS[point].fact, _checked(text, POINTS[point].fact, value)))
    options: dict[str, Any] = {}
    allowed = [key for key in _OPTIONS if _ONLY_FOR.get(key, action) is action]
    for part in rest:
        key, equals, setting = part.partition("=")
        if equals and key in allowed:
            try:
                options[key] = _OPTIONS[key](setting)
            except ValueError as error:
                raise UsageError(f"Fault {text!r}: {key}={setting!r} is not a number.") from error
        elif equals and key in (*_FACTS, POINTS[point].fact):
            when.append((key, _checked(text, key, setting)))
        else:
            known = dict.fromkeys((POINTS[point].fact, *_FACTS, *allowed))
            raise UsageError(f"Fault {text!r}: {part!r} is not known.", hint=f"key=value with {', '.join(known)}.")
    if "seed" in options and "rate" not in options:
        raise UsageError(f"Fault {text!r}: seed= decides which passes rate= picks, and there is no rate=.")
    fault = Fault(action, point, tuple(when), **{"seconds": 1.0, "times": 1, **options}, text=text)
    if problem := _out_of_range(fault):
        raise UsageError(f"Fault {text!r}: {problem}.")
    return fault


def _out_of_range(fault: Fault) -> str:
    if fault.times < 1:
        return f"times={fault.times}: at least 1, or it could never fire"
    if not 0 <= fault.seconds < math.inf:
        return f"seconds={fault.seconds:g}: a number of at least 0"
    if not 0 < fault.rate <= 1:
        return f"rate={fault.rate:g}: a number above 0, up to 1"
    if not 1 <= fault.deadline_s < math.inf:
        return f"deadline_s={fault.deadline_s:g}: a number of at least 1"
    if fault.how not in HOW:
        return f"how={fault.how!r}; allowed: {', '.join(HOW)}"
    return ""


def _checked(text: str, fact: str, value: str) -> str:
    """The value as points give it. A fault that could never fire would look like one that was survived."""
    if not value.strip():
        raise UsageError(f"Fault {text!r}: {fact}= has no value.", hint=f"{fact}=40, or leave it out for any.")
    if fact not in _NUMBERS:
        return value
    if not value.isdecimal():
        raise UsageError(f"Fault {text!r}: {fact}={value!r} must be a whole number of at least 0.")
    return str(int(value))


def parse_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """Reads several; each keeps its place, which is its identity for counting."""
    return tuple(parse_fault(text) for text in texts)
