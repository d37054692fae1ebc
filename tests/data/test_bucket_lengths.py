"""Lengths chosen from data: never more padding than any other choice, recorded or not."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.bucket_lengths import MOST_CANDIDATES, best_lengths, choose, padded_tokens, spread
from tpupipe.data.buckets import Buckets, plan_batches
from tpupipe.errors import JobError

histograms = st.dictionaries(st.integers(0, 40), st.integers(0, 50), max_size=9)


def brute_force(histogram, max_buckets, multiple, longest):
    """Fewest tokens over every set of allowed lengths that holds all rows."""
    top = max([length for length, rows in histogram.items() if rows], default=0)
    last = longest or max(-(-top // multiple), 1) * multiple
    inner = range(multiple, last, multiple)
    return min(
        padded_tokens(histogram, (*chosen, last))
        for count in range(min(max_buckets, len(inner) + 1))
        for chosen in combinations(inner, count)
    )


@given(histograms, st.integers(1, 3), st.sampled_from([1, 3, 8]), st.none() | st.integers(1, 45))
def test_no_other_lengths_pad_less(histogram, max_buckets, multiple, longest):
    """As few tokens as the best of all sets of allowed lengths; every row has a bucket, in each a row's need ends."""
    lengths = best_lengths(histogram, max_buckets, multiple=multiple, longest=longest)
    assert padded_tokens(histogram, lengths) == brute_force(histogram, max_buckets, multiple, longest)
    assert 1 <= len(lengths) <= max_buckets
    assert list(lengths) == sorted(set(lengths))
    assert all(length % multiple == 0 for length in lengths[:-1])
    if longest:
        assert lengths[-1] == longest
    else:
        assert lengths[-1] % multiple == 0
        assert lengths[-1] >= max([length for length, rows in histogram.items() if rows], default=0)


@given(histograms.filter(lambda h: any(h.values())), st.integers(1, 6))
def test_no_bucket_without_use(histogram, max_buckets):
    """Fewer buckets where more save nothing: leaving any one out costs tokens, so each compiled program is needed."""
    lengths = best_lengths(histogram, max_buckets)
    tokens = padded_tokens(histogram, lengths)
    for left_out in lengths[:-1]:
        assert padded_tokens(histogram, [length for length in lengths if length != left_out]) > tokens


@given(histograms, st.integers(1, 4))
def test_the_count_is_what_batches_of_one_row_hold(histogram, max_buckets):
    """padded_tokens, by which lengths are chosen, is what plan_batches makes of the same rows."""
    rows = [length for length, count in histogram.items() for _ in range(count)]
    lengths = best_lengths(histogram, max_buckets)
    batches = plan_batches(rows, Buckets(lengths, batch_rows=1))
    assert sum(batch.bucket_length for batch in batches) == padded_tokens(histogram, lengths)


def test_rows_that_are_cut():
    """Rows beyond ``longest`` count as so long: they do not draw a bucket towards them."""
    assert best_lengths({8: 10, 16: 10, 512: 1, 9000: 5}, 3, longest=512) == (8, 16, 512)


@pytest.mark.parametrize(("longest", "lengths"), [(None, (16,)), (100, (100,))])
def test_without_rows(longest, lengths):
    """One bucket."""
    assert best_lengths({}, 4, multiple=16, longest=longest) == lengths
    assert best_lengths({7: 0}, 4, multiple=16, longest=longest) == lengths


def test_many_distinct_lengths():
    """A hundred thousand lengths: the multiple is doubled to 64; within seconds, all rows held, little padding."""
    histogram = dict.fromkeys(range(1, 100_001), 1)
    began = time.process_time()
    lengths = best_lengths(histogram, 8)
    assert time.process_time() - began < 5
    assert 100_001 // 64 < MOST_CANDIDATES < 100_001 // 32
    assert lengths[-1] >= 100_000
    assert all(length % 64 == 0 for length in lengths)
    # Of evenly spread lengths, 8 equal buckets are best: n (n + n / 8) / 2 tokens.
    assert padded_tokens(histogram, lengths) == pytest.approx(100_000**2 * 9 / 16, rel=0.002)


def test_log_normal_lengths():
    """Median 66, at most 512: eight chosen lengths pad less than eight sensible ones, sixteen at most 12 % of tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(66), 0.8, 40_000)), 1, 512).astype(int)
    histogram = dict(zip(*(part.tolist() for part in np.unique(lengths, return_counts=True)), strict=True))

    def padding(chosen):
        return 1 - lengths.sum() / padded_tokens(histogram, chosen)

    eight = choose(Buckets.auto(max=8, longest=512), histogram)
    assert padding(eight) < padding((16, 32, 48, 64, 96, 128, 256, 512)) - 0.02
    assert padding(choose(Buckets.auto(max=16, longest=512), histogram)) < 0.12


@pytest.mark.parametrize(
    "arguments",
    [
        ({1: 1}, 0),
        ({1: 1}, 1, {"multiple": 0}),
        ({1: 1}, 1, {"longest": 0}),
        ({-1: 1}, 1),
        ({1: -1}, 1),
    ],
)
def test_what_best_lengths_refuses(arguments):
    """Numbers that mean nothing."""
    *positional, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(JobError):
        best_lengths(*positional, **named)


# -- the declaration ------------------------------------------------------------------------


def test_auto_hands_its_options_on():
    """What Buckets says of batches holds for the chosen lengths."""
    auto = Buckets.auto(4, longest=256, batch_tokens=1024, column="tokens", too_long="truncate")
    assert auto.max == 4
    assert auto.with_lengths((16, 256)) == Buckets((16, 256), batch_tokens=1024, column="tokens", too_long="truncate")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max": 0}, "max=0"),
        ({"max": True}, "max=True"),
        ({"longest": 0}, "longest=0"),
        ({"multiple": -8}, "multiple=-8"),
        ({"sample_units": 0}, "sample_units=0"),
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"batch_rows": 1, "batch_tokens": 1}, "not both"),
        ({"batch_tokens": 100, "longest": 512}, "holds no row of the longest bucket, 512"),
        ({"too_long": "drop"}, "too_long='drop'"),
    ],
)
def test_what_auto_refuses(options, said):
    """When it is declared, not when the stage runs."""
    with pytest.raises(JobError) as caught:
        Buckets.auto(**options)
    assert said in str(caught.value)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 40))
def test_spread(items, count):
    """So many, in order, the first among them, none twice, with gaps that differ by at most one."""
    places = spread(range(len(items)), count)
    assert len(places) == min(count, len(items))
    assert places[:1] == list(range(len(items)))[:1]
    gaps = np.diff([*places, len(items)])
    assert all(gap > 0 for gap in gaps)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
