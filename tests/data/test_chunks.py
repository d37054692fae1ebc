"""Prepared data: arrays to Parquet and back without a change, and rows by chunk."""

import json
import pickle
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tpupipe.data.chunks import (
    ChunkReader,
    Manifest,
    ManifestUnit,
    UnitFooter,
    decode_footer,
    decode_schema,
    decode_unit,
    encode_unit,
    merge_schemas,
    object_file,
    to_numpy,
    to_table,
)
from tpupipe.data.stream import Stream
from tpupipe.errors import DataError, ObjectNotFoundError, UsageError
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

DTYPES = st.sampled_from(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
     "datetime64[D]", "datetime64[ns]", "timedelta64[us]", ">i4"]
)  # fmt: skip


def stored(batch, chunk_rows=3):
    return to_numpy(decode_unit(encode_unit(to_table(batch), chunk_rows=chunk_rows, footer=UnitFooter("000000-aa"))))


def near(values):
    """Days brought into the range that Arrow holds; NaT stays."""
    return np.where(np.isnat(values), values, (values.astype(np.int64) % 2**31).astype("M8[D]"))


def equal(left, right):
    if left.dtype == object:
        return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fmM")


@given(st.data(), DTYPES, st.integers(0, 8), st.lists(st.integers(1, 3), max_size=3))
def test_fixed_shapes_round_trip(data, dtype, rows, inner):
    """Values, dtype and shape of n-d arrays survive the table and the Parquet object."""
    values = data.draw(hnp.arrays(np.dtype(dtype), (rows, *inner)))
    if dtype == "datetime64[D]":  # Arrow's days are 32 bits wide; see below
        values = near(values)
    native = values.astype(values.dtype.newbyteorder("="))
    assert equal(to_numpy(to_table({"x": values}))["x"], native)
    assert equal(stored({"x": values})["x"], native)


@given(
    st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=8), st.sampled_from(["int32", "float32"])
)
def test_ragged_round_trip(rows, dtype):
    """Ragged rows survive with their dtype, also when all have one length or some are empty."""
    values = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        values[i] = np.array(row, dtype)
    got = stored({"x": values})["x"]
    assert got.dtype == object
    assert equal(got, values)
    assert all(row.dtype == dtype for row in got)


def test_days_out_of_range_are_refused():
    """A day that Arrow would wrap around is an error."""
    with pytest.raises(DataError, match="32 bits"):
        to_table({"d": np.array(["5881580-07-12"], "M8[D]")})


def test_ragged_kind_depends_on_the_container():
    """Lists of lists are ragged whatever the lengths, so that units of one stage have one schema."""
    one = to_table({"x": [[1, 2], [3, 4]]}).schema
    other = to_table({"x": [[1], [2, 3], []]}).schema
    assert one == other
    assert str(one.field("x").type) == "list<element: int64>"


def test_other_columns_round_trip():
    """Text, bytes, missing values, bfloat16, ragged matrices and sliced views come back as they were."""
    import ml_dtypes

    matrices = np.empty(2, object)
    matrices[:] = [np.ones((1, 3), np.float32), np.zeros((2, 3), np.float32)]
    batch = {
        "text": np.array(["a", "é"]),
        "bytes": [b"\x00\xff", b""],
        "missing": ["x", None],
        "bf16": np.array([[1.5, 2.5], [3, 4]], ml_dtypes.bfloat16),
        "matrices": matrices,
        "words": [["a"], ["b", "c"]],
        "strided": np.arange(12).reshape(4, 3)[::2].T[:2],
        "names": np.array([["a", "b"], ["c", "d"]]),
    }
    got = stored(batch, chunk_rows=1)
    assert got["text"].tolist() == ["a", "é"]
    assert got["bytes"].tolist() == [b"\x00\xff", b""]
    assert got["missing"].tolist() == ["x", None]
    assert got["bf16"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(got["bf16"], batch["bf16"])
    assert equal(got["matrices"], matrices)
    assert [row.tolist() for row in got["words"]] == [["a"], ["b", "c"]]
    assert np.array_equal(got["strided"], batch["strided"])
    assert got["names"].tolist() == [["a", "b"], ["c", "d"]]


def test_foreign_tables_lose_no_value():
    """Missing integers become None, not rounded floats; slices, dictionaries, tensors and large lists decode."""
    big = 2**53 + 1
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(3, 2, 2))
    table = pa.table(
        {
            "ints": pa.array([big, None, 3]),
            "floats": pa.array([1.0, None, 3.0]),
            "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
            "large": pa.array([[1], None, [2, 3]], pa.large_list(pa.int64())),
            "tensor": tensor,
            "struct": pa.array([{"a": 1}, None, {"a": 2}]),
        }
    ).slice(0, 3)
    got = to_numpy(table)
    assert got["ints"].tolist() == [big, None, 3]
    assert np.isnan(got["floats"][1])
    assert got["dictionary"].tolist() == ["a", "b", "a"]
    assert [None if r is None else r.tolist() for r in got["large"]] == [[1], None, [2, 3]]
    assert got["tensor"].shape == (3, 2, 2)
    assert got["struct"].tolist() == [{"a": 1}, None, {"a": 2}]
    tail = to_numpy(table.slice(2))
    assert [r.tolist() for r in tail["large"]] == [[2, 3]]
    assert tail["tensor"].tolist() == [[[8, 9], [10, 11]]]
    assert to_numpy(to_table({"x": np.arange(12).reshape(4, 3)}).slice(1, 2))["x"].tolist() == [[3, 4, 5], [6, 7, 8]]


def test_no_copy_where_possible():
    """A number column of one piece shares memory with the table."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(to_numpy(to_table({"x": values}))["x"], values)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({}, "at least one column"),
        ({"a": np.ones(2), "b": np.ones(3)}, "different numbers of rows"),
        ({"a": np.float32(1)}, "single"),
        ({"a": np.ones(2, complex)}, "'a' of complex128"),
        ({"a": np.ones((2, 0))}, "size 0"),
        ({"a": [[1], 2]}, "some rows are arrays"),
        ({"a": np.array([1, "x"], object)}, "'a' of object"),
    ],
)
def test_what_cannot_be_stored_is_named(batch, match):
    """A column that cannot be stored is an error that names it."""
    with pytest.raises(DataError, match=match):
        to_table(batch)


# -- units ----------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 20))
def test_chunks_are_row_groups(rows, chunk_rows):
    """The footer's chunks are the object's row groups: full but the last, none without rows; same input, same bytes."""
    import pyarrow.parquet as pq

    table = to_table({"x": np.arange(rows)})
    footer = UnitFooter("000007-ab", rows_in=9, rows_bad=1, input_fingerprint="i", lease_epoch=3, sample="1/100")
    data = encode_unit(table, chunk_rows=chunk_rows, footer=footer)
    read = decode_footer(data)
    metadata = pq.read_metadata(pa.BufferReader(data))
    assert read.chunks == tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    assert (sum(read.chunks), read.rows, set(read.chunks[:-1]) <= {chunk_rows}) == (rows, rows, True)
    assert (read.unit, read.rows_in, read.rows_bad, read.input_fingerprint) == ("000007-ab", 9, 1, "i")
    assert (read.lease_epoch, read.sample) == (3, "1/100")
    assert decode_schema(data).equals(table.schema, check_metadata=True)
    assert encode_unit(table, chunk_rows=chunk_rows, footer=footer) == data


def test_footer_of_something_else():
    """Other Parquet files, truncated objects and footers of a newer format are refused."""
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(DataError, match="no 'tpupipe' footer"):
        decode_footer(bytes(sink.getvalue()))
    data = encode_unit(to_table({"x": np.arange(9)}), chunk_rows=3, footer=UnitFooter("u"))
    with pytest.raises(DataError, match="Not a unit's object"):
        decode_footer(data[:-5])
    with pytest.raises(DataError, match="not readable"):
        decode_unit(data[:-5])
    with pytest.raises(DataError, match="format other"):
        decode_footer(data.replace(b'"format":1', b'"format":2'))


# -- manifest -------------------------------------------------------------------------------


def test_manifest_round_trip():
    """A manifest survives JSON exactly, with schema metadata, and equal manifests have equal bytes."""
    schema = to_table({"x": np.ones((1, 2, 3), np.float32), "t": [[1]]}).schema
    units = [ManifestUnit("000000-aa", 5, (3, 2), 100, 7), ManifestUnit("000001-bb", 0, (), 50, None)]
    manifest = Manifest("tokens", units, schema, {"code": "c"})
    copy = Manifest.from_json(manifest.to_json())
    assert copy == manifest
    assert copy.to_json() == manifest.to_json()
    assert {k: (v.dtype.name, v.shape) for k, v in copy.empty_batch().items()} == {
        "x": ("float32", (0, 2, 3)), "t": ("object", (0,)),
    }  # fmt: skip


GOLDEN_MANIFEST = b'{"columns":{"x":"int32"},"fingerprints":{"code":"c"},"format":1,"rows":5,"schema":"/////3gAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAECEAAAABwAAAAEAAAAAAAAAAEAAAB4AAAACAAMAAgABwAIAAAAAAAAASAAAAA=","stage":"tokens","unit_fields":["unit","rows","chunks","size_bytes","crc32c"],"units":[["000000-aa",5,[3,2],100,7]]}'


def test_old_manifests_stay_readable():
    """A manifest written by the first version is stored here and still read."""
    manifest = Manifest.from_json(GOLDEN_MANIFEST)
    assert (manifest.stage, manifest.rows, manifest.chunk_rows.tolist()) == ("tokens", 5, [3, 2])
    assert manifest.schema == pa.schema({"x": pa.int32()})


def test_chunk_table():
    """Chunks number through the units in order; units without rows have none."""
    sizes = [(3, 2), (), (4,), (1, 1, 1)]
    units = [ManifestUnit(f"{i:06d}-x", sum(c), c, 1) for i, c in enumerate(sizes)]
    manifest = Manifest("s", units, pa.schema([]))
    assert manifest.rows == 12
    assert manifest.chunk_rows.tolist() == [3, 2, 4, 1, 1, 1]
    assert manifest.chunk_units.tolist() == [0, 0, 2, 3, 3, 3]
    assert manifest.chunk_groups.tolist() == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format":1}', b'{"format":9}'])
def test_not_a_manifest(data):
    """Anything else is refused with a message, never half read."""
    with pytest.raises(DataError, match="manifest"):
        Manifest.from_json(data)


def test_manifest_must_add_up():
    """Units out of order, twice, or with chunks that do not add up are refused."""
    for units in (
        [ManifestUnit("b", 1, (1,), 1), ManifestUnit("a", 1, (1,), 1)],
        [ManifestUnit("a", 1, (1,), 1), ManifestUnit("a", 1, (1,), 1)],
        [ManifestUnit("a", 2, (1,), 1)],
    ):
        with pytest.raises(DataError, match="must be sorted"):
            Manifest("s", units, pa.schema([]))


def test_schemas_merge():
    """All-missing columns take the type they have elsewhere; other columns, shapes or types are errors."""
    typed, missing = to_table({"a": ["x"], "b": [1]}).schema, to_table({"a": [None], "b": [1]}).schema
    assert merge_schemas([missing, typed, typed]) == typed
    for other in ({"a": ["x"]}, {"a": ["x"], "b": ["y"]}, {"a": ["x"], "b": np.ones((1, 2))}):
        with pytest.raises(DataError):
            merge_schemas([typed, to_table(other).schema])
    two, three = to_table({"v": np.ones((1, 2))}).schema, to_table({"v": np.ones((1, 3))}).schema
    with pytest.raises(DataError, match="'v' has different shapes"):
        merge_schemas([two, three])
    longs, shorts = to_table({"n": np.ones(1, np.int64)}).schema, to_table({"n": np.ones(1, np.int32)}).schema
    assert merge_schemas([shorts, longs]) == longs


# -- reading --------------------------------------------------------------------------------


class Recorder:
    """A real store that writes down the ranges it is asked for."""

    def __init__(self, store):
        self.store, self.reads = store, []

    def read(self, name, start=0, end=None):
        self.reads.append((name, start, end))
        return self.store.read(name, start, end)


PATHS = RunPaths("job", "run")


def prepare(store, batches, chunk_rows):
    """Commits batches as units of stage "s" and gives the manifest."""
    units, schemas = [], []
    for i, batch in enumerate(batches):
        table = to_table(batch)
        data = encode_unit(table, chunk_rows=chunk_rows, footer=UnitFooter(f"{i:06d}-u"))
        store.create(PATHS.unit("s", f"{i:06d}-u"), data)
        footer = decode_footer(data)
        units.append(ManifestUnit(footer.unit, footer.rows, footer.chunks, len(data)))
        schemas.append(table.schema)
    return Manifest("s", units, merge_schemas(schemas))


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/store")


def numbered(start, rows, width=4):
    ragged = np.empty(rows, object)
    for i in range(rows):
        ragged[i] = np.arange(i % 5)
    return {
        "id": np.arange(start, start + rows),
        "x": np.arange(rows * width).reshape(rows, width) + start,
        "r": ragged,
    }


def test_rows_come_in_the_order_asked(store):
    """Any mix of chunks and rows, with repeats, comes back in order, whatever the cache holds."""
    batches = [numbered(0, 25), numbered(25, 0), numbered(25, 13)]
    manifest = prepare(store, batches, 4)
    starts = np.cumsum(manifest.chunk_rows) - manifest.chunk_rows
    rng = np.random.default_rng(0)
    for cache in (1, 3, 100):
        reader = ChunkReader(store, PATHS, manifest, cache_chunks=cache)
        for size in (0, 1, 7, 64):
            chunk = rng.integers(0, len(manifest.chunk_rows), size)
            row = rng.integers(0, manifest.chunk_rows[chunk])
            got = reader.rows(chunk, row)
            assert np.array_equal(got["id"], starts[chunk] + row)
            assert got["x"].shape == (size, 4)
            assert [len(r) for r in got["r"]] == [i % 5 if i < 25 else (i - 25) % 5 for i in got["id"]]


def test_the_whole_stream_reads_back(store):
    """Stream and reader together feed every row once per data epoch."""
    manifest = prepare(store, [numbered(0, 25), numbered(25, 13)], 4)
    stream = Stream(manifest.chunk_rows, 1, 8, epochs=1)
    reader = ChunkReader(store, PATHS, manifest)
    fed = []
    for step in range(stream.steps):
        batch = stream.batch(step)
        ids = reader.rows(batch.chunk, batch.row)["id"]
        assert np.array_equal(ids[batch.mask], batch.sample_id[batch.mask])
        fed += ids[batch.mask].tolist()
    assert sorted(fed) == list(range(38))


def test_only_the_chunk_is_read(store):
    """One chunk of a large unit costs its footer and its own bytes; a cached chunk costs nothing."""
    rng = np.random.default_rng(0)
    manifest = prepare(store, [{"x": rng.random((4000, 64))}], 100)
    size = manifest.units[0].size_bytes
    recorder = Recorder(store)
    reader = ChunkReader(recorder, PATHS, manifest)
    reader.rows([20], [3])
    assert len(recorder.reads) == 2
    assert sum(end - start for _, start, end in recorder.reads) < size / 10
    reader.rows([20, 20], [1, 99])
    assert len(recorder.reads) == 2
    reader.rows([21], [0])
    assert len(recorder.reads) == 3


def test_footer_costs_the_tail(store):
    """object_file and decode_footer read the end of the object only."""
    manifest = prepare(store, [{"x": np.random.default_rng(0).random((4000, 64))}], 100)
    recorder = Recorder(store)
    name, size = PATHS.unit("s", "000000-u"), manifest.units[0].size_bytes
    assert decode_footer(object_file(recorder, name, size)).rows == 4000
    assert [end - start for _, start, end in recorder.reads] == [65_536]


def test_damage_is_found(store):
    """A flipped bit in a chunk is an error naming the object; other chunks stay readable."""
    manifest = prepare(store, [{"x": np.random.default_rng(0).random((400, 64))}], 100)
    name = PATHS.unit("s", "000000-u")
    data = bytearray(store.read(name))
    data[len(data) // 8] ^= 1
    store.put(name, bytes(data))
    with pytest.raises(DataError, match="not readable"):
        decode_unit(bytes(data))
    reader = ChunkReader(store, PATHS, manifest)
    with pytest.raises(DataError, match="000000-u"):
        reader.rows([0], [0])
    assert reader.rows([3], [0])["x"].shape == (1, 64)


def test_another_object_is_refused(store):
    """An object that is not what the manifest says, is cut short or is gone is an error."""
    manifest = prepare(store, [{"x": np.arange(50)}], 10)
    name = PATHS.unit("s", "000000-u")
    whole = store.read(name)
    store.put(name, encode_unit(to_table({"x": np.arange(60)}), chunk_rows=10, footer=UnitFooter("000000-u")))
    with pytest.raises(DataError):
        ChunkReader(store, PATHS, manifest).rows([0], [0])
    store.put(name, whole[:-100])
    with pytest.raises(DataError, match="cut short"):
        ChunkReader(store, PATHS, manifest).rows([0], [0])
    store.delete(name)
    with pytest.raises(ObjectNotFoundError):
        ChunkReader(store, PATHS, manifest).rows([0], [0])


def test_units_with_another_schema_are_cast_or_refused(store):
    """A unit whose column is all missing reads as the stage's type; one that would lose values is refused."""
    manifest = prepare(store, [{"t": ["a"]}, {"t": [None]}], 10)
    got = ChunkReader(store, PATHS, manifest).rows([1, 0], [0, 0])["t"]
    assert got.tolist() == [None, "a"]
    wrong = Manifest("s", manifest.units, pa.schema({"t": pa.int32()}))
    with pytest.raises(DataError):
        ChunkReader(store, PATHS, wrong).rows([0], [0])


@pytest.mark.parametrize(("chunk", "row"), [([2], [0]), ([-1], [0]), ([0], [3]), ([0], [-1]), ([0, 1], [0, 2])])
def test_outside_is_refused(store, chunk, row):
    """A chunk or row that does not exist is an error, never another row."""
    manifest = prepare(store, [{"x": np.arange(5)}], 3)
    with pytest.raises(UsageError):
        ChunkReader(store, PATHS, manifest).rows(chunk, row)


def test_returned_rows_are_the_callers(store):
    """Writing to a returned batch does not change what the next call returns."""
    reader = ChunkReader(store, PATHS, prepare(store, [{"x": np.arange(5)}], 5))
    reader.rows([0, 0], [1, 2])["x"][:] = 99
    assert reader.rows([0, 0], [1, 2])["x"].tolist() == [1, 2]


def test_reader_ships_and_shares(store):
    """A reader pickles without its cache, and threads that share one read the same rows."""
    manifest = prepare(store, [numbered(0, 200)], 4)
    reader = ChunkReader(store, PATHS, manifest, cache_chunks=2)
    chunk, row = np.repeat(np.arange(50), 4), np.tile(np.arange(4), 50)
    assert len(pickle.dumps(reader)) < 20_000
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(pickle.loads(pickle.dumps(reader)).rows(chunk, row)["id"])),
        *(threading.Thread(target=lambda: results.append(reader.rows(chunk, row)["id"])) for _ in range(3)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids.tolist() for ids in results] == [list(range(200))] * 4


def test_manifest_json_is_small_and_readable():
    """100,000 units take a few MB, and the columns can be read by a person."""
    units = [ManifestUnit(f"{i:06d}-abcd1234", 256, (256,), 123456, 1234567890) for i in range(100_000)]
    data = Manifest("s", units, pa.schema({"x": pa.int32()})).to_json()
    assert len(data) < 6_000_000
    assert json.loads(data)["columns"] == {"x": "int32"}
