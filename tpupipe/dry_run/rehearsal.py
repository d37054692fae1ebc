"""What a dry run changes of a production configuration so that it fits one machine. Pure."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.config import Config, dry_run_config
from tpupipe.errors import SliceError, UsageError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.job import Infer, Job, Preprocess, Train

SAMPLE = "1%"
STEPS = 24
SAVES = 3
STORE = {"uri": "gs://tpupipe-local/runs", "embedded": True}
FILE_STORE = ".tpupipe/dry-runs"

# The smallest shapes of more than one host are among these, by number of dimensions.
_SHAPES = {2: ("2x2", "2x4", "4x4", "4x8", "8x8"), 3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")}

# What a faked host costs with one JAX process: a raylet, a training worker with its spare, Ray Data's and an inference
# worker come to about 2 GB, and a core is shared by two hosts at most.
HOST_BYTES = 2 << 30
HOSTS_PER_CORE = 2


@dataclass(frozen=True)
class Machine:
    """Where the dry run happens.

    Args:
        cores: CPUs that this process may use.
        memory_bytes: Memory of the machine.
    """

    cores: int
    memory_bytes: int

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(len(os.sched_getaffinity(0)), memory)

    def fits(self, spec: SliceSpec) -> bool:
        """Whether a faked slice of that shape runs here."""
        return spec.hosts <= self.cores * HOSTS_PER_CORE and spec.hosts * HOST_BYTES <= self.memory_bytes


@dataclass(frozen=True)
class Rehearsal:
    """A dry run's configuration.

    Args:
        config: What is run.
        notes: What differs from production, one sentence each.
        shares: By training stage: steps of the dry run, steps of production (``None``: the data decides).
    """

    config: Config
    notes: tuple[str, ...]
    shares: Mapping[str, tuple[int, int | None]]


def rehearsal(config: Config, job: Job, machine: Machine) -> Rehearsal:
    """The dry run of a configuration: its own ``dry_run`` section, and defaults for what that leaves open.

    Args:
        config: The production configuration.
        job: The job with its changes.
        machine: Where it will run.

    Raises:
        ConfigError: The ``dry_run`` section does not fit.
        UsageError: There is no faked slice for it.
    """
    given = copy.deepcopy(config.dry_run)
    notes: list[str] = []
    defaults: dict[str, Any] = {"logs": {"format": "text"}, "mode": "full"}
    if "sample" not in given:
        defaults["sample"] = SAMPLE
    notes.append(f"{given.get('sample', SAMPLE)} of the input")
    if "store" not in given:
        defaults["store"], note = _store(job)
        notes.append(note)
    defaults["cluster"] = _cluster(config, given.get("cluster", {}), machine)
    shares: dict[str, tuple[int, int | None]] = {}
    for stage in job.stages:
        if isinstance(stage, Train):
            changed, steps = _training(stage, given.get("stages", {}).get(stage.name, {}))
            defaults.setdefault("stages", {})[stage.name] = changed
            shares[stage.name] = (steps, stage.steps)
            of = f"{stage.steps} steps" if stage.steps else f"{stage.epochs} epochs"
            notes.append(f"{stage.name}: {steps} steps instead of {of}")
    dry = dry_run_config(config.model_copy(update={"dry_run": _over(defaults, given)}))
    spec, wanted = dry.cluster.slice_spec(), config.cluster.slice_spec()
    if dry.cluster.kind != "fake" or spec is None:
        raise UsageError(
            f"A dry run needs a faked slice, and dry_run.cluster.kind is {dry.cluster.kind!r}.",
            hint="dry_run: {cluster: {kind: fake, generation: v6e, topology: 2x4}}",
        )
    same = wanted is not None and (spec.topology, spec.slices) == (wanted.topology, wanted.slices)
    shape = "the same shape" if same else f"instead of {wanted or config.cluster.kind}"
    notes.insert(0, f"a faked {spec}, {shape}")
    if job_keys := ", ".join(sorted(given.get("job", {}))):
        notes.append(f"other job parameters: {job_keys}")
    return Rehearsal(dry, tuple(notes), shares)


def _store(job: Job) -> tuple[dict[str, Any], str]:
    """The embedded store; a folder where inputs are in Cloud Storage, for the embedded one would stand in for that, too."""
    if any(path.startswith("gs://") for path in _paths(job)):
        return {
            "uri": FILE_STORE,
            "embedded": False,
        }, "a local folder as the store: the inputs are in gs://"
    return dict(STORE), "the embedded store"


def _paths(job: Job) -> Iterator[str]:
    for stage in job.stages:
        source = stage.source if isinstance(stage, Preprocess) else stage.data if isinstance(stage, Infer) else ""
        if not isinstance(source, str):
            yield from source.pattern


def _cluster(config: Config, given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "fake", "address": None, "timeout_s": 120}
    spec = config.cluster.slice_spec()
    if spec is None or {"topology", "generation"} & set(given):
        return found | ({"slices": 1} if spec is not None and spec.slices > 1 and "slices" not in given else {})
    shape = spec if machine.fits(spec) else smallest_like(spec)
    if not machine.fits(shape):
        raise UsageError(
            f"This machine ({machine.cores} cores, {machine.memory_bytes / (1 << 30):.0f} GiB) has no room for {shape}.",
            hint="A machine with 2 cores and 4 GiB holds two faked hosts.",
        )
    return found | {"topology": shape.topology, "slices": shape.slices, "chips_per_vm": shape.chips_per_host}


def smallest_like(spec: SliceSpec) -> SliceSpec:
    """The smallest shape of more than one host with the same generation and chips per host.

    >>> str(smallest_like(SliceSpec("v6e", "16x16"))), str(smallest_like(SliceSpec("v5p", "4x4x8")))
    ('v6e 2x4 (8 chips, 2 hosts)', 'v5p 2x2x2 (8 chips, 2 hosts)')
    """
    chips = spec.chips_per_host
    fitting = []
    for topology in _SHAPES[len(spec.dims)]:
        try:
            each = SliceSpec(spec.generation, topology, chips_per_vm=chips, slices=min(spec.slices, 2))
        except SliceError:
            continue
        if each.hosts > 1 and each.hosts_per_slice <= spec.hosts_per_slice:
            fitting.append(each)
    if not fitting:
        return spec
    return min(fitting, key=lambda each: (each.chips, each.topology))


def _training(stage: Train, given: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """What changes of a training stage, and its steps. What the section says stays."""
    changes: dict[str, Any] = {}
    if "steps" in given:
        steps = int(given["steps"])
    else:
        steps = min(STEPS, stage.steps or STEPS)
        if "epochs" not in given:
            changes["steps"] = steps
    every = SavePolicy.of(stage.checkpoint).steps
    if "checkpoint" not in given and (every is None or every >= steps):
        changes["checkpoint"] = {"steps": max(1, steps // SAVES)}
    return changes, steps


def _over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in given.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
