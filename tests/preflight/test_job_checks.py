"""The job's inputs, maps and functions on small real inputs, without Ray."""

from __future__ import annotations

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpupipe import Buckets, Every, Files, Infer, Job, JsonLines, Parquet, Preprocess, Pretrained, Quarantine, Train
from tpupipe.preflight.checks import run_checks
from tpupipe.preflight.findings import Status
from tpupipe.preflight.job_data import describe


def found(context, job, *, sample="100%", **options):
    """Check to its findings, of the job's group."""
    result: dict[str, list] = {}
    for finding in run_checks(context(job, sample=sample, **options), ["job"]):
        result.setdefault(finding.check.partition(".")[2], []).append(finding)
    return result


def infer(source, **options) -> Job:
    return Job("job", [Infer("i", data=source, params="gs://b/x", apply=divmod, **options)])


@pytest.fixture
def lines(tmp_path):
    """Writes JSON lines files, one for each list of rows; gives the pattern."""

    def write(*files: list[dict]) -> str:
        for index, rows in enumerate(files):
            (tmp_path / f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{tmp_path}/*.jsonl"

    return write


def test_what_came_out_of_the_first_unit_is_shown(context, lines):
    """Columns, dtypes with their shape, rows; and how much input there is, of which the sample."""
    source = JsonLines(lines([{"x": 1.5}, {"x": 2.5}], [{"x": 3.5}]), unit_bytes=1024)

    def mapped(batch):
        rows = len(batch["x"])
        return {"a": np.ones((rows * 2, 3), np.float32), "t": np.array(["x"] * rows * 2, object)}

    job = Job("job", [Preprocess("p", source, map=mapped)])
    judged = found(context, job)
    [source_], [sample], [map_] = judged["sources"], judged["sample"], judged["map"]
    assert source_.facts == {"stage": "p", "units": 2, "size_bytes": 33}
    assert sample.facts["rows_of_first"] == 2
    assert map_.facts == {"stage": "p", "rows": 4, "columns": {"a": "float32[3]", "t": "text"}}
    assert "4 row(s) of a: float32[3], t: text" in map_.message


def test_the_sample_is_smaller_and_has_a_row(context, tmp_path):
    """1 % of many rows: one piece of the input, and it says how much."""
    (tmp_path / "a.txt").write_text("0123456789\n" * 100_000)
    job = Job(
        "job", [Preprocess("p", Files(f"{tmp_path}/*.txt"), map=lambda batch: {"n": np.ones(len(batch["text"]))})]
    )
    judged = found(context, job, sample="1%")
    [sample], [source] = judged["sample"], judged["sources"]
    assert sample.status is Status.OK
    assert 0 < sample.facts["size_bytes"] < source.facts["size_bytes"] / 50


def test_a_sample_without_a_row_is_a_failure(context, tmp_path):
    """Files that exist and are empty: said once, and what needs rows is skipped."""
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text("\n\n")
    judged = found(context, Job("job", [Preprocess("p", JsonLines(f"{tmp_path}/*.jsonl"), map=dict)]))
    assert judged["sources"][0].status is Status.OK
    assert judged["sample"][0].status is Status.FAILURE
    assert "has no row" in judged["sample"][0].message
    assert judged["map"][0].status is judged["schema"][0].status is Status.SKIPPED


def test_input_that_may_not_be_listed_is_not_missing_input(context, proxy, endpoint, monkeypatch):
    """403 of the inputs' bucket: a refusal, with the place; no input at all: that."""
    from tpupipe.store.objects import open_store
    from tpupipe.store.wiring import fsspec_options, process_environment

    for name, value in process_environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    open_store("gs://secret-inputs", endpoint=endpoint).create("a.txt", b"x")
    job = Job("job", [Preprocess("p", Files("gs://secret-inputs/*.txt"), map=dict)])
    options = {"input_options": fsspec_options("gs://inputs", proxy.endpoint)}
    assert found(context, job, **options)["sources"][0].status is Status.OK
    proxy.set(["403@list", "403@read"])
    from gcsfs import GCSFileSystem

    GCSFileSystem.clear_instance_cache()
    [denied] = found(context, job, **options)["sources"]
    assert (denied.status, denied.facts["error_kind"]) == (Status.FAILURE, "StoreDeniedError")
    assert "Not permitted to list the input gs://secret-inputs" in denied.message
    none = Job("job", [Preprocess("p", Files("/nowhere/at/all/*"), map=dict)])
    assert found(context, none)["sources"][0].facts["error_kind"] == "DataError"


def test_a_column_that_the_files_do_not_have(context, tmp_path):
    """Named, with those that there are."""
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    judged = found(context, infer(Parquet(f"{tmp_path}/*.parquet", columns=["x", "y"])))
    assert judged["sample"][0].status is Status.FAILURE
    assert "no column y; it has x" in judged["sample"][0].message


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        (list, "gave list"),
        (lambda _: {}, "gave no columns"),
        (lambda _: {"a": np.ones(2), "b": np.ones(3)}, "different numbers of rows"),
        (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_map_that_cannot_be_used(context, lines, mapping, says):
    """The same words as in a run, before it."""
    judged = found(context, Job("job", [Preprocess("p", JsonLines(lines([{"x": 1}])), map=mapping)]))
    assert judged["map"][0].status is Status.FAILURE
    assert says in judged["map"][0].message


def test_a_map_that_drops_everything_is_a_warning(context, lines):
    """Later units may have rows."""
    source = JsonLines(lines([{"x": 1}]))
    job = Job("job", [Preprocess("p", source, map=lambda batch: {"x": batch["x"][:0]})])
    assert found(context, job)["map"][0].status is Status.WARNING


def test_rows_that_may_be_set_aside_are_a_warning(context, lines):
    """With bad_rows=Quarantine a map that raises is not the end."""
    job = infer(JsonLines(lines([{"x": 1}])), map=lambda batch: batch["y"], bad_rows=Quarantine(max=5))
    [map_] = found(context, job)["map"]
    assert (map_.status, "up to 5 such rows" in map_.hint) == (Status.WARNING, True)


def test_what_dataset_gives_is_not_known(context, lines):
    """It needs Ray: skipped for the stage and for those behind it, not claimed to be fine."""
    job = Job(
        "job",
        [
            Preprocess("p", JsonLines(lines([{"x": 1}])), dataset=lambda ds: ds),
            Train("lm", data="p", init=id, step=divmod, batch_size=1, steps=1, checkpoint=Every(steps=1)),
        ],
    )
    judged = found(context, job)
    assert {f.status for f in [*judged["map"], *judged["schema"]]} == {Status.SKIPPED}
    assert "dataset= of p" in judged["schema"][1].message


RAGGED = [{"t": [1, 2, 3]}, {"t": [1, 2, 3, 4, 5]}]


@pytest.mark.parametrize(
    ("rows", "options", "status", "says"),
    [
        ([{"x": 1}], {}, Status.OK, "the model is fed x"),
        ([{"s": "a"}], {}, Status.FAILURE, "No column has numbers to feed: s"),
        ([{"x": 1}], {"keep": ("y",)}, Status.FAILURE, "keeps y, but its rows have x"),
        (RAGGED, {}, Status.FAILURE, "'t' is ragged, and there are no buckets"),
        (RAGGED, {"buckets": Buckets(lengths=(8,))}, Status.OK, "the longest row has 5"),
        (RAGGED, {"buckets": Buckets(lengths=(4,))}, Status.FAILURE, "length 5; the longest bucket is 4"),
        (RAGGED, {"buckets": Buckets(lengths=(4,), too_long="truncate")}, Status.OK, "bucket 4: truncate"),
        (RAGGED, {"buckets": Buckets(lengths=(8,), column="u")}, Status.FAILURE, "'u') does not exist"),
        (RAGGED, {"buckets": Buckets.auto()}, Status.OK, "the longest row has 5"),
    ],
)
def test_what_a_model_can_be_fed(context, lines, rows, options, status, says):
    """Numbers, of one shape or with buckets that are long enough."""
    [schema] = found(context, infer(JsonLines(lines(rows)), **options))["schema"]
    assert (schema.status, says in schema.message) == (status, True), schema


@pytest.mark.parametrize(
    ("columns", "status", "says"),
    [
        ({"x": np.ones((2, 3))}, Status.OK, "is fed x"),
        ({"x": np.array([b"a", b"b"], object)}, Status.FAILURE, "'x' as bytes"),
        ({"x": np.array([np.ones(2), np.ones(3)], object)}, Status.FAILURE, "'x' as ragged float64"),
        ({"mask": np.ones(2)}, Status.FAILURE, "a column 'mask'"),
    ],
)
def test_what_can_be_trained_on(context, lines, columns, status, says):
    """Rectangular numbers, none of them called mask."""
    job = Job(
        "job",
        [
            Preprocess("p", JsonLines(lines([{"x": 1}])), map=lambda _: columns),
            Train("lm", data="p", init=id, step=divmod, batch_size=1, steps=1, checkpoint=Every(steps=1)),
        ],
    )
    schema = found(context, job)["schema"][1]
    assert (schema.status, says in schema.message) == (status, True), schema


def test_missing_pretrained_files(context, lines, tmp_path):
    """Parameters that no run trained are inputs, too."""
    (tmp_path / "w.bin").write_bytes(b"1234")
    source = JsonLines(lines([{"x": 1}]))
    for file, status in (("w.bin", Status.OK), ("v.bin", Status.FAILURE)):
        params = Pretrained(tmp_path / file, lambda data: data)
        job = Job("job", [Infer("i", data=source, params=params, apply=divmod)])
        assert found(context, job)["sources"][1].status is status


def test_functions_that_cannot_be_sent(context, lines):
    """With Ray's own pickler: a lock in a closure is named with its function; data that is carried along is a warning."""
    from tpupipe.cluster.connect import pickled

    lock, data = threading.Lock(), np.zeros(2_000_000)
    source = JsonLines(lines([{"x": 1}]))
    job = Job(
        "job",
        [
            Preprocess("locked", source, map=lambda batch: (lock, batch)[1]),
            Preprocess("large", source, map=lambda batch: (data, batch)[1]),
            Preprocess("fine", source, map=lambda batch: batch),
        ],
    )
    judged = {f.status: f for f in found(context, job, pickled=pickled)["pickle"]}
    assert "map of locked cannot be sent to workers: TypeError" in judged[Status.FAILURE].message
    assert "map of large carries 16.0 MB" in judged[Status.WARNING].message
    assert "1 function(s) pickle: map of fine" in judged[Status.OK].message


def test_a_table_is_described_by_its_rows():
    """Shapes of a row, text, bytes, ragged."""
    from tpupipe.data.columns import to_table

    table = to_table(
        {
            "a": np.zeros((2, 3, 4), np.int8),
            "b": np.zeros(2, np.float32),
            "c": np.array(["x", "y"], object),
            "d": np.array([np.ones(1, np.int32), np.ones(2, np.int32)], object),
        }
    )
    assert describe(table) == {"a": "int8[3, 4]", "b": "float32", "c": "text", "d": "ragged int32"}
