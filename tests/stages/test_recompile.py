"""The guard against compilations after the first step: what is told, what is let through, what a call costs."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.checkpoint.saver import SaveTarget
from tpupipe.data.chunks import Manifest, ManifestUnit
from tpupipe.data.columns import to_table
from tpupipe.data.stream import Stream
from tpupipe.errors import JobError, RecompileError
from tpupipe.job import Train
from tpupipe.programs.recompile import Guarded, changes, guarded_jit, signature_of
from tpupipe.programs.sharding import make_mesh, named_sharding
from tpupipe.programs.train import lower_step
from tpupipe.stages.context import FedBatch, StageContext
from tpupipe.stages.failures import final_error
from tpupipe.stages.watch import TrainWatch


def step(state, batch):
    total = batch["tokens"].sum() * 1.0
    return {"w": state["w"] + total}, {"loss": total}


def batch(rows=64, dtype=np.int32, **more):
    import jax.numpy as jnp

    return {"tokens": jnp.ones((rows, 128), dtype), **more}


def state():
    import jax.numpy as jnp

    return {"w": jnp.zeros(3, np.float32)}


def guarded(function=step, recompile="forbid", **options):
    told = []
    return guarded_jit(function, "lm", recompile=recompile, on_recompile=told.append, **options), told


def refused(call, *arguments):
    with pytest.raises(RecompileError) as caught:
        call(*arguments)
    assert caught.value.data["stage"] == "lm"
    return caught.value.data["changes"]


def test_a_shorter_last_batch_is_named():
    """The planted leak: the argument, its leaf, and both shapes; nothing is compiled or run for it."""
    call, _ = guarded()
    current, _ = call(state(), batch())
    current, _ = call(current, batch())
    assert refused(call, current, batch(rows=17)) == ["batch['tokens']: shape (64, 128) became (17, 128)"]
    assert call.compilations == 1
    np.testing.assert_array_equal(current["w"], np.full(3, 2 * 64 * 128))


def test_the_message_says_what_to_do():
    """Function, stage and change in the sentence; the hint on its line; it survives pickling and is not retried."""
    call, _ = guarded()
    call(state(), batch())
    with pytest.raises(
        RecompileError, match="step of stage 'lm' would be compiled anew after its first step"
    ) as caught:
        call(state(), batch(rows=17))
    assert "pad and mask the last batch" in caught.value.hint
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.data, str(copy)) == (caught.value.data, str(caught.value))
    assert final_error([copy]) is copy


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (lambda: batch(dtype=np.int16), ["batch['tokens']: dtype int32 became int16"]),
        (lambda: batch(mask=np.ones(64, bool)), ["batch['mask']: is new, bool[64]"]),
        (dict, ["batch['tokens']: is not there any more"]),
    ],
    ids=["dtype", "new", "gone"],
)
def test_every_kind_of_change_of_a_tree(second, told):
    """Types, leaves that come and leaves that go."""
    call, _ = guarded()
    call(state(), batch())
    assert refused(call, state(), second()) == told


def test_weak_types_and_static_values():
    """What jax.jit compiles anew for without a change of shape: a Python number in an array's place, another static value."""

    def scaled(x, rate, mode):
        return x * rate if mode == "train" else x

    import jax.numpy as jnp

    call, _ = guarded(scaled, static_argnames=("mode",))
    x = jnp.ones(3)
    call(x, jnp.float32(2), "train")
    assert refused(call, x, 2.0, "train") == ["rate: dtype float32 became weak float32 (a Python number's)"]
    assert refused(call, x, jnp.float32(2), "eval") == ["mode: static value 'train' became 'eval'"]
    np.testing.assert_array_equal(call(x, jnp.float32(3), "train"), [3, 3, 3])


def test_a_changed_sharding():
    """One device after a mesh is told; the same placement in other words is none."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    mesh = make_mesh({"data": 1, "model": 1}, jax.devices()[:1])
    x = np.ones((4, 4), np.float32)
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for spec in ((), (None, None))]
    assert placed[0].sharding != placed[1].sharding
    assert changes("x", signature_of(placed[0]), signature_of(placed[1])) == []
    call, _ = guarded(lambda x: x + 1)
    call(placed[0])
    call(placed[1])
    assert call.compilations == 1
    host = [("x", signature_of(placed[0]), signature_of(x))]
    assert [changes(*each)[0].startswith("x: sharding NamedSharding") for each in host] == [True]
    assert (
        changes("x", signature_of(placed[0]), signature_of(jax.device_put(x, SingleDeviceSharding(jax.devices()[0]))))
        == []
    )


def test_warn_compiles_and_tells_once_per_kind():
    """Results are right, each new kind is told once with what changed, and going back costs nothing."""
    call, told = guarded(recompile="warn")
    current = state()
    for rows in (64, 64, 17, 64, 17):
        current, metrics = call(current, batch(rows))
        assert metrics["loss"] == rows * 128
    assert told == [["batch['tokens']: shape (64, 128) became (17, 128)"]]
    assert call.compilations == 2


def test_a_state_that_comes_back_otherwise_is_told():
    """A function whose own result is of another kind is caught at its second call, by the leaf."""
    import jax.numpy as jnp

    call, _ = guarded(lambda state, _: ({"w": state["w"].astype(jnp.bfloat16)}, {}))
    current, _ = call(state(), batch())
    assert refused(call, current, batch()) == ["state['w']: dtype float32 became bfloat16"]


def test_a_program_compiled_ahead():
    """Expected arguments, given as shapes, are served by it alone; others are refused before they reach it, or compiled for."""
    import jax

    def abstract(*arguments):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments)

    def compiled(arguments):
        return jax.jit(step).lower(*abstract(*arguments)).compile()

    for mode in ("forbid", "warn"):
        told = []
        call = Guarded(
            "step", "lm", ("state", "batch"), compiled, recompile=mode, on_recompile=told.append, weak_types=False
        )
        call.expect(abstract(state(), batch()), compiled((state(), batch())))
        current, _ = call(state(), batch())
        assert call.compilations == 1
        if mode == "forbid":
            assert refused(call, current, batch(17)) == ["batch['tokens']: shape (64, 128) became (17, 128)"]
        else:
            current, _ = call(current, batch(17))
            assert float(current["w"][0]) == (64 + 17) * 128
            assert len(told) == 1


def test_a_call_costs_microseconds():
    """With 1000 arrays of state that it gave back itself, the guard takes less than 100 us of a call: a few, on an idle machine."""
    import jax.numpy as jnp

    results = ({f"w{i}": jnp.zeros(2) for i in range(1000)}, {})
    call = Guarded(
        "step", "lm", ("state", "batch"), lambda _: lambda *_: results, recompile="forbid", on_recompile=print
    )
    fed = [batch(mask=jnp.ones(64, bool)) for _ in range(3)]
    call(results[0], fed[0])
    call(results[0], fed[1])
    best = min(_timed(lambda: call(results[0], fed[2])) for _ in range(200))
    assert best < 100e-6
    assert call.compilations == 1


def _timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- the training stage ------------------------------------------------------------------------


def train(step, **options):
    return Train("lm", data="rows", init=lambda _: state(), step=step, batch_size=64, steps=4, **options)


def lowered(stage):
    import jax

    placed = named_sharding(make_mesh({"data": 1}, jax.devices()[:1]))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), (state(), batch()))
    return lower_step(stage, *abstract, placed)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (lambda w: {"w": w.astype("bfloat16")}, "state['w']: dtype float32 became bfloat16"),
        (lambda w: {"w": w[:2]}, "state['w']: shape (3) became (2)"),
        (lambda w: {"w": w, "n": w[0]}, "state['n']: is new, float32[]"),
    ],
    ids=["dtype", "shape", "leaf"],
)
def test_a_step_that_gives_another_state_is_refused_before_it_is_compiled(after, told):
    """Its second call would compile anew: the leaf is named while it is traced."""
    with pytest.raises(RecompileError) as caught:
        lowered(train(lambda state, _: (after(state["w"]), {})))
    assert caught.value.data["changes"] == [told]


def test_a_step_that_keeps_its_state_is_compiled():
    """No false alarm, also where weak types become strong ones."""
    assert lowered(train(step)).compile() is not None
    assert lowered(train(lambda state, _: ({"w": state["w"] * 0 + 1.0}, {}))) is not None


def test_recompile_is_an_option_of_training():
    """Forbidden by default; anything else than the two words is refused."""
    assert train(step).recompile == "forbid"
    with pytest.raises(JobError, match="recompile='never' is not known"):
        train(step, recompile="never")


# -- the context -------------------------------------------------------------------------------


class Told:
    """A coordinator that only keeps what it is told."""

    def __init__(self):
        self.records = []

    def report(self, *records):
        self.records += records


class Leaking(StageContext):
    """Feeds a shorter last batch, as a reader that forgets to pad would."""

    def _feed(self, step):
        rows = 17 if step == self.last_step - 1 else 64
        import jax

        return FedBatch(step, jax.device_put(batch(rows, np.uint8, mask=np.ones(rows, bool)), self._sharding), 0)


def context(store, run, recompile):
    import jax

    table = to_table({"tokens": np.zeros((64, 128), np.uint8)})
    manifest = Manifest("rows", (ManifestUnit("000000-00000000", 64, (64,), 1),), table.schema)
    told = Told()
    return told, Leaking(
        target=SaveTarget(store, run.paths, "lm", run.lease.fence, 0, 1, timeout_s=5, silence_s=5),
        policy=SavePolicy.of(train(step).checkpoint),
        manifest=manifest,
        stream=Stream(manifest.chunk_rows, 0, 64, steps=4),
        batch_size=64,
        sharding=named_sharding(make_mesh({"data": 1}, jax.devices()[:1]), "data"),
        coordinator=told,
        start=None,
        preemption=lambda: (False, None),
        recompile=recompile,
    )


def test_the_context_refuses_a_fed_batch_of_another_shape(store, run):
    """A loop of one's own gets three batches; the fourth, which is short, is an error that names the column."""
    _, fed = context(store, run, "forbid")
    steps = []
    with pytest.raises(RecompileError, match="step 3 of stage 'lm'") as caught, fed.batches() as batches:
        steps.extend(each.step for each in batches)
    assert steps == [0, 1, 2]
    assert caught.value.data["changes"] == [
        "batch['mask']: shape (64) became (17)",
        "batch['tokens']: shape (64, 128) became (17, 128)",
    ]


def test_the_contexts_jit_counts_where_that_is_allowed(store, run):
    """With "warn" the loop goes on, and the driver hears once which argument changed, and logs it as a warning."""
    told, fed = context(store, run, "warn")
    call = fed.jit(step)
    current = state()
    with fed.batches() as batches:
        for each in batches:
            current, _ = call(current, each.arrays)
    assert float(current["w"][0]) == (3 * 64 + 17) * 128
    [record] = [record for record in told.records if record["kind"] == "recompiled"]
    assert "batch['tokens']: shape (64, 128) became (17, 128)" in record["changes"]

    logged = []
    run.absorb = lambda _: [record]
    run.log = type("Log", (), {"emit": lambda _, kind, message, **facts: logged.append((kind, message, facts))})()
    watch = TrainWatch(train(step), run, seconds=None, recovery=None)
    watch.look()
    [(kind, message, facts)] = logged
    assert (kind, watch.recompilations, facts["count"]) == ("recompiled", 1, 1)
    assert "became (17" in message
