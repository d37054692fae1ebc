"""Rows of different lengths as one flat array, so that padding a batch is one gather and not a loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpupipe.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Ragged:
    """Ragged rows, laid end to end.

    Attributes:
        values: ``ndarray[T, ...]``: the values of all rows.
        starts: ``int64[N]``: where each row begins in ``values``.
        lengths: ``int64[N]``: length of each row.
        name: Column name, for messages.
    """

    values: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    name: str = "rows"

    @classmethod
    def of(cls, rows: Sequence[Any], name: str = "rows") -> Ragged:
        """From arrays (or lists) ``[L_i, ...]`` of one dtype and one inner shape.

        Rows of length 0 take the dtype and inner shape of the others.

        Raises:
            DataError: Rows differ in dtype or inner shape.
        """
        import numpy as np

        arrays = rows if all(type(row) is np.ndarray for row in rows) else [np.asarray(row) for row in rows]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        if len({row.dtype for row in arrays}) > 1 or len({row.shape[1:] for row in arrays}) > 1:
            arrays = cls._alike([row for row in arrays if row.size] or arrays[:1], name)
        values = np.concatenate(arrays) if len(arrays) else np.empty((0,), np.int32)
        return cls(values, np.cumsum(lengths) - lengths, lengths, name)

    @staticmethod
    def _alike(filled: Sequence[NDArray[Any]], name: str) -> Sequence[NDArray[Any]]:
        kinds = {(row.dtype, row.shape[1:]) for row in filled}
        if len(kinds) > 1:
            told = sorted(f"{dtype}[L{''.join(f', {n}' for n in inner)}]" for dtype, inner in kinds)
            raise DataError(
                f"Column {name!r}: rows of {' and '.join(told)} do not go into one batch.",
                hint="Rows must share a dtype and all dimensions but the first.",
            )
        return filled

    def pad(
        self,
        rows: NDArray[np.integer[Any]],
        length: int,
        batch_rows: int,
        *,
        fill: int = 0,
        truncate: bool = False,
        dtype: Any = None,
        inner: tuple[int, ...] | None = None,
    ) -> NDArray[Any]:
        """Some rows, padded to ``[batch_rows, length, ...]``.

        Args:
            rows: ``int[k]``: which rows; k is at most ``batch_rows``.
            length: Padded length.
            batch_rows: Padded number of rows.
            fill: Value of the padding.
            truncate: Keep the beginning of longer rows instead of raising.
            dtype: Of the result; by default that of the values.
            inner: Dimensions after the second; by default those of the values.

        Raises:
            DataError: There are too many rows, or one is too long.
        """
        import numpy as np

        sizes = self.lengths[rows]
        if len(rows) > batch_rows:
            raise DataError(f"Column {self.name!r}: {len(rows)} rows do not go into one batch of {batch_rows} rows.")
        if len(rows) and sizes.max() > length:
            if not truncate:
                row = int(sizes.argmax())
                raise DataError(
                    f"Column {self.name!r}: row {row} of the batch has length {sizes[row]}; the bucket is {length}."
                )
            sizes = np.minimum(sizes, length)
        shape = (batch_rows, length, *(self.values.shape[1:] if inner is None else inner))
        padded = np.full(shape, fill, self.values.dtype if dtype is None else dtype)
        total = int(sizes.sum())
        if total:
            # Value j of the batch is value j - (values of the rows before its own) of its row.
            index = np.repeat(self.starts[rows] - (np.cumsum(sizes) - sizes), sizes) + np.arange(total)
            padded[: len(rows)][np.arange(length) < sizes[:, None]] = self.values[index]
        return padded
