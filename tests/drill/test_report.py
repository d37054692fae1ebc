"""The report: JSON, a table, and JUnit XML that a CI reads."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from xml.etree import ElementTree as ET

from rich.console import Console

from tpupipe.drill.outcome import Verdict
from tpupipe.drill.plan import Skipped
from tpupipe.drill.report import Report

PASSED = Verdict(
    "kill", "a worker is killed", "d-kill", (), 2, {"kill-worker": 2}, 2, (5,), 20, (9.5,), 160, 1, 61.0, "k.log", 60.0
)
FAILED = replace(PASSED, scenario="lose", failed=("stage lm: params_digest differs <&>\x1b[0m", "more"))
REPORT = Report("lm", "d", {"run": "d-reference"}, (PASSED, FAILED), (Skipped("hang", "no time"),), 200.0, 600.0, "f")


def test_one_failure_fails_the_drill_and_nothing_run_is_no_success():
    assert REPORT.status == "failed"
    assert replace(REPORT, verdicts=(PASSED,)).status == "passed"
    assert replace(REPORT, verdicts=()).status == "nothing ran"
    assert replace(REPORT, verdicts=(PASSED,), unfinished="interrupted").status == "unfinished"
    assert replace(REPORT, unfinished="interrupted").status == "failed"


def test_the_json_has_every_verdict_and_what_was_left_out():
    value = json.loads(REPORT.to_json())
    assert value["status"] == "failed"
    assert [(v["scenario"], v["verdict"]) for v in value["verdicts"]] == [("kill", "passed"), ("lose", "failed")]
    assert value["left_out"] == [{"name": "hang", "why": "no time"}]
    assert value["verdicts"][0]["lost_steps"] == [5]


def test_junit_counts_failures_and_skipped_ones():
    """One test case per scenario; what XML cannot hold is replaced."""
    suite = ET.fromstring(REPORT.to_junit()).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    passed, failed, skipped = suite.findall("testcase")
    assert (passed.get("name"), passed.get("classname"), passed.get("time")) == ("kill", "drill.lm", "61.0")
    assert passed.find("failure") is None
    assert failed.find("failure").get("message") == "stage lm: params_digest differs <&>?[0m"
    assert "more" in failed.find("failure").text
    assert skipped.find("skipped").get("message") == "no time"


def test_a_drill_that_did_not_end_is_an_error_in_junit():
    """A CI must not take what it has found so far for the whole."""
    suite = ET.fromstring(replace(REPORT, verdicts=(PASSED,), unfinished="killed").to_junit()).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "1")
    [error] = suite.iter("error")
    assert error.get("message") == "the drill did not end: killed"


def test_the_table_and_the_lines_below_it_say_what_differs():
    screen = Console(width=200, record=True, file=io.StringIO())
    screen.print(REPORT.table())
    text = screen.export_text()
    for heading in ("scenario", "fired", "lost steps", "recovery s", "rows redone", "verdict"):
        assert heading in text
    assert "5 (of 20)" in text
    assert "9.5 (of 60)" in text
    lines = REPORT.lines()
    assert "lose: more" in lines
    assert "not run: hang (no time)" in lines
    assert lines[-1] == "logs and report: f"


def test_the_totals_count_by_kind():
    """What was tried in all, in one line."""
    assert REPORT.totals() == (
        "2 scenarios, 1 with differences; 4 faults fired (4 kill-worker); 2 recoveries, median 9.5 s, longest 9.5 s"
    )
