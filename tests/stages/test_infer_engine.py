"""Batches through a real compiled model on this process's devices: compiled ahead, put back in input order, refused shapes."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from tpupipe.data.buckets import Buckets
from tpupipe.data.sources import JsonLines
from tpupipe.errors import DataError, StageError, UserCodeError
from tpupipe.job import Infer
from tpupipe.programs.infer_batches import plan_window, ready_window, shapes_of
from tpupipe.programs.infer_rows import MappedWindow
from tpupipe.programs.sharding import make_mesh, named_sharding
from tpupipe.stages.infer_engine import Computed, InferEngine


def score(params, batch):
    import jax.numpy as jnp

    inside = jnp.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    return {
        "sum": jnp.where(inside, batch["tokens"], 0).sum(1) * params,
        "twice": batch["tokens"] * 2,
        "id": batch["id"],
    }


def stage(apply=score, **options):
    options = {"buckets": Buckets((4, 16), batch_rows=8), "ragged_outputs": ("twice",)} | options
    return Infer("s", JsonLines("x"), "fit", apply=apply, **options)


def window(lengths, dtype=np.int32, start=1):
    tokens = np.empty(len(lengths), object)
    for i, n in enumerate(lengths):
        tokens[i] = np.arange(start + i, start + i + n).astype(dtype)
    ids = np.arange(len(lengths), dtype=np.int32)
    return MappedWindow({"tokens": tokens, "id": ids}, {}, np.arange(len(lengths)), np.array(lengths), len(lengths), 0)


class Run:
    """An engine and what it gave back."""

    def __init__(self, declared):
        import jax

        mesh = make_mesh({"data": len(jax.devices())}, jax.devices())
        self.stage, self.got, self.compiled = declared, [], []
        rows = named_sharding(mesh, "data")
        self.engine = InferEngine(declared, jax.device_put(3, named_sharding(mesh)), mesh, rows, self.compiling)

    @contextlib.contextmanager
    def compiling(self, shapes, ahead):
        yield
        self.compiled.append((ahead, shapes))

    def submit(self, mapped):
        ready = ready_window(self.stage, "u", mapped, self.engine.devices, self.engine.spec)
        self.engine.submit(ready, self.got.append)

    def finish(self):
        while self.engine.collect():
            pass
        return self.got


def check(computed, mapped):
    tokens = mapped.fed["tokens"]
    assert isinstance(computed, Computed), computed
    assert computed.outputs["id"].tolist() == list(range(len(tokens)))
    assert computed.outputs["sum"].tolist() == [3 * int(row.sum()) for row in tokens]
    assert [row.tolist() for row in computed.outputs["twice"]] == [(2 * row).tolist() for row in tokens]


def test_outputs_are_in_input_order_and_every_bucket_is_compiled_once_ahead():
    """Five windows of ragged rows of both buckets: right values in input order, two programs, compiled before the first row."""
    run = Run(stage())
    rng = np.random.default_rng(0)
    windows = [window(rng.integers(0, 17, 50).tolist(), start=n) for n in range(5)]
    for mapped in windows:
        run.submit(mapped)
    for computed, mapped in zip(run.finish(), windows, strict=True):
        check(computed, mapped)
        assert computed.values_real == mapped.lengths.sum()
        assert computed.values_fed == sum(
            b.batch_rows * b.bucket_length for b in plan_window(run.stage, mapped, run.engine.devices)
        )
    assert [ahead for ahead, _ in run.compiled] == [True]
    assert run.engine.compilations == len(shapes_of(run.stage, run.engine.devices)) == 2


def test_batches_are_fetched_late():
    """One window of one batch stays in flight until it is collected; nothing is lost by it."""
    run = Run(stage())
    run.submit(window([3, 4]))
    assert run.got == []
    assert run.engine.collect()
    check(run.got[0], window([3, 4]))
    assert not run.engine.collect()


def test_another_dtype_is_refused_or_counted():
    """float32 after int32: DataError that tells both, and the engine goes on; with recompile="warn": one more program."""
    run = Run(stage())
    run.submit(window([3]))
    run.submit(window([3], np.float32))
    run.submit(window([5]))
    (refused,) = [got for got in run.finish() if isinstance(got, DataError)]
    first, last = [got for got in run.got if got is not refused]
    check(first, window([3]))
    check(last, window([5]))
    assert "tokens float32[rows, length]; compiled is for id int32[rows], tokens int32[rows, length]" in refused.message
    assert 'recompile="warn"' in refused.hint

    run = Run(stage(recompile="warn"))
    for dtype in (np.int32, np.float32, np.int32, np.float32):
        run.submit(window([3], dtype))
    for computed, dtype in zip(run.finish(), (np.int32, np.float32) * 2, strict=True):
        check(computed, window([3], dtype))
    assert [ahead for ahead, _ in run.compiled] == [True, False]
    assert run.engine.compilations == 3


def double(_, batch):
    return {"twice": batch["tokens"] * 2}


def kept(lengths, score):
    """A window with a kept column beside the tokens."""
    mapped = window(lengths)
    is_fed = score.dtype != object
    fed = {"tokens": mapped.fed["tokens"], **({"score": score} if is_fed else {})}
    return replace(mapped, fed=fed, kept={"score": score})


@pytest.mark.parametrize("nulls_first", [False, True])
def test_what_a_kept_column_holds_does_not_matter_to_a_model_that_does_not_read_it(nulls_first):
    """Integers in one window, integers and a null in the next, and the other way round: one program, right rows from both."""
    run = Run(stage(double, keep=("score",)))
    scores = [np.array([1, 2]), np.array([1, None], object), np.array([1, 2])]
    for score in reversed(scores[:2]) if nulls_first else scores:
        run.submit(kept([3, 5], score))
    for computed in run.finish():
        assert [row.tolist() for row in computed.outputs["twice"]] == [[2, 4, 6], [4, 6, 8, 10, 12]]
    assert [ahead for ahead, _ in run.compiled] == [True]


def test_a_kept_column_that_the_model_reads_has_to_be_numbers():
    """A null where numbers were: its dtype would be another one, and a number in its place another answer."""
    run = Run(stage(lambda _, batch: {"twice": batch["tokens"] * batch["score"][:, None]}, keep=("score",)))
    run.submit(kept([3, 5], np.array([1, 2])))
    run.submit(kept([3, 5], np.array([1, None], object)))
    run.submit(kept([3, 5], np.array([3, 2])))
    (refused,) = [got for got in run.finish() if isinstance(got, DataError)]
    assert "score" in refused.message
    assert run.got[-1].outputs["twice"][0].tolist() == [3, 6, 9]


def test_rows_without_values_take_the_dtype_of_the_others():
    """A window of empty rows only, as lists without a dtype, after one with values: same program."""
    run = Run(stage())
    run.submit(window([3]))
    empty = window([0, 0])
    empty.fed["tokens"][:] = [[], []]
    run.submit(empty)
    computed = run.finish()[1]
    assert computed.outputs["sum"].tolist() == [0, 0]
    assert run.engine.compilations == 2


def test_no_rows_keep_the_schema_without_compiling():
    """Outputs without rows, of the dtypes and shapes that rows would have."""
    run = Run(stage())
    run.submit(window([]))
    (computed,) = run.finish()
    assert {name: (len(v), v.dtype) for name, v in computed.outputs.items()} == {
        "sum": (0, np.dtype(np.int32)), "twice": (0, np.dtype(object)), "id": (0, np.dtype(np.int32)),
    }  # fmt: skip
    assert run.engine.compilations == 0


def test_ten_rows_on_three_times_the_devices_give_ten_rows():
    """ray#63285: without buckets the short last batch is padded: 10 rows in, 10 rows out, once each."""
    run = Run(stage(lambda _, b: {"id": b["id"], "real": b["mask"]}, buckets=None, ragged_outputs=(), batch_rows=3))
    mapped = MappedWindow({"id": np.arange(10)}, {}, np.arange(10), None, 10, 0)
    run.submit(mapped)
    (computed,) = run.finish()
    assert computed.outputs["id"].tolist() == list(range(10))
    assert computed.outputs["real"].all()
    assert computed.values_real == 10


def broken(_params, _batch):
    raise ZeroDivisionError("the job's own mistake")


@pytest.mark.parametrize(
    ("apply", "kind", "said"),
    [
        (broken, UserCodeError, "the job's own mistake"),
        (lambda _, b: {"x": b["id"].sum()}, StageError, r"output 'x' has shape \[\]"),
        (lambda _, b: b["id"], StageError, "not a mapping of outputs"),
    ],
)  # fmt: skip
def test_what_apply_does_wrong_is_the_units_error(apply, kind, said):
    """Raised, a wrong first dimension, no mapping: given back as that unit's result; the engine lives on."""
    run = Run(stage(apply, buckets=None, ragged_outputs=()))
    mapped = MappedWindow({"id": np.arange(3)}, {}, np.arange(3), None, 3, 0)
    run.submit(mapped)
    (error,) = run.finish()
    with pytest.raises(kind, match=said):
        raise error


def test_ragged_rows_need_buckets():
    """Said with what to declare."""
    with pytest.raises(DataError, match="'tokens' is ragged") as caught:
        ready_window(stage(buckets=None, ragged_outputs=()), "u", window([1, 2]), 1, None)
    assert "Buckets(lengths=" in caught.value.hint
