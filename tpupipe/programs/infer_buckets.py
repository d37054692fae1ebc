"""Bucket lengths of a stage with ``Buckets.auto``: chosen once from a sample, recorded in the run, the same ever after."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tpupipe.data.bucket_lengths import choose, padded_tokens
from tpupipe.data.buckets import AutoBuckets, Buckets, row_lengths
from tpupipe.errors import DataError, ObjectExistsError
from tpupipe.job import Infer
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

FORMAT = 1


def buckets_of(stage: Infer) -> Buckets | None:
    """The stage's buckets, in workers and where its units are counted: there the lengths are chosen."""
    assert not isinstance(stage.buckets, AutoBuckets)  # noqa: S101 - resolved before anything has a shape
    return stage.buckets


def length_histogram(columns: Mapping[str, Any], auto: AutoBuckets) -> dict[int, int]:
    """How many of a unit's rows have which length. Pure; runs where the rows are.

    Args:
        columns: Column name to ``ndarray[N, ...]``, as the model is fed from.
        auto: The declaration.

    Raises:
        DataError: The column that decides does not exist or has no length, or it must be named.
    """
    import numpy as np

    if not any(len(values) for values in columns.values()):
        return {}
    lengths, rows = np.unique(row_lengths(columns, Buckets(column=auto.column)), return_counts=True)
    return dict(zip(lengths.tolist(), rows.tolist(), strict=True))


def resolve_buckets(
    store: Store,
    paths: RunPaths,
    stage: str,
    auto: AutoBuckets,
    sample: Callable[[], Iterable[Mapping[int, int]]],
) -> Buckets:
    """The recorded lengths of this declaration, else such as fit a sample, which are recorded.

    A changed declaration has a record of its own. Nothing is recorded where the sample has no rows: they may come.

    Args:
        store: The run's store.
        paths: Names of the run.
        stage: Name of the stage.
        auto: The declaration.
        sample: Gives the histogram of each sampled unit (``spread(pending, auto.sample_units)``); called only where
            nothing is recorded.

    Raises:
        JobError: ``batch_tokens`` holds no row of the longest bucket.
        DataError: The record is damaged.
    """
    declared = json.dumps(asdict(auto), sort_keys=True)
    name = paths.buckets(stage, hashlib.sha256(declared.encode()).hexdigest()[:16])
    if store.exists(name):
        return auto.with_lengths(_read(store, name))
    histogram: Counter[int] = Counter()
    units = 0
    for each in sample():
        histogram.update(each)
        units += 1
    lengths = choose(auto, histogram)
    buckets = auto.with_lengths(lengths)
    rows = sum(histogram.values())
    if not rows:
        return buckets
    record = {
        "format": FORMAT,
        "lengths": lengths,
        "declared": json.loads(declared),
        "sampled_units": units,
        "sampled_rows": rows,
        "padding_share": round(1 - _kept_tokens(histogram, lengths[-1]) / padded_tokens(histogram, lengths), 4),
    }
    try:
        store.create(name, json.dumps(record, indent=1).encode())
    except ObjectExistsError:  # a driver before this one was quicker: one choice holds for all
        return auto.with_lengths(_read(store, name))
    return buckets


def _kept_tokens(histogram: Mapping[int, int], longest: int) -> int:
    return sum(min(length, longest) * rows for length, rows in histogram.items())


def _read(store: Store, name: str) -> tuple[int, ...]:
    try:
        record = json.loads(store.read(name))
        lengths = Buckets(tuple(record["lengths"])).lengths
        known = record["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{store.uri(name)} does not say which bucket lengths were chosen: {error!r}.",
            hint="Delete it to have them chosen again.",
            uri=store.uri(name),
        ) from error
    if not known:
        raise DataError(
            f"{store.uri(name)}: bucket lengths in format {record['format']}; allowed: {FORMAT}.", uri=store.uri(name)
        )
    return lengths
