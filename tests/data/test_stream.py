"""The training order: every row once, the same for any number of hosts, and never silently another."""

import pickle
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.stream import Stream, add_digests, digest
from tpupipe.errors import DataError, UsageError

chunk_lists = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
seeds = st.integers(0, 2**64 - 1)


def ids(stream):
    """Sample ids of the whole stream, padding left out."""
    batches = [stream.batch(step) for step in range(stream.steps)]
    return np.concatenate([b.sample_id[b.mask] for b in batches])


def same(left, right):
    names = ("chunk", "row", "sample_id", "position", "mask")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def part(batch, start, stop):
    return type(batch)(
        batch.step, *(getattr(batch, n)[start:stop] for n in ("chunk", "row", "sample_id", "position", "mask"))
    )


@given(chunk_lists, seeds, st.integers(1, 70), st.integers(1, 3))
def test_covers_every_row_once_per_data_epoch(chunks, seed, batch_size, epochs):
    """Each data epoch is a permutation of all rows; padding adds nothing."""
    total = sum(chunks)
    fed = ids(Stream(chunks, seed, batch_size, epochs=epochs))
    assert len(fed) == total * epochs
    for data_epoch in range(epochs):
        assert np.array_equal(np.sort(fed[data_epoch * total : (data_epoch + 1) * total]), np.arange(total))


@given(chunk_lists, seeds, st.integers(1, 70), st.integers(1, 9))
def test_steps_give_full_batches_that_wrap(chunks, seed, batch_size, steps):
    """With steps every batch is full, nothing is dropped, and every data epoch is complete before the next."""
    stream = Stream(chunks, seed, batch_size, steps=steps)
    total, fed = sum(chunks), ids(stream)
    assert (stream.steps, stream.rows, stream.rows_dropped) == (steps, steps * batch_size, 0)
    assert len(fed) == steps * batch_size
    for start in range(0, len(fed), total):
        piece = fed[start : start + total]
        assert len(np.unique(piece)) == len(piece)


@given(chunk_lists, seeds, st.integers(1, 50), st.integers(1, 3), st.sampled_from(["pad", "drop"]))
def test_nothing_is_lost_uncounted(chunks, seed, batch_size, epochs, tail):
    """Consumed rows plus reported dropped rows are all rows."""
    total = sum(chunks) * epochs
    if tail == "drop" and total < batch_size:
        with pytest.raises(DataError, match="drop all"):
            Stream(chunks, seed, batch_size, epochs=epochs, tail=tail)
        return
    stream = Stream(chunks, seed, batch_size, epochs=epochs, tail=tail)
    assert len(ids(stream)) == stream.rows
    assert stream.rows + stream.rows_dropped == total
    assert stream.rows_dropped == (0 if tail == "pad" else total % batch_size)


@given(chunk_lists, seeds, st.integers(1, 60), st.integers(1, 8), st.data())
def test_hosts_see_parts_of_the_same_batch(chunks, seed, batch_size, hosts, data):
    """A host's part is a slice of the global batch, and the digests of the parts add up, for any split."""
    stream = Stream(chunks, seed, batch_size, epochs=2)
    step = data.draw(st.integers(0, stream.steps - 1))
    whole = stream.batch(step)
    cuts = sorted(data.draw(st.lists(st.integers(0, batch_size), min_size=hosts - 1, max_size=hosts - 1)))
    bounds = [0, *cuts, batch_size]
    parts = [Stream(chunks, seed, batch_size, epochs=2).batch(step, a, b) for a, b in zip(bounds, bounds[1:])]  # noqa: B905, RUF007
    for piece, a, b in zip(parts, bounds, bounds[1:], strict=False):
        assert same(piece, part(whole, a, b))
    assert add_digests(*(piece.digest() for piece in parts)) == whole.digest()


@given(chunk_lists, seeds, st.integers(1, 60), st.randoms(use_true_random=False))
def test_batches_are_random_access(chunks, seed, batch_size, random):
    """Asking for batches in any order, or from a pickled copy, gives what iterating gives."""
    stream = Stream(chunks, seed, batch_size, epochs=3)
    iterated = [stream.batch(step) for step in range(stream.steps)]
    steps = list(range(stream.steps))
    random.shuffle(steps)
    copy = pickle.loads(pickle.dumps(stream))
    assert all(same(copy.batch(step), iterated[step]) for step in steps)


@given(chunk_lists, seeds, st.integers(1, 60))
def test_indices_address_the_manifest(chunks, seed, batch_size):
    """(chunk, row) is inside the chunk and sample_id is its row number in manifest order; padding points at real rows."""
    stream = Stream(chunks, seed, batch_size, epochs=1)
    starts = np.cumsum([0, *chunks])
    for step in range(stream.steps):
        batch = stream.batch(step)
        assert (batch.row < np.array(chunks)[batch.chunk]).all()
        assert np.array_equal(batch.sample_id[batch.mask], (starts[batch.chunk] + batch.row)[batch.mask])
        assert (batch.sample_id[~batch.mask] == -1).all()
        assert [a.dtype.name for a in (batch.chunk, batch.row, batch.sample_id, batch.mask)] == [
            "int32", "int32", "int64", "bool",
        ]  # fmt: skip


def test_without_shuffle_is_manifest_order():
    """shuffle=False feeds rows 0, 1, 2, … in every data epoch."""
    assert ids(Stream([3, 0, 4], 5, 4, epochs=2, shuffle=False)).tolist() == [*range(7), *range(7)]


def test_seed_and_epoch_change_the_order():
    """Another seed, and another data epoch, is another order."""
    first, second = ids(Stream([50] * 4, 1, 200, epochs=2)).reshape(2, 200)
    assert first.tolist() != second.tolist()
    assert first.tolist() != ids(Stream([50] * 4, 2, 200, epochs=1)).tolist()


def test_short_blocks_do_not_make_short_batches():
    """40 rows in chunks of 30 and 10, batch 8: sizes 8, 8, 8, 8, 8, none of them short."""
    stream = Stream([30, 10], 0, 8, epochs=1)
    assert [int(stream.batch(step).mask.sum()) for step in range(stream.steps)] == [8, 8, 8, 8, 8]


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ten_rows_three_workers(tail):
    """10 rows, 3 workers of 1 row each: consumed plus reported-dropped is 10."""
    stream = Stream([10], 0, 3, epochs=1, tail=tail)
    fed = []
    for step in range(stream.steps):
        for worker in range(3):
            piece = stream.batch(step, worker, worker + 1)
            fed += piece.sample_id[piece.mask].tolist()
    assert len(set(fed)) == len(fed)
    assert (len(fed), stream.rows_dropped) == ((10, 0) if tail == "pad" else (9, 1))


def test_resume_is_exact():
    """100 ids, batch 10, killed at step 6 with the last checkpoint after step 4: ids 50-99 follow."""
    stream = Stream([100], 0, 10, epochs=1, shuffle=False)
    resumed = [stream.batch(step).sample_id.tolist() for step in range(5, stream.steps)]
    assert list(chain(*resumed)) == list(range(50, 100))


def test_other_worker_count_continues():
    """Saved with 2 workers at row 40 of 100, resumed with 1: rows 40-99 of the same order, once each."""
    order = ids(Stream([7] * 14 + [2], 3, 10, epochs=1))
    two = Stream([7] * 14 + [2], 3, 10, epochs=1)
    before = [two.batch(s, h * 5, h * 5 + 5).sample_id.tolist() for s in range(4) for h in range(2)]
    one = Stream([7] * 14 + [2], 3, 10, epochs=1)
    after = [one.batch(s).sample_id.tolist() for s in range(4, 10)]
    assert list(chain(*before, *after)) == order.tolist()


GOLDEN = [
    [[1, 1, 1, 1, 1, 4, 3, 3], [3, 4, 0, 2, 1, 0, 5, 1], [7, 8, 4, 6, 5, 20, 19, 15]],
    [[2, 2, 2, 2, 2, 4, 3, 3], [1, 0, 2, 4, 3, 0, 0, 3], [10, 9, 11, 13, 12, 20, 14, 17]],
    [[0, 0, 0, 3, 3, 3, 3, 3], [1, 0, 3, 3, 0, 5, 1, 4], [1, 0, 3, 17, 14, 19, 15, 18]],
]


@given(chunk_lists, seeds, st.integers(0, 2))
def test_order_is_the_documented_one(chunks, seed, data_epoch):
    """The order can be made again from public numpy alone: stable argsorts of raw Philox words."""

    def permutation(lane, count):
        key, counter = np.array([seed, data_epoch], np.uint64), np.array([0, lane, 0, 0], np.uint64)
        return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(count), kind="stable").tolist()

    starts = np.cumsum([0, *chunks])
    expected = [starts[c] + r for c in permutation(0, len(chunks)) for r in permutation(c + 1, chunks[c])]
    total = sum(chunks)
    assert ids(Stream(chunks, seed, total, epochs=3))[data_epoch * total :][:total].tolist() == expected


def test_order_never_changes():
    """The first batches of seed 42 are stored here: a change of order would break every run that resumes."""
    stream = Stream([4, 5, 5, 6, 1], 42, 8, steps=1000)
    got = [
        [stream.batch(s).chunk.tolist(), stream.batch(s).row.tolist(), stream.batch(s).sample_id.tolist()]
        for s in (0, 2, 999)
    ]
    assert got == GOLDEN


def test_digest_never_changes():
    """The digest is part of results and checkpoints: stored values."""
    stream = Stream([4, 5, 5, 6, 1], 42, 8, epochs=1)
    assert [stream.batch(step).digest() for step in range(3)] == GOLDEN_DIGESTS
    assert digest(0, np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0


GOLDEN_DIGESTS = [8608410177207780983, 10689164597469231925, 1527314446682941167]


@given(st.integers(1, 50), seeds)
def test_digest_sees_step_position_and_sample(count, seed):
    """Any row at another step or position, or another sample, changes the digest; the order of the rows does not."""
    rng = np.random.default_rng(seed)
    sample = rng.integers(0, 2**40, count)
    position = np.arange(count)
    base = digest(7, position, sample)
    order = rng.permutation(count)
    assert digest(7, position[order], sample[order]) == base
    assert digest(8, position, sample) != base
    assert digest(7, position + 1, sample) != base
    assert digest(7, position, sample + 1) != base
    if count > 1 and sample[0] != sample[1]:
        swapped = sample.copy()
        swapped[:2] = sample[1::-1]
        assert digest(7, position, swapped) != base


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"chunk_rows": []}, DataError),
        ({"chunk_rows": [0, 0]}, DataError),
        ({"chunk_rows": [5, -1]}, DataError),
        ({"chunk_rows": [2**31]}, DataError),
        ({"seed": -1}, UsageError),
        ({"seed": 2**64}, UsageError),
        ({"batch_size": 0}, UsageError),
        ({"epochs": 1, "steps": 1}, UsageError),
        ({"epochs": None}, UsageError),
        ({"epochs": 0}, UsageError),
        ({"tail": "keep"}, UsageError),
    ],
)
def test_wrong_arguments_are_refused(kwargs, error):
    """Every wrong argument raises, rather than giving an order nobody asked for."""
    arguments = {"chunk_rows": [5], "seed": 0, "batch_size": 2, "epochs": 1} | kwargs
    with pytest.raises(error):
        Stream(**arguments)


@pytest.mark.parametrize("call", [(-1,), (3,), (0, 1, 3), (0, 2, 1), (0, -1)])
def test_outside_is_refused(call):
    """A step or a position outside the stream raises."""
    with pytest.raises(UsageError):
        Stream([5], 0, 2, epochs=1).batch(*call)
