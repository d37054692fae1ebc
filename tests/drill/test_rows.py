"""Outputs are compared row by row: the first difference is named with its unit, row and column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tpupipe.drill.leaves import first_leaf_difference
from tpupipe.drill.rows import first_difference, first_difference_joined, table_difference


def table(ids, scores=None):
    ids = list(ids)
    return pa.table({"id": pa.array(ids, pa.int32()), "score": pa.array(scores or [i / 2 for i in ids], pa.float32())})


def test_equal_outputs_have_no_difference():
    """NaN equals NaN, and how a table is cut into pieces does not count."""
    nan = table([1, 2], [float("nan"), 1.0])
    pieces = pa.concat_tables([nan.slice(0, 1), nan.slice(1, 1)])
    assert table_difference(nan, pieces) is None
    assert first_difference("s", [("u0", nan), ("u1", table([]))], [("u0", pieces), ("u1", table([]))]) is None


def test_a_changed_value_is_named():
    found = first_difference("s", [("u0", table([1, 2]))], [("u0", table([1, 2], [0.5, 1.25]))])
    assert found == (
        "stage s, unit u0, row 1, column 'score': 1.25 instead of 1.0 "
        "(1 row(s) of the reference are missing, 1 row(s) are too many)"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1, 2, 3, 3], "row 3: there are 4 rows instead of 3 (1 row(s) are too many)"),
        ([1, 2], "row 2: there are 2 rows instead of 3 (1 row(s) of the reference are missing)"),
        ([2, 3], "row 0, column 'id': 2 instead of 1 (1 row(s) of the reference are missing)"),
        ([1, 3, 2], "row 1, column 'id': 3 instead of 2 (the same rows in another order)"),
    ],
)
def test_duplicates_losses_and_other_orders_are_told_apart(found, said):
    assert table_difference(table([1, 2, 3]), table(found)) == said


def test_other_columns_and_types_are_differences():
    assert table_difference(table([1]), table([1]).drop(["score"])) == "columns id instead of id, score"
    wide = table([1]).set_column(0, "id", pa.array([1], pa.int64()))
    assert table_difference(table([1]), wide) == "column 'id': type int64 instead of int32"


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        (["a", "b"], ["a"], "stage s: unit b is missing"),
        (["a"], ["a", "b"], "stage s: unit b is one too many"),
        (["a", "b"], ["a", "c"], "stage s: unit c stands where b should"),
    ],
)
def test_units_are_compared_in_order(wanted, found, said):
    one, other = ([(name, table([1])) for name in names] for names in (wanted, found))
    assert first_difference("s", one, other) == said


def test_units_with_names_of_their_own_are_compared_as_one_table():
    """A dataset= stage cuts its rows anew each time; the rows are the same."""
    assert first_difference_joined("s", [("x", table([1, 2]))], [("y", table([1])), ("z", table([2]))]) is None
    found = first_difference_joined("s", [("x", table([1, 2]))], [("y", table([1])), ("z", table([3]))])
    assert found.startswith("stage s, row 1, column 'id': 3 instead of 2")


# -- parameters ---------------------------------------------------------------------------------------


def test_the_first_differing_leaf_is_named_with_its_place():
    """By its bits: in tree order, with the index and both values."""
    ours = {"b": np.zeros(3, np.float32), "w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    theirs = {"b": ours["b"], "w": ours["w"] + np.array([[0, 0, 0], [0, 0.5, 0.5]], np.float32)}
    assert first_leaf_difference(ours, theirs) == "leaf ['w'][1, 1]: 4.5 instead of 4.0 (1 of 2 leaves differ)"


def test_shapes_scalars_missing_leaves_and_equal_trees():
    one = {"s": np.int32(3), "w": np.zeros(2)}
    assert "leaf ['s']: 4 instead of 3" in first_leaf_difference(one, {**one, "s": np.int32(4)})
    assert "leaf ['w']: float64[3] instead of float64[2]" in first_leaf_difference(one, {**one, "w": np.zeros(3)})
    assert first_leaf_difference(one, {"s": one["s"]}) == "leaf ['w'] is in one checkpoint only"
    assert "hold the same arrays" in first_leaf_difference(one, one)
    assert "leaf ['s']" in first_leaf_difference({"s": np.float32(0.0)}, {"s": np.float32(-0.0)})
