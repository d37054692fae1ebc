"""A driver that was stopped between its last look at the lease and its record, and woke when the run was another's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.checkpoint.conftest import STAGE, Shelf
from tpupipe.checkpoint.inspect import Depth, plan_prune, view_stage
from tpupipe.checkpoint.prune import prune
from tpupipe.checkpoint.verify import Found, newest_intact, overtaken_by
from tpupipe.cli import app
from tpupipe.errors import NoIntactCheckpointError
from tpupipe.faults import points
from tpupipe.store.objects import ObjectInfo

# -- the decision -------------------------------------------------------------------------------


def found(arrays_s: float, record_s: float | None, epoch: int = 1) -> Found:
    times = {"arrays/d/a": arrays_s - 1, "arrays/d/b": arrays_s, "COMMIT.json": record_s}
    objects = {name: ObjectInfo(name, 1, None, "1", s) for name, s in times.items() if s is not None}
    return Found(20, epoch, 0, f"20-{epoch}", objects)


@pytest.mark.parametrize(
    ("arrays_s", "record_s", "taken_s", "epoch"),
    [
        pytest.param(10, 11, {}, None, id="nobody ever had a lease"),
        pytest.param(10, 11, {1: 5}, None, id="its own lease is the last one"),
        pytest.param(10, 11, {1: 5, 2: 12}, None, id="committed, then taken over"),
        pytest.param(10, 13, {1: 5, 2: 12}, 2, id="taken over in between"),
        pytest.param(10, 13, {1: 5, 2: 11, 3: 12}, 2, id="by two, one after the other"),
        pytest.param(10, 13, {1: 5, 2: 11, 3: 14}, 2, id="by one, and later by another"),
        pytest.param(10, 13, {1: 5, 2: 15, 3: 12}, 3, id="the next lease was copied since, the one after it tells"),
        pytest.param(10, 12, {1: 5, 2: 12}, None, id="at the same moment, as far as the store can tell"),
        pytest.param(12, 13, {1: 5, 2: 12}, 2, id="arrays at the moment of the lease, the record after it"),
        pytest.param(10, 10, {1: 10, 2: 10}, None, id="everything at one moment"),
        pytest.param(13, 14, {1: 5, 2: 12}, None, id="the arrays are newer, too: a copy"),
        pytest.param(14, 13, {1: 5, 2: 12}, None, id="the same, the record copied first"),
        pytest.param(10, None, {1: 5, 2: 12}, None, id="no record"),
        pytest.param(10, 13, {1: 12}, None, id="its own lease is no other"),
    ],
)
def test_which_record_is_late(arrays_s, record_s, taken_s, epoch):
    """Newer than a later lease although its arrays are not."""
    assert overtaken_by(found(arrays_s, record_s), taken_s) == epoch


@given(st.dictionaries(st.integers(1, 6), st.integers(0, 50)), st.integers(1, 6), st.integers(0, 50), st.integers(0, 5))
def test_who_commits_before_the_next_lease_is_taken_is_never_late(taken_s, epoch, arrays_s, after_s):
    """Whatever other times there are; and whoever is named had the run later, and before the record."""
    checkpoint = found(arrays_s, arrays_s + after_s, epoch)
    by = overtaken_by(checkpoint, taken_s)
    if by is not None:
        assert by > epoch
        assert arrays_s <= taken_s[by] < arrays_s + after_s
    assert overtaken_by(checkpoint, {e: max(s, arrays_s + after_s) for e, s in taken_s.items()}) is None


# -- what is restored ---------------------------------------------------------------------------


def test_a_record_of_a_driver_that_was_overtaken_is_not_read(shelf):
    """Step 10 is committed; at 20 the driver stops before its record, another one takes over, the record comes: 10.

    Nothing is deleted, and the late one is named.
    """
    shelf.lease(1)
    older = shelf.put(10)
    late = shelf.put_late(20)
    before = shelf.names()
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.folder, selection.commit.step, selection.damaged) == (older, 10, ())
    assert [(each.found.folder, each.taken_over_by) for each in selection.late] == [(late, 2)]
    assert str(selection.late[0]).endswith("is late: its record was written after epoch 2 took over")
    assert shelf.names() == before


def test_what_was_committed_before_a_take_over_counts(shelf):
    """Three drivers one after the other, the second started its workers twice: the newest of all is restored."""
    shelf.lease(1)
    shelf.put(10)
    shelf.lease(2)
    shelf.put(20, epoch=2)
    newest = shelf.put(30, epoch=2, restart=1)
    shelf.lease(3)
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.folder, selection.late) == (newest, ())


def test_only_a_late_one_is_a_fresh_start_that_names_it(shelf):
    """The new owner began from scratch, and so does the one after it: the answer is the same."""
    shelf.lease(1)
    shelf.put_late(10)
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.commit, len(selection.late)) == (None, 1)


def test_a_late_one_does_not_hide_that_the_others_are_damaged(shelf):
    """10 is damaged, 20 is late: an error, never a fresh start."""
    shelf.lease(1)
    shelf.damage(shelf.put(10), "truncated")
    shelf.put_late(20)
    with pytest.raises(NoIntactCheckpointError, match="All 1 committed checkpoints"):
        newest_intact(shelf.store, shelf.paths, STAGE)


def test_a_record_that_cannot_be_read_is_damaged_whenever_it_was_written(shelf):
    """Cut after the take-over, as by a disk that fails: damage, which is an error where nothing else is there."""
    shelf.lease(1)
    folder = shelf.put(10)
    shelf.lease(2)
    shelf.damage(folder, "record cut")
    with pytest.raises(NoIntactCheckpointError):
        newest_intact(shelf.store, shelf.paths, STAGE)


def test_a_late_one_that_is_asked_for_by_name_is_refused(shelf):
    """Naming a checkpoint does not make it one; the message says why."""
    shelf.lease(1)
    shelf.put(10)
    late = shelf.put_late(20)
    with pytest.raises(NoIntactCheckpointError, match=r"step 20 .* is late: .* after epoch 2 took over"):
        newest_intact(shelf.store, shelf.paths, STAGE, only=late)


def test_a_run_that_was_copied_as_a_whole_keeps_its_checkpoints(shelf):
    """Copied name by name, the leases come first: every record is newer than they are, and still counts."""
    shelf.lease(1)
    shelf.put(10)
    shelf.lease(2)
    shelf.put(20, epoch=2)
    shelf.lease(3)
    copy = Shelf(shelf.store.sub("copy"))
    for info in [i for i in shelf.store.list() if not i.name.startswith("copy/")]:
        copy.store.create(info.name, shelf.store.read(info.name))
        copy._moment()
    selection = newest_intact(copy.store, copy.paths, STAGE)
    assert (selection.commit.step, selection.late) == (20, ())


def test_looking_at_the_leases_is_one_listing_and_none_without_a_record(shelf):
    """Per restore, however many checkpoints and leases there are."""
    listed = []

    class Counting:
        def list(self, prefix):
            listed.append(prefix)
            return shelf.store.list(prefix)

        def __getattr__(self, name):
            return getattr(shelf.store, name)

    shelf.lease(1)
    shelf.arrays(5)
    checkpoints, leases = shelf.paths.checkpoints(STAGE) + "/", shelf.paths.leases + "/"
    newest_intact(Counting(), shelf.paths, STAGE)
    assert listed == [checkpoints]
    for step in (10, 20):
        shelf.put(step)
    shelf.put_late(30)
    listed.clear()
    newest_intact(Counting(), shelf.paths, STAGE)
    assert listed == [checkpoints, leases]


# -- the saver itself ---------------------------------------------------------------------------


def test_a_saver_that_is_overtaken_between_its_look_and_its_record_commits_what_nobody_reads(file_shelf, make_saver):
    """With the real saver: at step 20 the run is taken over at the fault point in between. 10 is restored by the next one.

    The zombie's record is there and complete; the new owner's own step 20 is then the newest, and stays when it prunes.
    """
    store, paths = file_shelf.store, file_shelf.paths
    file_shelf.lease(1)
    zombie = make_saver(store)
    zombie.save(10, {"w": numbers()}, {})
    zombie.finish()
    points.arm(
        lambda name, facts: file_shelf.lease(2) if name == "save.before_commit" and facts["step"] == 20 else None
    )
    try:
        zombie.save(20, {"w": numbers()}, {})
        zombie.close()
    finally:
        points.arm(None)
    late = paths.checkpoint(STAGE, step=20, epoch=1)
    assert store.exists(f"{late}/COMMIT.json")
    selection = newest_intact(store, paths, STAGE)
    assert (selection.commit.step, selection.late[0].found.folder) == (10, late)
    owner = make_saver(store, epoch=2, keep=1)
    owner.save(15, {"w": numbers()}, {})
    owner.close()
    assert newest_intact(store, paths, STAGE).commit.step == 15


def numbers():
    import jax.numpy as jnp

    return jnp.arange(8.0)


# -- retention and looking after them -----------------------------------------------------------


def test_a_late_one_neither_counts_for_one_that_is_kept_nor_shields(shelf):
    """keep=1, late 20 beside the new owner's 15: the 10 goes, 15 and what is newer stay; later the late one goes as well."""
    shelf.lease(1)
    shelf.put(10)
    late = shelf.put_late(20)
    newest = shelf.put(15, epoch=2)
    assert [f.step for f in prune(shelf.store, shelf.paths, STAGE, keep=1)] == [10]
    assert newest_intact(shelf.store, shelf.paths, STAGE).folder == newest
    shelf.put(25, epoch=2)
    assert [f.folder for f in prune(shelf.store, shelf.paths, STAGE, keep=1)] == [late, newest]


@pytest.mark.parametrize("depth", Depth)
def test_a_late_one_is_neither_intact_nor_damaged(shelf, depth):
    """It says who had taken over; what a restore takes is the newest; a plan is that of the retention."""
    shelf.lease(1)
    shelf.put(10)
    late = shelf.put_late(20)
    newest = shelf.put(15, epoch=2)
    view = view_stage(shelf.store, shelf.paths, STAGE, depth)
    first = view.checkpoints[0]
    assert (first.found.folder, first.intact, first.compared, first.taken_over_by) == (late, None, None, 2)
    said = first.as_json(shelf.store, first.written_s)
    assert (said["committed"], said["intact"], said["taken_over_by"]) == (True, None, 2)
    assert view.newest_intact.found.folder == newest
    assert [v.found.step for v in plan_prune(view, 1, uncommitted=True).go] == [10]


def test_the_commands_tell_a_late_one_from_damage(file_shelf):
    """``ls`` and ``prune`` say what it is; ``verify`` ends with 0, for nothing that counts is damaged."""
    file_shelf.lease(1)
    file_shelf.put(10)
    late = file_shelf.put_late(20)
    uri = file_shelf.store.uri(file_shelf.paths.root)

    def call(*arguments: str):
        return CliRunner().invoke(app, ["checkpoints", *arguments])

    told = call("ls", uri)
    assert f"late: written after epoch 2 took over, does not count: {file_shelf.store.uri(late)}" in told.stdout
    report = json.loads(call("ls", uri, "--json").stdout)
    assert (report["status"], report["late"], report["damaged"], report["uncommitted"]) == ("intact", 1, 0, 0)
    assert call("verify", uri, "--deep").exit_code == 0
    assert "step 20, late: written after epoch 2 took over, " in call("prune", uri, "--keep", "1").stdout
