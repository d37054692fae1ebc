"""From a module and a configuration to the job that will run: build it, lay the configuration's changes over it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tpupipe.checkpoint.policy import Every, SavePolicy
from tpupipe.config import Config, StageConfig, job_parameters, load_config
from tpupipe.errors import ConfigError, JobError, TpupipeError, UsageError
from tpupipe.faults.plan import parse_fault
from tpupipe.faults.store_faults import StoreFault
from tpupipe.job import Infer, Job, Preprocess, Quarantine, Stage, Train

Build = Callable[..., Job]

# Which stage kinds a key of `stages.<name>` is for.
_KEYS: dict[str, tuple[type[Stage], ...]] = {
    "checkpoint": (Train,),
    "epochs": (Train,),
    "steps": (Train,),
    "batch_size": (Train,),
    "seed": (Train,),
    "log_every_s": (Train,),
    "mesh": (Train, Infer),
    "sharding": (Train, Infer),
    "parallel": (Infer,),
    "spare": (Train,),
    "chunk_rows": (Preprocess,),
    "batch_rows": (Infer,),
    "bad_rows": (Infer,),
    "recompile": (Train, Infer),
    "concurrency": (Preprocess, Infer),
    "stall_timeout_s": (Preprocess, Train, Infer),
    "compile_timeout_s": (Train, Infer),
    "restore_timeout_s": (Train, Infer),
}
_DECLARED = ("batch_size", "seed", "mesh", "sharding", "parallel", "chunk_rows", "batch_rows", "recompile")


def load_build(module_name: str) -> Build:
    """The ``build`` function of a job module, looked for in the current folder first.

    Raises:
        UsageError: No such module, or it has no ``build``.
        JobError: Importing it touched JAX's devices.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    before = jax_is_awake()
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(
            f"There is no module {module_name!r}: that cannot be the name of one.",
            hint="jobs.stdlib_lm, as for `python -m`.",
            module=module_name,
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"Importing {module_name!r} failed: {error}.", hint="Install what the job needs.", module=module_name
            ) from error
        raise UsageError(
            f"There is no module {module_name!r} (looked in {here} and on the Python path).",
            hint="Name it as for `python -m`: jobs.stdlib_lm, from the folder that has jobs/.",
            module=module_name,
        ) from error
    except Exception as error:
        raise JobError(
            f"Importing {module_name!r} raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}",
            module=module_name,
        ) from error
    if jax_is_awake() and not before:
        raise _touched_jax(module_name)
    build = getattr(module, "build", None)
    if not callable(build):
        raise UsageError(f"{module_name} has no function build(config) -> tpupipe.Job.", module=module_name)
    return typing.cast(Build, build)


def jax_is_awake() -> bool:
    """Whether this process has initialised a JAX backend. Imports nothing."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "_backends", None))


def refuse_early_jax(name: str) -> None:
    """For a job that is run as a script, where the import is over.

    Raises:
        JobError: JAX's devices are initialised.
    """
    if jax_is_awake():
        raise _touched_jax(name)


def _touched_jax(name: str) -> JobError:
    return JobError(
        f"Importing {name} made JAX look for devices in the driver, before the slice's processes exist; a number of "
        "devices taken then would silently be this machine's.",
        hint="Move jax.devices(), jax.random and every computation into init, step, apply or map.",
        module=name,
    )


def parameter_model(build: Build) -> type[BaseModel] | None:
    """The pydantic model that ``build``'s first parameter is annotated with; ``None`` if it takes none.

    Raises:
        JobError: ``build`` takes a parameter that is not annotated with a pydantic model.
    """
    parameters = list(inspect.signature(build).parameters.values())
    if not parameters:
        return None
    try:
        annotation = typing.get_type_hints(build).get(parameters[0].name)
    except NameError as error:
        raise JobError(f"build's annotation cannot be resolved: {error}.") from error
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    raise JobError(
        f"build's parameter {parameters[0].name!r} must be annotated with a pydantic model; it is {annotation!r}.",
        hint="class Params(pydantic.BaseModel): steps: int = 100 … def build(cfg: Params) -> tpupipe.Job",
    )


def resolve(build: Build, paths: Sequence[Path | str], overrides: Sequence[str] = ()) -> tuple[Job, Config]:
    """Loads the configuration, types the job's parameters and builds the job with the configuration's changes.

    Raises:
        ConfigError, JobError: With every problem found.
    """
    model = parameter_model(build)
    grammars = {"faults": parse_fault, "store_faults": StoreFault.parse}
    config = load_config(paths, overrides, job_model=model, grammars=grammars)
    parameters = job_parameters(config, model)
    if parameters is not None:  # defaults written out: leaving a key out and giving its default are the same job
        config = config.model_copy(update={"job": parameters.model_dump(mode="json")})
    return configured(call_build(build, parameters), config), config


def rebuilt(build: Build, config: Config) -> Job:
    """The job of another configuration that is loaded already.

    Raises:
        ConfigError, JobError: It does not fit the job.
    """
    return configured(call_build(build, job_parameters(config, parameter_model(build))), config)


def call_build(build: Build, parameters: BaseModel | None) -> Job:
    """Calls ``build``.

    Raises:
        JobError: It does not give a ``Job``.
    """
    try:
        job: Any = build() if parameters is None else build(parameters)
    except TpupipeError:
        raise
    except Exception as error:
        raise JobError(f"build raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}") from error
    if not isinstance(job, Job):
        raise JobError(f"build returned {type(job).__name__}, not a tpupipe.Job.")
    return job


def configured(job: Job, config: Config) -> Job:
    """The job with ``stages.<name>`` of the configuration laid over its declarations.

    Raises:
        ConfigError: A section names no stage of the job, or a key that its kind of stage does not have.
    """
    problems = []
    for name, settings in config.stages.items():
        if name not in job.stage_names:
            near = difflib.get_close_matches(name, job.stage_names, n=1)
            problems.append(
                f"stages.{name}: the job has no such stage; it has {', '.join(job.stage_names)}"
                + (f" (nearest: {near[0]})" if near else "")
            )
            continue
        stage = job.stage(name)
        problems += [
            f"stages.{name}.{key}: not for a {type(stage).__name__} stage"
            for key in settings.model_dump(exclude_none=True)
            if not isinstance(stage, _KEYS[key])
        ]
    if problems:
        raise ConfigError("The configuration does not fit the job:\n  " + "\n  ".join(problems), problems=problems)
    return Job(job.name, [_changed(stage, config.stages.get(stage.name)) for stage in job.stages])


def _changed(stage: Stage, settings: StageConfig | None) -> Stage:
    if settings is None:
        return stage
    changes: dict[str, Any] = {
        key: getattr(settings, key) for key in _DECLARED if getattr(settings, key) is not None and hasattr(stage, key)
    }
    if isinstance(stage, Train):
        if settings.steps is not None:
            changes |= {"steps": settings.steps, "epochs": None}
        if settings.epochs is not None:
            changes |= {"epochs": settings.epochs, "steps": None}
        if settings.checkpoint is not None:
            changes["checkpoint"] = _checkpoint(stage, settings)
    if isinstance(stage, Infer) and settings.bad_rows is not None:
        declared = stage.bad_rows if isinstance(stage.bad_rows, Quarantine) else Quarantine()
        changes["bad_rows"] = declared if settings.bad_rows == "quarantine" else "fail"
    return dataclasses.replace(stage, **changes)


def _checkpoint(stage: Train, settings: StageConfig) -> Any:
    declared = SavePolicy.of(stage.checkpoint)
    wanted = settings.checkpoint
    assert wanted is not None  # noqa: S101 - the caller looked
    interval = wanted.steps is not None or wanted.minutes is not None
    every = Every(
        steps=wanted.steps if interval else declared.steps,
        minutes=wanted.minutes if interval else declared.minutes,
        keep=wanted.keep or declared.keep,
    )
    given = stage.checkpoint if isinstance(stage.checkpoint, Sequence) else (stage.checkpoint,)
    return (every, *(policy for policy in given if not isinstance(policy, Every)))
