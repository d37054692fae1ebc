"""Bounded tables of a Parquet file: the same rows as when it is read at once, and memory that their size does not decide."""

import io
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.chunks import to_numpy
from tpupipe.data.parquet_rows import bounded_tables, no_rows
from tpupipe.data.sources import Parquet
from tpupipe.data.windows import committed_windows, read_windows
from tpupipe.errors import DataError, ObjectNotFoundError, StoreUnavailableError
from tpupipe.store.objects import open_store

MB = 1 << 20
POOLS = []  # never freed: a buffer that is still alive goes back to its pool
SMALL_PAGES = {"write_batch_size": 4, "data_page_size": 65_536}  # a page is the least that can be decoded


@contextmanager
def peak_bytes():
    """A function that gives the most that Arrow held at a time since."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield pool.max_memory
    finally:
        pa.set_memory_pool(before)


def incompressible(rows, size_bytes):
    rng = np.random.default_rng(0)
    return pa.table({"id": np.arange(rows), "data": [rng.bytes(size_bytes) for _ in range(rows)]})


def repeated(rows, size_bytes):
    return pa.table({"id": np.arange(rows), "data": ["x" * size_bytes] * rows})


WIDE = {
    "wide": (incompressible(600, 100_000), {"use_dictionary": False, "compression": "none"}),
    "packed": (repeated(3000, 20_000), {"use_dictionary": False, "compression": "zstd"}),
    "dictionary": (repeated(3000, 20_000), {"compression": "zstd"}),
    "long dictionary": (repeated(600, 100_000), {}),
    "large last": (
        pa.table({"id": np.arange(4600), "data": ["y"] * 4000 + ["x" * 100_000] * 600}), {"compression": "zstd"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE)
def test_memory_of_a_unit_is_that_of_a_window(tmp_path, case):
    """60 MB of rows in one row group, in windows of 2 MB: never more than a few windows, and each row once, in order."""
    table, options = WIDE[case]
    assert table.nbytes > 50 * MB
    pq.write_table(table, tmp_path / "a.parquet", **SMALL_PAGES, **options)
    source = Parquet(str(tmp_path / "a.parquet"))
    (unit,) = source.units()
    ids = []
    with peak_bytes() as peak:
        for window in read_windows(source, unit, size_bytes=2 * MB):
            assert window.table.nbytes <= 2 * MB
            assert window.origin(0).row == window.first_row == window.table["id"][0].as_py()
            ids += window.table["id"].to_pylist()
        # Of a dictionary of long values the first 64 rows tell how long they are.
        assert peak() < (16 if case == "long dictionary" else 10) * MB
    assert ids == table["id"].to_pylist()


@pytest.mark.parametrize("case", WIDE)
def test_memory_of_a_committed_unit_is_that_of_a_window(tmp_path, case):
    """The same of a unit that an earlier stage committed, in one chunk."""
    table, options = WIDE[case]
    store = open_store(f"file://{tmp_path}/store")
    info = store.create("unit", written(table, **SMALL_PAGES, **options, write_page_checksum=True))
    ids = []
    with peak_bytes() as peak:
        for window in committed_windows(store, "unit", "000000-aa", total_bytes=info.size, size_bytes=2 * MB):
            assert window.table.nbytes <= 2 * MB
            assert window.origin(0).row == window.first_row == window.table["id"][0].as_py()
            ids += window.table["id"].to_pylist()
        assert peak() < (16 if case == "long dictionary" else 10) * MB
    assert ids == table["id"].to_pylist()


class Counting:
    """A store that counts what is read of it, and may fail after so many reads."""

    def __init__(self, store, reads=10**6):
        self.store, self.uri, self.reads, self.left = store, store.uri, [], reads

    def read(self, name, start=0, stop=None):
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailableError("too many requests")
        data = self.store.read(name, start, stop)
        self.reads.append(len(data))
        return data


def test_a_large_committed_unit_is_fetched_in_bounded_pieces(tmp_path):
    """20 MB in 4 chunks with windows of 2 MB: no request for more than a page, and each byte about once."""
    table, options = incompressible(200, 100_000), WIDE["wide"][1]
    store = Counting(open_store(f"file://{tmp_path}/store"))
    info = store.store.create("unit", written(table, **SMALL_PAGES, **options, row_group_size=50))
    windows = committed_windows(store, "unit", "000000-aa", total_bytes=info.size, size_bytes=2 * MB)
    assert sum(window.table.num_rows for window in windows) == 200
    assert max(store.reads) < 1 * MB
    assert sum(store.reads) < info.size + 1 * MB


def test_small_chunks_of_a_large_committed_unit_take_a_request_each(tmp_path):
    """8 chunks of 20 columns with windows of 1 MB: the footer, and one request per chunk."""
    table = pa.table({f"c{i}": np.random.default_rng(i).random(8000) for i in range(20)})
    store = Counting(open_store(f"file://{tmp_path}/store"))
    info = store.store.create("unit", written(table, row_group_size=1000, write_page_checksum=True))
    windows = list(committed_windows(store, "unit", "000000-aa", total_bytes=info.size, size_bytes=1 * MB))
    assert pa.concat_tables([window.table for window in windows]).equals(table)
    assert len(store.reads) <= 9


def test_errors_of_a_committed_unit(tmp_path):
    """A damaged object is an error that names it, at once or by pieces; what the store raises arrives as itself."""
    data = bytearray(written(pa.table({"x": np.arange(1000)}), write_page_checksum=True))
    data[100] ^= 1
    store = open_store(f"file://{tmp_path}/store")
    info = store.create("unit", bytes(data))
    for size_bytes in (100, 10 * MB):
        with pytest.raises(DataError, match=r"store/unit, is not readable Parquet"):
            list(committed_windows(store, "unit", "000000-aa", total_bytes=info.size, size_bytes=size_bytes))
        gone = committed_windows(store, "gone", "000000-aa", total_bytes=info.size, size_bytes=size_bytes)
        with pytest.raises(ObjectNotFoundError):
            list(gone)
    data = written(pa.table({"x": np.random.default_rng(0).random(100_000)}), row_group_size=1000)
    info = store.create("good", data)
    for size_bytes in (100, 1 * MB):  # chunks by buffers, and at once
        failing = committed_windows(
            Counting(store, reads=5), "good", "000000-aa", total_bytes=info.size, size_bytes=size_bytes
        )
        with pytest.raises(StoreUnavailableError):
            list(failing)


@pytest.mark.parametrize("case", WIDE)
def test_a_window_does_not_keep_the_others_alive(tmp_path, case):
    """What is held of one window of 2 MB, all others gone, is about 2 MB."""
    table, options = WIDE[case]
    pq.write_table(table, tmp_path / "a.parquet", **SMALL_PAGES, **options)
    source = Parquet(str(tmp_path / "a.parquet"))
    (unit,) = source.units()
    before = pa.total_allocated_bytes()
    kept = list(read_windows(source, unit, size_bytes=2 * MB))[7]
    assert kept.table.num_rows >= 1
    assert pa.total_allocated_bytes() - before < 4 * MB


def test_a_single_row_is_not_cut():
    """Rows of 100 kB where 10 kB were asked for: one at a time."""
    tables = list(bounded_tables(opened(incompressible(5, 100_000)), 0, 5, rows=100, size_bytes=10_000))
    assert [table.num_rows for table in tables] == [1] * 5


def test_narrow_rows_are_cut_by_their_number_alone():
    """Rows that fit are cut where they always were, at multiples of ``rows``: a map may depend on what it sees together."""
    for table in (pa.table({"id": np.arange(1000)}), pa.table({"id": [str(i) for i in range(1000)]})):
        tables = bounded_tables(opened(table, row_group_size=130), 0, 1000, rows=300, size_bytes=40_000)
        assert [each.num_rows for each in tables] == [300, 300, 300, 100]


def test_dictionary_columns_are_columns_of_their_values():
    """Also where there are no rows; numpy sees the same as before."""
    table = pa.table({"id": pa.array(["a", "b", None] * 10).dictionary_encode()})
    file = opened(table)
    (whole,) = bounded_tables(file, 0, 30, rows=100, size_bytes=10_000)
    assert whole["id"].type == no_rows(file)["id"].type == pa.string()
    assert to_numpy(whole)["id"].tolist() == to_numpy(table)["id"].tolist()


def opened(table, **options):
    return pq.ParquetFile(pa.BufferReader(written(table, **options)))


def written(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


rows_of = st.lists(
    st.tuples(st.integers(0, 3000), st.lists(st.integers(0, 9), max_size=40), st.booleans(), st.integers(0, 99)),
    min_size=1,
    max_size=120,
)


@given(rows_of, st.integers(1, 50), st.integers(1, 200), st.integers(500, 20_000), st.data())
def test_all_rows_once_in_order(records, group, rows, size_bytes, data):
    """Any columns, row groups, limits and range: the rows are those of the whole file, no table is over a limit."""
    table = pa.table(
        {
            "text": ["é" * n if flag else None for n, _, flag, _ in records],
            "ragged": [values if flag else None for _, values, flag, _ in records],
            "nested": pa.array([{"a": str(n), "b": values} for n, values, _, _ in records]),
            "fixed": pa.FixedSizeListArray.from_arrays(np.arange(3.0 * len(records)), 3),
            "flag": [flag for _, _, flag, _ in records],
            "few": pa.array([str(few) * 50 for *_, few in records]),
        },
        metadata={"k": "v"},
    )
    start = data.draw(st.integers(0, len(records) - 1))
    stop = data.draw(st.integers(start + 1, len(records)))
    file = opened(table, row_group_size=group)
    columns = data.draw(st.sampled_from([None, ["text"], ["fixed", "flag"], ["nested"]]))
    tables = list(bounded_tables(file, start, stop, rows=rows, size_bytes=size_bytes, columns=columns))
    expected = file.read(columns=columns).slice(start, stop - start)
    assert pa.concat_tables(tables).equals(expected, check_metadata=True)
    assert all(1 <= each.num_rows <= rows and (each.nbytes <= size_bytes or each.num_rows == 1) for each in tables)
