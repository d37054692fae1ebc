"""The language model and its data, with plain JAX on the CPU."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import tpupipe
from jobs.stdlib_lm import SEPARATOR, Pack, Params, Split, TinyLM, build, stdlib_files

SMALL = TinyLM(width=16, layers=2, heads=2, steps=20)
ROWS, LENGTH = 8, 32


@functools.cache
def training_text() -> str:
    from pathlib import Path

    return Path(stdlib_files()[0][0]).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def state():
    import jax

    return jax.jit(SMALL.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def step():
    import jax

    return jax.jit(SMALL.train_step)


@pytest.fixture(scope="module")
def logits(state):
    import jax

    return functools.partial(jax.jit(SMALL.logits), state["params"])


@pytest.fixture(scope="module")
def tokens():
    text = training_text().encode()[: ROWS * (LENGTH + 1)]
    return np.frombuffer(text, np.uint8).reshape(ROWS, LENGTH + 1)


def texts(*values: str) -> dict[str, np.ndarray]:
    return {"path": np.array([f"/f{i}.py" for i in range(len(values))], object), "text": np.array(values, object)}


def test_a_step_keeps_shapes_and_types(state, step, tokens):
    """A jitted step maps a state to one of the same tree, and gives finite scalars."""
    import jax

    batch = {"tokens": tokens, "mask": np.ones(ROWS, bool)}
    after, metrics = step(state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {name: value.shape for name, value in metrics.items()} == {"loss": (), "grad_norm": ()}
    assert np.isfinite(metrics["loss"])


def test_an_untrained_model_knows_nothing(state, step, tokens):
    """The first loss is near log 256 = 5.5 nats: nothing leaks from the target to the input."""
    _, metrics = step(state, {"tokens": tokens, "mask": np.ones(ROWS, bool)})
    assert 5.0 < float(metrics["loss"]) < 6.5


def test_the_loss_falls_in_twenty_steps(state, step, tokens):
    """On one batch of real text the loss falls by more than a nat."""
    losses, current = [], state
    for _ in range(20):
        current, metrics = step(current, {"tokens": tokens, "mask": np.ones(ROWS, bool)})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1


def test_masked_rows_do_not_count(state, step, tokens):
    """Loss and gradients of a padded batch are those of its real rows, whatever the padding holds."""
    import jax

    mask = np.arange(ROWS) < 3
    padded = np.where(mask[:, None], tokens, 77).astype(np.uint8)
    alone, of_three = step(state, {"tokens": tokens[:3], "mask": np.ones(3, bool)})
    after, of_padded = step(state, {"tokens": padded, "mask": mask})
    np.testing.assert_allclose(of_padded["loss"], of_three["loss"], rtol=1e-6)
    np.testing.assert_allclose(of_padded["grad_norm"], of_three["grad_norm"], rtol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), after, alone)


def test_no_position_looks_ahead(logits, tokens):
    """Changing byte t changes no logits before t, and does change those at t."""
    t = 11
    changed = tokens[:, :-1].astype(np.int32)
    before = np.asarray(logits(changed))
    changed = changed.copy()
    changed[:, t] = (changed[:, t] + 1) % 256
    after = np.asarray(logits(changed))
    np.testing.assert_array_equal(before[:, :t], after[:, :t])
    assert (before[:, t] != after[:, t]).any(axis=-1).all()


def test_positions_matter(logits):
    """The same two bytes in another order are predicted from differently: attention sees positions."""
    one = np.array([[97, 98, 99, 100]], np.int32)
    other = np.array([[98, 97, 99, 100]], np.int32)
    difference = np.abs(np.asarray(logits(one) - logits(other)))
    assert difference[0, -1].max() > 1e-6


@functools.cache
def scorer():
    import jax

    return jax.jit(SMALL.nll)


def score(state, rows, length, batch_rows, fill=0):
    padded = np.full((batch_rows, length), fill, np.uint8)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows] + [0] * (batch_rows - len(rows)), np.int32)
    mask = np.arange(batch_rows) < len(rows)
    out = scorer()(state["params"], {"tokens": padded, "lengths": lengths, "mask": mask})
    assert out["nll"].shape == (batch_rows,)
    return np.asarray(out["nll"])[: len(rows)], np.asarray(out["bytes"])[: len(rows)]


@pytest.mark.parametrize(("length", "batch_rows", "fill"), [(32, 3, 0), (64, 3, 0), (64, 8, 0), (64, 8, 200)])
def test_padding_does_not_change_a_score(state, tokens, length, batch_rows, fill):
    """A row scores the same alone and unpadded as in a longer bucket, a larger batch, or beside any fill."""
    rows = [tokens[0, :32], tokens[1, :5], tokens[2, :1]]
    got, counted = score(state, rows, length, batch_rows, fill)
    for i, row in enumerate(rows):
        alone, _ = score(state, [row], len(row), 1)
        np.testing.assert_allclose(got[i], alone[0], rtol=2e-5)
    assert counted.tolist() == [32, 5, 1]


def test_a_score_is_the_mean_of_what_the_model_says_of_each_byte(state, logits, tokens):
    """Checked against a byte-by-byte sum over the model's own predictions."""
    import jax

    row = tokens[0, :7].astype(np.int32)
    seen = np.concatenate([[SEPARATOR], row, np.zeros(LENGTH - 8, np.int32)]).astype(np.int32)
    said = []
    for i in range(len(row)):
        known = np.where(np.arange(LENGTH) <= i, seen, 0)[None, :]  # nothing of what is predicted
        said.append(-jax.nn.log_softmax(np.asarray(logits(known))[0, i])[row[i]])
    got, _ = score(state, [row.astype(np.uint8)], 16, 1)
    np.testing.assert_allclose(got[0], np.mean(said), rtol=1e-5)


@given(st.lists(st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=200), min_size=1, max_size=5),
       st.integers(8, 40))  # fmt: skip
def test_packing_predicts_every_byte_once(values, seq_len):
    """Rows chain: the targets of all rows, put in order, are the joined text, and only separators are added."""
    rows = Pack(seq_len)(texts(*values))["tokens"]
    assert rows.dtype == np.uint8
    assert rows.shape[1] == seq_len + 1
    text = bytes([SEPARATOR]).join([*(v.encode() for v in values), b""])
    count = len(rows)
    assert count == max(-(-len(text) // seq_len), 1)
    wanted = np.full(count * seq_len + 1, SEPARATOR, np.uint8)
    wanted[1 : len(text) + 1] = np.frombuffer(text, np.uint8)
    cut = sorted(wanted[i * seq_len : (i + 1) * seq_len + 1].tobytes() for i in range(count))
    assert sorted(row.tobytes() for row in rows) == cut


def test_packing_is_deterministic_and_mixes_neighbours():
    """The same unit gives the same rows, and a row is not followed by its neighbour in the file."""
    batch = texts(training_text())
    rows = Pack(64)(batch)["tokens"]
    np.testing.assert_array_equal(rows, Pack(64)(batch)["tokens"])
    assert (rows[:-1, -1] == rows[1:, 0]).mean() < 0.5


@given(
    st.lists(st.text(max_size=50).map(lambda t: t.encode("utf-8", "replace").decode()), max_size=5), st.integers(1, 16)
)
def test_splitting_loses_no_byte(values, piece_bytes):
    """The pieces of a file, joined by offset, are the file; none is empty or too long."""
    out = Split(piece_bytes)(texts(*values))
    assert {len(column) for column in out.values()} == {len(out["tokens"])}
    for i, value in enumerate(values):
        own = [(o, p) for f, o, p in zip(out["file"], out["offset"], out["tokens"], strict=True) if f == f"/f{i}.py"]
        assert all(0 < len(piece) <= piece_bytes and piece.dtype == np.uint8 for _, piece in own)
        assert b"".join(piece.tobytes() for _, piece in sorted(own, key=lambda pair: pair[0])) == value.encode()


def test_the_split_of_the_library_is_fixed():
    """Both sides have files, they share none, and the lists are sorted and repeatable."""
    train, held_out = stdlib_files()
    assert len(train) > 20 * len(held_out) > 0
    assert not set(train) & set(held_out)
    assert (train, held_out) == stdlib_files()
    assert train == sorted(train)
    assert not any("site-packages" in path or "/test/" in path for path in [*train, *held_out])


def test_the_declaration():
    """Three stages in order; steps, batch size and seed reach the training stage; lengths fit the pieces."""
    job = build(Params(steps=8, batch_size=16, seed=3, seq_len=64))
    tokens_stage, lm, nll = job.stages
    assert [stage.name for stage in job.stages] == ["tokens", "lm", "nll"]
    assert isinstance(job, tpupipe.Job)
    assert (lm.steps, lm.batch_size, lm.seed, lm.data) == (8, 16, 3, tokens_stage.name)
    assert nll.buckets.lengths[-1] == nll.map.piece_bytes == 64
    assert nll.params == "lm"


def test_the_functions_travel_to_workers():
    """Cloudpickle brings them over; equal models stay equal."""
    import cloudpickle

    job = build(Params())
    copy = pickle.loads(cloudpickle.dumps(job))
    assert copy.stages[0].map == job.stages[0].map
    assert copy.stages[1].step.__self__ == job.stages[1].step.__self__


@pytest.mark.parametrize(
    "wrong", [{"width": 63}, {"width": 64, "heads": 3}, {"steps": 0}, {"depth": 3}, {"seq_len": 1}]
)
def test_parameters_that_make_no_model_are_refused(wrong):
    """Heads must divide the width into pairs; counts are positive; unknown keys are errors."""
    with pytest.raises(ValidationError):
        Params(**wrong)


@pytest.mark.parametrize("module", ["jobs.stdlib_lm", "jobs.digits"])
def test_declaring_a_job_imports_neither_ray_nor_jax(module):
    """A job file is cheap to import and to build: JAX belongs to the workers."""
    code = (
        f"import sys, {module} as m; m.build(m.Params()); "
        "print(sorted({'jax', 'jaxlib', 'ray', 'sklearn', 'optax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.strip()
    # importlib.resources has to import scikit-learn's package to find the file inside it
    assert loaded == ("['sklearn']" if module == "jobs.digits" else "[]")
