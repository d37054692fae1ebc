"""From files and ``--set`` to one checked configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tpupipe.config.always_on import switched_off
from tpupipe.config.problems import (
    Problem,
    config_error,
    dotted,
    ignored_keys,
    validation_problems,
    with_sources,
)
from tpupipe.config.reader import read_file, read_value
from tpupipe.config.schema import Config
from tpupipe.errors import UsageError

M = TypeVar("M", bound=BaseModel)

# A section written without content ("labels:") says nothing; "store:" and "sample:" without content are mistakes.
_MAY_BE_EMPTY = frozenset(Config.model_fields) - {"store", "sample"}


def load_config(
    paths: Sequence[Path | str],
    overrides: Sequence[str] = (),
    *,
    job_model: type[BaseModel] | None = None,
    grammars: Mapping[str, Callable[[str], object]] | None = None,
) -> Config:
    """Read, merge and check a configuration.

    Args:
        paths: YAML files, later ones laid over earlier ones key by key.
        overrides: ``a.b=c``, laid over the files in order; ``c`` is read as YAML.
        job_model: The job's parameter model, if it is known already: then the ``job`` section's problems are
            in the same list.
        grammars: For top-level keys that are lists of texts: what reads one text, and raises ``UsageError``.

    Raises:
        ConfigError: With every problem of every file and section in ``data["problems"]``
            (:class:`tpupipe.config.Problem`).
    """
    problems: list[Problem] = []
    raw: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for path in paths:
        layer, found = read_file(Path(path))
        problems += found
        _lay_over(raw, layer, sources, str(path))
    for override in overrides:
        layer, found = _read_override(override)
        problems += found
        _lay_over(raw, layer, sources, f"--set {override}")
    if problems:  # what could not be read would only cause further, misleading problems
        raise config_error(problems)
    config, problems = _check(raw)
    if job_model is not None:
        problems += _type_job(raw.get("job") or {}, job_model)[1]
    problems += _text_problems(raw, grammars or {})
    if config is None or problems:
        raise config_error(with_sources(_without_echoes(problems), sources))
    return config


def job_parameters(config: Config, model: type[M] | None) -> M | None:
    """Type the ``job`` section by the model the job declares.

    Args:
        config: A checked configuration.
        model: The job's parameter model; ``None`` for a job without parameters.

    Returns:
        The parameters, or ``None`` where ``model`` is.

    Raises:
        ConfigError: With every problem of the section; unknown keys are refused even by a model that
            would ignore them.
    """
    if model is None:
        if config.job:
            unknown = [Problem(f"job.{key}", "unknown key", value) for key, value in config.job.items()]
            raise config_error([*unknown, Problem("job", "this job takes no parameters")])
        return None
    parameters, problems = _type_job(config.job, model)
    if parameters is None or problems:
        raise config_error(_without_echoes(problems))
    return parameters


def dry_run_config(config: Config) -> Config:
    """Lay the ``dry_run`` section over the configuration it stands in.

    Returns:
        The configuration of the dry run, without a ``dry_run`` section of its own.

    Raises:
        ConfigError: The result is not a valid configuration.
    """
    base = config.model_dump(exclude_unset=True, exclude={"dry_run"})
    _lay_over(base, config.dry_run, {}, "")
    dry, problems = _check(base)
    if dry is None or problems:
        raise config_error(_without_echoes([_below("dry_run", problem) for problem in problems]))
    return dry


def _check(raw: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Type a merged configuration, and the dry run's on top of it."""
    problems = switched_off(raw)
    if "store" not in raw:
        problems.append(Problem("store", "is missing: a run keeps checkpoints, so it needs a store", allowed=_STORES))
    config: Config | None = None
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        problems += validation_problems(error, Config)
    dry_run = raw.get("dry_run")
    if isinstance(dry_run, Mapping) and dry_run:
        if "dry_run" in dry_run:
            problems.append(Problem("dry_run.dry_run", "a dry run has no dry run of its own", dry_run["dry_run"]))
        problems += _dry_run_problems(raw, dry_run, {problem.path for problem in problems})
    return config, problems


_STORES = "gs://bucket/prefix, file:///folder or a path"


def _dry_run_problems(raw: Mapping[str, Any], dry_run: Mapping[str, Any], known: set[str]) -> list[Problem]:
    merged = copy.deepcopy({key: value for key, value in raw.items() if key != "dry_run"})
    _lay_over(merged, {key: value for key, value in dry_run.items() if key != "dry_run"}, {}, "")
    try:
        Config.model_validate(merged)
    except ValidationError as error:
        found = validation_problems(error, Config)
        return [_below("dry_run", problem) for problem in found if problem.path not in known]
    return []


def _text_problems(raw: Mapping[str, Any], grammars: Mapping[str, Callable[[str], object]]) -> list[Problem]:
    """What ``grammars`` cannot read, in the configuration and in its dry run."""
    problems = []
    for prefix, section in (("", raw), ("dry_run", raw.get("dry_run"))):
        for key, read in grammars.items():
            texts = section.get(key) if isinstance(section, Mapping) else None
            for index, text in enumerate(texts if isinstance(texts, list) else ()):
                try:
                    read(text if isinstance(text, str) else "")  # the schema says so of what is no text
                except UsageError as error:
                    problems.append(Problem(dotted(prefix, key, str(index)), error.message, text, allowed=error.hint))
    return problems


def _type_job(raw: Any, model: type[M]) -> tuple[M | None, list[Problem]]:
    problems = ignored_keys(raw, model, "job")
    try:
        return model.model_validate(raw), problems
    except ValidationError as error:
        return None, problems + validation_problems(error, model, "job")


def _read_override(override: str) -> tuple[dict[str, Any], list[Problem]]:
    name, found, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not found or not all(keys):
        return {}, [Problem("", f"--set {override!r} is not key=value; allowed: --set cluster.topology=4x4")]
    value, problems = read_value(text, source=f"--set {override}")
    for key in reversed(keys):
        value = {key: value}
    return value, problems


def _lay_over(base: dict[str, Any], layer: Mapping[str, Any], sources: dict[str, str], source: str) -> None:
    """Merge ``layer`` into ``base`` in place: mappings key by key, anything else replaces."""
    layer = {key: value for key, value in layer.items() if value is not None or key not in _MAY_BE_EMPTY}
    if isinstance(layer.get("store"), str):
        # A string is the whole section: a new URI never inherits that it is embedded.
        base.pop("store", None)
        layer["store"] = {"uri": layer["store"]}
    _merge(base, layer, sources, source, "")


def _merge(base: dict[str, Any], layer: Mapping[str, Any], sources: dict[str, str], source: str, at: str) -> None:
    for key, value in layer.items():
        path = dotted(at, str(key))
        if isinstance(value, Mapping):
            if not isinstance(base.get(key), dict):
                base[key] = {}
                sources[path] = source
            _merge(base[key], value, sources, source, path)
        else:
            base[key] = copy.deepcopy(value)
            sources[path] = source


def _below(section: str, problem: Problem) -> Problem:
    return Problem(
        dotted(section, problem.path), problem.message, problem.value, problem.allowed, problem.nearest, problem.source
    )


def _without_echoes(problems: Sequence[Problem]) -> list[Problem]:
    """Keep the first problem of a key: the refusal to switch off goes before a bound or an unknown key."""
    kept: dict[str, Problem] = {}
    for problem in problems:
        above = problem.path
        while above and above not in kept:
            above = above.rpartition(".")[0]
        if not above:
            kept[problem.path] = problem
    return list(kept.values())
