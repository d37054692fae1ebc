"""Inputs in a bucket read as inputs on a disk do."""

import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tpupipe.local.server import embedded_store
from tpupipe.store.objects import open_store
from tpupipe.store.wiring import fsspec_options, process_environment

REPLACED = {
    "files": "text/a.txt",
    "json": "lines/b.jsonl",
    "parquet": "table/a.parquet",
    "odd names": "odd/a#1?b:c d.txt",
    "binary": "text/b/c.txt",
}

PROGRAM = """
import json, sys
import gcsfs
from tpupipe.data.read import read_unit
from tpupipe.data.sample import sample_units
from tpupipe.data.sources import Files, JsonLines, Parquet
from tpupipe.data.windows import read_windows
from tpupipe.errors import TpupipeError

options = json.loads(sys.argv[1])
sources = {
    "files": Files("gs://inputs/text/**/*.txt"),
    "binary": Files("gs://inputs/text", mode="binary"),
    "pieces": Files("gs://inputs/lines/a.jsonl", unit_bytes=70_000),
    "json": JsonLines("gs://inputs/lines", unit_bytes=70_000),
    "parquet": Parquet("gs://inputs/table/*.parquet", columns=["i"]),
    "odd names": Files("gs://inputs/odd"),
    "none": Files("gs://inputs/nothing/*"),
    "no bucket": Files("gs://elsewhere/*"),
}
result = {}
for name, source in sources.items():
    try:
        units = source.units(storage_options=options)
        tables = [read_unit(source, unit, storage_options=options) for unit in units]
        sample = [read_unit(source, unit, storage_options=options) for unit in sample_units(units, "10%")]
    except TpupipeError as error:
        result[name] = type(error).__name__
        continue
    column = tables[0].column_names[-1]
    values = [v for t in tables for v in t[column].to_pylist()]
    result[name] = {
        "units": [unit.id for unit in units],
        "paths": sorted({part.path for unit in units for part in unit.parts}),
        "versions": all(part.version for unit in units for part in unit.parts),
        "values": [v.decode() if isinstance(v, bytes) else v for v in values],
        "sampled": sum(t.num_rows for t in sample),
    }
# Another client replaces objects by others of the same size; what this one has listed does not hide it.
other = gcsfs.GCSFileSystem(**options, skip_instance_cache=True)
replaced = json.loads(sys.argv[2])
for name, path in replaced.items():
    source = sources[name]
    units = source.units(storage_options=options)
    other.pipe_file(f"inputs/{path}", other.cat_file(f"inputs/{path}"))
    result[name]["changed"] = []
    for read in (read_unit, lambda *of, **how: list(read_windows(*of, **how))):
        try:
            for unit in units:
                read(source, unit, storage_options=options)
        except TpupipeError as error:
            result[name]["changed"].append(f"{type(error).__name__}: {error.message}")
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What a process with the environment of a worker reads from the embedded server."""
    with embedded_store(tmp_path_factory.mktemp("server")) as endpoint:
        store = open_store("gs://inputs", endpoint=endpoint)
        store.create("text/a.txt", "é\n".encode())
        store.create("text/b/c.txt", b"")
        store.create("odd/a#1?b:c d.txt", b"odd")
        store.create("odd/b.txt", b"even")
        store.create("lines/a.jsonl", b"".join(b'{"i": %d, "x": "%s"}\n' % (i, b"y" * 1000) for i in range(300)))
        store.create("lines/b.jsonl", b'{"i": 300, "x": ""}')
        sink = io.BytesIO()
        pq.write_table(pa.table({"j": [0] * 1000, "i": range(1000)}), sink, row_group_size=400)
        store.create("table/a.parquet", sink.getvalue())
        environment = os.environ | process_environment(endpoint)
        options = json.dumps(fsspec_options("gs://inputs", endpoint))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, options, json.dumps(REPLACED)], env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)


def test_files(read):
    """Files list by glob and by folder, with URIs as paths and generations as versions; empty objects are rows."""
    assert read["files"]["values"] == ["é\n", ""]
    assert read["binary"]["values"] == ["é\n", ""]
    assert read["files"]["paths"] == ["gs://inputs/text/a.txt", "gs://inputs/text/b/c.txt"]
    assert read["files"]["versions"]
    assert read["files"]["sampled"] == 1


def test_ranges(read):
    """Line ranges of an object cover every line once."""
    assert len(read["json"]["units"]) >= 5
    lines = "".join(read["pieces"]["values"]).splitlines()
    assert [json.loads(line)["i"] for line in lines] == list(range(300))
    assert 20 <= read["json"]["sampled"] <= 40


def test_json_rows(read):
    """JSON lines of two objects are read in order."""
    assert read["json"]["values"][-1] == ""
    assert len(read["json"]["values"]) == 301


def test_parquet_rows(read):
    """Row groups of an object are units, and a sample reads about its share of the rows."""
    assert read["parquet"]["values"] == list(range(1000))
    assert len(read["parquet"]["units"]) == 3
    assert 50 <= read["parquet"]["sampled"] <= 150


def test_odd_names(read):
    """A name that looks like one with a version or a query is a name."""
    assert read["odd names"]["values"] == ["odd", "even"]
    assert read["odd names"]["versions"]


@pytest.mark.parametrize(("name", "path"), REPLACED.items())
def test_replaced_objects(read, name, path):
    """An object replaced after it was listed is an error, even by one of its size and by way of a client that listed it."""
    assert len(read[name]["changed"]) == 2
    for told in read[name]["changed"]:
        assert told.startswith(f"DataError: The input gs://inputs/{path} changed since it was listed")


def test_nothing_there(read):
    """No match and no bucket are the same clear error, not an empty input."""
    assert (read["none"], read["no bucket"]) == ("DataError", "DataError")
