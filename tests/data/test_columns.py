"""Columns of a batch: object arrays of rows, whether or not these happen to have one length."""

import numpy as np
import pytest

from tpupipe.data.buckets import Buckets, PackedBatch, pad, row_lengths
from tpupipe.data.columns import as_array, is_numeric, to_numpy, to_table
from tpupipe.data.ragged import Ragged


@pytest.mark.parametrize("rows", [[[1, 2, 3]], [[1, 2], [3, 4]], [[1, 2], [3]]])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.bool_])
def test_rows_of_one_length_are_as_others(rows, dtype):
    """One array of two dimensions is what numpy makes; the column is rows of arrays all the same, which batch with others."""
    column = as_array("x", np.array([np.array(row, dtype) for row in rows], dtype=object))
    assert (column.dtype, column.shape) == (object, (len(rows),))
    assert [(row.dtype, row.tolist()) for row in column] == [(dtype, np.array(row, dtype).tolist()) for row in rows]
    assert is_numeric(column)
    assert Ragged.of([*column, np.array([9], dtype)]).lengths.tolist() == [*map(len, rows), 1]
    assert row_lengths({"x": column}, Buckets((4,), batch_rows=4)).tolist() == [*map(len, rows)]
    batch = pad({"x": column}, PackedBatch(4, np.arange(len(rows)), 4), Buckets((4,), batch_rows=4))
    assert batch.columns["x"].shape == (4, 4)


def test_windows_of_either_kind_are_stored_in_one_type():
    """A window whose rows have one length has the schema of those where they differ."""
    one = to_table({"x": np.array([np.arange(2), np.arange(2)], dtype=object)})
    two = to_table({"x": np.array([np.arange(2), np.arange(3)], dtype=object)})
    assert one.schema.equals(two.schema, check_metadata=True)
    assert [row.tolist() for row in to_numpy(one)["x"]] == [[0, 1], [0, 1]]


def test_more_dimensions():
    """A row of rows keeps its dimensions; the first one is that of rows."""
    column = as_array("x", np.array([np.ones((2, 3)), np.ones((2, 3))], dtype=object))
    assert [(row.dtype, row.shape) for row in column] == [(np.float64, (2, 3))] * 2


def test_empty_rows_have_no_dtype():
    """All rows without values: lists, which take the dtype of others."""
    column = as_array("x", np.array([np.arange(0)] * 2, dtype=object))
    assert column.tolist() == [[], []]
    assert Ragged.of([*column, np.arange(2)]).values.dtype == np.int64
    assert as_array("x", np.empty((0, 3), object)).shape == (0,)


@pytest.mark.parametrize("rows", [[["a", "b"]], [[1, None]], [[b"a\0", b""]], [[1, "a"]]])
def test_values_that_are_not_numbers_stay(rows):
    """Text, bytes and missing values are not turned into anything else."""
    column = as_array("x", np.array(rows, dtype=object))
    assert (column.dtype, len(column)) == (object, 1)
    assert column[0].tolist() == rows[0]
    if rows != [[1, "a"]]:
        assert to_table({"x": column})["x"].to_pylist() == rows
