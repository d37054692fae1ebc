"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended. Only ``FAILURE`` makes ``tpupipe check`` fail."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    Args:
        check: ``group.name``: ``store.create``, ``topology.mesh``, ``aot.lm``.
        status: How it ended.
        message: One sentence with the value.
        hint: What to do about it; for ``SKIPPED``, how to get it.
        facts: The values behind the message, as JSON values, for ``--json``.
    """

    check: str
    status: Status
    message: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The part of ``check`` before the first dot."""
        return self.check.partition(".")[0]


def worst(findings: Iterable[Finding]) -> Status:
    """The status of all findings together; ``SKIPPED`` counts as ``OK``.

    >>> worst([Finding("a.b", Status.OK, "fine"), Finding("a.c", Status.WARNING, "hm")]).value
    'warning'
    """
    found = {finding.status for finding in findings}
    return next((status for status in (Status.FAILURE, Status.WARNING) if status in found), Status.OK)
