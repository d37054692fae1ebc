"""A sample: the same every time, about its share of the bytes, never empty, from many files."""

from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.read import read_unit
from tpupipe.data.sample import parse_sample, sample_units
from tpupipe.data.sources import Files, JsonLines, Parquet, Part, make_units
from tpupipe.errors import ConfigError

LINE = b'{"text": "0123456789 0123456789 0123456789"}\n'


def rows(source, units):
    return sum(read_unit(source, unit).num_rows for unit in units)


def size(units):
    return sum(unit.size_bytes for unit in units)


@pytest.mark.parametrize(
    ("value", "fraction"),
    [
        ("1%", "1/100"), (0.01, "1/100"), ("100%", "1"), ("1/50", "1/50"), (1, "1"), (1.0, "1"), ("0.1%", "1/1000"),
        (" 2.5 % ", "1/40"), (Fraction(1, 3), "1/3"), ("0.05", "1/20"), (0.1, "1/10"),
    ],
)  # fmt: skip
def test_parse(value, fraction):
    """Percent, decimals and ratios mean exactly what is written."""
    assert parse_sample(value) == Fraction(fraction)


@pytest.mark.parametrize(
    "value", ["0%", 0, -1, "101%", 2, "1/0", "x", "", "%", None, True, [1], float("nan"), float("inf")]
)
def test_parse_refuses(value):
    """Nothing, more than everything, and nonsense are refused with the value named."""
    with pytest.raises(ConfigError, match="sample="):
        parse_sample(value)


def text_files(folder, count, size):
    for i in range(count):
        (folder / f"{i:04d}.jsonl").write_bytes(LINE * (size // len(LINE)))


@pytest.mark.parametrize(
    ("count", "each", "files"),
    [(1, 8_000_000, 1), (20, 1_000_000, 10), (600, 10_000, 6)],
    ids=["one big file", "some big files", "many small files"],
)
@pytest.mark.parametrize("make", [Files, JsonLines], ids=["files", "json"])
def test_one_percent_of_the_bytes(tmp_path, count, each, files, make):
    """1 % of the bytes within a quarter of that, from several files, with rows; packed into few units."""
    text_files(tmp_path, count, each)
    source = make(tmp_path, unit_bytes=500_000)
    units = source.units()
    picked = sample_units(units, "1%")
    assert size(picked) == pytest.approx(size(units) / 100, rel=0.25)
    assert len({part.path for unit in picked for part in unit.parts}) >= files
    assert rows(source, picked) > 0
    assert len(picked) <= 2
    assert sample_units(source.units(), "1%") == picked


def test_parquet_heads(tmp_path):
    """Parquet is sampled by rows, from many row groups, about 1 % of them, also when a file is one row group."""
    for i in range(10):
        pq.write_table(pa.table({"i": pa.array(range(i * 10_000, i * 10_000 + 10_000))}), tmp_path / f"{i}.parquet")
    source = Parquet(tmp_path)
    picked = sample_units(source.units(), "1%")
    tables = [read_unit(source, unit) for unit in picked]
    values = [v for t in tables for v in t["i"].to_pylist()]
    assert len(values) == pytest.approx(1000, rel=0.25)
    assert len(set(values)) == len(values)


def test_binary_files_stay_whole(tmp_path):
    """Binary files are kept or left out, never cut; with one file larger than the share, one is kept."""
    for i in range(300):
        (tmp_path / f"{i:03d}.bin").write_bytes(bytes(1000 + i * 10))
    source = Files(tmp_path, mode="binary", unit_bytes=50_000)
    units = source.units()
    picked = sample_units(units, "2%")
    assert all(
        len(v) == 1000 + int(p[-7:-4]) * 10
        for u in picked
        for p, v in zip(*read_unit(source, u).to_pydict().values(), strict=True)
    )
    assert size(picked) == pytest.approx(size(units) / 50, rel=0.25)
    assert rows(source, sample_units(units[:1], "0.01%")) == 1


@pytest.mark.parametrize("content", [b"x", b"\n" * 3, b"a" * 100_000, b""])
def test_never_no_rows(tmp_path, content):
    """However small the share, and however long the lines, there is a row."""
    (tmp_path / "a.txt").write_bytes(content)
    source = Files(tmp_path, unit_bytes=1000)
    assert rows(source, sample_units(source.units(), "0.001%")) >= 1


def test_long_json_lines_still_give_a_row(tmp_path):
    """Lines longer than a piece: the piece at the start of a file holds one."""
    (tmp_path / "a.jsonl").write_bytes(b'{"x": "' + b"y" * 400_000 + b'"}\n')
    source = JsonLines(tmp_path, unit_bytes=50_000)
    assert rows(source, sample_units(source.units(), "1%")) == 1


def test_everything_is_everything(tmp_path):
    """100 % gives the units themselves, so ids do not change."""
    text_files(tmp_path, 3, 10_000)
    units = JsonLines(tmp_path).units()
    assert sample_units(units, "100%") == units


def test_sampled_units_have_their_own_ids(tmp_path):
    """No id of a sampled unit is one of the full run: their contents differ."""
    text_files(tmp_path, 20, 100_000)
    units = JsonLines(tmp_path, unit_bytes=200_000).units()
    picked = sample_units(units, "10%")
    assert not {u.id for u in picked} & {u.id for u in units}


sizes = st.lists(st.lists(st.integers(0, 100_000), min_size=1, max_size=6), min_size=1, max_size=20)


@given(sizes, st.fractions(Fraction(1, 2000), Fraction(99, 100)), st.sampled_from(["bytes", "rows", "file"]))
def test_sample_is_a_part_of_the_input(groups, fraction, kind):
    """Pieces lie inside their parts, each part is used once, order is kept, and cuttable input gives its share."""
    parts = [
        [Part(f"/d/{g:02d}-{p}", 0, size, kind, size, size, "1") for p, size in enumerate(group)]
        for g, group in enumerate(groups)
    ]
    units = make_units(parts)
    total = size(units)
    picked = sample_units(units, fraction)
    pieces = [part for unit in picked for part in unit.parts]
    by_path = {part.path: part for group in parts for part in group}
    assert [p.path for p in pieces] == sorted({p.path for p in pieces})
    assert pieces
    for piece in pieces:
        whole = by_path[piece.path]
        assert whole.start <= piece.start <= piece.stop <= whole.stop
        assert kind != "file" or piece == whole
    if kind != "file" and total:
        wanted = max(1, fraction * total)
        assert wanted * Fraction(3, 4) - 1 <= size(picked) <= wanted + 1
    assert [unit.id for unit in picked] == sorted(unit.id for unit in picked)
    assert sample_units(units, fraction) == picked
