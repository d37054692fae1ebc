"""When a training stage saves. Small composable values; the decision is a pure function.

A policy never decides *whether* there are checkpoints: the last step is always saved, and
there is no value that means "never".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tpupipe.errors import JobError

DEFAULT_KEEP = 3


@dataclass(frozen=True)
class Every:
    """Save every so many steps, every so many minutes, or both (whichever comes first).

    Args:
        steps: Optimizer steps between saves, at least 1.
        minutes: Wall-clock minutes between saves, above 0. Agreed on by all hosts, so it
            is as coarse as the interval at which they confer (about a second).
        keep: How many committed checkpoints stay in the store. The newest intact one is
            never deleted, whatever this says.

    Example:
        >>> Every(steps=100, keep=3)
        Every(steps=100, minutes=None, keep=3)
    """

    steps: int | None = None
    minutes: float | None = None
    keep: int = DEFAULT_KEEP

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise JobError(
                "Every() names no interval; checkpoints cannot be switched off.",
                hint="Every(steps=100), Every(minutes=10) or both.",
            )
        for name, value, kinds in (("steps", self.steps, int), ("minutes", self.minutes, (int, float))):
            if value is None:
                continue
            number: object = value
            if isinstance(number, bool) or not isinstance(number, kinds) or not 0 < number < math.inf:
                what = "a whole number" if kinds is int else "a number"
                raise JobError(
                    f"Every({name}={value!r}): must be {what} above 0; checkpoints cannot be switched off.",
                    hint=f"Give a large {name} if saves are dear; the last step is saved anyway.",
                )
        keep: object = self.keep
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise JobError(f"Every(keep={keep!r}): a whole number; at least 1 checkpoint must stay.")


@dataclass(frozen=True)
class OnPreemption:
    """Save when the platform announces that a host will go away, if the notice leaves time.

    Args:
        min_notice_s: Seconds of notice below which no save is tried (it would not finish).
    """

    min_notice_s: float = 2.0


Policy = Every | OnPreemption


@dataclass(frozen=True)
class SavePolicy:
    """The policies of one stage, merged into what the decision needs."""

    steps: int | None
    minutes: float | None
    keep: int
    preemption_min_notice_s: float | None

    @classmethod
    def of(cls, policies: Policy | Iterable[Policy]) -> SavePolicy:
        """Merges one policy or several: the shortest intervals win, the largest ``keep`` wins.

        Raises:
            JobError: Nothing but ``OnPreemption`` (or nothing at all) is given: a run that is
                never preempted would then only be saved at its end.
        """
        if isinstance(policies, (Every, OnPreemption)):
            given: tuple[Any, ...] = (policies,)
        else:
            given = tuple(policies) if isinstance(policies, (list, tuple)) else (policies,)
        for policy in given:
            if not isinstance(policy, (Every, OnPreemption)):
                raise JobError(
                    f"checkpoint={policy!r} is not a policy; checkpoints cannot be switched off.",
                    hint="Use Every(steps=, minutes=, keep=) and OnPreemption(), alone or in a list.",
                )
        every = [policy for policy in given if isinstance(policy, Every)]
        if not every:
            raise JobError(
                f"checkpoint={policies!r} has no Every(...); checkpoints cannot be switched off.",
                hint="Add Every(steps=100) beside it.",
            )
        notices = [policy.min_notice_s for policy in given if isinstance(policy, OnPreemption)]
        return cls(
            steps=min((e.steps for e in every if e.steps is not None), default=None),
            minutes=min((e.minutes for e in every if e.minutes is not None), default=None),
            keep=max(e.keep for e in every),
            preemption_min_notice_s=min(notices, default=None),
        )

    def due_at_step(self, step: int, last_step: int) -> bool:
        """Whether the state after ``step`` steps is saved by count. The last one always is."""
        return step == last_step or (self.steps is not None and step % self.steps == 0)

    def due_by_time(self, since_save_s: float) -> bool:
        """Whether the clock asks for a save, ``since_save_s`` seconds after the last one."""
        return self.minutes is not None and since_save_s >= self.minutes * 60.0

    def due_on_preemption(self, notice_s: float | None) -> bool:
        """Whether a preemption notice leaves time to save (``None``: no deadline was given)."""
        if self.preemption_min_notice_s is None:
            return False
        return notice_s is None or notice_s >= self.preemption_min_notice_s
