"""What makes a run the run it is: job, parameters, inputs, sample and code. Where it runs is no part of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tpupipe.config import Config, canonical, config_hash
from tpupipe.data.sample import parse_sample, sample_units
from tpupipe.data.sources import Source, fingerprint_units
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
        inputs: Fingerprint of each stage's sampled inputs.
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


def identify(job: Job, config: Config, *, input_options: Mapping[str, Any]) -> Identity:
    """Computes the identity; lists the inputs, reads none.

    Raises:
        DataError: A source has no input.
    """
    fraction = parse_sample(config.sample)
    return Identity(
        job=job.name,
        parameters=canonical(config.job),
        stages={stage.name: _result_options(stage) for stage in job.stages},
        inputs={name: _inputs(source, fraction, input_options) for name, source in _sources(job)},
        sample=config.sample,
        code=code_fingerprint(job),
    )


def _sources(job: Job) -> Iterator[tuple[str, Source]]:
    for stage in job.stages:
        source = stage.source if isinstance(stage, Preprocess) else stage.data if isinstance(stage, Infer) else None
        if isinstance(source, Source):
            yield stage.name, source


def _inputs(source: Source, fraction: Fraction, input_options: Mapping[str, Any]) -> str:
    units = source.units(storage_options=input_options)
    if not units:
        raise DataError(f"{source!r} has no input.", hint="Look at the pattern.")
    return fingerprint_units(sample_units(units, fraction) if fraction != 1 else units)


def _result_options(stage: Preprocess | Train | Infer) -> dict[str, Any]:
    """The options that decide a stage's result (not how often it saves, not where it runs)."""
    match stage:
        case Preprocess():
            return {"kind": "preprocess", "chunk_rows": stage.chunk_rows, "whole": stage.dataset is not None}
        case Train():
            return {
                "kind": "train",
                "data": stage.data,
                "batch_size": stage.batch_size,
                "steps": stage.steps,
                "epochs": stage.epochs,
                "seed": stage.seed,
            }
        case Infer():
            buckets = asdict(stage.buckets) if is_dataclass(stage.buckets) else None
            return {
                "kind": "infer",
                "params": stage.params,
                "buckets": json.loads(json.dumps(buckets)),
                "keep": list(stage.keep),
                "ragged_outputs": list(stage.ragged_outputs),
            }


def code_fingerprint(job: Job) -> str:
    """sha256 over the source files of the job's functions, and of the modules beside them that they import.

    Functions without a source file (typed at a prompt) count with their bytecode.
    """
    functions = [
        function
        for stage in job.stages
        for name in ("map", "dataset", "init", "step", "apply")
        if (function := getattr(stage, name, None)) is not None
    ]
    digest = hashlib.sha256()
    files: set[Path] = set()
    for function in functions:
        module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", "") or "")
        file = getattr(module, "__file__", None)
        if file:
            files |= _with_siblings(Path(file))
        elif hasattr(function, "__code__"):
            digest.update(function.__code__.co_code)
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _with_siblings(file: Path) -> set[Path]:
    """The file and the loaded modules of its own folder: a job's helpers. Installed packages are not code of the job."""
    if "site-packages" in file.parts:
        return {file}
    loaded = {Path(f) for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    # Only what the module itself refers to: a run must not depend on which other jobs are loaded.
    named = {line.split()[1].split(".")[-1] for line in file.read_text().splitlines() if _is_import(line)}
    return {file} | {f for f in loaded if f.parent == file.parent and f.stem in named and f.suffix == ".py"}


def _is_import(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[0] in ("import", "from")


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
    """
    record = {"format": FORMAT, "created_s": time.time(), "identity": canonical(asdict(identity))}
    try:
        store.create(paths.identity, json.dumps(record, indent=1).encode())
    except ObjectExistsError:
        pass
    else:
        return False
    then = json.loads(store.read(paths.identity))["identity"]
    changes = sorted(store.list(paths.changes + "/"), key=lambda info: info.name)
    if changes:
        then = json.loads(store.read(changes[-1].name))["identity"]
    differing = differences(then, record["identity"])  # type: ignore[arg-type]
    if not differing:
        return True
    if not allow_change:
        shown = "\n".join(f"  {path}: was {was!r}, is {now!r}" for path, (was, now) in differing.items())
        raise RunChangedError(
            f"Run {paths.run!r} of job {paths.job!r} exists, and this is not the same:\n{shown}",
            hint="Use another --run for a new result, or --allow-change to go on with this one and record the change.",
            run=paths.run,
            changes=differing,
        )
    changed = {**record, "changes": differing}
    store.create(paths.change(len(changes) + 1), json.dumps(changed, indent=1).encode())
    return True
