"""Which checkpoint is restored: the newest intact one, and never "none" because something could not be read."""

from __future__ import annotations

import pytest

from tpupipe.checkpoint.verify import list_checkpoints, newest_intact, reads_whole
from tpupipe.errors import NoIntactCheckpointError, ObjectNotFoundError, StoreDeniedError, StoreError
from tpupipe.store.objects import open_store

STAGE = "lm"
DAMAGES = ["deleted", "truncated", "flipped", "record cut", "record of another"]


def test_nothing_saved_is_a_fresh_start(shelf):
    """A listing that succeeds and is empty: no checkpoint, no damage."""
    shelf.store.create("somewhere/else", b"1")
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.commit, selection.damaged, selection.uncommitted) == (None, (), ())


def test_the_newest_wins(shelf):
    """The highest step, of one step the highest lease epoch, and under one lease the last start of the workers."""
    shelf.put(10)
    shelf.put(9, epoch=7)
    shelf.put(30, epoch=1, restart=9)
    shelf.put(30, epoch=2)
    shelf.put(30, epoch=2, restart=1)
    newest = shelf.put(30, epoch=2, restart=10)
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.folder, selection.commit.step, selection.commit.lease_epoch) == (newest, 30, 2)
    assert selection.damaged == ()


def test_stages_and_runs_do_not_see_each_other(shelf):
    """Another stage whose name begins alike has its own checkpoints."""
    shelf.put(10)
    assert newest_intact(shelf.store, shelf.paths, "l").commit is None
    assert newest_intact(shelf.store, shelf.paths, "lm-2").commit is None


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_newest_falls_back_to_the_older(shelf, how):
    """Steps 10 and 20, 20 is damaged: 10 is restored, 20 is named with the reason, and everything stays where it is."""
    older, newer = shelf.put(10), shelf.put(20)
    shelf.damage(newer, how)
    before = shelf.names()
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert (selection.folder, selection.commit.step) == (older, 10)
    assert [d.step for d in selection.damaged] == [20]
    assert newer in str(selection.damaged[0])
    assert selection.damaged[0].reasons
    assert shelf.names() == before


@pytest.mark.parametrize("how", DAMAGES)
def test_all_damaged_is_an_error_and_nothing_is_deleted(shelf, how):
    """Both damaged: NoIntactCheckpointError naming both; never a fresh start."""
    folders = [shelf.put(10), shelf.put(20)]
    for folder in folders:
        shelf.damage(folder, how)
    before = shelf.names()
    with pytest.raises(NoIntactCheckpointError, match="Nothing was deleted") as caught:
        newest_intact(shelf.store, shelf.paths, STAGE)
    assert sorted(caught.value.data["damaged"]) == folders
    assert shelf.names() == before


@pytest.mark.parametrize("how", [None, *DAMAGES[:3]])
def test_what_could_not_be_read_is_whole_or_damaged(shelf, how):
    """Each object is compared with the record, its content too; the record itself is known already."""
    folder = shelf.put(10)
    commit = newest_intact(shelf.store, shelf.paths, STAGE).commit
    if how:
        shelf.damage(folder, how)
    assert reads_whole(shelf.store, folder, commit) == (how is None)
    assert not reads_whole(shelf.store, folder.replace("10-", "11-"), commit)


def test_an_excluded_checkpoint_is_passed_over(shelf):
    """What turned out to be unreadable counts as damaged; if it was the only one, that is an error."""
    older, newer = shelf.put(10), shelf.put(20)
    assert newest_intact(shelf.store, shelf.paths, STAGE, exclude={newer}).folder == older
    with pytest.raises(NoIntactCheckpointError, match="restoring it failed"):
        newest_intact(shelf.store, shelf.paths, STAGE, exclude={newer, older})


def test_a_folder_without_a_record_is_left_alone_and_named(shelf):
    """A copied or half-written checkpoint does not count, is not adopted, and loses no file.

    There is one root per stage, so "a fresher temporary checkpoint elsewhere" is a newer folder without a record: it
    is given by name in ``Selection.uncommitted``, which the stage warns about.
    """
    committed = shelf.put(20)
    shelf.arrays(30)
    before = shelf.names()
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert selection.folder == committed
    assert [(f.step, f.folder) for f in selection.uncommitted] == [
        (30, shelf.paths.checkpoint(STAGE, step=30, epoch=1))
    ]
    assert shelf.names() == before


def test_only_uncommitted_folders_is_a_fresh_start_that_names_them(shelf):
    """The first save died: nothing was ever committed, so the start is fresh, and the folder is named."""
    shelf.arrays(10)
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert selection.commit is None
    assert [f.step for f in selection.uncommitted] == [10]


def test_what_a_dead_start_left_does_not_damage_a_checkpoint(shelf):
    """More objects in the folder than the record names: it is intact."""
    folder = shelf.put(10)
    shelf.store.create(f"{folder}/other/half", b"1")
    assert newest_intact(shelf.store, shelf.paths, STAGE).folder == folder


def test_without_reading_contents_a_flip_is_seen_where_the_store_keeps_checksums(shelf):
    """Above the size limit the store's own checksum decides; sizes always do."""
    older, newer = shelf.put(10), shelf.put(20)
    shelf.damage(newer, "truncated")
    assert newest_intact(shelf.store, shelf.paths, STAGE, deep_limit_bytes=0).folder == older
    newest = shelf.put(30)
    shelf.damage(newest, "flipped")
    vouches = next(iter(shelf.store.list(newest))).crc32c is not None
    assert newest_intact(shelf.store, shelf.paths, STAGE, deep_limit_bytes=0).folder == (older if vouches else newest)


class Refusing:
    """A store of which one operation is refused, as a bucket without the permission for it does."""

    def __init__(self, store, operation):
        self._store = store
        self._operation = operation

    def __getattr__(self, name):
        if name == self._operation:
            raise StoreDeniedError(f"{name} was refused: 403.", operation=name)
        return getattr(self._store, name)


@pytest.mark.parametrize("operation", ["list", "read", "checksum"])
def test_a_refusal_is_never_no_checkpoint(shelf, operation):
    """403 on listing or reading is raised as it is: not "no checkpoint", not "damaged, take the older one"."""
    shelf.put(10)
    shelf.put(20)
    with pytest.raises(StoreDeniedError):
        newest_intact(Refusing(shelf.store, operation), shelf.paths, STAGE)


def test_a_listing_that_breaks_off_is_an_error(shelf):
    """A page of the listing, then a refusal: an error, not the checkpoints seen so far."""
    shelf.put(10)
    shelf.put(20)
    whole = shelf.store.list

    class BreaksOff:
        def list(self, prefix):
            found = whole(prefix)
            yield next(found)
            raise StoreDeniedError("page 2 was refused: 403.", operation="list")

    with pytest.raises(StoreDeniedError):
        newest_intact(BreaksOff(), shelf.paths, STAGE)


def test_a_missing_bucket_is_an_error(endpoint, shelf):
    """No such bucket, or no server: StoreError, not a fresh start."""
    gone = open_store("gs://no-such-bucket/x", endpoint=endpoint, make_root=False)
    with pytest.raises(ObjectNotFoundError):
        newest_intact(gone, shelf.paths, STAGE)
    nobody = open_store("gs://bucket/x", endpoint="http://127.0.0.1:9", timeout_s=0.5, attempts=1)
    with pytest.raises(StoreError):
        newest_intact(nobody, shelf.paths, STAGE)


def test_foreign_folders_are_not_checkpoints(shelf):
    """Only folders named by step and epoch are looked at; the rest is left alone."""
    shelf.put(10)
    prefix = shelf.paths.checkpoints(STAGE)
    for name in ("tmp/COMMIT.json", "20-1/COMMIT.json", "0000000020-000001.bak/COMMIT.json", "0000000030-000001"):
        shelf.store.create(f"{prefix}/{name}", b"{}")
    assert [f.step for f in list_checkpoints(shelf.store, shelf.paths, STAGE)] == [10]
