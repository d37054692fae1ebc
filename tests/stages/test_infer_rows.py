"""Bad rows: found by bisecting, named or set aside; rows that are too long; nothing else changes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.data.buckets import Buckets
from tpupipe.data.sources import JsonLines
from tpupipe.data.windows import Origin, Window
from tpupipe.errors import BadRowError, DataError, UserCodeError
from tpupipe.job import Infer, Quarantine
from tpupipe.programs.infer_rows import UnitMapper, bisect, errors_table


def stage(mapping=None, bad_rows="fail", **options):
    return Infer("s", JsonLines("x"), "fit", apply=lambda _, batch: batch, map=mapping, bad_rows=bad_rows, **options)


def window(values, first_row=0, **columns):
    table = pa.table({"id": values, **columns})
    return Window(table, first_row, (Origin("a.jsonl", 0, 0, 3), Origin("b.jsonl", 100, 0, len(values) - 3)))


def failing(*bad):
    """A map that raises where one of ``bad`` is among the rows."""

    def mapping(batch):
        for value in np.asarray(batch["id"]):
            if value in bad:
                raise ValueError(f"{value} cannot be used")
        return {"x": np.asarray(batch["id"]) * 10, "name": np.array([f"n{v}" for v in batch["id"]], object)}

    return mapping


@given(st.integers(0, 60), st.sets(st.integers(0, 59)))
def test_bisecting_finds_exactly_the_rows_that_fail_alone(total, bad):
    """All others are mapped, in order, once; the map is called far less than once a row when few are bad."""
    bad = {row for row in bad if row < total}
    calls, refused = [], []

    def call(batch):
        calls.append(len(batch["id"]))
        if bad & set(batch["id"].tolist()):
            raise ValueError
        return {"id": batch["id"]}

    pieces = bisect(call, {"id": np.arange(total)}, total, lambda row, _: refused.append(row))
    assert refused == sorted(bad)
    assert [i for _, _, p in pieces for i in p["id"].tolist()] == [i for i in range(total) if i not in bad]
    assert [i for start, stop, _ in pieces for i in range(start, stop)] == [i for i in range(total) if i not in bad]
    assert len(calls) <= 1 + 2 * len(bad) * 6


def test_by_default_the_first_bad_row_is_named():
    """Row 5 of the unit, which is row 2 of the second file's piece: all of that is in the error, with the map's traceback."""
    with pytest.raises(
        BadRowError, match=r"row 15 of unit u \(b.jsonl, from byte 100, row 2\): map raised ValueError: 5"
    ) as caught:
        UnitMapper(stage(failing(5, 7)), "u").map(window(list(range(10)), first_row=10))
    assert caught.value.data == {"stage": "s", "unit": "u", "row": 15, "path": "b.jsonl", "over_limit": False}
    assert "in mapping" in caught.value.message
    assert "Quarantine" in caught.value.hint


def test_quarantined_rows_leave_a_record_each_and_the_others_are_mapped():
    """2 of 10 rows raise: 8 are mapped, numbered on; 2 records with row, file and error; the same twice."""
    tables = []
    for _ in range(2):
        mapper = UnitMapper(stage(failing(1, 5), Quarantine(max=2), keep=("name",)), "u")
        mapped = mapper.map(window(list(range(10))))
        assert mapped.fed["x"].tolist() == [0, 20, 30, 40, 60, 70, 80, 90]
        assert mapped.kept["name"].tolist() == [f"n{i}" for i in (0, 2, 3, 4, 6, 7, 8, 9)]
        assert mapped.rows.tolist() == list(range(8))
        assert mapper.map(window([20, 21, 22, 23], first_row=10)).rows.tolist() == [8, 9, 10, 11]
        tables.append(errors_table("u", mapper.bad))
    assert tables[0].equals(tables[1])
    assert tables[0].to_pylist() == [
        {"unit": "u", "input_row": 1, "path": "a.jsonl", "start": 0, "file_row": 1, "row": None, "reason": "map", "error": "ValueError: 1 cannot be used"},
        {"unit": "u", "input_row": 5, "path": "b.jsonl", "start": 100, "file_row": 2, "row": None, "reason": "map", "error": "ValueError: 5 cannot be used"},
    ]  # fmt: skip


def test_more_bad_rows_than_allowed_name_the_one_too_many():
    """max=2 and three bad rows: the third is named, and why."""
    mapper = UnitMapper(stage(failing(1, 5, 8), Quarantine(max=2)), "u")
    with pytest.raises(BadRowError, match=r"row 8 .*2 rows were set aside before it") as caught:
        mapper.map(window(list(range(10))))
    assert caught.value.data["over_limit"]


def test_a_window_of_bad_rows_only_takes_its_columns_from_elsewhere():
    """From a map of no rows, or from windows before; if neither is to be had, the unit fails and is tried again later."""
    mapped = UnitMapper(stage(failing(1, 2, 3, 4), Quarantine()), "u").map(window([1, 2, 3, 4]))
    assert (len(mapped.rows), sorted(mapped.fed), mapped.rows_in) == (0, ["x"], 4)

    def picky(batch):
        if not len(batch["id"]):
            raise ValueError("no rows")
        return failing(1, 2, 3, 4)(batch)

    with pytest.raises(BadRowError, match="columns of the output are not known"):
        UnitMapper(stage(picky, Quarantine()), "u").map(window([1, 2, 3, 4]))
    known = UnitMapper(stage(picky, Quarantine()), "u")
    known.map(window([10, 11, 12, 13]))
    assert UnitMapper(stage(picky, Quarantine()), "v", known.template).map(window([1, 2, 3, 4])).fed["x"].tolist() == []


def test_rows_that_fail_only_together_are_nobodys_fault():
    """The map raises for more than 4 rows: UserCodeError over the rows, with and without quarantine; none is set aside."""

    def crowded(batch):
        if len(batch["id"]) > 4:
            raise RuntimeError("too many at once")
        return {"x": np.asarray(batch["id"])}

    for bad_rows in ("fail", Quarantine()):
        mapper = UnitMapper(stage(crowded, bad_rows), "u")
        with pytest.raises(UserCodeError, match=r"rows 0 to 9 together, on none of them alone") as caught:
            mapper.map(window(list(range(10))))
        assert not isinstance(caught.value, BadRowError)
        assert mapper.bad == []


def ragged(*lengths):
    return pa.array([[7] * n for n in lengths], pa.list_(pa.int32()))


def test_rows_that_are_too_long():
    """Error names the row, its length and its file; truncate counts; quarantine records the mapped row too."""
    rows = window(list(range(5)), tokens=ragged(1, 9, 3, 4, 12))
    with pytest.raises(
        BadRowError, match=r"row 1 of unit u \(a.jsonl, row 1\): its length is 9; the longest bucket is 4"
    ):
        UnitMapper(stage(buckets=Buckets((4,))), "u").map(rows)
    cut = UnitMapper(stage(buckets=Buckets((4,), too_long="truncate")), "u").map(rows)
    assert (cut.truncated, cut.rows.tolist()) == (2, [0, 1, 2, 3, 4])
    mapper = UnitMapper(stage(buckets=Buckets((4,), too_long="quarantine"), bad_rows=Quarantine()), "u")
    mapped = mapper.map(rows)
    assert mapped.rows.tolist() == [0, 2, 3]
    assert mapped.lengths.tolist() == [1, 3, 4]
    assert [(b.input_row, b.row, b.path, b.file_row, b.reason) for b in mapper.bad] == [
        (1, 1, "a.jsonl", 1, "too_long"),
        (4, 4, "b.jsonl", 1, "too_long"),
    ]


def test_a_map_that_changes_the_number_of_rows_is_not_pinned_to_a_file_row():
    """Two rows out of each: which input a too long row came from is not guessed, the files are named."""

    def doubled(batch):
        tokens = [np.arange(1), np.arange(9)] * len(batch["id"])
        column = np.empty(len(tokens), object)
        column[:] = tokens
        return {"tokens": column}

    mapper = UnitMapper(stage(doubled, Quarantine(), buckets=Buckets((4,), too_long="quarantine")), "u")
    assert mapper.map(window(list(range(5)))).rows.tolist() == [0, 2, 4, 6, 8]
    assert {(b.input_row, b.file_row, b.path) for b in mapper.bad} == {(None, None, "a.jsonl, b.jsonl")}


@pytest.mark.parametrize(
    ("mapping", "options", "said"),
    [
        (lambda b: {"t": np.array(["a"] * len(b["id"]), object)}, {}, "no column with numbers"),
        (lambda b: {"x": b["id"], "y": b["id"][:1]}, {}, "different lengths"),
        (lambda b: [b["id"]], {}, "not a mapping"),
        (lambda b: {"x": b["id"]}, {"keep": ("name",)}, "keeps name"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_fed_are_an_error(mapping, options, said):
    """They say what is missing; rows are not set aside for it."""
    mapper = UnitMapper(stage(mapping, Quarantine(), **options), "u")
    with pytest.raises(DataError, match=said):
        mapper.map(window(list(range(5))))
    assert mapper.bad == []
