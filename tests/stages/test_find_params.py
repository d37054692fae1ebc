"""Which parameters an inference stage loads."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from tpupipe.checkpoint.commit import Commit, Leaf, SavedObject
from tpupipe.data.pretrained import Pretrained
from tpupipe.errors import DataError, JobError, NoIntactCheckpointError, UserCodeError
from tpupipe.stages.infer_params import find_params, parse_params_uri
from tpupipe.stages.record import TrainRecord, write_train_record
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import crc32c_of


def put(store, paths, step, epoch=1, stage="lm"):
    data = f"arrays of {step}".encode()
    folder = paths.checkpoint(stage, step=step, epoch=epoch)
    store.create(f"{folder}/arrays/a", data)
    objects = (SavedObject("arrays/a", len(data), crc32c_of(data)),)
    commit = Commit(step, epoch, "arrays", objects, (Leaf("['w']", (1,), "float32"),), 0)
    store.create(paths.checkpoint_commit(stage, step=step, epoch=epoch), commit.to_json())
    return folder


@pytest.fixture
def other(store):
    """Another run with checkpoints of steps 10 and 20; gives the URI of its training stage."""
    paths = RunPaths("other", "r1")
    for step in (10, 20):
        put(store, paths, step)
    return store.uri(paths.stage("lm"))


def stage(job, params):
    return replace(job.stage("score"), params=params, init=lambda key: key)


def test_params_of_this_run(run, job):
    """The newest checkpoint of the stage that was named."""
    put(run.store, run.paths, 10)
    folder = put(run.store, run.paths, 20)
    found = find_params(job.stage("score"), run)
    assert (found.folder, found.step) == (folder, 20)


def test_no_checkpoint_is_an_error(run, job):
    """Nothing trained yet: no parameters are made up."""
    with pytest.raises(NoIntactCheckpointError):
        find_params(job.stage("score"), run)


def test_a_complete_stage_gives_its_last_parameters_or_none(run, job):
    """Trained to step 20 and recorded so, then 20 is damaged: the outputs must not come from step 10 unnoticed."""
    put(run.store, run.paths, 10)
    folder = put(run.store, run.paths, 20)
    fingerprint = find_params(job.stage("score"), run).fingerprint
    record = TrainRecord(20, "p", "s", {}, folder, fingerprint, 80, 0)
    write_train_record(run.store, run.paths, "lm", record)
    assert find_params(job.stage("score"), run).fingerprint == fingerprint
    run.store.put(f"{folder}/arrays/a", b"x")
    with pytest.raises(NoIntactCheckpointError):
        find_params(job.stage("score"), run)


def test_params_of_another_run(run, job, other):
    """The URI of its training stage: the newest."""
    assert find_params(stage(job, other), run).step == 20


@pytest.mark.parametrize("step", [10, 20])
def test_params_of_one_checkpoint_of_another_run(run, job, other, step):
    """The URI of a checkpoint: that one, whether or not there are newer ones."""
    found = find_params(stage(job, f"{other}/checkpoints/{step:010d}-000001"), run)
    assert found.step == step


def test_a_checkpoint_that_is_not_there_is_an_error(run, job, other):
    """Not the nearest one."""
    with pytest.raises(NoIntactCheckpointError):
        find_params(stage(job, f"{other}/checkpoints/0000000015-000001"), run)


def test_a_uri_needs_the_structure_of_the_state(run, job, other):
    """Without init= nobody knows the tree."""
    with pytest.raises(JobError, match="init="):
        find_params(replace(job.stage("score"), params=other), run)


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/job/run",
        "gs://bucket/x/job/run/stages/",
        "gs://bucket/x/job/run/stages/lm/units",
        "gs://bucket/x/job/run/stages/lm/checkpoints/20",
        "gs://bucket/x/job/run/stages/lm/checkpoints/0000000020-000001/arrays",
    ],
)
def test_what_is_no_training_stage_is_refused(run, uri):
    """JobError with the form that is allowed."""
    with pytest.raises(JobError, match="not a training stage") as caught:
        parse_params_uri(uri, run.config.store, None)
    assert "stages/<stage>" in caught.value.hint


def test_the_parts_of_a_uri(run):
    """Store, job, run, stage and the checkpoint's folder; a trailing slash does not matter."""
    named = "job/run/stages/lm/checkpoints/0000000020-000003"
    store, paths, name, folder = parse_params_uri(f"gs://bucket/a/b/{named}/", run.config.store, run.endpoint)
    assert (str(store.root), paths, name, folder) == ("gs://bucket/a/b", RunPaths("job", "run"), "lm", named)


# -- parameters that no run trained ---------------------------------------------------------


def read_numbers(weights: bytes, bias: bytes):
    import numpy as np

    return {"weights": np.frombuffer(weights, np.float32), "bias": np.frombuffer(bias, np.float32)}


@pytest.fixture
def files(tmp_path):
    """Two files of float32 numbers."""
    import numpy as np

    (tmp_path / "w").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "b").write_bytes(np.ones(1, np.float32).tobytes())
    return [tmp_path / "w", tmp_path / "b"]


def found_in(files, run, job, load=read_numbers):
    return find_params(replace(job.stage("score"), params=Pretrained(files, load)), run)


def on_device(found):
    import jax
    from jax.sharding import SingleDeviceSharding

    return found.load(lambda tree: jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree))


def test_pretrained_files_become_arrays_on_the_devices(run, job, files):
    """``load`` gets each file's bytes in the order they were named."""
    import jax

    loaded = on_device(found_in(files, run, job))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    assert jax.tree.map(lambda leaf: leaf.tolist(), loaded) == {"weights": [0, 1, 2, 3], "bias": [1]}


def test_the_fingerprint_is_of_the_bytes(run, job, files, tmp_path):
    """The same bytes elsewhere: the same. Other bytes, another order, or bytes moved between files: another."""
    first = found_in(files, run, job).fingerprint
    copies = [tmp_path / "copy of w", tmp_path / "copy of b"]
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    assert found_in(copies, run, job).fingerprint == first
    assert found_in(copies[::-1], run, job).fingerprint != first
    joined = b"".join(file.read_bytes() for file in files)
    for cut in (0, 4, len(joined)):
        copies[0].write_bytes(joined[:cut])
        copies[1].write_bytes(joined[cut:])
        assert found_in(copies, run, job).fingerprint != first
    digests = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    assert first == hashlib.sha256(digests).hexdigest()[:32], "committed units name it: it must not change by itself"


def test_a_host_with_other_files_is_an_error(run, job, files):
    """Found by the driver, changed before a worker read them: no unit is made with them."""
    found = found_in(files, run, job)
    files[0].write_bytes(b"\0" * 16)
    with pytest.raises(DataError, match="not those the run started with"):
        on_device(found)


def test_a_file_that_is_not_there_is_named(run, job, files):
    """By the driver, before any worker starts."""
    with pytest.raises(DataError, match="no such"):
        found_in([files[0], files[0].with_name("no such")], run, job)


@pytest.mark.parametrize("load", [lambda w, _: 1 / len(w[:0]), lambda _, __: {"name": "not an array"}])
def test_what_load_does_wrong_is_the_jobs_error(run, job, files, load):
    """It raises, or gives a leaf that is no array: UserCodeError, with the stage."""
    with pytest.raises(UserCodeError, match="load of stage 'score'"):
        on_device(found_in(files, run, job, load))
