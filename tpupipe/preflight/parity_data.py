"""A few real batches, made in this process from the first units of the sources. No Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpupipe.data.bucket_lengths import choose, spread
from tpupipe.data.buckets import AutoBuckets, Buckets, PackedBatch, pad, plan_batches, row_lengths
from tpupipe.data.columns import as_array, is_numeric, to_numpy, to_table
from tpupipe.data.read import read_unit
from tpupipe.data.sample import sample_units
from tpupipe.data.sources import Source
from tpupipe.data.stream import Stream
from tpupipe.errors import DataError, UserCodeError
from tpupipe.job import Infer, Job, Preprocess, Quarantine, Train
from tpupipe.programs.infer_batches import LENGTHS, MASK
from tpupipe.programs.user_code import user_code

Columns = dict[str, NDArray[Any]]

MOST_UNITS = 8


class NeedsRayError(DataError):
    """The rows come from a ``dataset=``, which only Ray Data can run."""


@dataclass(frozen=True)
class Inputs:
    """Where rows come from.

    Args:
        job: The declaration.
        sample: Fraction of the input, as in the configuration.
        options: fsspec's options for opening inputs.
    """

    job: Job
    sample: str
    options: Mapping[str, Any]

    def units(self, source: Source) -> Iterator[Columns]:
        """The rows of the first units that have some, one after the other."""
        read = 0
        for unit in sample_units(source.units(storage_options=self.options), self.sample):
            table = read_unit(source, unit, storage_options=self.options)
            if not table.num_rows:
                continue
            yield to_numpy(table)
            read += 1
            if read == MOST_UNITS:
                return

    def prepared(self, name: str) -> Iterator[Columns]:
        """The rows that a ``Preprocess`` stage would commit for its first units.

        Raises:
            NeedsRayError: The stage has ``dataset=``.
            UserCodeError: Its map raises.
        """
        stage = self.job.stage(name)
        assert isinstance(stage, Preprocess)  # noqa: S101 - the job has checked its references
        if stage.map is None:
            raise NeedsRayError(f"Stage {name!r} has dataset=, which needs Ray Data.", stage=name)
        for rows in self.units(stage.source):
            with user_code("map", name):
                mapped = stage.map(rows)
            yield to_numpy(to_table(mapped))  # as they are read back


def training_batches(stage: Train, inputs: Inputs, *, rows: int, count: int) -> list[Columns]:
    """The first global batches of a training stage, in the order of its stream over the first units.

    Args:
        stage: The declaration.
        inputs: Where rows come from.
        rows: Rows of a batch; the stage's own batch size may be larger.
        count: Batches; the rows are read again from the start when they run out.

    Returns:
        Columns ``[rows, ...]`` with ``mask``.

    Raises:
        DataError: There are no rows, or a column cannot be trained on.
    """
    prepared = inputs.job.stage(stage.data)
    assert isinstance(prepared, Preprocess)  # noqa: S101 - the job has checked its references
    units: list[Columns] = []
    for unit in inputs.prepared(stage.data):
        units.append(unit)
        if sum(map(_rows, units)) >= rows * count:
            break
    chunks = [size for unit in units for size in _chunks(_rows(unit), prepared.chunk_rows)]
    stream = Stream(chunks, stage.seed, rows, steps=count, shuffle=stage.shuffle)
    columns = _joined([unit for unit in units if _rows(unit)])
    for name, values in columns.items():
        if not is_numeric(values) or values.dtype == object:
            raise DataError(
                f"Column {name!r} of stage {stage.data!r} is {values.dtype}; training needs rectangular numbers.",
                hint="Let the stage's map pad or pack it, or drop it.",
                stage=stage.data,
                column=name,
            )
    batches = []
    for step in range(count):
        index = stream.batch(step)
        batches.append({**{name: values[index.sample_id] for name, values in columns.items()}, MASK: index.mask})
    return batches


def inference_batches(stage: Infer, inputs: Inputs, *, rows: int, count: int) -> list[Columns]:
    """Batches of an inference stage, from its longest bucket to its shortest one.

    Args:
        stage: The declaration.
        inputs: Where rows come from.
        rows: Rows of a batch at most.
        count: Batches at most.

    Returns:
        Padded columns with ``mask`` and, with buckets, ``lengths``.

    Raises:
        DataError: There are no rows, or no column can be fed.
    """
    columns = _fed(stage, inputs, wanted=rows * count)
    total = _rows(columns)
    if stage.buckets is None:
        size = min(rows, stage.batch_rows)
        starts = range(0, total, size)[:count]
        packed = [PackedBatch(1, np.arange(at, min(at + size, total)), size) for at in starts]
        return [_rectangular(columns, batch) for batch in packed]
    buckets = _declared(stage.buckets, columns)
    lengths = row_lengths(columns, buckets)
    if buckets.too_long == "quarantine":
        kept = lengths <= buckets.lengths[-1]
        columns, lengths = {name: values[kept] for name, values in columns.items()}, lengths[kept]
    most = max(buckets.rows_for(length, default=stage.batch_rows) for length in buckets.lengths)
    small = dataclasses.replace(buckets, batch_tokens=None, batch_rows=min(rows, most))
    batches = spread(plan_batches(lengths, small)[::-1], count)
    padded = [pad(columns, batch, small) for batch in batches]
    return [{**each.columns, LENGTHS: each.lengths, MASK: each.mask} for each in padded]


def _declared(buckets: Buckets | AutoBuckets, columns: Columns) -> Buckets:
    if isinstance(buckets, Buckets):
        return buckets
    lengths, counts = np.unique(row_lengths(columns, Buckets(column=buckets.column)), return_counts=True)
    return buckets.with_lengths(choose(buckets, dict(zip(lengths.tolist(), counts.tolist(), strict=True))))


def _rectangular(columns: Columns, batch: PackedBatch) -> Columns:
    feed = {}
    for name, values in columns.items():
        feed[name] = np.zeros((batch.batch_rows, *values.shape[1:]), values.dtype)
        feed[name][: len(batch.rows)] = values[batch.rows]
    return {**feed, MASK: np.arange(batch.batch_rows) < len(batch.rows)}


def _fed(stage: Infer, inputs: Inputs, *, wanted: int) -> Columns:
    """Columns with numbers of the first rows, after the stage's map."""
    found: list[Columns] = []
    for rows in inputs.prepared(stage.data) if isinstance(stage.data, str) else inputs.units(stage.data):
        mapped = _mapped(stage, rows)
        columns = {name: as_array(name, values) for name, values in mapped.items()}
        found.append({name: values for name, values in columns.items() if is_numeric(values)})
        if sum(map(_rows, found)) >= wanted:
            break
    columns = _joined([each for each in found if _rows(each)])
    if not columns:
        raise DataError(f"Stage {stage.name!r} has no rows with numbers to feed in its first {MOST_UNITS} units.")
    if stage.buckets is None and any(values.dtype == object for values in columns.values()):
        raise DataError(f"Stage {stage.name!r} has ragged columns, and no buckets are declared.", stage=stage.name)
    return columns


def _mapped(stage: Infer, rows: Columns) -> Mapping[str, Any]:
    """The mapped rows; where bad rows are set aside, those before the first half that has one."""
    mapping = stage.map
    if mapping is None:
        return rows
    while True:
        try:
            with user_code("map", stage.name):
                mapped = mapping(rows)
        except UserCodeError:
            if not isinstance(stage.bad_rows, Quarantine) or _rows(rows) <= 1:
                raise
            rows = {name: values[: _rows(rows) // 2] for name, values in rows.items()}
            continue
        if not isinstance(mapped, Mapping):
            raise DataError(f"map of stage {stage.name!r} returned {type(mapped).__name__}, not a mapping of columns.")
        return mapped


def _rows(columns: Mapping[str, Any]) -> int:
    return len(next(iter(columns.values()), ()))


def _chunks(rows: int, size: int) -> list[int]:
    return [min(size, rows - at) for at in range(0, rows, size)]


def _joined(parts: Sequence[Columns]) -> Columns:
    if not parts:
        return {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
