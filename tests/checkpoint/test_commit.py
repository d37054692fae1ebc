"""COMMIT.json: what goes in comes out, and what is not one is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.checkpoint.commit import Commit, Leaf, SavedObject, tree_differences
from tpupipe.errors import CheckpointError

leaves = st.builds(
    Leaf,
    st.text(max_size=20),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(["bfloat16", "int8"]),
)
commits = st.builds(
    Commit,
    step=st.integers(0, 2**40),
    lease_epoch=st.integers(1, 2**20),
    arrays=st.just("arrays"),
    objects=st.lists(
        st.builds(SavedObject, st.text(max_size=20), st.integers(0, 2**50), st.integers(0, 2**32 - 1)), max_size=4
    ).map(tuple),
    leaves=st.lists(leaves, max_size=4).map(tuple),
    sample_digest=st.integers(0, 2**64 - 1),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    devices=st.integers(1, 10_000),
    created_s=st.floats(0, 1e12),
)
SOME = Commit(3, 1, "arrays", (SavedObject("arrays/a", 5, 7),), (Leaf("['w']", (2,), "float32"),), 2**64 - 1)


@given(commits)
def test_round_trip(commit):
    """Written and read again it is equal, whatever the numbers."""
    again = Commit.from_json(commit.to_json(), "uri")
    assert again == commit
    assert (again.fingerprint, again.tree_digest) == (commit.fingerprint, commit.tree_digest)


@given(st.data())
def test_a_record_that_is_cut_short_is_refused(data):
    """However much is missing, the error names the object."""
    whole = SOME.to_json()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(CheckpointError, match="gs://b/COMMIT"):
        Commit.from_json(cut, "gs://b/COMMIT.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"3", b"\xff\xfe", b'{"format": 1}', b'{"format": 2}'],
)
def test_what_is_no_record_is_refused(data):
    """Other JSON, other bytes, another format: one kind of error."""
    with pytest.raises(CheckpointError, match="uri-of-it"):
        Commit.from_json(data, "uri-of-it")


@pytest.mark.parametrize("key", sorted(set(json.loads(SOME.to_json()))))
def test_a_record_without_one_of_its_keys_is_refused(key):
    """No key has a silent default."""
    record = json.loads(SOME.to_json())
    del record[key]
    with pytest.raises(CheckpointError):
        Commit.from_json(json.dumps(record).encode(), "uri")


def test_a_record_with_changed_leaves_is_refused():
    """The tree digest guards the list of leaves."""
    with pytest.raises(CheckpointError, match="tree digest"):
        Commit.from_json(SOME.to_json().replace(b"float32", b"float16"), "uri")


def test_the_fingerprint_tells_contents_apart():
    """Another checksum, size, name, step or leaf is another fingerprint; time and devices are not content."""
    from dataclasses import replace

    others = [
        replace(SOME, step=4),
        replace(SOME, leaves=(Leaf("['w']", (3,), "float32"),)),
        *(
            replace(SOME, objects=(o,))
            for o in (SavedObject("b", 5, 7), SavedObject("arrays/a", 6, 7), SavedObject("arrays/a", 5, 8))
        ),
    ]
    assert len({c.fingerprint for c in (SOME, *others)}) == 6
    assert replace(SOME, devices=9, created_s=9.0, lease_epoch=2).fingerprint == SOME.fingerprint


def test_tree_differences():
    """Missing, unexpected and changed leaves, each by its path."""
    saved = [Leaf("a", (2,), "f4"), Leaf("b", (2,), "f4"), Leaf("c", (2,), "f4")]
    wanted = [Leaf("b", (3,), "f4"), Leaf("c", (2,), "f4"), Leaf("d", (2,), "f4")]
    assert tree_differences(saved, wanted) == (["d"], ["a"], ["b: saved f4[2], wanted f4[3]"])
