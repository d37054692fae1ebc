"""Running checks: what breaks is a failure, what cannot be looked at is skipped, nothing is silently fine."""

from __future__ import annotations

import pytest

from tpupipe.errors import SliceError
from tpupipe.preflight.checks import Check, guarded, run_checks
from tpupipe.preflight.findings import Finding, Status, worst
from tpupipe.preflight.registry import CHECKS, GROUPS

FINE = Finding("a.b", Status.OK, "fine")


def crash(_):
    yield FINE
    raise ZeroDivisionError("by nought")


def test_a_check_that_breaks_is_a_failure_with_its_error(context):
    """Its name, the error, where it was; and the checks after it still run."""
    checks = [Check("a.b", crash), Check("a.c", lambda _: [FINE])]
    found = run_checks(context(), checks=checks)
    assert [(f.check, f.status) for f in found] == [("a.b", Status.FAILURE), ("a.b", Status.OK)]
    assert "ZeroDivisionError: by nought" in found[0].message
    assert "test_checks.py" in found[0].hint
    assert "by nought" in found[0].facts["traceback"]


def test_a_check_that_says_nothing_is_a_failure(context):
    """Silence is never fine."""
    [found] = run_checks(context(), checks=[Check("a.b", lambda _: [])])
    assert found.status is Status.FAILURE


def test_an_error_of_ours_is_its_message():
    """With hint and kind."""

    def look():
        raise SliceError("no such slice", hint="take another")

    assert guarded("a.b", look) == [
        Finding("a.b", Status.FAILURE, "no such slice", "take another", {"error_kind": "SliceError"})
    ]


def test_an_interrupt_ends_it():
    """Ctrl-C is no finding."""

    def look():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("a.b", look)


def test_only_the_groups_that_are_asked_for(context):
    """Each check of the group, and progress for each."""
    said: list[str] = []
    found = run_checks(context(), ["zone"], said.append)
    assert [f.check for f in found] == ["zone.offer", "zone.prices"]
    assert said == ["checking zone.offer", "checking zone.prices"]


def test_without_a_job_its_checks_are_skipped_and_say_so(context):
    """Nothing about meshes or maps is claimed."""
    found = {f.check: f.status for f in run_checks(context(), ["topology", "job"])}
    assert found["topology.slice"] is Status.OK
    needing = {check.name for check in CHECKS if check.needs_job}
    assert {name for name, status in found.items() if status is Status.SKIPPED} >= needing


def test_the_registry_is_in_groups():
    """Names are unique and of the form group.name; a group is in one piece."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(name.count(".") == 1 for name in names)
    assert [c.group for c in CHECKS] == sorted((c.group for c in CHECKS), key=GROUPS.index)


def test_the_worst_counts():
    """A failure before a warning before the rest."""
    warning, failure = (Finding("a.b", s, "") for s in (Status.WARNING, Status.FAILURE))
    skipped = Finding("a.b", Status.SKIPPED, "")
    assert worst([FINE, skipped]) is Status.OK
    assert worst([FINE, warning]) is Status.WARNING
    assert worst([failure, warning, FINE]) is Status.FAILURE
    assert worst([]) is Status.OK
