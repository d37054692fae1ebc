"""Resuming: what is pending, what is believed of a compacted listing, and what never is."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tpupipe.data.sources import Unit
from tpupipe.errors import DataError, RunChangedError, StoreDeniedError, StoreUnavailableError
from tpupipe.faults.points import arm
from tpupipe.stages import committed as module
from tpupipe.stages.committed import CommittedUnits, Compaction, resume_units
from tpupipe.stages.units import Committed, UnitTarget, commit_unit
from tpupipe.store.objects import Store

STAGE = "tokens"


def unit(number: int, fingerprint: str = "") -> Unit:
    return Unit(id=f"{number:06d}-ab12cd34", parts=(), fingerprint=fingerprint or f"input-{number}")


@pytest.fixture
def target(run) -> UnitTarget:
    return UnitTarget(run.store, run.paths, STAGE, run.lease.fence, 2, "", "code-1", "1")


@pytest.fixture
def small_caches(monkeypatch):
    """A cache is kept from the first unit on, and batches are short: the same code as with thousands."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(module, "_BATCH", 3)


def commit(target, number, *values, fingerprint="", column="x") -> Committed:
    table = pa.table({column: pa.array(values, pa.int64())})
    return commit_unit(target, unit(number, fingerprint), number, table, rows_in=len(values) + 1)


def said(committed) -> list[Any]:
    """What is known of units, by unit; some stores know no checksum of what they list."""
    return sorted((c.footer.unit, c.footer, c.schema.to_string(), c.size_bytes, c.generation) for c in committed)


class Counting:
    """Passes everything on, and notes the names of what is read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read_names: list[str] = []

    def read(self, name: str, *span: Any) -> bytes:
        self.read_names.append(name)
        return self._store.read(name, *span)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def footers_read(run) -> int:
    return len([name for name in run.store.read_names if name.endswith(".parquet")])


def test_nothing_committed_is_all_pending(run):
    """Every unit, in order."""
    units = [unit(n) for n in range(3)]
    pending, committed = resume_units(run, STAGE, units, "")
    assert list(pending) == units
    assert list(committed) == []
    assert committed.total("rows_in") == 0


def test_committed_units_are_not_pending(run, target):
    """Two of four are committed: the other two are pending, in input order; what is not of this input is ignored."""
    units = [unit(n) for n in range(4)]
    done = [commit(target, 2, 1), commit(target, 0, 1, 5)]
    commit(target, 9, 1)
    run.store.create(f"{run.paths.units(STAGE)}/README", b"foreign")
    pending, committed = resume_units(run, STAGE, units, "")
    assert list(pending) == [units[1], units[3]]
    assert said(committed) == said(done)
    assert committed.total("rows_in") == 5
    assert list(resume_units(run, "tokens-2", units, "")[0]) == units


def test_a_listing_error_is_not_all_pending(run):
    """Refused is refused."""

    class Refuses(Counting):
        def pages(self, prefix):
            raise StoreDeniedError(f"list {prefix}: 403.", operation="list")

    run.store = Refuses(run.store)
    with pytest.raises(StoreDeniedError):
        resume_units(run, STAGE, [unit(0)], "")


def test_a_kill_between_commit_and_word_of_it_neither_loses_nor_doubles(run, target):
    """The error strikes after the object exists: on the next try the unit is not pending."""

    class KilledError(Exception):
        pass

    def strike(name, _):
        if name == "unit.after_commit":
            raise KilledError

    arm(strike)
    try:
        with pytest.raises(KilledError):
            commit(target, 0, 1, 2)
    finally:
        arm(None)
    pending, committed = resume_units(run, STAGE, [unit(0), unit(1)], "")
    assert list(pending) == [unit(1)]
    assert [c.footer.unit for c in committed] == [unit(0).id]


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("cached", [False, True])
def test_reused_units_must_come_from_the_same_input(run, target, cached):
    """A changed input or parameter stops the run with the hint of another --run, read from footers or from the cache."""
    units = [unit(n) for n in range(5)]
    done = [commit(target, n, n) for n in range(5)]
    if cached:
        with Compaction(run, STAGE, CommittedUnits.of(done)):
            pass
    resume_units(run, STAGE, units, "")
    with pytest.raises(RunChangedError, match="other input") as caught:
        resume_units(run, STAGE, [*units[:3], unit(3, "changed"), units[4]], "")
    assert caught.value.exit_status == 2
    assert caught.value.data["unit"] == unit(3).id
    assert "--run" in caught.value.hint
    with pytest.raises(RunChangedError, match="other parameters"):
        resume_units(run, STAGE, units, "p2")


def test_an_object_that_is_another_unit_is_refused(run, target):
    """A unit's object copied to another unit's name counts for neither."""
    commit(target, 0, 1)
    run.store.create(run.paths.unit(STAGE, unit(1).id), run.store.read(run.paths.unit(STAGE, unit(0).id)))
    with pytest.raises(DataError, match=f"holds unit {unit(0).id}"):
        resume_units(run, STAGE, [unit(0), unit(1)], "")


# -- the compacted listing -----------------------------------------------------------------------


@pytest.fixture
def compacted(run, target, small_caches):  # noqa: ARG001 - a fixture that sets something
    """Eight committed units of two schemas with a compacted listing; reads are counted from here on."""
    done = [commit(target, n, *range(n), column="y" if n == 5 else "x") for n in range(8)]
    with Compaction(run, STAGE, CommittedUnits.of([])) as compaction:
        for each in done:
            compaction.add(each)
    run.store = Counting(run.store)
    return sorted(done, key=lambda c: c.footer.unit)


def test_a_compacted_listing_spares_every_footer(run, compacted):
    """One object is read, no footer, and every word is the same: footers, schemas, sizes, checksums."""
    pending, committed = resume_units(run, STAGE, [unit(n) for n in range(9)], "")
    assert list(pending) == [unit(8)]
    assert said(committed) == said(compacted)
    assert [c.schema.names for c in committed][4:6] == [["x"], ["y"]]
    assert run.store.read_names == [run.paths.compacted(STAGE)]


def test_only_what_is_newer_is_read(run, target, compacted):
    """A unit committed after the listing was written: one footer."""
    commit(replace(target, store=run.store), 8, 1)
    pending, committed = resume_units(run, STAGE, [unit(n) for n in range(9)], "")
    assert list(pending) == []
    assert len(committed) == 9
    assert footers_read(run) == 1
    assert compacted


@pytest.mark.usefixtures("compacted")
def test_a_listed_unit_that_was_deleted_is_pending_again(run):
    """The compacted listing has it, the store does not: it is done again."""
    run.store.delete(run.paths.unit(STAGE, unit(3).id))
    pending, committed = resume_units(run, STAGE, [unit(n) for n in range(8)], "")
    assert list(pending) == [unit(3)]
    assert unit(3).id not in {c.footer.unit for c in committed}
    assert footers_read(run) == 0


@pytest.mark.usefixtures("compacted")
def test_a_unit_that_was_deleted_and_done_again_is_read_anew(run, target):
    """Same name, another object: what was compacted of the old one does not count for it."""
    run.store.delete(run.paths.unit(STAGE, unit(3).id))
    commit(replace(target, params_fingerprint="p2"), 3, 0, 1, 2)
    with pytest.raises(RunChangedError, match="other parameters"):
        resume_units(run, STAGE, [unit(n) for n in range(8)], "")


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed", "another version"])
def test_a_damaged_listing_changes_nothing_but_the_time(run, compacted, damage, caplog):
    """The same answer, from the footers; damage is told, and the next attempt has a listing again."""
    name = run.paths.compacted(STAGE)
    data = run.store.read(name)
    if damage == "missing":
        run.store.delete(name)
    elif damage == "another version":
        body = data[16:].replace(b'"format": 1', b'"format": 9')
        assert body != data[16:]
        run.store.put(name, module._digest(body) + body)
    else:
        middle = len(data) // 2
        broken = {"empty": b"", "cut": data[:-40], "changed": data[:middle] + b"\x00\xff" + data[middle + 2 :]}[damage]
        run.store.put(name, broken)
    units = [unit(n) for n in range(9)]
    pending, committed = resume_units(run, STAGE, units, "")
    assert list(pending) == [unit(8)]
    assert said(committed) == said(compacted)
    assert footers_read(run) == 8
    assert ("footers are read instead" in caplog.text) == (damage != "missing")
    with Compaction(run, STAGE, committed):
        pass
    run.store.read_names.clear()
    assert said(resume_units(run, STAGE, units, "")[1]) == said(compacted)
    assert footers_read(run) == 0


@pytest.mark.usefixtures("small_caches")
def test_a_killed_driver_leaves_a_listing_of_most_units(run, target, monkeypatch):
    """It is written while units are committed, not only at the end: at most an eighth is missing."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 4)
    compaction = Compaction(run, STAGE, CommittedUnits.of([]))
    for n in range(50):
        compaction.add(commit(target, n, n))
    run.store = Counting(run.store)
    assert not resume_units(run, STAGE, [unit(n) for n in range(50)], "")[0]
    assert footers_read(run) <= 50 // 8


@pytest.mark.usefixtures("small_caches")
def test_units_done_are_kept_as_columns(run, target, monkeypatch):
    """Of fifty, fewer than eight are objects at any time, written or not; all are there at the end, in order."""
    monkeypatch.setattr(module, "_FRESH", 8)
    monkeypatch.setattr(module, "_WORTH_KEEPING", 100)
    compaction = Compaction(run, STAGE, CommittedUnits.of([commit(target, 0, 1)]))
    done = [commit(target, n, n) for n in range(1, 50)]
    for each in done:
        compaction.add(each)
        assert len(compaction._fresh) < 8
    assert said(compaction.committed)[1:] == said(done)
    assert len(compaction.committed) == 50
    assert not run.store.exists(run.paths.compacted(STAGE))


@pytest.mark.usefixtures("small_caches")
def test_a_listing_that_cannot_be_written_stops_nothing(run, target, caplog):
    """The units are committed; the failure is told."""
    done = commit(target, 0, 1)

    class Full(Counting):
        def put(self, name, data):
            raise StoreUnavailableError(f"put {name} of {len(data)} bytes: 503.", operation="put")

    run.store = Full(run.store)
    with Compaction(run, STAGE, CommittedUnits.of([])) as compaction:
        compaction.add(done)
    assert "was not written" in caplog.text


def test_few_units_are_not_worth_a_listing(run, target):
    """Reading a handful of footers costs less than keeping a cache of them."""
    with Compaction(run, STAGE, CommittedUnits.of([])) as compaction:
        compaction.add(commit(target, 0, 1))
    assert not run.store.exists(run.paths.compacted(STAGE))


# -- very many -----------------------------------------------------------------------------------


def planning(units: int, case: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan", "--json", "--units", str(units), "--case", case],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def test_a_hundred_thousand_units_are_planned_from_one_object():
    """ray#60200: one object and the pages of names are read, no footer; memory stays small."""
    measured = planning(100_000, "compacted")
    assert measured["pending"] == 1000
    assert measured["requests"] == {"list": 99, "read": 1}
    assert measured["peak_mb"] - measured["before_mb"] < 150
    assert measured["cpu_s"] < 5  # not of the clock: other tests run beside this one


@pytest.mark.soak
@pytest.mark.parametrize("case", ["compacted", "finished"])
def test_a_million_units_are_planned_in_seconds_and_below_a_gigabyte(case):
    """ray#60200: the same with a million; a complete stage is seen from its manifest alone."""
    measured = planning(1_000_000, case)
    assert measured["requests"] == {"list": 999 if case == "compacted" else 0, "read": 1}
    assert measured["cpu_s"] < 15
    assert measured["peak_mb"] < 1024
