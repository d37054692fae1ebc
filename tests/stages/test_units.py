"""Units on a real store: how one is committed, what a manifest says."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tpupipe.data.chunks import Manifest, UnitFooter, decode_footer, decode_schema, decode_unit, encode_unit
from tpupipe.data.columns import to_table
from tpupipe.data.schemas import merge_schemas
from tpupipe.data.sources import Unit
from tpupipe.errors import FencedError, StageError
from tpupipe.stages.record import TrainRecord, read_train_record, write_train_record
from tpupipe.stages.units import (
    Committed,
    UnitTarget,
    clear_errors,
    commit_errors,
    commit_unit,
    read_committed,
    write_manifest,
)

STAGE = "tokens"


def unit(number: int, fingerprint: str = "") -> Unit:
    return Unit(id=f"{number:06d}-ab12cd34", parts=(), fingerprint=fingerprint or f"input-{number}")


def table(*values: int) -> pa.Table:
    return pa.table({"x": pa.array(values, pa.int64())})


@pytest.fixture
def target(run) -> UnitTarget:
    return UnitTarget(run.store, run.paths, STAGE, run.lease.fence, 2, "", "code-1", "1")


def commit(target, number, *values, fingerprint=""):
    return commit_unit(target, unit(number, fingerprint), number, table(*values), rows_in=len(values) + 1)


def test_a_commit_is_one_object_that_describes_itself(run, target):
    """Rows, chunks, fingerprints, lease epoch and sample are in the footer; the rows are the rows."""
    done = commit(target, 3, 10, 11, 12)
    footer = done.footer
    assert (footer.unit, footer.rows, footer.chunks, footer.rows_in) == (unit(3).id, 3, (2, 1), 4)
    assert (footer.input_fingerprint, footer.code_fingerprint, footer.sample) == ("input-3", "code-1", "1")
    assert footer.lease_epoch == run.lease.epoch
    name = run.paths.unit(STAGE, unit(3).id)
    data = run.store.read(name)
    assert decode_unit(data)["x"].to_pylist() == [10, 11, 12]
    again = read_committed(run.store, run.store.info(name))
    assert (again.footer, again.schema, again.size_bytes) == (footer, done.schema, len(data))


def test_a_unit_committed_twice_counts_once(run, target):
    """A faster try of the same task won: its object stays, its footer is given back."""
    first = commit(target, 3, 10, 11)
    second = commit(target, 3, 10, 11)
    assert second.footer == first.footer
    assert [i.name for i in run.store.list(run.paths.units(STAGE))] == [run.paths.unit(STAGE, unit(3).id)]


@pytest.mark.parametrize("change", ["input", "parameters"])
def test_an_existing_unit_made_from_something_else_is_refused(run, target, change):
    """Other input, or other parameters: StageError that says which, and the object is untouched."""
    commit(target, 3, 10, 11)
    name = run.paths.unit(STAGE, unit(3).id)
    before = run.store.read(name)
    other = replace(target, params_fingerprint="p2") if change == "parameters" else target
    with pytest.raises(StageError, match=f"other {change}") as caught:
        commit(other, 3, 99, fingerprint="changed" if change == "input" else "")
    assert caught.value.data["unit"] == unit(3).id
    assert run.store.read(name) == before


def test_a_zombie_commits_nothing(run, target):
    """Another driver took the run over: FencedError, no object."""
    run.store.create(run.paths.lease(run.lease.epoch + 1), b"{}")
    with pytest.raises(FencedError):
        commit(target, 3, 10)
    assert not run.store.exists(run.paths.unit(STAGE, unit(3).id))


def test_a_manifest_lists_every_unit_once_in_input_order(run, target):
    """Whatever order they were committed in; rows, chunks and fingerprints add up."""
    units = [unit(n) for n in range(4)]
    done = [commit(target, n, *range(n)) for n in (2, 0, 3, 1)]
    manifest = write_manifest(run, STAGE, units, done, {"code": "code-1"})
    stored = Manifest.from_json(run.store.read(run.paths.manifest(STAGE)))
    assert [u.unit for u in stored.units] == [u.id for u in units]
    assert [u.rows for u in stored.units] == [0, 1, 2, 3]
    assert stored.chunk_rows.tolist() == [1, 2, 2, 1]
    assert stored.fingerprints["code"] == "code-1"
    assert stored.rows == manifest.rows == 6


def test_a_missing_unit_makes_no_manifest(run, target):
    """Three of four: StageError that names the first missing one, and the stage is not complete."""
    done = [commit(target, n, n) for n in (0, 1, 3)]
    with pytest.raises(StageError, match=f"1 of 4 units are not committed, {unit(2).id} first"):
        write_manifest(run, STAGE, [unit(n) for n in range(4)], done, {})
    assert not run.store.exists(run.paths.manifest(STAGE))


def test_a_stage_is_completed_once(run, target):
    """A second manifest with other content is refused and told in what it differs, and the first stays."""
    done = [commit(target, n, n) for n in (0, 1)]
    units = [unit(0), unit(1)]
    write_manifest(run, STAGE, units, done, {})
    before = run.store.read(run.paths.manifest(STAGE))
    other = replace(done[0], size_bytes=done[0].size_bytes + 1)
    for committed, facts, differing in (
        (done, {"other": "1"}, ["fingerprints"]),
        ([other, done[1]], {}, ["units"]),
        ([replace(done[0], crc32c=1), done[1]], {"other": "1"}, ["units", "fingerprints"]),
    ):
        with pytest.raises(StageError, match="manifest already, with other ") as caught:
            write_manifest(run, STAGE, units, committed, facts)
        assert caught.value.data["differing"] == differing
    with pytest.raises(StageError, match="with other units, fingerprints"):
        write_manifest(run, STAGE, units[:1], done[:1], {})
    assert run.store.read(run.paths.manifest(STAGE)) == before


@pytest.mark.parametrize("knew", [True, False], ids=["checksum", "no checksum"])
def test_a_zombies_manifest_with_the_same_content_is_no_failure(run, target, knew):
    """A driver was stopped right before the create and woke in between: the next one goes on with what is there.

    The next one may have listed units whose checksum the store does not list, which is no other content.
    """
    done = [commit(target, n, n) for n in (0, 1)]
    units = [unit(0), unit(1)]
    stored = write_manifest(run, STAGE, units, done, {"code": "1"})
    before = run.store.info(run.paths.manifest(STAGE))
    found = done if knew else [replace(c, crc32c=None) for c in done]
    assert write_manifest(run, STAGE, units, found, {"code": "1"}) == stored
    assert run.store.info(run.paths.manifest(STAGE)) == before


RECORD = TrainRecord(20, "p", "s", {"loss": float("nan")}, "job/run/stages/lm/checkpoints/x", "f", 80, 0)


def test_a_training_record_is_written_once_or_twice_the_same(run):
    """The same content, a loss that is no number included, counts as written; another result is refused, and named."""
    for _ in range(2):
        write_train_record(run.store, run.paths, "lm", RECORD)
    other = replace(RECORD, params_digest="q", metrics={"loss": 1.0})
    with pytest.raises(StageError, match=r"another result \(params_digest, metrics\)") as caught:
        write_train_record(run.store, run.paths, "lm", other)
    assert caught.value.data["stage"] == "lm"
    assert read_train_record(run.store, run.paths, "lm").params_digest == "p"


def test_a_zombie_completes_nothing(run, target):
    """The lease is checked before the manifest."""
    done = [commit(target, 0, 1)]
    run.store.create(run.paths.lease(run.lease.epoch + 1), b"{}")
    with pytest.raises(FencedError):
        write_manifest(run, STAGE, [unit(0)], done, {})
    assert not run.store.exists(run.paths.manifest(STAGE))


def records(*values: str) -> pa.Table:
    return pa.table({"error": pa.array(values, pa.string())})


def test_error_records_are_the_same_object_under_any_lease(run, target):
    """Written twice, the second time under a later lease: one object, the same bytes."""
    commit_errors(target, unit(3), records("a"))
    name = run.paths.unit_errors(STAGE, unit(3).id)
    before = run.store.info(name)
    run.lease.fence.check()
    commit_errors(replace(target, fence=LaterFence(target.fence)), unit(3), records("a"))
    assert run.store.info(name).generation == before.generation
    assert decode_unit(run.store.read(name))["error"].to_pylist() == ["a"]


def test_error_records_of_a_try_that_did_not_commit_are_replaced_and_of_one_that_did_are_not(run, target):
    """The unit's own object decides which try counts."""
    name = run.paths.unit_errors(STAGE, unit(3).id)
    for value in ("first", "second"):
        commit_errors(target, unit(3), records(value))
        assert decode_unit(run.store.read(name))["error"].to_pylist() == [value]
    commit(target, 3, 1)
    commit_errors(target, unit(3), records("late"))
    assert decode_unit(run.store.read(name))["error"].to_pylist() == ["second"]


def later(target: UnitTarget) -> UnitTarget:
    """The target as the next driver's workers have it."""
    return replace(target, fence=LaterFence(target.fence))


def test_error_records_of_a_try_that_died_go_when_the_unit_has_no_bad_rows_any_more(run, target):
    """Killed between errors and unit, then the map is mended: the row is in the output only."""
    commit_errors(target, unit(3), records("a"))
    commit_errors(target, unit(4), records("b"))
    clear_errors(later(target), unit(3))
    commit(target, 3, 1)
    assert [i.name for i in run.store.list(run.paths.errors(STAGE))] == [run.paths.unit_errors(STAGE, unit(4).id)]


def test_error_records_of_a_committed_unit_stay(run, target):
    """Another try was faster, and its unit counts: with its error records."""
    commit_errors(target, unit(3), records("a"))
    commit(target, 3, 1)
    clear_errors(later(target), unit(3))
    assert run.store.exists(run.paths.unit_errors(STAGE, unit(3).id))


def test_looking_for_old_error_records_costs_nothing_under_the_first_lease_and_one_request_after(run, target):
    """Nobody was there before the first driver; later ones ask for the unit's object, and for nothing more without one."""
    asked = []

    class Counting:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(run.store, name)

    clear_errors(replace(target, store=Counting()), unit(3))
    assert asked == []
    clear_errors(replace(later(target), store=Counting()), unit(3))
    assert asked == ["exists"]


def test_a_zombie_removes_no_error_records(run, target):
    """The lease is checked before."""
    commit_errors(target, unit(3), records("a"))
    run.store.create(run.paths.lease(run.lease.epoch + 1), b"{}")
    with pytest.raises(FencedError):
        clear_errors(later(target), unit(3))
    assert run.store.exists(run.paths.unit_errors(STAGE, unit(3).id))


def test_a_zombie_writes_no_error_records(run, target):
    """The lease is checked before."""
    run.store.create(run.paths.lease(run.lease.epoch + 1), b"{}")
    with pytest.raises(FencedError):
        commit_errors(target, unit(3), records("a"))
    assert not run.store.exists(run.paths.unit_errors(STAGE, unit(3).id))


class LaterFence:
    """The same fence with a later epoch, as the next driver's workers have it."""

    def __init__(self, fence):
        self.epoch = fence.epoch + 1
        self.check = fence.check


def test_a_committed_unit_comes_from_a_worker_with_the_schema_of_its_file():
    """What a task sends back and what a resumed run reads of the object are one schema, or the stage could not end."""
    table = to_table({"tokens": np.zeros((3, 5), np.uint8)})
    footer = UnitFooter("u", rows_in=3)
    data = encode_unit(table, chunk_rows=2, footer=footer)
    committed = Committed(decode_footer(data), decode_schema(data), len(data), None)
    sent = pickle.loads(pickle.dumps(committed))
    assert sent == committed
    assert str(sent.schema.field("tokens").type) == str(committed.schema.field("tokens").type)
    merge_schemas([sent.schema, decode_schema(data)])
