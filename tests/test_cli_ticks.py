"""What is typed about ticks, and what a backfill makes of it."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tpupipe.cli import app
from tpupipe.cli_ticks import TickOptions, print_backfill, run_backfill
from tpupipe.config import Config
from tpupipe.errors import DataError, RunHeldError, UsageError
from tpupipe.incremental import failed_before
from tpupipe.run import RunOptions, RunResult
from tpupipe.ticks import tick_text

STORE = {"uri": "gs://bucket/runs"}
CLUSTER = {"kind": "fake", "generation": "v6e", "topology": "2x4"}


def config(**sections) -> Config:
    return Config.model_validate({"store": STORE, "cluster": CLUSTER, "mode": "incremental", **sections})


def result(options: RunOptions) -> RunResult:
    return RunResult("job", "nightly", "gs://x", "done", 1, {"scores": {"rows_out": 3}}, tick=tick_text(options.as_of))


def test_a_backfill_runs_its_ticks_in_order():
    """One run for each, with the cut-off by time; a new generation is asked for once, with the first."""
    asked: list[RunOptions] = []

    def run_one(options):
        asked.append(options)
        return result(options)

    ticks = TickOptions(backfill="2026-11-01..2026-11-03", every="1d", reprocess=True)
    results = run_backfill(ticks, config(), ticks.of_one(RunOptions("nightly")), run_one)
    assert [r.tick for r in results] == [f"2026-11-0{n}T00:00" for n in (1, 2, 3)]
    assert [(o.name, o.backfilled, o.reprocess) for o in asked] == [
        ("nightly", True, True),
        ("nightly", True, False),
        ("nightly", True, False),
    ]


def test_a_backfill_takes_its_interval_from_the_schedule():
    """12 hours by the configuration, where --every is not given."""
    ticks = TickOptions(backfill="2026-11-01..2026-11-02")
    results = run_backfill(ticks, config(schedule={"every": "12h"}), RunOptions(), result)
    assert [r.tick for r in results] == ["2026-11-01T00:00", "2026-11-01T12:00", "2026-11-02T00:00"]


def test_the_first_failure_ends_a_backfill_and_tells_what_was_done():
    """Two are done, the third is held: its own error and exit status, with the results before it."""

    def run_one(options):
        if options.as_of.day == 3:
            raise RunHeldError("held", result=result(options))
        return result(options)

    ticks = TickOptions(backfill="2026-11-01..2026-11-05", every="1d")
    with pytest.raises(RunHeldError) as caught:
        run_backfill(ticks, config(), RunOptions(), run_one)
    assert caught.value.exit_status == 4
    report = caught.value.data["report"]
    assert report["status"] == "failed"
    assert [t["tick"] for t in report["ticks"]] == [f"2026-11-0{n}T00:00" for n in (1, 2, 3)]


def test_an_earlier_tick_that_fails_does_not_end_a_backfill():
    """It is tried once; the range is done, then its error is raised, with all results."""
    earlier = RunResult("job", "nightly", "gs://x", "failed", 2, tick="2026-10-31T00:00")
    left: list[frozenset[str]] = []

    def run_one(options):
        left.append(options.left)
        if earlier.tick in options.left:
            return result(options)
        raise failed_before(result(options), {earlier.tick: DataError("poisoned", result=earlier)})

    ticks = TickOptions(backfill="2026-11-01..2026-11-03", every="1d")
    with pytest.raises(DataError, match="poisoned") as caught:
        run_backfill(ticks, config(), RunOptions(), run_one)
    assert left == [frozenset(), frozenset({earlier.tick}), frozenset({earlier.tick})]
    report = caught.value.data["report"]
    assert [(t["tick"], t["status"]) for t in report["ticks"]] == [
        ("2026-10-31T00:00", "failed"),
        *((f"2026-11-0{n}T00:00", "done") for n in (1, 2, 3)),
    ]


def test_a_backfill_is_printed_as_lines_or_as_one_object(capsys):
    """Each tick with its rows; ``--json`` is one object."""
    ticks = TickOptions(backfill="2026-11-01..2026-11-02", every="1d")
    results = run_backfill(ticks, config(), RunOptions(), result)
    print_backfill(results, Console(width=160), as_json=False)
    lines = capsys.readouterr().out
    assert "2026-11-01T00:00" in lines
    assert "scores 3" in lines
    print_backfill(results, Console(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["status"] == "done"
    assert [t["tick"] for t in printed["ticks"]] == ["2026-11-01T00:00", "2026-11-02T00:00"]


def test_a_backfill_of_a_full_run_is_refused():
    """There are no ticks."""
    with pytest.raises(UsageError, match="mode: incremental"):
        run_backfill(TickOptions(backfill="2026-11-01..2026-11-02"), config(mode="full"), RunOptions(), result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--as-of", "yesterday"], "not the time of a tick"),
        (["--as-of", "2026-11-30", "--backfill", "2026-11-01..2026-11-02"], "one of them"),
        (["--every", "1d"], "--every is for --backfill"),
        (["--as-of", "2026-11-30"], "mode: incremental, and it is full"),
        (["--reprocess"], "mode: incremental, and it is full"),
        (["--set", "mode=incremental", "--set", "schedule.every=daily"], "schedule.every"),
        (["--set", "mode=incremental"], "trains"),
        (["--set", "mode=incremental", "--backfill", "2026-11-30"], "not a range"),
    ],
)
def test_what_makes_no_sense_ends_with_2(tmp_path, arguments, said):
    """Before anything is reserved or written: the store's folder is not even made."""
    file = tmp_path / "world.yaml"
    cluster = "{kind: fake, generation: v6e, topology: 2x4, chips_per_vm: 4}"
    file.write_text(f"store: file://{tmp_path}/store\ncluster: {cluster}\n")
    done = CliRunner().invoke(app, ["run", "jobs.digits", "-c", str(file), *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert not (tmp_path / "store").exists()
