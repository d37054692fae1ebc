"""What a drill reads of two runs, on a real store: what cannot be read is a part of what was seen, by its object's name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.faults.conftest import config_of
from tpupipe.cluster.connect import Cluster
from tpupipe.data.chunks import Manifest, ManifestUnit, UnitFooter, encode_unit
from tpupipe.drill.attempts import Ended
from tpupipe.drill.bench import Bench
from tpupipe.drill.facts import JobFacts, StageFacts
from tpupipe.drill.outcome import judge
from tpupipe.drill.scenario import Scenario
from tpupipe.store.objects import open_store

FACTS = JobFacts((StageFacts("ids", "preprocess", total=2), StageFacts("scores", "infer", total=2)), 2, True, True)
KILL = Scenario("kill")
DONE = {"status": "done", "stages": {"ids": {"status": "done"}, "scores": {"status": "done"}}}


class PlayedBench(Bench):
    """Attempts end as told, without a process and without a cluster; everything else is the real thing."""

    statuses: tuple[int, ...] = (0,)

    def _attempt(self, scenario: Scenario, number: int, timeout_s: float) -> Ended:
        del scenario, timeout_s
        log = self.folder / "log"
        log.write_text("")
        result = DONE if self.statuses[number] == 0 else {"status": "failed", "error": "no"}
        return Ended(self.statuses[number], result, 0.0, 1.0, log)

    def _left(self, scenario: str) -> list[str]:
        del scenario
        return []


@pytest.fixture
def bench(tmp_path: Path) -> PlayedBench:
    """With a reference run and another one of two stages of two units each."""
    store = open_store(str(tmp_path / "store"))
    cluster = Cluster("", "", started=False)
    bench = PlayedBench("m", (), (), "job", config_of(), store, None, cluster, "d", tmp_path, print)
    for scenario in ("reference", "kill"):
        for stage in ("ids", "scores"):
            write_stage(bench, scenario, stage)
        event = {"kind": "stage_done", "time_s": 1.0, "stage": "ids"}
        bench.store.create(bench.paths(scenario).event_segment(1, 1), json.dumps(event).encode())
    return bench


def write_stage(bench: Bench, scenario: str, stage: str) -> None:
    paths, table, units = bench.paths(scenario), pa.table({"id": [1, 2]}), []
    for unit in ("0000", "0001"):
        info = bench.store.create(
            paths.unit(stage, unit), encode_unit(table, chunk_rows=2, footer=UnitFooter(unit, rows_in=2))
        )
        units.append(ManifestUnit(unit, 2, (2,), info.size))
    bench.store.create(paths.manifest(stage), Manifest(stage, tuple(units), table.schema).to_json())


def failed(bench: Bench, scenario: Scenario = KILL) -> tuple[str, ...]:
    seen = bench.disturbed(scenario, FACTS, "reference", DONE, 60)
    return judge(scenario, FACTS, DONE, seen, run="r", seconds=1.0).failed


def test_two_equal_runs_have_nothing_to_say(bench):
    assert failed(bench) == ()


@pytest.mark.parametrize("scenario", ["kill", "reference"])
def test_a_unit_that_is_gone_fails_the_scenario_and_is_named(bench, scenario):
    """It is listed and not there: the verdict has its URI, and the other stage was compared all the same."""
    name = bench.paths(scenario).unit("ids", "0001")
    bench.store.delete(name)
    other = bench.paths("kill").unit("scores", "0000")
    changed = encode_unit(pa.table({"id": [1, 3]}), chunk_rows=2, footer=UnitFooter("0000", rows_in=2))
    bench.store.put(other, changed)
    ids, scores = failed(bench)
    assert ids.startswith("stage ids: its rows could not be compared: ObjectNotFoundError: ")
    assert bench.store.uri(name) in ids
    assert "stage scores, unit 0000, row 1" in scores


def test_a_unit_that_cannot_be_read_fails_the_scenario_and_is_named(bench):
    """Damaged beyond reading: Parquet's own error does not know the object, the verdict does."""
    name = bench.paths("kill").unit("scores", "0000")
    bench.store.put(name, b"no Parquet")
    [only] = failed(bench)
    assert "stage scores: its rows could not be compared: DataError" in only
    assert bench.store.uri(name) in only


def test_a_manifest_and_events_that_cannot_be_read_are_named(bench):
    """Of the disturbed run: each is said, and nothing is raised."""
    bench.store.put(bench.paths("kill").manifest("ids"), b"{}")
    bench.store.put(bench.paths("kill").event_segment(1, 1), b"{no json\n")
    events, manifest = failed(bench)
    assert events.startswith("the events could not be read: JSONDecodeError")
    assert "stage ids: its manifest could not be read: DataError" in manifest
    assert bench.store.uri(bench.paths("kill").manifest("ids")) in manifest


def test_a_run_that_is_done_without_a_manifest_has_not_passed(bench):
    bench.store.delete(bench.paths("kill").manifest("scores"))
    assert failed(bench) == ("stage scores: the run is done, and the stage has no manifest",)


def test_a_reference_without_its_manifest_is_not_equal_to_anything(bench):
    bench.store.delete(bench.paths("reference").manifest("ids"))
    assert failed(bench) == ("stage ids: the reference has no manifest any more",)


def test_a_store_that_refuses_does_so_in_the_first_attempt_only(bench, monkeypatch):
    """The second attempt gets no store fault; one that did not end with the status asked for is the last one."""
    given: list[list[str]] = []

    def run_attempt(arguments, log, _timeout_s):
        given.append([value for option, value in itertools.pairwise(arguments) if option == "--store-fault"])
        status = 1 if len(given) == 1 else 0
        return Ended(status, DONE if status == 0 else {}, 0.0, 1.0, log)

    monkeypatch.setattr("tpupipe.drill.bench.run_attempt", run_attempt)
    monkeypatch.setattr(PlayedBench, "_attempt", Bench._attempt)
    scenario = Scenario("kill", ((), ()), ("403@create",), first_status=1)
    (bench.folder / "kill").mkdir()
    (bench.folder / "kill" / "attempt-1.log").write_text("refused")
    seen = bench.disturbed(scenario, FACTS, "reference", DONE, 60)
    assert given == [["403@create"], []]
    assert [attempt.exit_status for attempt in seen.attempts] == [1, 0]


def test_a_first_attempt_that_went_to_the_end_is_not_followed(bench):
    """It should have been refused; nothing is tried after that, and the verdict says so."""
    scenario = Scenario("kill", ((), ()), ("403@create",), first_status=1)
    refused, unfired = failed(bench, scenario)
    assert refused == "attempt 1 of 2 ended with exit status 0 instead of 1"
    assert "403@create' hit no request" in unfired
