"""Bucket lengths chosen from data: which few lengths pad the rows to the fewest tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tpupipe.data.buckets import AutoBuckets
from tpupipe.errors import JobError

MOST_CANDIDATES = 2048
"""Of more distinct lengths than this the multiple is doubled: the choice takes time with their square."""

T = TypeVar("T")


def best_lengths(
    histogram: Mapping[int, int], max_buckets: int, *, multiple: int = 1, longest: int | None = None
) -> tuple[int, ...]:
    """Chooses the lengths that pad the rows of a histogram to the fewest tokens.

    Exact, by dynamic programming over the distinct lengths K (after rounding up to ``multiple``):
    O(K² ``max_buckets``). Among equals the fewest buckets.

    Args:
        histogram: Length of a row to how many rows have it; 0 is allowed.
        max_buckets: At most so many lengths are chosen.
        multiple: Lengths are multiples of this, but for ``longest``. With more than ``MOST_CANDIDATES`` distinct
            lengths it is doubled until they are no more.
        longest: The last bucket, whatever the rows; longer rows count as so long. By default what the longest row needs.

    Returns:
        1 to ``max_buckets`` lengths, ascending. Without rows: ``longest`` or ``multiple`` alone.

    Raises:
        JobError: A number is negative, or not one that it may be.

    >>> best_lengths({10: 90, 100: 9, 500: 1}, 2, multiple=8)
    (16, 504)
    >>> best_lengths({10: 90, 100: 9, 500: 1}, 3, multiple=8, longest=500)
    (16, 104, 500)
    """
    import numpy as np

    if max_buckets < 1 or multiple < 1 or (longest is not None and longest < 1):
        raise JobError(
            f"best_lengths(max_buckets={max_buckets}, multiple={multiple}, longest={longest}) must be at least 1."
        )
    if any(length < 0 or rows < 0 for length, rows in histogram.items()):
        raise JobError("best_lengths: lengths and their numbers of rows must not be negative.")
    rows_of = {length: rows for length, rows in histogram.items() if rows}
    candidates = _candidates(rows_of, multiple, longest)
    while len(candidates) > MOST_CANDIDATES:
        multiple *= 2
        candidates = _candidates(rows_of, multiple, longest)
    lengths = np.array(sorted(candidates), np.int64)
    below = np.concatenate([[0], np.cumsum([candidates[int(length)] for length in lengths])])

    # best[j]: fewest tokens for the rows up to lengths[j] with at most k buckets, the last of which is lengths[j].
    # splits[k - 2][j]: which length is the last bucket but one then.
    best = lengths * below[1:]
    splits = []
    totals = [int(best[-1])]
    for _ in range(1, min(max_buckets, len(lengths))):
        split = np.zeros(len(lengths), np.int64)
        better = best.copy()
        for j in range(1, len(lengths)):
            tokens = best[:j] + lengths[j] * (below[j + 1] - below[1 : j + 1])
            split[j] = tokens.argmin()
            better[j] = tokens[split[j]]
        best = better
        splits.append(split)
        totals.append(int(best[-1]))

    at = len(lengths) - 1
    chosen = [int(lengths[at])]
    for split in reversed(splits[: totals.index(min(totals))]):
        at = int(split[at])
        chosen.append(int(lengths[at]))
    return tuple(reversed(chosen))


def _candidates(histogram: Mapping[int, int], multiple: int, longest: int | None) -> dict[int, int]:
    """Rows by the bucket that would be just long enough; ``longest`` is always one of them."""
    rows_of: dict[int, int] = {} if longest is None else {longest: 0}
    for length, rows in histogram.items():
        bucket = -(-max(length, 1) // multiple) * multiple
        bucket = bucket if longest is None else min(bucket, longest)
        rows_of[bucket] = rows_of.get(bucket, 0) + rows
    return rows_of or {multiple: 0}


def padded_tokens(histogram: Mapping[int, int], lengths: Sequence[int]) -> int:
    """Tokens of all rows of a histogram, each padded to the shortest of ``lengths`` that holds it, else cut to the last.

    >>> padded_tokens({10: 90, 100: 9, 500: 1}, (16, 504))
    6480
    """
    import numpy as np

    bounds = np.sort(np.asarray(lengths, np.int64))
    sizes = np.fromiter(histogram, np.int64, len(histogram))
    rows = np.fromiter(histogram.values(), np.int64, len(histogram))
    bucket_of = np.minimum(np.searchsorted(bounds, sizes), len(bounds) - 1)
    return int((bounds[bucket_of] * rows).sum())


def choose(auto: AutoBuckets, histogram: Mapping[int, int]) -> tuple[int, ...]:
    """The lengths that a declaration asks for, over these rows."""
    return best_lengths(histogram, auto.max, multiple=auto.multiple, longest=auto.longest)


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of the items (all, if there are no more), evenly spread, in their order, the first among them.

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    taken = min(count, len(items))
    return [items[i * len(items) // taken] for i in range(taken)]
