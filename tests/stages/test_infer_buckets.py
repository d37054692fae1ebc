"""Bucket lengths chosen from the data are the same for every attempt of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tpupipe.data.buckets import Buckets
from tpupipe.errors import DataError, JobError, ObjectExistsError
from tpupipe.programs.infer_buckets import length_histogram, resolve_buckets
from tpupipe.store.layout import RunPaths

PATHS = RunPaths("job", "run")
AUTO = Buckets.auto(max=2, column="tokens")


def ragged(*lengths):
    rows = np.empty(len(lengths), object)
    rows[:] = [np.zeros(length, np.int32) for length in lengths]
    return rows


def never():
    raise AssertionError("sampled again")


def recorded(store):
    (info,) = store.list(PATHS.stage("score") + "/buckets/")
    return info.name


def test_the_first_choice_stays(store):
    """Sampled once: a later attempt, with other units pending, reads the record."""
    first = resolve_buckets(store, PATHS, "score", AUTO, lambda: [{5: 9, 30: 1}, {5: 3, 17: 1}])
    assert first == Buckets((8, 32), column="tokens")
    assert resolve_buckets(store, PATHS, "score", AUTO, never) == first
    record = json.loads(store.read(recorded(store)))
    assert (record["lengths"], record["sampled_units"], record["sampled_rows"]) == ([8, 32], 2, 14)
    assert record["padding_share"] == round(1 - (12 * 5 + 30 + 17) / (12 * 8 + 2 * 32), 4)


def test_another_stage_or_declaration_chooses_for_itself(store):
    """Neither reads the other's record."""
    resolve_buckets(store, PATHS, "score", AUTO, lambda: [{5: 1}])
    assert resolve_buckets(store, PATHS, "other", AUTO, lambda: [{20: 1}]).lengths == (24,)
    finer = Buckets.auto(max=2, column="tokens", multiple=1)
    assert resolve_buckets(store, PATHS, "score", finer, lambda: [{20: 1}]).lengths == (20,)
    assert resolve_buckets(store, PATHS, "score", AUTO, never).lengths == (8,)


def test_two_drivers_have_one_choice(store):
    """Another driver recorded its choice while this one sampled: that one holds."""

    def sample():
        resolve_buckets(store, PATHS, "score", AUTO, lambda: [{60: 1}])
        return [{5: 1}]

    assert resolve_buckets(store, PATHS, "score", AUTO, sample).lengths == (64,)


def test_a_sample_without_rows_decides_nothing(store):
    """No record: the next attempt, which may find rows, chooses."""
    assert resolve_buckets(store, PATHS, "score", AUTO, lambda: [{}, {}]).lengths == (8,)
    assert resolve_buckets(store, PATHS, "score", AUTO, lambda: [{100: 1}]).lengths == (104,)


def test_a_batch_that_holds_no_row_is_refused_before_it_is_recorded(store):
    """The longest sampled row does not fit batch_tokens: said with the values."""
    auto = Buckets.auto(batch_tokens=64)
    with pytest.raises(JobError, match=r"batch_tokens=64.*104"):
        resolve_buckets(store, PATHS, "score", auto, lambda: [{100: 1}])
    assert list(store.list(PATHS.stage("score") + "/")) == []


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format": 1, "lengths": []}', b'{"format": 9, "lengths": [8]}']
)
def test_a_damaged_record_is_an_error(store, content):
    """Never a reason to choose again: rows were made with the old lengths."""
    resolve_buckets(store, PATHS, "score", AUTO, lambda: [{5: 1}])
    store.put(recorded(store), content)
    with pytest.raises(DataError, match="bucket lengths"):
        resolve_buckets(store, PATHS, "score", AUTO, never)


def test_the_record_is_never_written_over(store):
    """Its object is created if absent, and only then."""
    resolve_buckets(store, PATHS, "score", AUTO, lambda: [{5: 1}])
    with pytest.raises(ObjectExistsError):
        store.create(recorded(store), b"other")


def test_the_histogram_of_a_unit():
    """Of the named column, or the only ragged one; empty rows count; a unit without rows has none."""
    columns = {"tokens": ragged(3, 0, 3, 7), "label": np.zeros(4)}
    assert length_histogram(columns, AUTO) == {0: 1, 3: 2, 7: 1}
    assert length_histogram(columns, Buckets.auto()) == {0: 1, 3: 2, 7: 1}
    assert length_histogram({"tokens": np.empty(0, object)}, AUTO) == {}
    assert length_histogram({}, AUTO) == {}
    with pytest.raises(DataError, match="column='ids'"):
        length_histogram(columns, Buckets.auto(column="ids"))
