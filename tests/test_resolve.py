"""From a module and a configuration to the job that runs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from pydantic import BaseModel

from tpupipe.checkpoint.policy import Every, OnPreemption, SavePolicy
from tpupipe.config import Config, StageConfig
from tpupipe.data.sources import Files
from tpupipe.errors import ConfigError, JobError, UsageError
from tpupipe.job import Infer, Job, Preprocess, Quarantine, Train
from tpupipe.resolve import call_build, configured, load_build, parameter_model, resolve

ROOT = Path(__file__).parents[1]
WORLD = "store: gs://bucket/runs\ncluster: {kind: fake, generation: v6e, topology: 2x4}\n"


class Params(BaseModel):
    width: int = 4
    steps: int = 10


def make_job(steps: int = 10, **changes) -> Job:
    train = {"init": lambda key: key, "step": lambda state, _: (state, {}), "batch_size": 8, "steps": steps}
    return Job(
        "job",
        [
            Preprocess("tokens", Files("/nowhere/*"), map=lambda batch: batch),
            Train("lm", "tokens", **(train | changes)),
            Infer("score", "tokens", params="lm", apply=lambda _, batch: batch),
        ],
    )


def build(cfg: Params) -> Job:
    return make_job(cfg.steps)


def world(**stages) -> Config:
    return Config.model_validate(
        {
            "store": {"uri": "gs://b-1/x"},
            "cluster": {"kind": "fake", "generation": "v6e", "topology": "2x4"},
            "stages": {name: StageConfig.model_validate(keys) for name, keys in stages.items()},
        }
    )


# -- the build function --------------------------------------------------------------------------


def test_the_annotation_types_the_parameters():
    """build(cfg: Params) takes Params; a build without parameters takes none."""
    assert parameter_model(build) is Params
    assert parameter_model(lambda: None) is None


@pytest.mark.parametrize("annotation", [None, "int", "dict", "Missing", "Params | None"])
def test_another_annotation_is_refused(annotation):
    """Nothing, a plain type, a name that does not exist: an error that shows what to write."""
    scope = {"Params": Params}
    exec(f"def build(cfg{f': {annotation!r}' if annotation else ''}): ...", scope)
    with pytest.raises(JobError):
        parameter_model(scope["build"])


@pytest.mark.parametrize("result", [None, {"job": 1}, [], "job"])
def test_build_must_give_a_job(result):
    """The error says what it gave."""
    with pytest.raises(JobError, match=type(result).__name__):
        call_build(lambda: result, None)


def test_the_configuration_reaches_build(tmp_path):
    """Files in order, then --set; the job section is typed by the model."""
    (tmp_path / "a.yaml").write_text(WORLD + "job: {steps: 3, width: 5}\n")
    (tmp_path / "b.yaml").write_text("job: {steps: 4}\nsample: 1%\n")
    job, config = resolve(build, [tmp_path / "a.yaml", tmp_path / "b.yaml"], ["job.width=6", "stages.lm.seed=3"])
    assert (job.stage("lm").steps, job.stage("lm").seed) == (4, 3)
    assert (config.sample, config.job["width"]) == ("1%", 6)


def test_unknown_and_wrong_parameters_are_listed_together(tmp_path):
    """Both problems in one error, with the nearest name."""
    (tmp_path / "a.yaml").write_text(WORLD + "job: {stepz: 3, width: wide}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(build, [tmp_path / "a.yaml"])
    assert {p.path for p in caught.value.data["problems"]} == {"job.stepz", "job.width"}
    assert "steps" in str(caught.value)


# -- modules -------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a job module and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write(text: str, name: str = "") -> str:
        name = name or f"job_{uuid.uuid4().hex[:8]}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    """As with python -m, without PYTHONPATH."""
    name = f"job_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text("def build(): return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    assert load_build(name)() == 7


@pytest.mark.parametrize("name", ["jobs.no_such_job", "no_such_package.job", "jobs/stdlib_lm.py", "nojob-at-all"])
def test_a_missing_module_is_a_usage_error(name):
    """The name, where it was looked for, and how to name one."""
    with pytest.raises(UsageError, match="no module") as caught:
        load_build(name)
    assert name in caught.value.message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("name", ["", ".", ".job", "..jobs.digits"])
def test_what_cannot_be_a_module_is_a_usage_error(name):
    """Nothing, or a relative name: exit status 2, not a traceback."""
    with pytest.raises(UsageError):
        load_build(name)


def test_a_module_without_build_is_a_usage_error(module):
    """The message shows the signature."""
    for text in ("", "build = 3\n"):
        with pytest.raises(UsageError, match="no function build"):
            load_build(module(text))


def test_a_dependency_that_is_missing_is_named(module):
    """The job's module is there, something it imports is not."""
    name = module("import no_such_dependency\n")
    with pytest.raises(UsageError, match="no_such_dependency") as caught:
        load_build(name)
    assert "Install" in caught.value.hint


def test_a_dependency_whose_name_begins_like_the_job_is_named_too(module):
    """opt_job imports opt, which is missing: opt_job is there, and the message must not say otherwise."""
    letters = uuid.uuid4().hex[:8]
    name = module(f"import abc_{letters}\n", name=f"abc_{letters}_job")
    with pytest.raises(UsageError, match="Importing") as caught:
        load_build(name)
    assert "Install" in caught.value.hint


_TOUCHES = """
import sys
sys.path.insert(0, {folder!r})
from tpupipe.errors import JobError
from tpupipe.resolve import load_build
try:
    load_build({name!r})
    print("loaded")
except JobError as error:
    print(type(error).__name__, error.exit_status, error.message, error.hint)
"""


@pytest.mark.parametrize(
    ("text", "touches"),
    [
        ("import jax\nN = jax.device_count()\n", True),
        ("import jax\nKEY = jax.random.key(0)\n", True),
        ("import jax, jax.numpy as jnp\nf = jax.jit(lambda x: x)\n", False),
        ("import jax\nS = jax.ShapeDtypeStruct((2,), 'float32')\n", False),
        ("", False),
    ],
)
def test_touching_devices_at_import_is_refused(tmp_path, text, touches):
    """jax.devices() while the module is imported counts this machine's: an error that explains the order.

    Importing JAX, and jitting without running, are fine.
    """
    (tmp_path / "early.py").write_text(text + "def build(): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", _TOUCHES.format(folder=str(tmp_path), name="early")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    if touches:
        assert done.stdout.startswith("JobError 2 Importing early made JAX look for devices")
        assert "init, step, apply or map" in done.stdout
    else:
        assert done.stdout == "loaded\n"


# -- changes of stages ---------------------------------------------------------------------------


def test_every_stage_kind_takes_its_keys():
    """Given keys replace the declaration's, the others stay."""
    config = world(
        tokens={"chunk_rows": 7, "concurrency": 3},
        lm={"batch_size": 16, "seed": 9, "mesh": {"data": 2, "model": -1}, "sharding": "fsdp", "log_every_s": 2.0},
        score={"batch_rows": 5},
    )
    job = configured(make_job(), config)
    train = job.stage("lm")
    assert job.stage("tokens").chunk_rows == 7
    assert (train.batch_size, train.seed, train.mesh, train.sharding) == (16, 9, {"data": 2, "model": -1}, "fsdp")
    assert train.steps == 10
    assert job.stage("score").batch_rows == 5
    assert configured(make_job(), world()).stage("lm").batch_size == 8


def test_steps_replace_epochs_and_the_other_way_round():
    """Only one of them is ever set."""
    by_steps = configured(make_job(steps=None, epochs=2), world(lm={"steps": 5})).stage("lm")
    assert (by_steps.steps, by_steps.epochs) == (5, None)
    by_epochs = configured(make_job(), world(lm={"epochs": 2})).stage("lm")
    assert (by_epochs.steps, by_epochs.epochs) == (None, 2)


@pytest.mark.parametrize(
    ("declared", "keys", "steps", "minutes", "keep"),
    [
        (Every(steps=100, keep=2), {"steps": 5}, 5, None, 2),
        (Every(steps=100, keep=2), {"minutes": 3.0}, None, 3.0, 2),
        (Every(steps=100, keep=2), {"keep": 9}, 100, None, 9),
        (Every(minutes=7), {"steps": 5, "minutes": 2.0, "keep": 1}, 5, 2.0, 1),
        ([Every(steps=100), Every(minutes=7, keep=4)], {"keep": 5}, 100, 7, 5),
    ],
)
def test_checkpoint_intervals(declared, keys, steps, minutes, keep):
    """A given interval replaces the declared ones; keep alone leaves them."""
    job = configured(make_job(checkpoint=declared), world(lm={"checkpoint": keys}))
    policy = SavePolicy.of(job.stage("lm").checkpoint)
    assert (policy.steps, policy.minutes, policy.keep) == (steps, minutes, keep)


def test_on_preemption_stays():
    """The configuration says how often, not whether a preemption is heeded."""
    declared = [Every(steps=100), OnPreemption(min_notice_s=9)]
    job = configured(make_job(checkpoint=declared), world(lm={"checkpoint": {"steps": 5}}))
    assert SavePolicy.of(job.stage("lm").checkpoint).preemption_min_notice_s == 9


def test_bad_rows_and_recompile_of_an_inference_stage():
    """``quarantine`` keeps the job's limit where it has one; ``fail`` takes it away; a key left out changes nothing."""
    score = configured(make_job(), world(score={"bad_rows": "quarantine", "recompile": "warn"})).stage("score")
    assert (score.bad_rows, score.recompile) == (Quarantine(), "warn")
    job = make_job()
    limited = Job("job", [*job.stages[:-1], dataclasses.replace(job.stage("score"), bad_rows=Quarantine(max=7))])
    assert configured(limited, world(score={"bad_rows": "quarantine"})).stage("score").bad_rows == Quarantine(max=7)
    assert configured(limited, world(score={"bad_rows": "fail"})).stage("score").bad_rows == "fail"
    assert configured(limited, world(score={"batch_rows": 3})).stage("score").bad_rows == Quarantine(max=7)


def test_an_unknown_stage_and_wrong_keys_are_listed_together():
    """All problems at once, the nearest stage, and the kind of stage that a key is not for."""
    config = world(lmm={"seed": 1}, tokens={"seed": 1, "steps": 4}, lm={"chunk_rows": 3}, score={"epochs": 1})
    with pytest.raises(ConfigError) as caught:
        configured(make_job(), config)
    problems = caught.value.data["problems"]
    assert len(problems) == 5
    text = str(caught.value)
    assert "stages.lmm: the job has no such stage; it has tokens, lm, score (nearest: lm)" in text
    for part in (
        "stages.tokens.seed: not for a Preprocess stage",
        "stages.tokens.steps: not for a Preprocess stage",
        "stages.lm.chunk_rows: not for a Train stage",
        "stages.score.epochs: not for a Infer stage",
    ):
        assert part in text


def test_every_key_of_the_schema_is_for_some_stage():
    """A key that the schema takes and no stage kind has would be silently without effect."""
    from tpupipe.resolve import _KEYS

    assert set(_KEYS) == set(StageConfig.model_fields)


def test_a_change_that_breaks_the_declaration_is_a_job_error():
    """A mesh without the batch's axis."""
    with pytest.raises(JobError, match="batch_axes"):
        configured(make_job(), world(lm={"mesh": {"model": -1}}))
