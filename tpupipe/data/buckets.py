"""Static shapes for ragged rows: which rows share a padded batch.

A compiled program has one shape; a new length means a new compilation. Declared lengths
bound the number of programs, and rows are padded to the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tpupipe.data.ragged import Ragged
from tpupipe.errors import DataError, JobError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TooLong: TypeAlias = Literal["error", "truncate", "quarantine"]


@dataclass(frozen=True)
class Buckets:
    """The lengths rows are padded to. Standard library only, so a job module may import it.

    Args:
        lengths: Padded lengths, kept sorted and unique.
        batch_rows: Rows of every batch; or
        batch_tokens: rows times length of every batch, so short buckets hold more rows.
            With neither, the stage's own ``batch_rows`` decides.
        column: The ragged column whose length decides; may be left out when there is one.
        too_long: What becomes of a row longer than the longest bucket: ``"error"`` names it,
            ``"truncate"`` keeps its beginning, ``"quarantine"`` sets it aside with an error record.

    Raises:
        JobError: An argument is not valid.
    """

    lengths: tuple[int, ...] = (128, 256, 512)
    batch_rows: int | None = None
    batch_tokens: int | None = None
    column: str | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        lengths: object = self.lengths
        if not isinstance(lengths, Sequence) or isinstance(lengths, str) or not lengths:
            raise JobError(f"Buckets(lengths={lengths!r}) must be a list of at least one length.")
        for length in lengths:
            _check_positive("lengths", length)
        object.__setattr__(self, "lengths", tuple(sorted(set(lengths))))
        for name in ("batch_rows", "batch_tokens"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.batch_rows is not None and self.batch_tokens is not None:
            raise JobError("Buckets: give batch_rows or batch_tokens, not both.")
        if self.batch_tokens is not None and self.batch_tokens < self.lengths[-1]:
            raise JobError(
                f"Buckets(batch_tokens={self.batch_tokens}) holds no row of the longest bucket, {self.lengths[-1]}."
            )
        if self.too_long not in ("error", "truncate", "quarantine"):
            raise JobError(
                f'Buckets(too_long={self.too_long!r}) is not known; allowed: "error", "truncate", "quarantine".'
            )

    @staticmethod
    def auto(
        max: int = 8,  # noqa: A002 - Buckets.auto(max=8) reads as what it is
        *,
        longest: int | None = None,
        multiple: int = 8,
        sample_units: int = 8,
        batch_rows: int | None = None,
        batch_tokens: int | None = None,
        column: str | None = None,
        too_long: TooLong = "error",
    ) -> AutoBuckets:
        """Lengths chosen from the data when the stage first runs; see :class:`AutoBuckets`."""
        return AutoBuckets(max, longest, multiple, sample_units, batch_rows, batch_tokens, column, too_long)

    def rows_for(self, length: int, *, default: int = 64, multiple: int = 1) -> int:
        """Rows of a batch of bucket ``length``.

        Args:
            length: One of ``lengths``.
            default: Rows when neither ``batch_rows`` nor ``batch_tokens`` was given.
            multiple: The result is a multiple of this (the devices a batch is split over):
                rounded down where possible, else up.
        """
        rows = self.batch_tokens // length if self.batch_tokens else (self.batch_rows or default)
        return max(rows // multiple, 1) * multiple


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"Buckets({name}={value!r}) must be whole numbers of at least 1.")


@dataclass(frozen=True)
class AutoBuckets:
    """Buckets whose lengths are chosen from a sample of the rows; made by ``Buckets.auto``.

    The lengths are those that pad the sampled rows to the fewest tokens. They are recorded in the run when the stage
    first has something to do, and are the same from then on.

    Args:
        max: At most so many lengths.
        longest: The longest bucket, whatever the sample holds: the most that the model takes. Without it that is the
            longest sampled row, so a longer one may still come, and ``too_long`` decides about it.
        multiple: Lengths are multiples of this (``longest`` stays as it is).
        sample_units: Units whose rows are sampled, spread evenly over the pending ones. They are read and mapped
            once more for it.
        batch_rows: As for :class:`Buckets`.
        batch_tokens: As for :class:`Buckets`.
        column: As for :class:`Buckets`.
        too_long: As for :class:`Buckets`.

    Raises:
        JobError: An argument is not valid.
    """

    max: int = 8
    longest: int | None = None
    multiple: int = 8
    sample_units: int = 8
    batch_rows: int | None = None
    batch_tokens: int | None = None
    column: str | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        for name in ("max", "multiple", "sample_units"):
            _check_positive(name, getattr(self, name))
        if self.longest is not None:
            _check_positive("longest", self.longest)
        self.with_lengths((self.longest or 1,))

    def with_lengths(self, lengths: Sequence[int]) -> Buckets:
        """The buckets with their lengths chosen.

        Raises:
            JobError: ``batch_tokens`` holds no row of the longest.
        """
        return Buckets(tuple(lengths), self.batch_rows, self.batch_tokens, self.column, self.too_long)


@dataclass(frozen=True)
class PackedBatch:
    """Rows that are padded together.

    Attributes:
        bucket_length: Padded length.
        rows: ``int64[k]``, row numbers, ascending; k is at most ``batch_rows``.
        batch_rows: Rows of the compiled batch; those beyond k are padding.
    """

    bucket_length: int
    rows: NDArray[np.int64]
    batch_rows: int


def plan_batches(
    lengths: NDArray[Any] | Sequence[int], buckets: Buckets, *, default_rows: int = 64, row_multiple: int = 1
) -> list[PackedBatch]:
    """Puts every row in exactly one batch of the smallest bucket that holds it.

    Rows are packed from the longest bucket down, so the free places of a bucket's last batch go to rows of
    shorter buckets: only the last batch of the shortest bucket in use has padding rows.

    Args:
        lengths: ``int[N]``, length of every row; 0 is allowed.
        buckets: The declaration.
        default_rows: See :meth:`Buckets.rows_for`.
        row_multiple: See :meth:`Buckets.rows_for`.

    Returns:
        Batches by bucket, shortest first; rows ascending within a batch.

    Raises:
        DataError: A row is too long and ``buckets.too_long`` is not ``"truncate"`` (rows that are set aside
            must not be given). ``data["rows"]`` holds the first few.
    """
    import numpy as np

    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    bounds = np.asarray(buckets.lengths, dtype=np.int64)
    long = np.flatnonzero(sizes > bounds[-1])
    if long.size and buckets.too_long != "truncate":
        some = long[:5].tolist()
        raise DataError(
            f"{long.size} of {sizes.size} rows are longer than the longest bucket, {bounds[-1]}; "
            f"the first: {', '.join(f'row {i} ({sizes[i]})' for i in some)}.",
            hint='Add a longer bucket, or set too_long="truncate".',
            rows=some,
        )
    bucket_of = np.minimum(np.searchsorted(bounds, sizes, side="left"), len(bounds) - 1)
    order = np.argsort(-bucket_of, kind="stable")
    batches = []
    at = 0
    while at < order.size:
        length = int(bounds[bucket_of[order[at]]])
        batch_rows = buckets.rows_for(length, default=default_rows, multiple=row_multiple)
        batches.append(PackedBatch(length, np.sort(order[at : at + batch_rows]), batch_rows))
        at += batch_rows
    return sorted(batches, key=lambda batch: batch.bucket_length)


# -- padding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedBatch:
    """Arrays of one static shape.

    Attributes:
        columns: Column name to ``ndarray[batch_rows, ...]``; ragged columns are
            ``[batch_rows, bucket_length, ...]``.
        lengths: ``int32[batch_rows]``, real length of every row (after truncation); 0 for padding rows.
        mask: ``bool[batch_rows]``, True where the row is real.
    """

    columns: dict[str, NDArray[Any]]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]


def row_lengths(columns: Mapping[str, NDArray[Any]], buckets: Buckets) -> NDArray[np.int64]:
    """Length of every row in the column that decides the bucket.

    Args:
        columns: Column name to ``ndarray[N, ...]``. Ragged columns are object arrays of arrays.
        buckets: The declaration.

    Returns:
        ``int64[N]``.

    Raises:
        DataError: The column does not exist or has no length, or it must be named.
    """
    import numpy as np

    name = buckets.column
    if name is None:
        ragged = [key for key, values in columns.items() if is_ragged(values)]
        if len(ragged) != 1:
            raise DataError(
                f"Buckets needs column=: {'no' if not ragged else len(ragged)} column is ragged"
                f"{': ' + ', '.join(ragged) if ragged else ''}. Columns: {', '.join(columns) or 'none'}.",
                hint="Name the column whose length decides the bucket.",
            )
        name = ragged[0]
    if name not in columns:
        raise DataError(f"Buckets(column={name!r}) does not exist; there are {', '.join(columns) or 'none'}.")
    values = columns[name]
    if is_ragged(values):
        return np.fromiter((len(row) for row in values), np.int64, len(values))
    if values.dtype == object or values.ndim < 2:
        raise DataError(f"Buckets(column={name!r}) has rows without a length: {values.dtype}{list(values.shape)}.")
    return np.full(len(values), values.shape[1], np.int64)


def is_ragged(values: NDArray[Any]) -> bool:
    """Whether a column is an object array whose rows are arrays or lists."""
    import numpy as np

    return values.dtype == object and len(values) > 0 and all(isinstance(row, (np.ndarray, list)) for row in values)


def pad(columns: Mapping[str, NDArray[Any]], batch: PackedBatch, buckets: Buckets, *, fill: int = 0) -> PaddedBatch:
    """Takes a packed batch's rows and pads them to its static shape.

    Ragged columns, and the deciding column, are padded along their second dimension to
    ``bucket_length``; padding rows are ``fill`` everywhere.

    Args:
        columns: Column name to ``ndarray[N, ...]``.
        batch: From :func:`plan_batches` over these rows.
        buckets: The declaration.
        fill: Value of the padding.

    Raises:
        DataError: A row is longer than the bucket and ``too_long`` is ``"error"``, or the rows of a
            ragged column differ in dtype or inner shape.
    """
    import numpy as np

    taken = {name: values[batch.rows] for name, values in columns.items()}
    lengths = np.zeros(batch.batch_rows, np.int32)
    lengths[: len(batch.rows)] = np.minimum(row_lengths(taken, buckets), batch.bucket_length)
    padded = {}
    for name, values in taken.items():
        if is_ragged(values) or (name == buckets.column and values.ndim >= 2):
            truncate = buckets.too_long == "truncate"
            rows = np.arange(len(values))
            padded[name] = Ragged.of(list(values), name).pad(
                rows, batch.bucket_length, batch.batch_rows, fill=fill, truncate=truncate
            )
        else:
            padded[name] = np.full((batch.batch_rows, *values.shape[1:]), fill, values.dtype)
            padded[name][: len(values)] = values
    return PaddedBatch(padded, lengths, np.arange(batch.batch_rows) < len(batch.rows))
