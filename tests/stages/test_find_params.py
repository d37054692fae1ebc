"""Which parameters an inference stage loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpupipe.checkpoint.commit import Commit, Leaf, SavedObject
from tpupipe.errors import JobError, NoIntactCheckpointError
from tpupipe.stages.infer import find_params, parse_params_uri
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
    assert (found.folder, found.commit.step) == (folder, 20)


def test_no_checkpoint_is_an_error(run, job):
    """Nothing trained yet: no parameters are made up."""
    with pytest.raises(NoIntactCheckpointError):
        find_params(job.stage("score"), run)


def test_a_complete_stage_gives_its_last_parameters_or_none(run, job):
    """Trained to step 20 and recorded so, then 20 is damaged: the outputs must not come from step 10 unnoticed."""
    put(run.store, run.paths, 10)
    folder = put(run.store, run.paths, 20)
    fingerprint = find_params(job.stage("score"), run).commit.fingerprint
    record = TrainRecord(20, "p", "s", {}, folder, fingerprint, 80, 0)
    write_train_record(run.store, run.paths, "lm", record)
    assert find_params(job.stage("score"), run).commit.fingerprint == fingerprint
    run.store.put(f"{folder}/arrays/a", b"x")
    with pytest.raises(NoIntactCheckpointError):
        find_params(job.stage("score"), run)


def test_params_of_another_run(run, job, other):
    """The URI of its training stage: the newest."""
    assert find_params(stage(job, other), run).commit.step == 20


@pytest.mark.parametrize("step", [10, 20])
def test_params_of_one_checkpoint_of_another_run(run, job, other, step):
    """The URI of a checkpoint: that one, whether or not there are newer ones."""
    found = find_params(stage(job, f"{other}/checkpoints/{step:010d}-000001"), run)
    assert found.commit.step == step


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
        parse_params_uri(uri, run)
    assert "stages/<stage>" in caught.value.hint


def test_the_parts_of_a_uri(run):
    """Store, job, run, stage and the checkpoint's folder; a trailing slash does not matter."""
    named = "job/run/stages/lm/checkpoints/0000000020-000003"
    store, paths, name, folder = parse_params_uri(f"gs://bucket/a/b/{named}/", run)
    assert (str(store.root), paths, name, folder) == ("gs://bucket/a/b", RunPaths("job", "run"), "lm", named)
