"""Inputs become units: every byte and row once, ids that stay."""

import gzip
import json
import os
import pickle
from pathlib import Path

import aiohttp
import gcsfs.retry
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from fsspec.exceptions import FSTimeoutError
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.listing import input_errors
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Files, JsonLines, Parquet, Part, fingerprint_units, make_units
from tpupipe.data.windows import read_windows
from tpupipe.errors import DataError, JobError, StoreDeniedError, StoreError, StoreUnavailableError


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_all(source):
    return [read_unit(source, unit) for unit in source.units()]


def test_units_pack_small_files_in_path_order(tmp_path):
    """Small files share units up to unit_bytes, sorted by path; ids sort in that order and every file is there once."""
    write(tmp_path, {f"{i:02d}.txt": bytes([97 + i]) * 2000 for i in (3, 1, 2, 0, 4)})
    units = Files(str(tmp_path), unit_bytes=4500).units()
    names = [[Path(part.path).name for part in unit.parts] for unit in units]
    assert names == [["00.txt", "01.txt"], ["02.txt", "03.txt"], ["04.txt"]]
    assert [unit.id for unit in units] == sorted(unit.id for unit in units)
    assert [unit.id[:7] for unit in units] == ["000000-", "000001-", "000002-"]


def test_ids_are_stable_and_fingerprints_follow_content(tmp_path):
    """Listing twice gives equal units; rewriting a file changes its unit's fingerprint and no id."""
    write(tmp_path, {"a.txt": b"a" * 3000, "b.txt": b"b" * 3000})
    source = Files(tmp_path / "*.txt", unit_bytes=3000)
    before = source.units()
    assert source.units() == before
    assert pickle.loads(pickle.dumps((source, before))) == (source, before)
    (tmp_path / "b.txt").write_bytes(b"c" * 3000)
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    after = source.units()
    assert [u.id for u in after] == [u.id for u in before]
    assert after[0].fingerprint == before[0].fingerprint
    assert after[1].fingerprint != before[1].fingerprint
    assert fingerprint_units(after) != fingerprint_units(before)


def test_unit_id_never_changes():
    """Ids name committed objects: the id of a known input is stored here."""
    units = make_units(
        [[Part("gs://b/x.txt", 0, 10, "bytes", 10, 10, "1")], [Part("/d/y.parquet", 5, 9, "rows", 1, 1, "")]]
    )
    assert [unit.id for unit in units] == ["000000-2615cd19", "000001-00bd6816"]


def test_files_rows(tmp_path):
    """Text rows are path and text with invalid UTF-8 replaced; empty files are rows; binary rows are exact."""
    write(tmp_path, {"a.txt": b"caf\xc3\xa9\r\n\xff", "sub/b.txt": b""})
    (text,) = read_all(Files(tmp_path))
    assert text.to_pylist() == [
        {"path": str(tmp_path / "a.txt"), "text": "café\r\n\ufffd"},
        {"path": str(tmp_path / "sub/b.txt"), "text": ""},
    ]
    (binary,) = read_all(Files(tmp_path, mode="binary"))
    assert binary["data"].to_pylist() == [b"caf\xc3\xa9\r\n\xff", b""]


def test_patterns(tmp_path):
    """Globs, recursive globs, folders, single files and lists of them work; a file matched twice is read once."""
    write(
        tmp_path, {"a.py": b"1", "x/b.py": b"2", "x/y/c.py": b"3", "x/d.txt": b"4", ".git/e.py": b"5", "x/.f.py": b"6"}
    )

    def names(pattern):
        return [os.path.relpath(p.path, tmp_path) for u in Files(pattern).units() for p in u.parts]

    assert names(f"{tmp_path}/*.py") == ["a.py"]
    assert names(f"{tmp_path}/**/*.py") == ["a.py", "x/b.py", "x/y/c.py"]
    assert names(tmp_path) == ["a.py", "x/b.py", "x/d.txt", "x/y/c.py"]
    assert names([tmp_path / "x", f"file://{tmp_path}/x/b.py"]) == ["x/b.py", "x/d.txt", "x/y/c.py"]
    assert names(f"{tmp_path}/.git/*.py") == [".git/e.py"]


def test_hidden_parent_does_not_hide(tmp_path):
    """A dot folder above the pattern's fixed part does not count as hidden."""
    write(tmp_path, {".cache/data/a.txt": b"1", ".cache/data/.b.txt": b"2"})
    assert len(Files(tmp_path / ".cache/data").units()[0].parts) == 1


@pytest.mark.parametrize("pattern", ["*.none", "missing", ["*.txt", "*.none"]])
def test_no_match_is_an_error(tmp_path, pattern):
    """A pattern that matches nothing is an error that names it, also beside one that matches."""
    write(tmp_path, {"a.txt": b"1"})
    patterns = [str(tmp_path / p) for p in ([pattern] if isinstance(pattern, str) else pattern)]
    with pytest.raises(DataError, match=patterns[-1].replace("*", r"\*")):
        Files(patterns).units()


lines = st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b" ").replace(b"\r", b" ")), max_size=40)


@given(lines, st.booleans(), st.integers(1, 60))
def test_text_pieces_join_to_the_file(tmp_path_factory, content, ends, unit_bytes):
    """A text file cut at any unit size gives its exact bytes back, each piece ending at a line end."""
    data = b"\n".join(content) + (b"\n" if ends else b"")
    folder = tmp_path_factory.mktemp("text")
    write(folder, {"a.txt": data})
    rows = [row for t in read_all(Files(folder, unit_bytes=unit_bytes)) for row in t["text"].to_pylist()]
    # Pieces are decoded one by one, which is the same as decoding all: a line end never splits a character.
    assert "".join(rows) == data.decode("utf-8", "replace")
    assert all(row.endswith("\n") for row in rows[:-1])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=30), st.integers(1, 300))
def test_json_lines_come_once(tmp_path_factory, records, unit_bytes):
    """Every line of several files is a row of exactly one unit, in order, however the files are cut and padded."""
    folder = tmp_path_factory.mktemp("json")
    rows = [{"i": i, "pad": "é" * width} for i, (width, _) in enumerate(records)]
    texts = ["", "", ""]
    for (_, blank), row in zip(records, rows, strict=True):
        texts[row["i"] * 3 // len(rows)] += json.dumps(row, ensure_ascii=False) + "\n" + "\n" * blank
    write(folder, {f"{i}.jsonl": text.rstrip("\n").encode() for i, text in enumerate(texts)})
    got = [row for t in read_all(JsonLines(folder, unit_bytes=unit_bytes)) for row in t.to_pylist()]
    assert got == rows


def test_long_lines_cross_many_ranges(tmp_path):
    """A line much longer than a unit and than the read-ahead is read whole, once."""
    rows = [{"x": "a" * 300_000}, {"x": "b"}, {"x": "c" * 200_000}]
    write(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert [r for t in read_all(JsonLines(tmp_path, unit_bytes=10_000)) for r in t.to_pylist()] == rows


def test_compressed_text(tmp_path):
    """Compressed files are unpacked whole, never cut, for text and JSON lines; binary keeps the bytes."""
    data = b'{"a": 1}\n{"a": 2}\n' * 100
    write(tmp_path, {"a.jsonl.gz": gzip.compress(data)})
    assert sum(t.num_rows for t in read_all(JsonLines(tmp_path, unit_bytes=10))) == 200
    assert read_all(Files(tmp_path, unit_bytes=10))[0]["text"].to_pylist() == [data.decode()]
    assert read_all(Files(tmp_path, mode="binary"))[0]["data"].to_pylist() == [(tmp_path / "a.jsonl.gz").read_bytes()]
    write(tmp_path, {"b.jsonl.gz": b"not gzip"})
    with pytest.raises(DataError, match=r"b\.jsonl\.gz"):
        read_all(JsonLines(tmp_path))


def test_bad_json_names_the_file(tmp_path):
    """A line that is not JSON is an error that names its file, not its neighbours in the unit."""
    write(tmp_path, {"a.jsonl": b'{"a": 1}\n', "b.jsonl": b'{"a": }\n', "c.jsonl": b'{"a": 2}\n'})
    with pytest.raises(DataError, match=r"b\.jsonl") as caught:
        read_all(JsonLines(tmp_path))
    assert "c.jsonl" not in caught.value.message


def test_types_that_do_not_go_together(tmp_path):
    """One column with two types in the files of a unit is an error about the unit."""
    write(tmp_path, {"a.jsonl": b'{"a": 1}\n', "b.jsonl": b'{"a": "x"}\n'})
    with pytest.raises(DataError, match="do not go together"):
        read_all(JsonLines(tmp_path))


@pytest.mark.parametrize("per_unit", [1, 2, 3, 10])
def test_parquet_row_groups(tmp_path, per_unit):
    """Row groups become units; all rows come once, in order, with only the wanted columns."""
    for index in range(2):
        table = pa.table({"i": list(range(index * 100, index * 100 + 25)), "s": ["x"] * 25})
        pq.write_table(table, tmp_path / f"{index}.parquet", row_group_size=7)
    source = Parquet(tmp_path, row_groups_per_unit=per_unit, columns=["i"])
    tables = read_all(source)
    assert len(tables) == 2 * -(-4 // per_unit)
    assert [i for t in tables for i in t["i"].to_pylist()] == [*range(25), *range(100, 125)]
    assert tables[0].column_names == ["i"]


def test_parquet_without_rows_keeps_its_schema(tmp_path):
    """An empty Parquet file is one unit of no rows whose schema is the file's."""
    pq.write_table(pa.table({"i": pa.array([], pa.int32())}), tmp_path / "a.parquet")
    (table,) = read_all(Parquet(tmp_path))
    assert (table.num_rows, table.schema.field("i").type) == (0, pa.int32())


def test_parquet_errors(tmp_path):
    """A missing column and a file that is not Parquet are errors that say so."""
    pq.write_table(pa.table({"i": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column j; it has i"):
        read_all(Parquet(tmp_path, columns=["j"]))
    write(tmp_path, {"b.parquet": b"nothing of the kind"})
    with pytest.raises(DataError, match=r"b\.parquet is not a Parquet file"):
        Parquet(tmp_path).units()


def changing(path, kind):
    """A file of that kind, and a source that reads it."""
    if kind == "parquet":
        pq.write_table(pa.table({"i": list(range(1000))}), path)
    else:
        data = b'{"i": 1}\n' * 1000
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return {
        "text": Files(path), "binary": Files(path, mode="binary"), "json": JsonLines(path), "parquet": Parquet(path),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["text", "binary", "json", "parquet"])
@pytest.mark.parametrize("change", ["gone", "shorter", "longer", "same size", "touched"])
@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_changed_inputs_are_errors(tmp_path, kind, change, name):
    """A file that is not the one listed is an error, not other rows under its fingerprint; read at once or in windows."""
    path = tmp_path / name
    source = changing(path, kind)
    (unit,) = source.units()
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        made = {"shorter": data[:-9], "longer": data + data[-9:], "same size": data.replace(b"1", b"2")}
        path.write_bytes(made.get(change, data))
        os.utime(path, ns=(1, 1))
    for read in (read_unit, lambda *of: list(read_windows(*of)), lambda *of: list(read_windows(*of, size_bytes=500))):
        with pytest.raises(DataError, match="does not exist" if change == "gone" else "changed since") as caught:
            read(source, unit)
        assert caught.value.data["path"] == str(path)
    if change == "touched":
        assert f"version {unit.parts[0].version}: it has version 1." in caught.value.message


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, kind):
    """The first windows are given; the end says that not all rows were of one version."""
    path = tmp_path / ("a.gz" if kind == "json" else "a")
    source = changing(path, kind)
    windows = read_windows(source, source.units()[0], size_bytes=200)
    next(windows)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="changed since"):
        list(windows)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_that_is_overwritten_while_it_is_read_is_not_called_damaged(tmp_path, kind):
    """Half of one file and half of another cannot be read: what is told is that it changed."""
    path = tmp_path / ("a.gz" if kind == "json" else "a")
    values = np.random.default_rng(0).integers(0, 99, 400_000)  # more than is read ahead
    if kind == "json":
        path.write_bytes(gzip.compress("".join(f'{{"i": {value}}}\n' for value in values).encode(), 1))
    else:
        pq.write_table(pa.table({"i": values}), path, compression="none", use_dictionary=False, data_page_size=1000)
    source = JsonLines(path) if kind == "json" else Parquet(path)
    windows = read_windows(source, source.units()[0], size_bytes=10_000)
    next(windows)
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(DataError, match="changed since"):
        list(windows)


def test_an_empty_file_that_was_filled_is_an_error(tmp_path):
    """Nothing is read of it, and all the same it is not what it was."""
    write(tmp_path, {"a.txt": b"", "b.txt": b"b"})
    source = Files(tmp_path)
    (unit,) = source.units()
    write(tmp_path, {"a.txt": b"a"})
    with pytest.raises(DataError, match=r"a\.txt changed since it was listed with 0 bytes"):
        read_unit(source, unit)


def test_parts_without_a_version_are_not_checked(tmp_path):
    """A store that tells no version: a file of the same size is taken for the same."""
    path = tmp_path / "a"
    for kind in ("text", "parquet"):
        source = changing(path, kind)
        (unit,) = source.units()
        (unit,) = make_units([[part._replace(version="") for part in unit.parts]])
        os.utime(path, ns=(1, 1))
        assert read_unit(source, unit).num_rows == sum(w.table.num_rows for w in read_windows(source, unit)) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Files([]),
        lambda: Files(""),
        lambda: Files(3),
        lambda: Files("a", mode="utf-8"),
        lambda: Files("a", unit_bytes=0),
        lambda: JsonLines("a", unit_bytes=1.5),
        lambda: Parquet("a", columns="i"),
        lambda: Parquet("a", row_groups_per_unit=True),
    ],
)
def test_wrong_declarations_are_refused(make):
    """A wrong declaration raises where it is written, before anything is listed."""
    with pytest.raises(JobError):
        make()


def test_declarations_import_nothing_heavy():
    """Declaring sources and buckets loads neither numpy nor pyarrow nor fsspec."""
    import subprocess
    import sys

    code = (
        "import sys; from tpupipe.data import buckets, sources; buckets.Buckets(); sources.Files('x');"
        "print([m for m in ('numpy', 'pyarrow', 'fsspec', 'ray', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (gcsfs.retry.HttpError({"code": 503, "message": "busy"}), StoreUnavailableError),
        (gcsfs.retry.HttpError({"code": 429, "message": "slower"}), StoreUnavailableError),
        (gcsfs.retry.ChecksumError("half of it"), StoreUnavailableError),
        (aiohttp.ServerDisconnectedError(), StoreUnavailableError),
        (requests.exceptions.ConnectionError("reset"), StoreUnavailableError),
        (FSTimeoutError(), StoreUnavailableError),
        (ConnectionResetError(104, "reset"), StoreUnavailableError),
        (gcsfs.retry.HttpError({"code": 400, "message": "what?"}), StoreError),
        (OSError(5, "Input/output error"), StoreError),
        (gcsfs.retry.HttpError({"code": 403, "message": "no"}), StoreDeniedError),
        (FileNotFoundError("a"), DataError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_what_a_file_system_raises(raised, error):
    """A store that is away may be there later; anything else is an answer, and a bug stays one."""
    with pytest.raises(error) as caught, input_errors("read", "gs://b/a"):
        raise raised
    assert type(caught.value) is error
    assert error is ZeroDivisionError or "gs://b/a" in str(caught.value)
