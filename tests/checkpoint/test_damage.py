"""A checkpoint damaged on purpose is damaged for whoever looks next, on every backend, and the older ones are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.conftest import STAGE
from tpupipe.checkpoint.commit import Commit, SavedObject
from tpupipe.checkpoint.verify import newest_intact
from tpupipe.errors import CheckpointError
from tpupipe.faults.damage import choose, damage_newest, damaged
from tpupipe.faults.plan import HOW


@pytest.mark.parametrize("how", HOW)
def test_the_newest_is_damaged_and_the_one_before_it_is_taken(shelf, how):
    """One object of step 20 is another one (or gone); step 10 is chosen, and step 20 is told of with its object."""
    folders = {step: shelf.put(step) for step in (10, 20)}
    contents = {name: shelf.store.read(name) for name in shelf.names()}
    done = damage_newest(shelf.store, shelf.paths, how, seed=0)
    assert (done["step"], done["how"]) == (20, how)
    assert done["object"].startswith(folders[20] + "/arrays/")
    now = {name: shelf.store.read(name) for name in shelf.names()}
    assert {name for name in contents if now.get(name) != contents[name]} == {done["object"]}
    selection = newest_intact(shelf.store, shelf.paths, STAGE)
    assert selection.commit is not None
    assert selection.commit.step == 10
    assert [damage.step for damage in selection.damaged] == [20]
    assert done["object"].removeprefix(folders[20] + "/") in str(selection.damaged[0])


def test_it_is_the_listing_that_shows_it_where_the_store_keeps_checksums(shelf):
    """A flipped bit in a store with checksums is seen without reading: the damage went through the store."""
    shelf.put(10)
    done = damage_newest(shelf.store, shelf.paths, "flip", seed=3)
    listed = {info.name: info for info in shelf.store.list()}[done["object"]]
    assert listed.crc32c in (None, shelf.store.checksum(done["object"]))


def test_a_second_time_damages_the_next_one(shelf):
    """Flipping the same bit again would mend it; the newest that is still intact is taken instead."""
    for step in (10, 20, 30):
        shelf.put(step)
    assert [damage_newest(shelf.store, shelf.paths, "flip", seed=0)["step"] for _ in range(3)] == [30, 20, 10]
    with pytest.raises(CheckpointError, match="no intact checkpoint to damage"):
        damage_newest(shelf.store, shelf.paths, "flip", seed=0)


def test_nothing_to_damage_is_an_error(shelf):
    """No run, and a folder without a record: said, and nothing is written."""
    with pytest.raises(CheckpointError, match="no intact checkpoint to damage"):
        damage_newest(shelf.store, shelf.paths, "delete", seed=0)
    shelf.arrays(10)
    before = shelf.names()
    with pytest.raises(CheckpointError, match="slow@"):
        damage_newest(shelf.store, shelf.paths, "delete", seed=0)
    assert shelf.names() == before


def test_the_object_depends_on_the_seed_and_is_a_large_one():
    """Equal seeds choose equally, other seeds reach every one of the larger half, none the empty or the small."""
    objects = tuple(SavedObject(f"arrays/{n}", size, 0) for n, size in enumerate((0, 5, 900, 800, 1000, 7, 0)))
    commit = Commit(1, 1, "arrays", objects, (), 0)
    chosen = [choose(commit, seed).size for seed in range(60)]
    assert set(chosen) == {800, 900, 1000}
    assert chosen == [choose(commit, seed).size for seed in range(60)]


@given(st.binary(min_size=1), st.integers(0, 50))
def test_content_is_never_the_same_afterwards(content, seed):
    """One bit differs, or the second half is missing, also for a single byte."""
    flipped = damaged(content, "flip", seed)
    assert len(flipped) == len(content)
    assert sum((a ^ b).bit_count() for a, b in zip(content, flipped, strict=True)) == 1
    assert damaged(content, "truncate", seed) == content[: len(content) // 2]
