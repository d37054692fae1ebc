"""A unit in windows: the same rows as when it is read at once, bounded pieces, and where each row comes from."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpupipe.data.chunks import UnitFooter, encode_unit
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Files, JsonLines, Parquet, Unit
from tpupipe.data.windows import Origin, committed_windows, read_windows
from tpupipe.errors import DataError
from tpupipe.store.objects import open_store


def whole(windows):
    """The rows of all windows; checks that their numbers follow each other and their origins add up."""
    at = 0
    for window in windows:
        assert window.first_row == at
        assert sum(origin.rows for origin in window.origins) == window.table.num_rows
        at += window.table.num_rows
    return pa.concat_tables([window.table for window in windows])


def lines(path, values):
    path.write_text("".join(json.dumps({"id": v}) + "\n" for v in values))


@pytest.mark.parametrize("size_bytes", [50, 1000, 10**6])
def test_json_lines(tmp_path, size_bytes):
    """Every line once, in order, whatever the window; a row's origin names its file, the piece's byte and the line in it."""
    lines(tmp_path / "a.jsonl", range(100))
    lines(tmp_path / "b.jsonl", range(100, 103))
    (tmp_path / "b.jsonl").write_text("\n" + (tmp_path / "b.jsonl").read_text().replace("\n", "\n\n"))
    source = JsonLines(str(tmp_path / "*.jsonl"))
    (unit,) = source.units()
    windows = list(read_windows(source, unit, rows=30, size_bytes=size_bytes))
    assert whole(windows)["id"].to_pylist() == list(range(103))
    assert max(w.table.num_rows for w in windows) <= 30
    assert len(windows) >= 4
    contents = {str(p): p.read_bytes() for p in tmp_path.glob("*.jsonl")}
    for window in windows:
        for row, value in enumerate(window.table["id"].to_pylist()):
            origin = window.origin(row)
            piece = contents[origin.path][origin.start :]
            if origin.start and contents[origin.path][origin.start - 1 : origin.start] != b"\n":
                piece = piece[piece.index(b"\n") + 1 :]  # a line belongs to the piece that it begins in
            found = [line for line in piece.splitlines() if line.strip()][origin.row]
            assert json.loads(found)["id"] == value


def test_a_compressed_file_is_unpacked_piece_by_piece(tmp_path):
    """A file of 5,000 lines with windows of about 2 kB: many windows, each row once, counted from the file's beginning."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"id": v}) + "\n" for v in range(5000)))
    source = JsonLines(str(tmp_path / "*.gz"))
    (unit,) = source.units()
    windows = list(read_windows(source, unit, size_bytes=2000))
    assert len(windows) > 20
    assert whole(windows)["id"].to_pylist() == list(range(5000))
    assert windows[-1].origin(0).row == windows[-1].first_row


def test_types_that_are_inferred_per_window_stay_those_of_the_first(tmp_path):
    """Whole numbers later are floats as before, a column that is missing later is null; a float after whole numbers is an error."""
    rows = [{"x": 0.5, "y": "a"}] * 20 + [{"x": 1}] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = JsonLines(str(tmp_path / "a.jsonl"))
    table = whole(list(read_windows(source, source.units()[0], size_bytes=200)))
    assert table["x"].to_pylist() == [0.5] * 20 + [1.0] * 20
    assert table["y"].to_pylist() == ["a"] * 20 + [None] * 20
    lines(tmp_path / "b.jsonl", [1] * 20 + [0.5] * 20)
    source = JsonLines(str(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match="column 'id' is int64 in the first and double in a later one"):
        list(read_windows(source, source.units()[0], size_bytes=100))


@pytest.mark.parametrize("size_bytes", [400, 10**7])
def test_parquet(tmp_path, size_bytes):
    """A unit in the middle of a file: its rows in order, numbered as in the file."""
    pq.write_table(
        pa.table({"id": np.arange(1000), "x": np.arange(1000.0)}), tmp_path / "a.parquet", row_group_size=100
    )
    source = Parquet(str(tmp_path / "a.parquet"), row_groups_per_unit=4)
    unit = source.units()[1]
    windows = list(read_windows(source, unit, rows=64, size_bytes=size_bytes))
    assert whole(windows).equals(read_unit(source, unit))
    assert windows[1].origin(0) == Origin(str(tmp_path / "a.parquet"), 0, windows[1].table["id"][0].as_py(), 1)
    assert max(w.table.num_rows for w in windows) <= (25 if size_bytes == 400 else 64)


def test_files(tmp_path):
    """A row per file; windows hold files up to about their size, and a larger file alone."""
    for name, size in (("a", 1000), ("b", 1000), ("c", 50_000), ("d", 1000)):
        (tmp_path / name).write_text(name * size)
    source = Files(str(tmp_path))
    windows = list(read_windows(source, source.units()[0], size_bytes=10_000))
    assert [w.table.num_rows for w in windows] == [2, 1, 1]
    assert whole(windows).equals(read_unit(source, source.units()[0]))
    assert windows[1].origin(0) == Origin(str(tmp_path / "c"), 0, 0, 1)


def test_no_rows_are_one_window_with_the_schema(tmp_path):
    """An empty Parquet file: one window, no rows, the columns."""
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    source = Parquet(str(tmp_path / "a.parquet"))
    (window,) = read_windows(source, source.units()[0])
    assert (window.table.num_rows, window.table.schema.names, window.origins) == (0, ["id"], ())


@pytest.mark.parametrize("size_bytes", [100, 10**7])
def test_committed_units(tmp_path, size_bytes):
    """What an earlier stage committed, at once or chunk by chunk."""
    store = open_store(f"file://{tmp_path}/store")
    for rows in (0, 50):
        unit = Unit(f"00000{rows // 50}-aa", (), "")
        table = pa.table({"x": np.arange(rows)})
        info = store.create(unit.id, encode_unit(table, chunk_rows=20, footer=UnitFooter(unit.id)))
        windows = list(
            committed_windows(store, unit.id, unit.id, total_bytes=info.size, rows=15, size_bytes=size_bytes)
        )
        assert whole(windows)["x"].to_pylist() == list(range(rows))
        assert len(windows) >= (4 if rows else 1)
