"""Retention: what goes, and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.checkpoint.prune import Judged, judge, prune, superfluous
from tpupipe.checkpoint.verify import Found, newest_intact
from tpupipe.errors import UsageError

STAGE = "lm"


def judged(step: int, epoch: int, intact: bool) -> Judged:
    return Judged(Found(step, epoch, 0, f"{step}-{epoch}", {}), intact)


checkpoints = st.dictionaries(st.tuples(st.integers(0, 30), st.integers(1, 3)), st.booleans(), max_size=12).map(
    lambda found: [judged(*key, intact) for key, intact in found.items()]
)


def age(j: Judged) -> tuple[int, int]:
    return j.found.step, j.found.lease_epoch


@given(checkpoints, st.integers(1, 5), st.randoms())
def test_retention(all_of_them, keep, random):
    """The newest ``keep`` intact ones stay, and so does whatever is newer than the last of them; all else goes."""
    random.shuffle(all_of_them)
    gone = superfluous(all_of_them, keep)
    stays = [j for j in all_of_them if j.found not in gone]
    intact = sorted((j for j in all_of_them if j.intact), key=age, reverse=True)
    assert sorted((j for j in stays if j.intact), key=age, reverse=True) == intact[:keep]
    if intact:
        assert intact[0] in stays
    if len(intact) >= keep:
        oldest_kept = age(intact[keep - 1])
        assert all(age(j) >= oldest_kept for j in stays)
        assert all((f.step, f.lease_epoch) < oldest_kept for f in gone)
    else:
        assert gone == []


def test_damaged_newer_ones_neither_count_nor_shield():
    """Newest first: damaged 50, intact 40, damaged 30, intact 20, damaged 10; keep 1 leaves 50 and 40."""
    found = [judged(step, 1, step in (20, 40)) for step in (10, 20, 30, 40, 50)]
    assert [f.step for f in superfluous(found, 1)] == [30, 20, 10]
    assert [f.step for f in superfluous(found, 2)] == [10]


def test_without_an_intact_one_nothing_goes():
    """All damaged: perhaps somebody can mend one."""
    assert superfluous([judged(step, 1, False) for step in range(9)], 1) == []


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep):
    """At least one checkpoint stays."""
    with pytest.raises(UsageError):
        superfluous([judged(1, 1, True)], keep)


def test_prune_deletes_whole_checkpoints_and_nothing_else(shelf):
    """Of steps 10 to 50 with 40 damaged and keep 2: 10 and 20 go with all their files; an uncommitted 5 stays."""
    folders = {step: shelf.put(step) for step in (10, 20, 30, 40, 50)}
    shelf.arrays(5)
    shelf.damage(folders[40], "truncated")
    gone = prune(shelf.store, shelf.paths, STAGE, keep=2)
    assert [f.step for f in gone] == [20, 10]
    left = {name.split("/")[-2 if name.endswith("COMMIT.json") else -4] for name in shelf.names()}
    assert left == {"0000000005-000001", *(f.rpartition("/")[2] for s, f in folders.items() if s in (30, 40, 50))}
    assert newest_intact(shelf.store, shelf.paths, STAGE).commit.step == 50


def test_pruning_again_changes_nothing(shelf):
    """Once pruned, always pruned."""
    for step in (1, 2, 3):
        shelf.put(step)
    prune(shelf.store, shelf.paths, STAGE, keep=1)
    before = shelf.names()
    assert prune(shelf.store, shelf.paths, STAGE, keep=1) == []
    assert shelf.names() == before


@pytest.mark.parametrize("how", ["deleted", "truncated", "record cut"])
def test_the_newest_intact_one_survives_a_damaged_newer_one(shelf, how):
    """keep=1, the newest is damaged: the one before it stays and is what a restore gets."""
    older, newer = shelf.put(10), shelf.put(20)
    shelf.damage(newer, how)
    assert prune(shelf.store, shelf.paths, STAGE, keep=1) == []
    assert newest_intact(shelf.store, shelf.paths, STAGE).folder == older


@pytest.mark.parametrize(
    "place",
    [
        "file",
        "gs",
    ],
    indirect=True,
)
def test_a_flipped_bit_in_the_newest_is_seen_before_the_older_one_goes(shelf):
    """keep=1, a byte of the newest differs: the older, intact one must not be deleted for it."""
    older, newer = shelf.put(10), shelf.put(20)
    shelf.damage(newer, "flipped")
    prune(shelf.store, shelf.paths, STAGE, keep=1)
    assert newest_intact(shelf.store, shelf.paths, STAGE).folder == older


def test_judge_looks_at_committed_ones_only(file_shelf):
    """One verdict per committed checkpoint, newest first."""
    file_shelf.put(10)
    file_shelf.damage(file_shelf.put(20), "deleted")
    file_shelf.arrays(30)
    verdicts = [(j.found.step, j.intact) for j in judge(file_shelf.store, file_shelf.paths, STAGE)]
    assert verdicts == [(20, False), (10, True)]
