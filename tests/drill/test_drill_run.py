"""A drill's report is on disk after every verdict, however the drill ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.drill.test_drill_plan import LM
from tests.faults.conftest import config_of
from tpupipe import Files, Job, Preprocess
from tpupipe.cluster.connect import Cluster
from tpupipe.drill.attempts import Ended
from tpupipe.drill.bench import Bench
from tpupipe.drill.outcome import Seen
from tpupipe.drill.run import DrillOptions, _Drill
from tpupipe.drill.scenario import Scenario
from tpupipe.errors import ClusterError, StageError
from tpupipe.store.objects import open_store

PLAN = (Scenario("one"), Scenario("two"), Scenario("three"))
RESULT: dict[str, Any] = {
    "run": "d-reference",
    "status": "done",
    "seconds": {"working": 2.0},
    "stages": {s.name: {"total": 4, "seconds": {"working": 1.0}} for s in LM.stages},
}


class PlayedBench(Bench):
    """Its runs end as ``play`` says: by scenario an error, or nothing to say."""

    play: dict[str, BaseException]

    def undisturbed(self, scenario: str, timeout_s: float) -> Ended:
        del timeout_s
        if scenario in self.play:
            raise self.play[scenario]
        return Ended(0, RESULT, 0.0, 5.0, self.folder / "log")

    def disturbed(self, scenario: Scenario, *_: Any) -> Seen:
        if scenario.name in self.play:
            raise self.play[scenario.name]
        return Seen((), {"status": "done"} if scenario.name == "one" else {})

    def events(self, scenario: str) -> dict[int, list[Any]]:
        del scenario
        return {}


@pytest.fixture
def drill(tmp_path: Path):
    """Runs a drill of three scenarios; gives its error (or ``None``), its JSON and its JUnit suite."""

    def run(**play: BaseException):
        junit, folder = tmp_path / "junit.xml", tmp_path / "drill"
        store, cluster = open_store(str(tmp_path / "store")), Cluster("", "", started=False)
        bench = PlayedBench("m", (), (), "lm", config_of(), store, None, cluster, "d", folder, lambda _: None)
        object.__setattr__(bench, "play", play)
        job = Job("lm", [Preprocess("tokens", Files("*"), map=dict)])
        error: BaseException | None = None
        try:
            _Drill(job, bench, DrillOptions(plan=PLAN, junit=junit), LM, 0.0).run()
        except BaseException as raised:  # noqa: BLE001 - also KeyboardInterrupt
            error = raised
        assert junit.exists(), error
        suite = ET.parse(junit).getroot().find("testsuite")
        return error, json.loads((folder / "drill.json").read_text()), suite

    return run


def cases(suite, tag):
    return {case.get("name"): case.find(tag).get("message") for case in suite if case.find(tag) is not None}


def test_a_whole_drill_is_kept(drill):
    """One passes, two do not come to an end; nothing is unfinished."""
    error, report, suite = drill()
    assert error is None
    assert (report["status"], report["unfinished"]) == ("failed", "")
    assert [v["verdict"] for v in report["verdicts"]] == ["passed", "failed", "failed"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "2", "0")


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), "interrupted"), (ClusterError("Ray is gone."), "ClusterError: Ray is gone.")],
)
def test_what_was_found_before_an_interruption_is_kept(drill, error, said):
    """The second scenario is interrupted: the first one's verdict is there, the others are told as not run."""
    raised, report, suite = drill(two=error)
    assert raised is error
    assert (report["status"], report["unfinished"]) == ("unfinished", said)
    assert [(v["scenario"], v["verdict"]) for v in report["verdicts"]] == [("one", "passed")]
    assert [left["name"] for left in report["left_out"]] == ["two", "three"]
    assert said in report["left_out"][0]["why"]
    assert (suite.get("tests"), suite.get("errors"), suite.get("skipped")) == ("4", "1", "2")
    assert cases(suite, "error") == {"the whole drill": f"the drill did not end: {said}"}


def test_after_each_verdict_the_report_says_that_the_drill_goes_on(drill, monkeypatch):
    """A drill that is killed leaves what it has found, and never a pass."""
    kept = []
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text, **more: kept.append(text) or write(path, text, **more))
    drill()
    reports = [json.loads(text) for text in kept if text.startswith("{")]
    assert [(r["status"], len(r["verdicts"])) for r in reports] == [
        ("unfinished", 0), ("unfinished", 1), ("failed", 2), ("failed", 3), ("failed", 3),
    ]  # fmt: skip


def test_a_failed_reference_is_a_failed_test_case(drill):
    """Nothing can be compared: JUnit has the failure, with the message, and all scenarios as skipped."""
    error, report, suite = drill(reference=StageError("The reference run failed.", log="the.log"))
    assert isinstance(error, StageError)
    assert report["status"] == "failed"
    assert [(v["scenario"], v["failed"], v["log"]) for v in report["verdicts"]] == [
        ("reference", ["The reference run failed."], "the.log")
    ]
    assert cases(suite, "failure") == {"reference": "The reference run failed."}
    assert set(cases(suite, "skipped")) == {"one", "two", "three"}
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
