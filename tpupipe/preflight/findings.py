"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's answer.

    Args:
        check: ``group.name``: ``topology.mesh``, ``store.create``, ``aot.lm``.
        status: How it ended.
        message: One sentence with the value.
        hint: What to do about it.
        facts: The numbers behind it, for ``--json``.
    """

    check: str
    status: Status
    message: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
