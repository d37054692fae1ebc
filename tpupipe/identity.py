"""What makes a run the run it is: job, parameters, inputs, sample and code. Where it runs is no part of it."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from tpupipe.config import Config, canonical, config_hash
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.sample import parse_sample, sample_units
from tpupipe.data.sources import Source, Unit, fingerprint_units
from tpupipe.errors import DataError, ObjectExistsError, RunChangedError
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """What is compared when a run is named again.

    Args:
        job: The job's name.
        parameters: The ``job:`` section.
        stages: What decides each stage's result, by stage.
        inputs: Fingerprint of each stage's sampled inputs, and as ``<stage>.params`` of its ``Pretrained`` files.
        sample: Exact fraction of the input.
        code: sha256 over the sources of the modules that the job's functions come from.
    """

    job: str
    parameters: Mapping[str, Any]
    stages: Mapping[str, Any]
    inputs: Mapping[str, str]
    sample: str
    code: str

    @property
    def default_run(self) -> str:
        """The run's name where none is given: the same job, parameters and sample resume the same run.

        Inputs and code are not in it: when they change, the run of that name says so instead of starting afresh.
        """
        named = {"job": self.job, "parameters": self.parameters, "stages": self.stages, "sample": self.sample}
        return f"r-{config_hash(named)[:10]}"


def plan_inputs(job: Job, config: Config, input_options: Mapping[str, Any]) -> dict[Source, Sequence[Unit]]:
    """Lists each source of the job once, as the units of its sample. What is planned and what is compared is the same.

    Raises:
        DataError: A source has no input.
    """
    fraction = parse_sample(config.sample)
    planned: dict[Source, Sequence[Unit]] = {}
    for _, source in _sources(job):
        if source not in planned:
            units = source.units(storage_options=input_options)
            if not units:
                raise DataError(f"{source!r} has no input.", hint="Look at the pattern.")
            planned[source] = sample_units(units, fraction) if fraction != 1 else units
    return planned


def identify(
    job: Job,
    config: Config,
    *,
    input_options: Mapping[str, Any],
    inputs: Mapping[Source, Sequence[Unit]] | None = None,
) -> Identity:
    """Computes the identity; lists the inputs, reads none of them but pretrained parameters.

    Args:
        job: The declaration.
        config: The configuration.
        input_options: fsspec's options for opening inputs.
        inputs: What ``plan_inputs`` gave, to list nothing again. Sources that are not in it are no part of the identity.

    Raises:
        DataError: A source has no input, or a file of pretrained parameters does not exist.
    """
    planned = plan_inputs(job, config, input_options) if inputs is None else inputs
    fingerprints = {name: fingerprint_units(planned[source]) for name, source in _sources(job) if source in planned}
    for stage in job.stages:
        if isinstance(stage, Infer) and isinstance(stage.params, Pretrained):
            fingerprints[f"{stage.name}.params"] = stage.params.read(input_options)[1]
    return Identity(
        job=job.name,
        parameters=canonical(config.job),
        stages={stage.name: _result_options(stage) for stage in job.stages},
        inputs=fingerprints,
        sample=config.sample,
        code=code_fingerprint(job),
    )


def _sources(job: Job) -> Iterator[tuple[str, Source]]:
    for stage in job.stages:
        source = stage.source if isinstance(stage, Preprocess) else stage.data if isinstance(stage, Infer) else None
        if isinstance(source, Source):
            yield stage.name, source


def _result_options(stage: Preprocess | Train | Infer) -> dict[str, Any]:
    """The options that decide a stage's result (not how often it saves, not where it runs)."""
    match stage:
        case Preprocess():
            return {
                "kind": "preprocess",
                "source": _reading(stage.source),
                "chunk_rows": stage.chunk_rows,
                "whole": stage.dataset is not None,
            }
        case Train():
            return {
                "kind": "train",
                "data": stage.data,
                "batch_size": stage.batch_size,
                "steps": stage.steps,
                "epochs": stage.epochs,
                "seed": stage.seed,
                "shuffle": stage.shuffle,
            }
        case Infer():
            buckets = asdict(stage.buckets) if is_dataclass(stage.buckets) else None
            return {
                "kind": "infer",
                "source": stage.data if isinstance(stage.data, str) else _reading(stage.data),
                "params": stage.params if isinstance(stage.params, str) else "pretrained",
                "buckets": json.loads(json.dumps(buckets)),
                "keep": list(stage.keep),
                "ragged_outputs": list(stage.ragged_outputs),
            }


def _reading(source: Source) -> dict[str, Any]:
    """How a source reads what it finds (what it finds is in ``inputs``)."""
    options: dict[str, Any] = {f.name: getattr(source, f.name) for f in fields(source)} if is_dataclass(source) else {}
    return {"class": type(source).__name__, **{n: _plain(v) for n, v in options.items() if not n.startswith("pattern")}}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def code_fingerprint(job: Job) -> str:
    """sha256 over the source files of the job's functions, and of the modules of their folder that they import.

    Functions without a source file (typed at a prompt) count with their bytecode.
    """
    functions = [
        function
        for stage in job.stages
        for name in ("map", "dataset", "init", "step", "params", "sharding", "apply")
        if callable(function := getattr(stage, name, None))
    ]
    functions += [s.params.load for s in job.stages if isinstance(s, Infer) and isinstance(s.params, Pretrained)]
    digest = hashlib.sha256()
    files: set[Path] = set()
    for wrapped in functions:
        function = _innermost(wrapped)
        name = getattr(function, "__module__", "") or ""
        if name.split(".")[0] == __package__:
            continue  # the framework's own defaults are not the job's code
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file:
            _collect_sources(Path(file), files)
        elif hasattr(function, "__code__"):
            digest.update(function.__code__.co_code)
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _innermost(function: Any) -> Any:
    """The function behind decorators, partials, bound methods and callable objects."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if inspect.isroutine(function):
        return function
    return type(function)


def _collect_sources(file: Path, found: set[Path]) -> None:
    """Adds the file and, through its imports, the modules of the same source tree. Installed packages are not the job's."""
    if file in found or file.suffix != ".py" or not file.exists():
        return
    found.add(file)
    if "site-packages" in file.parts:
        return
    for folder, parts in _imported(file):
        for depth in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:depth])
            _collect_sources(place.with_suffix(".py"), found)
            _collect_sources(place / "__init__.py", found)


def _imported(file: Path) -> set[tuple[Path, tuple[str, ...]]]:
    """What a source file imports: folder to look in, and the module's path there (the last part may be a name in it)."""
    top = file.parent
    while (top / "__init__.py").exists():
        top = top.parent
    found: set[tuple[Path, tuple[str, ...]]] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            folders: tuple[Path, ...] = (top, file.parent)
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folders = (file.parents[node.level - 1],) if node.level else (top, file.parent)
            named = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
        else:
            continue
        found |= {
            (folder, tuple(name.split(".")))
            for name in named
            for folder in folders
            if name.split(".")[0] != __package__
        }
    return found


def differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """What differs between two identities, by dotted path: ``[then, now]``. Pure."""
    found: dict[str, list[Any]] = {}
    for key in sorted({*then, *now}):
        path = f"{prefix}{key}"
        a, b = then.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differences(a, b, f"{path}.")
        elif a != b:
            found[path] = [a, b]
    return found


def check_identity(store: Store, paths: RunPaths, identity: Identity, *, allow_change: bool) -> None:
    """Refuses a run that exists and is another one. Writes nothing.

    Raises:
        RunChangedError: It exists, something differs, and ``allow_change`` is false.
        DataError: Its record is damaged.
    """
    if store.exists(paths.identity):
        _differing(store, paths, identity, allow_change)


def settle_identity(store: Store, paths: RunPaths, identity: Identity, *, allow_change: bool) -> bool:
    """Creates the run's record, or compares with it.

    Args:
        store: The store.
        paths: The run.
        identity: Of the job as it is now.
        allow_change: Record what differs and go on, rather than stop.

    Returns:
        Whether the run existed.

    Raises:
        RunChangedError: The run exists, and something differs.
        DataError: Its record is damaged.
    """
    record = {"format": FORMAT, "created_s": time.time(), "identity": canonical(asdict(identity))}
    try:
        store.create(paths.identity, json.dumps(record, indent=1).encode())
    except ObjectExistsError:
        differing, changes = _differing(store, paths, identity, allow_change)
        if differing:
            changed = {**record, "changes": differing}
            store.create(paths.change(changes + 1), json.dumps(changed, indent=1).encode())
        return True
    return False


def _differing(
    store: Store, paths: RunPaths, identity: Identity, allow_change: bool
) -> tuple[dict[str, list[Any]], int]:
    """What differs from the run's newest record, and how many changes were recorded before."""
    changes = sorted(store.list(paths.changes + "/"), key=lambda info: info.name)
    latest = changes[-1].name if changes else paths.identity
    try:
        then = json.loads(store.read(latest))["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{store.uri(latest)} is damaged: {error!r}.",
            hint="It says what the run is; without it nothing can be compared. Restore it, or use another --run.",
            uri=store.uri(latest),
        ) from error
    differing = differences(then, canonical(asdict(identity)))
    if differing and not allow_change:
        shown = "\n".join(f"  {path}: was {was!r}, is {now!r}" for path, (was, now) in differing.items())
        raise RunChangedError(
            f"Run {paths.run!r} of job {paths.job!r} exists, and this is not the same:\n{shown}",
            hint="Use another --run for a new result, or --allow-change to go on with this one and record the change.",
            run=paths.run,
            changes=differing,
        )
    return differing, len(changes)
