"""A unit's object written window by window is the object that it would be if written at once."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.chunks import decode_footer, decode_unit, encode_unit
from tpupipe.data.unit_writer import UnitFooter, UnitWriter
from tpupipe.errors import DataError


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 7))
def test_any_windows_give_the_same_object(sizes, chunk_rows):
    """Rows, chunks, footer and bytes do not depend on how the rows came."""
    total = sum(sizes)
    table = pa.table(
        {"x": np.arange(total), "t": [f"text {i % 3}" for i in range(total)]},
        schema=pa.schema([("x", pa.int64()), ("t", pa.string())]),
    )
    writer = UnitWriter("u", chunk_rows)
    at = 0
    for size in sizes:
        writer.append(table.slice(at, size))
        at += size
    data = writer.finish(UnitFooter("u", rows_in=7))
    assert data == encode_unit(table, chunk_rows=chunk_rows, footer=UnitFooter("u", rows_in=7))
    assert decode_unit(data).equals(table)
    footer = decode_footer(data)
    assert (footer.rows, footer.rows_in) == (total, 7)
    assert footer.chunks == tuple(
        pq.ParquetFile(io.BytesIO(data)).metadata.row_group(i).num_rows for i in range(len(footer.chunks))
    )


def test_a_column_without_values_takes_its_type_when_it_comes():
    """Null in the first two windows, text in the third: one text column, the earlier rows null."""
    writer = UnitWriter("u", 4)
    for values in ([None] * 3, [None] * 3, ["a", None, "b"]):
        writer.append(pa.table({"t": pa.array(values)}))
    data = writer.finish(UnitFooter("u"))
    assert decode_unit(data)["t"].to_pylist() == [None] * 6 + ["a", None, "b"]
    assert decode_footer(data).chunks == (4, 4, 1)


def test_other_columns_are_refused():
    """A window with another column: DataError; a unit without a window has no columns."""
    writer = UnitWriter("u", 4)
    writer.append(pa.table({"x": [1]}))
    with pytest.raises(DataError, match="different columns"):
        writer.append(pa.table({"y": [1]}))
    writer.discard()
    with pytest.raises(DataError, match="no columns"):
        UnitWriter("u", 4).finish(UnitFooter("u"))
