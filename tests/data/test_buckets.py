"""Static shapes: every row in one batch of a length that holds it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.buckets import Buckets, PackedBatch, pad, plan_batches, row_lengths
from tpupipe.data.ragged import Ragged
from tpupipe.errors import DataError, JobError

declarations = st.builds(
    lambda lengths, rows, tokens: Buckets(
        tuple(lengths), batch_rows=rows, batch_tokens=max(lengths) * tokens if tokens and not rows else None
    ),
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
)


@given(declarations, st.lists(st.integers(0, 100), max_size=200), st.sampled_from([1, 4, 8]))
def test_every_row_once_in_a_batch_that_holds_it(buckets, lengths, multiple):
    """All rows once; no row longer than its bucket; no batch fuller than its static rows; deterministic."""
    lengths = np.minimum(lengths, buckets.lengths[-1])
    batches = plan_batches(lengths, buckets, default_rows=16, row_multiple=multiple)
    rows = np.concatenate([b.rows for b in batches]) if batches else np.zeros(0)
    assert np.array_equal(np.sort(rows), np.arange(len(lengths)))
    for batch in batches:
        assert batch.bucket_length in buckets.lengths
        assert lengths[batch.rows].max() <= batch.bucket_length
        assert 0 < len(batch.rows) <= batch.batch_rows
        assert batch.batch_rows % multiple == 0
        assert (np.diff(batch.rows) > 0).all()
    shapes = {(b.bucket_length, b.batch_rows) for b in batches}
    assert len(shapes) <= len(buckets.lengths)
    again = plan_batches(lengths, buckets, default_rows=16, row_multiple=multiple)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(batches, again, strict=True))


@given(declarations, st.lists(st.integers(0, 100), min_size=1, max_size=200))
def test_no_more_batches_than_buckets_need(buckets, lengths):
    """Moving left-over rows up never adds a batch, nor pads a row of a full batch further than its own bucket."""
    lengths = np.minimum(lengths, buckets.lengths[-1])
    batches = plan_batches(lengths, buckets)
    bounds = np.array(buckets.lengths)
    own = bounds[np.searchsorted(bounds, lengths)]
    plain = sum(-(-int((own == length).sum()) // buckets.rows_for(length)) for length in buckets.lengths)
    assert len(batches) <= plain


def test_left_over_rows_fill_free_places():
    """Two short rows left over ride in the long bucket's batch, which they just fit: one batch, not two."""
    (batch,) = plan_batches([3, 9, 2], Buckets((4, 10), batch_rows=3))
    assert (batch.bucket_length, batch.rows.tolist()) == (10, [0, 1, 2])
    assert len(plan_batches([3, 9, 2], Buckets((4, 10), batch_rows=2))) == 2


def test_too_long():
    """A too long row is an error naming it, or goes to the longest bucket when that was asked for."""
    with pytest.raises(DataError, match=r"1 of 3 rows .* row 1 \(11\)") as caught:
        plan_batches([3, 11, 2], Buckets((4, 10)))
    assert caught.value.data["rows"] == [1]
    batches = plan_batches([3, 11, 2], Buckets((4, 10), too_long="truncate", batch_rows=1))
    assert [(b.bucket_length, b.rows.tolist()) for b in batches] == [(4, [0]), (4, [2]), (10, [1])]


def test_batch_tokens_give_short_buckets_more_rows():
    """batch_tokens keeps rows times length constant."""
    buckets = Buckets((128, 512), batch_tokens=1024)
    assert [buckets.rows_for(length) for length in buckets.lengths] == [8, 2]
    assert [buckets.rows_for(length, multiple=4) for length in buckets.lengths] == [8, 4]
    assert Buckets((8,)).rows_for(8, default=3) == 3


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(-5, 5), st.sampled_from([(), (2,)]))
def test_padding_keeps_the_rows(lengths, fill, inner):
    """Real rows come back exactly, everything else is the fill value, shapes are static."""
    tokens = np.empty(len(lengths), object)
    for i, n in enumerate(lengths):
        tokens[i] = np.arange(n * (2 if inner else 1), dtype=np.int32).reshape(n, *inner) + 100 * i
    columns = {"tokens": tokens, "id": np.arange(len(lengths))}
    buckets = Buckets((3, 8), batch_rows=4)
    seen = []
    for batch in plan_batches(row_lengths(columns, buckets), buckets):
        padded = pad(columns, batch, buckets, fill=fill)
        assert padded.columns["tokens"].shape == (4, batch.bucket_length, *inner)
        assert padded.columns["tokens"].dtype == np.int32 or not any(lengths)
        for place, row in enumerate(batch.rows):
            size = padded.lengths[place]
            assert np.array_equal(padded.columns["tokens"][place, :size], tokens[row])
            assert (padded.columns["tokens"][place, size:] == fill).all()
            assert padded.columns["id"][place] == row
        assert padded.mask.tolist() == [True] * len(batch.rows) + [False] * (4 - len(batch.rows))
        assert (padded.columns["tokens"][~padded.mask] == fill).all()
        seen += padded.columns["id"][padded.mask].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_truncated_rows_keep_their_beginning():
    """too_long="truncate" keeps the first tokens and says so in lengths."""
    tokens = np.empty(1, object)
    tokens[0] = np.arange(9)
    buckets = Buckets((4,), too_long="truncate", batch_rows=1)
    padded = pad({"t": tokens}, PackedBatch(4, np.array([0]), 1), buckets)
    assert (padded.columns["t"].tolist(), padded.lengths.tolist()) == ([[0, 1, 2, 3]], [4])
    with pytest.raises(DataError, match="length 9; the bucket is 4"):
        pad({"t": tokens}, PackedBatch(4, np.array([0]), 1), Buckets((4,), batch_rows=1))


def test_which_column_decides():
    """The one ragged column decides; none or two must be settled with column=; a named one must have lengths."""
    ragged = np.array([np.arange(2), np.arange(3)], object)
    fixed = np.zeros((2, 5))
    assert row_lengths({"a": ragged, "b": fixed}, Buckets()).tolist() == [2, 3]
    assert row_lengths({"a": ragged, "b": fixed}, Buckets(column="b")).tolist() == [5, 5]
    for columns, column in [
        ({"b": fixed}, None),
        ({"a": ragged, "c": ragged}, None),
        ({"a": ragged}, "x"),
        ({"a": ragged, "s": np.array(["x", "y"], object)}, "s"),
        ({"a": ragged, "n": np.arange(2)}, "n"),
    ]:
        with pytest.raises(DataError, match="column="):
            row_lengths(columns, Buckets(column=column))


def test_rows_of_two_kinds_are_refused():
    """Rows of different dtypes or inner shapes are not silently converted."""
    with pytest.raises(DataError, match=r"int32.* and int64"):
        Ragged.of([np.ones(2, np.int32), np.ones(2, np.int64)])
    with pytest.raises(DataError, match="share a dtype"):
        Ragged.of([np.ones((2, 3)), np.ones((2, 4))])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lengths": ()}, {"lengths": (0,)}, {"lengths": "128"}, {"lengths": (1.5,)}, {"batch_rows": 0},
        {"batch_rows": 1, "batch_tokens": 1024}, {"batch_tokens": 511}, {"too_long": "drop"}, {"lengths": 5},
    ],
)  # fmt: skip
def test_wrong_declarations_are_refused(kwargs):
    """A declaration that makes no sense raises where it is written."""
    with pytest.raises(JobError, match="Buckets"):
        Buckets(**kwargs)


def test_lengths_are_sorted_and_unique():
    """The order of the declaration does not matter."""
    assert Buckets([512, 128, 128]) == Buckets((128, 512))
