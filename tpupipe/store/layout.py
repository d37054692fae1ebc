"""Every object name of a run, in one place.

Names are relative to the store's URI. Nothing else in the project spells one out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpupipe.errors import UsageError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LEASE = re.compile(r"(\d{6,})\.json")
_CHECKPOINT = re.compile(r"(\d{10,})-(\d{6,})(?:-(\d{4,}))?")
_CLAIM = re.compile(r"(\d{6,})\.parquet")
_DONE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d)\.json")
_EVENTS = re.compile(r"(\d{6,})-(\d{6,})\.jsonl")


ARRAYS = "arrays"
"""Folder of Orbax's files in a checkpoint's folder."""

PROBES = ".preflight"
"""Folder of the objects that ``tpupipe check`` writes and removes; the leading dot keeps it from being a job's."""

DRY_RUN_NAME = "dry_run.json"
COMMIT_NAME = "COMMIT.json"
"""Name of the commit record in a checkpoint's folder."""


def check_name(kind: str, value: str) -> str:
    """Gives ``value`` back when it is a valid job, run or stage name.

    Raises:
        UsageError: It is not ``[a-z0-9][a-z0-9._-]{0,62}``.
    """
    if not _NAME.fullmatch(value):
        raise UsageError(
            f"{value!r} is not a {kind} name; allowed: lower-case letters, digits, '.', '_', '-', "
            "starting with a letter or digit, at most 63 characters.",
            name=value,
        )
    return value


@dataclass(frozen=True)
class RunPaths:
    """The names of one run's objects.

    Args:
        job: Name of the job.
        run: Name of the run.

    Raises:
        UsageError: A name is not valid (also raised by the methods that take a stage or unit).

    >>> RunPaths("lm", "a").checkpoint_commit("train", step=20, epoch=1)
    'lm/a/stages/train/checkpoints/0000000020-000001/COMMIT.json'
    """

    job: str
    run: str

    def __post_init__(self) -> None:
        check_name("job", self.job)
        check_name("run", self.run)

    @property
    def root(self) -> str:
        """Folder of the run, without a trailing '/'."""
        return f"{self.job}/{self.run}"

    @property
    def identity(self) -> str:
        """``run.json``: what makes this run the run it is."""
        return f"{self.root}/run.json"

    @property
    def result(self) -> str:
        """``result.json``: how the run ended."""
        return f"{self.root}/result.json"

    @property
    def dry_run(self) -> str:
        """``dry_run.json``: the verdict, where the run was a dry run."""
        return f"{self.root}/{DRY_RUN_NAME}"

    def change(self, number: int) -> str:
        """Record ``number`` of an allowed change of identity."""
        return f"{self.root}/changes/{number:04d}.json"

    @property
    def changes(self) -> str:
        """Folder of the records of allowed changes."""
        return f"{self.root}/changes"

    @property
    def compile_cache(self) -> str:
        """Folder of JAX's persistent compilation cache, shared by all attempts of the run."""
        return f"{self.root}/compile-cache"

    def compiled(self, key: str) -> str:
        """A compiled function that JAX's own cache does not keep; beside it."""
        return f"{self.compile_cache}/own-{key}"

    # -- lease -----------------------------------------------------------------------------

    @property
    def leases(self) -> str:
        """Folder of the leases."""
        return f"{self.root}/lease"

    def lease(self, epoch: int) -> str:
        """The object whose creation makes its creator the owner with this lease epoch."""
        return f"{self.leases}/{epoch:06d}.json"

    def beat(self, epoch: int) -> str:
        """The object the owner of this lease epoch rewrites while it lives."""
        return f"{self.leases}/{epoch:06d}.beat.json"

    # -- events ----------------------------------------------------------------------------

    @property
    def events(self) -> str:
        """Folder of the event segments."""
        return f"{self.root}/events"

    def event_segment(self, epoch: int, sequence: int) -> str:
        """Segment ``sequence`` of the events written under lease ``epoch``."""
        return f"{self.event_segments(epoch)}{sequence:06d}.jsonl"

    def event_segments(self, epoch: int) -> str:
        """What the names of all segments of a lease epoch begin with."""
        return f"{self.events}/{epoch:06d}-"

    # -- stages ----------------------------------------------------------------------------

    def stage(self, stage: str) -> str:
        """Folder of a stage."""
        return f"{self.root}/stages/{check_name('stage', stage)}"

    def manifest(self, stage: str) -> str:
        """The object that says the stage is complete."""
        return f"{self.stage(stage)}/manifest.json"

    def outputs(self, stage: str) -> str:
        """Folder to tell a user of: where the stage's rows are."""
        return self.stage(stage)

    def units(self, stage: str) -> str:
        """Folder of a stage's committed units."""
        return f"{self.stage(stage)}/units"

    def unit(self, stage: str, unit: str) -> str:
        """The object that is the commit of one unit."""
        return f"{self.units(stage)}/{_check_unit(unit)}.parquet"

    def buckets(self, stage: str, declared: str) -> str:
        """The bucket lengths chosen from the data for one declaration of ``Buckets.auto``, named by its hash."""
        return f"{self.stage(stage)}/buckets/{check_name('declaration', declared)}.json"

    def compacted(self, stage: str) -> str:
        """A cache of what the committed units say of themselves; rewritten, and never needed."""
        return f"{self.stage(stage)}/committed.arrows"

    def errors(self, stage: str) -> str:
        """Folder of a stage's error records."""
        return f"{self.stage(stage)}/errors"

    def unit_errors(self, stage: str, unit: str) -> str:
        """Error records of one unit's quarantined rows."""
        return f"{self.errors(stage)}/{_check_unit(unit)}.parquet"

    def stacks(self, stage: str, name: str) -> str:
        """Stacks of a worker that stalled."""
        return f"{self.stage(stage)}/stalls/{check_name('dump', name)}.txt"

    # -- checkpoints -----------------------------------------------------------------------

    def checkpoints(self, stage: str) -> str:
        """Folder of a stage's checkpoints."""
        return f"{self.stage(stage)}/checkpoints"

    def checkpoint(self, stage: str, *, step: int, epoch: int, restart: int = 0) -> str:
        """Folder of the checkpoint at ``step``, written under lease ``epoch`` by start ``restart`` of the workers."""
        return f"{self.checkpoints(stage)}/{checkpoint_name(step, epoch, restart)}"

    def checkpoint_arrays(self, stage: str, *, step: int, epoch: int, restart: int = 0) -> str:
        """Folder below which Orbax writes."""
        return f"{self.checkpoint(stage, step=step, epoch=epoch, restart=restart)}/{ARRAYS}"

    def checkpoint_commit(self, stage: str, *, step: int, epoch: int, restart: int = 0) -> str:
        """The object that makes a checkpoint one."""
        return f"{self.checkpoint(stage, step=step, epoch=epoch, restart=restart)}/{COMMIT_NAME}"


@dataclass(frozen=True)
class GenerationPaths(RunPaths):
    """The names of one generation of a dataset that grows tick by tick; ``run`` is the dataset's name.

    Args:
        number: The generation, from 1. Partitions of one generation were made by the same job.

    >>> GenerationPaths("embed", "nightly", 1).table("scores")
    'embed/datasets/nightly/generations/0001/tables/scores'
    """

    number: int

    @property
    def root(self) -> str:
        """Folder of the generation, without a trailing '/'."""
        return f"{self.job}/datasets/{self.run}/generations/{self.number:04d}"

    @property
    def begun(self) -> str:
        """The object that makes the generation one, and says for which tick."""
        return f"{self.root}/begun.json"

    @property
    def claims(self) -> str:
        """Folder of the claims."""
        return f"{self.root}/claims"

    def claim(self, number: int) -> str:
        """The object that says which inputs a tick takes."""
        return f"{self.claims}/{number:06d}.parquet"

    @property
    def done(self) -> str:
        """Folder of the records of complete ticks."""
        return f"{self.root}/done"

    def tick_done(self, tick: str) -> str:
        """The object that says that a tick is complete."""
        return f"{self.done}/{tick}.json"

    def params(self, stage: str) -> str:
        """Folder of the records of a stage's parameters."""
        return f"{self.root}/params/{check_name('stage', stage)}"

    def param(self, stage: str, number: int) -> str:
        """Record ``number`` of the parameters that a stage's partitions were made with; the newest counts."""
        return f"{self.params(stage)}/{number:04d}.json"

    def table(self, stage: str) -> str:
        """Folder that reads as one table, partitioned by ``date``."""
        return f"{self.root}/tables/{check_name('stage', stage)}"

    def tick(self, tick: str, tables: tuple[str, ...]) -> TickPaths:
        """Names of the run that does one tick."""
        return TickPaths(self.job, self.run, self.number, tick, tables)


@dataclass(frozen=True)
class TickPaths(GenerationPaths):
    """The names of one tick's run: those of any run, but the rows of some stages are a partition of a table.

    Args:
        date: The tick.
        tables: Stages whose units go to the partition ``date=<tick>`` of their table.
    """

    date: str
    tables: tuple[str, ...]

    @property
    def generation(self) -> GenerationPaths:
        """The generation it belongs to."""
        return GenerationPaths(self.job, self.run, self.number)

    @property
    def root(self) -> str:
        """Folder of the tick's run, without a trailing '/'."""
        return f"{self.generation.root}/ticks/{self.date}"

    @property
    def compile_cache(self) -> str:
        """Shared by all ticks of the generation."""
        return self.generation.compile_cache

    def outputs(self, stage: str) -> str:
        """The table, or the stage's folder."""
        return self.generation.table(stage) if stage in self.tables else self.stage(stage)

    def units(self, stage: str) -> str:
        """The partition, or the stage's own units."""
        return f"{self.generation.table(stage)}/date={self.date}" if stage in self.tables else super().units(stage)

    def errors(self, stage: str) -> str:
        """Error records, partitioned like the table that their rows are missing in."""
        return f"{self.generation.root}/errors/{check_name('stage', stage)}/date={self.date}"


def _check_unit(unit: str) -> str:
    if not _UNIT.fullmatch(unit):
        raise UsageError(
            f"{unit!r} is not a unit id; allowed: letters, digits, '.', '_', '-', at most 200 characters.", unit=unit
        )
    return unit


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def checkpoint_name(step: int, epoch: int, restart: int = 0) -> str:
    """Folder name of a checkpoint; sorts by step, then lease epoch, then start of the workers.

    Each start of the workers under one lease has folders of its own, so what a dead one left never mixes with what
    the next one saves at the same step.

    Raises:
        UsageError: A number is negative.
    """
    if step < 0 or epoch < 0 or restart < 0:
        raise UsageError(f"step {step}, lease epoch {epoch}, restart {restart}: must not be negative.", step=step)
    return f"{step:010d}-{epoch:06d}" + (f"-{restart:04d}" if restart else "")


def parse_checkpoint(name: str) -> tuple[int, int, int] | None:
    """``(step, lease epoch, restart)`` of a checkpoint's folder (its name or path), ``None`` for anything else."""
    match = _CHECKPOINT.fullmatch(_last(name))
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def parse_unit(name: str) -> str | None:
    """Unit id of a committed unit's (or its error records') object name, ``None`` for anything else."""
    last = _last(name)
    unit = last.removesuffix(".parquet")
    return unit if unit != last and _UNIT.fullmatch(unit) else None


def parse_claim(name: str) -> int | None:
    """Number of a claim's object name, ``None`` for anything else."""
    match = _CLAIM.fullmatch(_last(name))
    return int(match[1]) if match else None


def parse_tick_done(name: str) -> str | None:
    """Tick of the name of a complete tick's record, ``None`` for anything else."""
    match = _DONE.fullmatch(_last(name))
    return match[1] if match else None


def parse_lease(name: str) -> int | None:
    """Lease epoch of a lease object's name, ``None`` for beats and anything else."""
    match = _LEASE.fullmatch(_last(name))
    return int(match[1]) if match else None


def parse_event_segment(name: str) -> tuple[int, int] | None:
    """``(lease epoch, sequence)`` of an event segment's name, ``None`` for anything else."""
    match = _EVENTS.fullmatch(_last(name))
    return (int(match[1]), int(match[2])) if match else None
