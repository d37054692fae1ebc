"""Saving and restoring with the real Orbax, in one process of one, two or four devices."""

from __future__ import annotations

import json
import threading

import pytest

from tests.processes import until
from tpupipe.checkpoint.commit import Commit
from tpupipe.checkpoint.verify import list_checkpoints, newest_intact
from tpupipe.errors import CheckpointSaveError, FencedError, StoreDeniedError
from tpupipe.faults.points import arm
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Fence

PATHS = RunPaths("job", "run")
STAGE = "lm"


def test_a_checkpoint_of_four_devices_restores_on_two_and_on_one(tmp_path, endpoint, run_python):
    """Saved from 4 devices on each backend, restored on 4, 2 and 1: equal arrays, placed as asked."""
    stores = f"[open_store('file://{tmp_path}/store'), open_store('gs://resharded/runs', endpoint={endpoint!r})]"
    save = f"""
for store in {stores}:
    store.create(paths.identity, b"{{}}")  # every run has this first, and with it the bucket
    s = saver(store)
    s.save(7, placed(tree(3)), {{"loss": 0.25}})
    s.close()
"""
    load = f"""
for store in {stores}:
    found = newest_intact(store, paths, "lm")
    commit = found.commit
    assert (commit.step, commit.devices, commit.sample_digest, commit.metrics) == (7, 4, 77, {{"loss": 0.25}}), commit
    wanted = placed(tree(3))
    got = restore(store, found.folder, commit, abstract(wanted))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding, (a.sharding, b.sharding)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    print(devices, len(got["params"]["w"].sharding.device_set))
"""
    run_python(save, 4, endpoint)
    for devices in (4, 2, 1):
        assert run_python(load, devices, endpoint).split() == [str(devices)] * 4


def test_saving_compiles_nothing_for_small_arrays_and_restores_typed_keys(tmp_path, run_python):
    """Replicas do not share the writing of a few bytes: that would compile a program per shape. A large one is shared."""
    said = run_python(
        f"""
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
)
whole = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P())
small = {{str(n): jax.device_put(np.ones((4, n), np.float32), whole) for n in range(1, 9)}}
small["key"] = jax.device_put(jax.random.key(5), whole)
large = {{"l": jax.device_put(np.arange(1 << 20, dtype=np.float32), whole)}}
store = open_store({str(tmp_path / "store")!r})
s = saver(store)
for step, state in ((1, small), (2, large)):
    del compiled[:]
    s.save(step, state, {{}})
    print(len(compiled))
s.close()
for step, state in ((2, large), (1, small)):
    (found,) = [c for c in list_checkpoints(store, paths, "lm") if c.step == step]
    got = restore(store, found.folder, Commit.from_json(store.read(f"{{found.folder}}/COMMIT.json"), ""), abstract(state))
    print(all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)))
""",
        4,
    )
    small, large, *same = said.split()
    assert (small, same) == ("0", ["True", "True"])
    assert int(large) > 0


@pytest.mark.parametrize(
    ("place", "dies"), [("gs", "in the middle of writing"), ("file", "before the record")], indirect=["place"]
)
def test_what_a_dead_start_wrote_is_not_in_a_later_commit(place, run_python, dies):
    """Start 0 is killed while it saves step 5, start 1 saves step 5 again in a folder of its own, and it is whole."""
    if dies == "before the record":
        arm = 'Injection(parse_faults(["kill-worker@save.arrays_written"]), identity={}, claim=lambda *_: True, kill_driver=None).arm()'
        end = "s.finish()"
    else:
        arm = ""
        end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    opened = f"store = open_store({place.uri!r}, endpoint={place.endpoint!r})"
    store = place.open()
    store.create(PATHS.identity, b"{}")  # every run has this first, and with it the bucket
    run_python(
        f"""
{opened}
{arm}
s = saver(store, restart=0)
s.save(5, {{"w": jnp.ones((2_000_000,)), "b": jnp.ones(3)}}, {{}})
{end}
print("alive")
""",
        1,
        place.endpoint,
        check=False,
    )
    assert newest_intact(store, PATHS, STAGE).commit is None
    left = {name for f in list_checkpoints(store, PATHS, STAGE) for name in f.objects}
    assert left or dies == "in the middle of writing"
    run_python(
        f"""
{opened}
s = saver(store, restart=1)
s.save(5, {{"w": jnp.full((2_000_000,), 2.0), "b": jnp.ones(3)}}, {{}})
s.close()
""",
        1,
        place.endpoint,
    )
    found = newest_intact(store, PATHS, STAGE)
    assert found.folder == PATHS.checkpoint(STAGE, step=5, epoch=1, restart=1)
    listed = {info.name.removeprefix(found.folder + "/") for info in store.list(found.folder + "/")}
    assert {o.name for o in found.commit.objects} == listed - {"COMMIT.json"}
    assert found.commit.size_bytes > 1000


# -- in this process ----------------------------------------------------------------------------


@pytest.fixture
def jax():
    import jax

    return jax


def tree(layers=2, scale=1.0):
    import jax.numpy as jnp

    params = {f"layer{i}": {"w": jnp.full((4, 3), scale + i), "b": jnp.zeros(3)} for i in range(layers)}
    return {"params": params, "momentum": {"v": jnp.full((50,), scale)}, "count": jnp.int32(layers)}


def abstract(state):
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


class RefusesRecords:
    """The store, except that creating a COMMIT.json of some steps is refused, as without the permission for it."""

    def __init__(self, store, steps):
        self._store = store
        self._steps = steps

    def create(self, name, data):
        if name.endswith("COMMIT.json") and json.loads(data)["step"] in self._steps:
            raise StoreDeniedError(f"create {name} was refused: 403 Forbidden.", operation="create")
        return self._store.create(name, data)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_two_quick_saves_are_both_committed(file_store, make_saver):
    """The second waits for the first; both are there, in order, and told of once each."""
    committed = []
    saver = make_saver(file_store, committed=committed)
    saver.save(1, tree(), {"loss": 2.0})
    saver.save(2, tree(scale=5.0), {"loss": 1.0})
    saver.close()
    assert committed == [1, 2]
    assert [f.step for f in list_checkpoints(file_store, PATHS, STAGE) if f.committed] == [2, 1]
    assert saver.last_step == 2


def test_who_waits_for_a_save_is_told_of_progress_and_of_none_while_its_commit_hangs(file_store):
    """Something moves until the arrays are there; then nothing does until the commit goes on."""
    from tpupipe.checkpoint.saver import Saver, SaveTarget

    hung, go, moved = threading.Event(), threading.Event(), []
    target = SaveTarget(file_store, PATHS, STAGE, Fence(file_store, PATHS, 1), 0, 3, timeout_s=30)
    saver = Saver(
        target, primary=True, combine=int, on_commit=lambda *_: None, on_progress=lambda: moved.append(saver._moves)
    )
    waiter = threading.Thread(target=saver.close)
    arm(lambda name, _: (hung.set(), go.wait(120)) if name == "save.before_commit" else None)
    try:
        saver.save(1, tree(), {})
        waiter.start()
        assert hung.wait(60)
        until(lambda: moved and moved[-1] == saver._moves)  # what moved before is told of
        told = len(moved)
        waiter.join(1.0)
        assert waiter.is_alive()
        assert 0 < len(moved) == told
    finally:
        go.set()
        waiter.join(30)
        arm(None)
    assert not waiter.is_alive()
    assert [f.step for f in list_checkpoints(file_store, PATHS, STAGE) if f.committed] == [1]


def test_the_state_may_be_overwritten_as_soon_as_save_returns(jax, file_store, make_saver):
    """Donated right after save(): the checkpoint holds the values as they were."""
    from tpupipe.checkpoint.restore import restore

    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    state, wanted = tree(scale=3.0), tree(scale=3.0)
    saver = make_saver(file_store)
    saver.save(1, state, {})
    jax.block_until_ready(overwrite(state))
    saver.close()
    found = newest_intact(file_store, PATHS, STAGE)
    got = restore(file_store, found.folder, found.commit, abstract(wanted))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, wanted))


def test_retention_happens_after_each_commit(file_store, make_saver):
    """keep=2, five saves: the two newest stay."""
    saver = make_saver(file_store, keep=2)
    for step in (1, 2, 3, 4, 5):
        saver.save(step, {"w": tree()["count"]}, {})
    saver.close()
    assert [f.step for f in list_checkpoints(file_store, PATHS, STAGE)] == [5, 4]


def test_a_failed_background_save_is_raised_by_check(file_store, make_saver):
    """The record of step 5 is refused: check() raises before the next save, the message names step, place and cause."""
    saver = make_saver(RefusesRecords(file_store, {5}))
    saver.save(5, tree(), {})
    saver._background.join()
    with pytest.raises(CheckpointSaveError, match=r"step 5 .*403 Forbidden") as caught:
        saver.check()
    assert caught.value.data["step"] == 5
    assert isinstance(caught.value.__cause__, StoreDeniedError)
    assert newest_intact(file_store, PATHS, STAGE).commit is None


def test_a_failed_background_save_is_raised_by_the_next_save(file_store, make_saver):
    """The loop that never asks is told when it saves again, and that save does not begin."""
    saver = make_saver(RefusesRecords(file_store, {5}))
    saver.save(5, tree(), {})
    with pytest.raises(CheckpointSaveError, match="step 5"):
        saver.save(10, tree(), {})
    assert [f.step for f in list_checkpoints(file_store, PATHS, STAGE)] == [5]
    assert not any(f.committed for f in list_checkpoints(file_store, PATHS, STAGE))


def test_a_failed_final_save_is_raised_by_close(file_store, make_saver):
    """Only the last record is refused: close() raises, and the one before is what a restore gets."""
    saver = make_saver(RefusesRecords(file_store, {9}))
    saver.save(5, tree(), {})
    saver.save(9, tree(), {})
    with pytest.raises(CheckpointSaveError, match="step 9"):
        saver.close()
    assert newest_intact(file_store, PATHS, STAGE).commit.step == 5


def test_arrays_that_cannot_be_written_are_a_failed_save(file_place, run_python):
    """A file stands where the checkpoints' folder belongs: the save fails with the step in the message."""
    file_place.open().create(PATHS.checkpoints(STAGE), b"in the way")
    said = run_python(f"""
import os
from tpupipe.errors import CheckpointSaveError
s = saver(open_store({file_place.uri!r}))
try:
    s.save(1, tree(), {{}})
    s.close()
    print("saved")
except CheckpointSaveError as error:
    print(error.data["step"], error.message)
sys.stdout.flush()
os._exit(0)  # Orbax's own threads wait minutes for a folder that never comes
""")
    assert said.startswith("1 Saving step 1 to ")


def test_a_driver_that_lost_the_run_commits_nothing(file_store, make_saver):
    """A higher lease epoch exists: the arrays may be written, the record is not."""
    file_store.create(PATHS.lease(2), b"{}")
    saver = make_saver(file_store, epoch=1)
    saver.save(5, tree(), {})
    with pytest.raises(CheckpointSaveError, match="no longer owns") as caught:
        saver.close()
    assert isinstance(caught.value.__cause__, FencedError)
    assert newest_intact(file_store, PATHS, STAGE).commit is None


def test_a_damaged_checkpoint_can_be_saved_again_under_the_same_lease(file_store, make_saver):
    """Steps 5 and 10 saved, 10 damaged, the workers start again from 5 and reach 10: it is committed and intact."""
    first = make_saver(file_store)
    first.save(5, tree(), {})
    first.save(10, tree(), {})
    first.close()
    found = newest_intact(file_store, PATHS, STAGE)
    for o in found.commit.objects:
        file_store.delete(f"{found.folder}/{o.name}")
    assert newest_intact(file_store, PATHS, STAGE).commit.step == 5
    again = make_saver(file_store, restart=1)
    again.save(10, tree(), {})
    again.close()
    assert newest_intact(file_store, PATHS, STAGE).commit.step == 10


def test_no_thread_is_left(file_store, make_saver):
    """close() ends what saving started."""
    before = set(threading.enumerate())
    saver = make_saver(file_store)
    saver.save(1, tree(), {})
    saver.close()
    assert [t.name for t in set(threading.enumerate()) - before if t.name.startswith("save-")] == []


# -- restoring ----------------------------------------------------------------------------------


@pytest.fixture
def two_layers(file_store, make_saver):
    """A committed checkpoint of a model with two layers: folder and record."""
    saver = make_saver(file_store)
    saver.save(3, tree(2), {})
    saver.close()
    found = newest_intact(file_store, PATHS, STAGE)
    return found.folder, found.commit


def test_a_model_with_more_layers_is_refused_listing_the_leaves(file_store, two_layers):
    """Two layers saved, three wanted: the error lists the missing leaves, and nothing is loaded in part."""
    from tpupipe.checkpoint.restore import restore
    from tpupipe.errors import CheckpointMismatchError

    folder, commit = two_layers
    with pytest.raises(CheckpointMismatchError, match=r"missing: .*layer2.*\['b'\].*layer2.*\['w'\]") as caught:
        restore(file_store, folder, commit, abstract(tree(3)))
    assert caught.value.data["missing"] == ["['params']['layer2']['b']", "['params']['layer2']['w']"]
    assert caught.value.data["unexpected"] == []


def test_fewer_layers_and_other_shapes_are_refused_too(jax, file_store, two_layers):
    """What is saved and not wanted, and what has another shape or dtype, are differences as well."""
    from tpupipe.checkpoint.restore import restore
    from tpupipe.errors import CheckpointMismatchError

    folder, commit = two_layers
    with pytest.raises(CheckpointMismatchError, match=r"unexpected: .*layer1") as caught:
        restore(file_store, folder, commit, abstract(tree(1)))
    assert len(caught.value.data["unexpected"]) == 2
    other = abstract(tree(2))
    for shape, dtype in (((4, 4), "float32"), ((4, 3), "bfloat16")):
        other["params"]["layer0"]["w"] = jax.ShapeDtypeStruct(
            shape, dtype, sharding=other["params"]["layer0"]["b"].sharding
        )
        with pytest.raises(CheckpointMismatchError, match=r"changed: .*layer0.*saved float32"):
            restore(file_store, folder, commit, other)


def test_only_the_parameters_are_read(jax, file_store, two_layers):
    """restore_params: the optimizer's arrays are not fetched, the parameters are equal."""
    from tpupipe.checkpoint.restore import restore_params

    folder, commit = two_layers
    read = []

    def picks(state):
        read.append(
            [
                jax.tree_util.keystr(p)
                for p, x in jax.tree_util.tree_flatten_with_path(state)[0]
                if isinstance(x, jax.Array)
            ]
        )
        return state["params"]

    got = restore_params(file_store, folder, commit, abstract(tree()), picks)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, tree()["params"]))
    assert len(read[-1]) == 4
    assert all("params" in path for path in read[-1])


def test_parameters_that_are_computed_come_from_the_whole_state(jax, file_store, two_layers):
    """params() that averages leaves: everything is read, and it is called on real arrays."""
    from tpupipe.checkpoint.restore import restore_params

    folder, commit = two_layers

    def computes(state):
        return {"w": jax.numpy.sqrt(state["params"]["layer0"]["w"])}

    got = restore_params(file_store, folder, commit, abstract(tree()), computes)
    assert (got["w"] == computes(tree())["w"]).all()


def test_arrays_that_cannot_be_read_are_an_error(file_place, run_python):
    """Array files are gone although nobody verified them: CheckpointReadError naming the folder, no partial state."""
    said = run_python(f"""
import os
from tpupipe.errors import CheckpointReadError
store = open_store({file_place.uri!r})
s = saver(store)
s.save(3, tree(), {{}})
s.close()
found = newest_intact(store, paths, "lm")
for o in found.commit.objects:
    if "/d/" in o.name:
        store.delete(f"{{found.folder}}/{{o.name}}")
try:
    restore(store, found.folder, found.commit, abstract(tree()))
    print("restored")
except CheckpointReadError as error:
    print(type(error).__name__, error.data["folder"] == found.folder, error.message)
sys.stdout.flush()
os._exit(0)  # Orbax leaves callbacks behind that complain at exit
""")
    assert said.startswith("CheckpointReadError True Reading the arrays of step 3 at ")


def test_the_record_lists_what_the_store_holds(file_store, two_layers):
    """Names, sizes and checksums in the record are those of the objects, all of them."""
    folder, commit = two_layers
    listed = {
        info.name.removeprefix(folder + "/"): (info.size, file_store.checksum(info.name))
        for info in file_store.list(folder + "/")
        if not info.name.endswith("COMMIT.json")
    }
    assert {o.name: (o.size, o.crc32c) for o in commit.objects} == listed
    assert isinstance(commit, Commit)


def test_params_digest_is_of_the_bytes_in_tree_order(jax):
    """Equal values, equal digest; another value, order of leaves or dtype, another digest."""
    import hashlib

    import numpy as np

    from tpupipe.checkpoint.tree import params_digest

    a, b = np.arange(3, dtype=np.float32), np.ones(2, np.int32)
    assert (
        params_digest({"a": jax.numpy.asarray(a), "b": jax.numpy.asarray(b)})
        == hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
    )
    assert params_digest({"a": b, "b": a}) != params_digest({"a": a, "b": b})
