"""Checks are values: a name, the function that looks, and what it needs. Running them is here, what they look at is elsewhere.

A check that breaks is a failure with its error: neither the end of the command, nor silently fine.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpupipe.errors import TpupipeError
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status

_log = logging.getLogger("tpupipe.preflight")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: ``group.name``.
        look: Looks, and gives one finding or several: at least one.
        needs_job: Whether it is skipped where the job's module could not be loaded.
    """

    name: str
    look: Callable[[CheckContext], Iterable[Finding]]
    needs_job: bool = False

    @property
    def group(self) -> str:
        """What ``--only`` and ``--skip`` name."""
        return self.name.partition(".")[0]


def guarded(name: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What ``look`` finds; whatever it raises, and that it finds nothing, is a failure of the check ``name``."""
    try:
        found = list(look())
    except TpupipeError as error:
        facts = {"error_kind": type(error).__name__}
        return [Finding(name, Status.FAILURE, error.message, error.hint, facts)]
    except Exception as error:  # noqa: BLE001 - whatever a check raises is what it found
        _log.debug("check %s broke", name, exc_info=True)
        last = traceback.extract_tb(error.__traceback__)[-1]
        return [
            Finding(
                name,
                Status.FAILURE,
                f"The check itself broke: {type(error).__name__}: {error}",
                f"It was at {last.filename}:{last.lineno} in {last.name}; what it would have found is not known. Please report it.",
                {"error_kind": type(error).__name__, "traceback": traceback.format_exc()},
            )
        ]
    return found or [
        Finding(name, Status.FAILURE, "The check itself broke: it found nothing at all.", "Please report it.")
    ]


def iter_checks(
    context: CheckContext,
    groups: Iterable[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    checks: Sequence[Check] | None = None,
) -> Iterator[Finding]:
    """Runs the checks of some groups, in the registry's order, and gives each finding as it is there.

    Args:
        context: What is looked at.
        groups: Names of groups; all by default.
        say: Takes a line of progress before each check.
        checks: Instead of the registry (``tpupipe.preflight.registry.CHECKS``).
    """
    from tpupipe.preflight.registry import CHECKS

    wanted = None if groups is None else set(groups)
    try:
        for check in CHECKS if checks is None else checks:
            if wanted is not None and check.group not in wanted:
                continue
            if check.needs_job and context.job is None:
                yield Finding(
                    check.name, Status.SKIPPED, "The job could not be loaded.", "Mend what job.import says first."
                )
                continue
            say(f"checking {check.name}")
            yield from guarded(check.name, lambda check=check: check.look(context))  # type: ignore[misc]
    finally:
        context.close()


def run_checks(
    context: CheckContext,
    groups: Iterable[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    checks: Sequence[Check] | None = None,
) -> list[Finding]:
    """All of :func:`iter_checks`."""
    return list(iter_checks(context, groups, say, checks))
