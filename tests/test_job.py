"""What a job declaration refuses, and what the message says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpupipe import Buckets, Every, Files, Infer, Job, OnPreemption, Preprocess, Pretrained, Quarantine, Train
from tpupipe.errors import JobError
from tpupipe.job import default_params

SOURCE = Files("/nowhere/*")
P = {"name": "tokens", "source": SOURCE, "map": lambda batch: batch}
T = {
    "name": "lm",
    "data": "tokens",
    "init": lambda key: key,
    "step": lambda state, batch: (state, batch),
    "batch_size": 8,
    "steps": 10,
}
I = {"name": "score", "data": SOURCE, "params": "lm", "apply": lambda params, batch: (params, batch)}  # noqa: E741


def without(fields: dict, *names: str) -> dict:
    return {key: value for key, value in fields.items() if key not in names}


def test_a_whole_job():
    """One stage of each kind, by name and in order."""
    job = Job("job", [Preprocess(**P), Train(**T), Infer(**I)])
    assert job.stage_names == ("tokens", "lm", "score")
    assert isinstance(job.stages, tuple)
    assert job.stage("lm").batch_size == 8
    with pytest.raises(JobError, match="no stage 'l'") as caught:
        job.stage("l")
    assert "tokens, lm, score" in caught.value.hint


NAMES = ["", "A", "a b", "-a", ".a", "a/b", "a" * 64, "ü", "a\n", None, 3]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_cannot_be_folders_are_refused(name):
    """Of jobs and of every kind of stage; the hint says what is allowed."""
    for make in (
        lambda: Preprocess(**(P | {"name": name})),
        lambda: Train(**(T | {"name": name})),
        lambda: Infer(**(I | {"name": name})),
        lambda: Job(name, [Preprocess(**P)]),
    ):
        with pytest.raises(JobError, match="is not allowed") as caught:
            make()
        assert "1 to 63 of a-z 0-9" in caught.value.hint


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b-c_d"])
def test_names_that_are_allowed(name):
    """Everything the store's layout takes."""
    assert Job(name, [Preprocess(**(P | {"name": name}))]).stage_names == (name,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "/nowhere/*"}, "source='/nowhere/\\*' is not a source"),
        ({"source": None}, "is not a source"),
        ({"map": None}, "exactly one of map= and dataset="),
        ({"dataset": lambda ds: ds}, "exactly one of map= and dataset="),
        ({"map": 3}, "map=3 is not callable"),
        ({"map": lambda: None}, "map must take 1 positional"),
        ({"map": lambda a, b: (a, b)}, "map must take 1 positional"),
        ({"map": None, "dataset": lambda: None}, "dataset must take 1 positional"),
        ({"chunk_rows": 0}, "chunk_rows=0 must be a whole number of at least 1"),
        ({"chunk_rows": 2.0}, "chunk_rows=2.0 must be a whole number"),
        ({"chunk_rows": True}, "chunk_rows=True must be a whole number"),
        ({"chunk_rows": "2"}, "chunk_rows='2' must be a whole number"),
    ],
)
def test_preprocess(changes, says):
    """Each wrong option, by name and value."""
    with pytest.raises(JobError, match=says) as caught:
        Preprocess(**(P | changes))
    assert "'tokens'" in caught.value.message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init": lambda: None}, "init must take 1 positional"),
        ({"init": "init"}, "init='init' is not callable"),
        ({"step": lambda state: state}, "step must take 2 positional"),
        ({"params": lambda: None}, "params must take 1 positional"),
        ({"steps": None}, "exactly one of steps= and epochs="),
        ({"epochs": 1}, "exactly one of steps= and epochs="),
        ({"batch_size": 0}, "batch_size=0"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"steps": None, "epochs": 0}, "epochs=0"),
        ({"mesh": {}}, "mesh={}"),
        ({"mesh": {"data": 0}}, "axis sizes are positive"),
        ({"mesh": {"data": -2}}, "axis sizes are positive"),
        ({"mesh": {"data": 2.0}}, "axis sizes are positive"),
        ({"mesh": {"data": -1, "model": -1}}, "only one axis may be -1"),
        ({"batch_axes": ("rows",)}, "batch_axes names 'rows'"),
        ({"batch_axes": "data"}, "batch_axes"),
        ({"sharding": "zero3"}, "sharding='zero3' is not known"),
        ({"checkpoint": None}, "cannot be switched off"),
        ({"checkpoint": ()}, "cannot be switched off"),
        ({"checkpoint": False}, "cannot be switched off"),
        ({"checkpoint": "never"}, "cannot be switched off"),
        ({"checkpoint": OnPreemption()}, "cannot be switched off"),
        ({"checkpoint": [Every(steps=1), None]}, "cannot be switched off"),
    ],
)
def test_train(changes, says):
    """Each wrong option, by name and value, before anything is reserved."""
    with pytest.raises(JobError, match=says):
        Train(**(T | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"apply": lambda batch: batch}, "apply must take 2 positional"),
        ({"map": lambda: None}, "map must take 1 positional"),
        ({"data": None}, "neither a source nor a stage name"),
        ({"data": ["tokens"]}, "neither a source nor a stage name"),
        ({"params": ""}, "params='' must be"),
        ({"params": None}, "params=None must be"),
        ({"ragged_outputs": ("nll",)}, "ragged_outputs needs buckets"),
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"bad_rows": "quarantine"}, "bad_rows='quarantine' is not known"),
        ({"recompile": "never"}, "recompile='never' is not known"),
        ({"buckets": Buckets(too_long="quarantine")}, "needs bad_rows=Quarantine"),
    ],
)
def test_infer(changes, says):
    """Each wrong option, by name and value."""
    with pytest.raises(JobError, match=says):
        Infer(**(I | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (Train, T | {"batch_size": None}, "batch_size=None"),
        (Train, T | {"seed": -1}, "seed=-1"),
        (Train, T | {"seed": 2**64}, "seed="),
        (Train, T | {"seed": 0.5}, "seed=0.5"),
        (Train, T | {"seed": None}, "seed=None"),
        (Train, T | {"sharding": None}, "sharding=None is not known"),
        (Train, T | {"sharding": lambda path: path}, "sharding must take 3 positional"),
        (Train, T | {"data": SOURCE}, "data="),
        (Train, T | {"data": 3}, "data=3"),
        (Infer, I | {"init": 3}, "init=3 is not callable"),
        (Infer, I | {"keep": "path"}, "keep='path'"),
        (Infer, I | {"ragged_outputs": "nll", "buckets": Buckets(lengths=(8,))}, "ragged_outputs='nll'"),
        (Infer, I | {"buckets": (8, 16)}, "buckets="),
    ],
)
def test_what_would_only_fail_on_the_slice(kind, changes, says):
    """Refused where it is declared, not after the slice was reserved and the earlier stages ran."""
    with pytest.raises(JobError, match=says):
        kind(**changes)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([], "has no stages"),
        ([Preprocess(**P), Preprocess(**P)], "two stages are named 'tokens'"),
        ([Preprocess(**P), 3], "3 is not a Preprocess, Train or Infer stage"),
        ([Train(**T)], "data='tokens' is not an earlier Preprocess stage"),
        ([Train(**T), Preprocess(**P)], "data='tokens' is not an earlier Preprocess stage"),
        (
            [Preprocess(**P), Train(**T), Train(**(T | {"name": "x", "data": "lm"}))],
            "data='lm' is not an earlier Prepro",
        ),
        ([Infer(**I)], "params='lm' is not an earlier Train stage"),
        ([Preprocess(**P), Infer(**(I | {"params": "tokens"}))], "params='tokens' is not an earlier Train stage"),
        ([Preprocess(**P), Train(**T), Infer(**(I | {"data": "lm"}))], "data='lm' is not an earlier Preprocess stage"),
    ],
)
def test_jobs(stages, says):
    """No stages, one name twice, what is no stage, and references that go nowhere or backwards."""
    with pytest.raises(JobError, match=says):
        Job("job", stages)


def test_a_wrong_reference_lists_what_fits():
    """The earlier stages of the right kind."""
    with pytest.raises(JobError) as caught:
        Job("job", [Preprocess(**P), Preprocess(**(P | {"name": "more"})), Train(**(T | {"data": "token"}))])
    assert "tokens, more" in caught.value.hint


def test_params_by_uri_need_no_stage():
    """A URI points outside the job."""
    assert Job("job", [Infer(**(I | {"params": "gs://b/x/job/run/stages/lm"}))]).stage_names == ("score",)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None])
def test_quarantine_needs_a_limit(limit):
    """A whole number of rows, at least 1."""
    with pytest.raises(JobError, match=r"Quarantine\(max="):
        Quarantine(max=limit)


def test_builtins_without_a_signature_are_taken():
    """They are checked when they are called."""
    assert Preprocess(**(P | {"map": dict})).map is dict


def test_pretrained_params_need_no_stage_and_no_file_yet():
    """Declared without looking: one path or several, text or Path; load takes as many arguments."""
    assert Pretrained(Path("/nowhere/m"), len).files == ("/nowhere/m",)
    pretrained = Pretrained(["gs://b/one", "gs://b/two"], lambda one, two: (one, two))
    assert pretrained.files == ("gs://b/one", "gs://b/two")
    assert Job("job", [Infer(**(I | {"params": pretrained}))]).stage_names == ("score",)


@pytest.mark.parametrize(
    ("files", "load", "said"),
    [
        ([], len, "files=[]) must be"),
        ("", len, "files='') must be"),
        (None, len, "files=None) must be"),
        (["a", 3], len, "files=['a', 3]) must be"),
        (b"a", len, "files=b'a') must be"),
        ("a", None, "load=None is not callable"),
        (["a", "b"], lambda one: one, "load must take 2 positional"),
    ],
)
def test_what_pretrained_refuses(files, load, said):
    """When it is declared, with the value."""
    with pytest.raises(JobError) as caught:
        Pretrained(files, load)
    assert said in str(caught.value)


def test_default_params():
    """The params key or attribute, else the state itself."""

    class State:
        params = 3

    assert default_params({"params": 1, "opt": 2}) == 1
    assert default_params(State()) == 3
    assert default_params((1, 2)) == (1, 2)


def test_declaring_a_job_imports_neither_ray_nor_jax():
    """Nor pyarrow: a declaration is read by schedulers and checks too."""
    code = """
import sys
from tpupipe import *
Job("job", [Preprocess("p", Files("/x"), map=dict), Train("t", "p", init=lambda k: k, step=lambda s, b: s, batch_size=1, steps=1)])
print(sorted({"ray", "jax", "orbax", "pyarrow", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
