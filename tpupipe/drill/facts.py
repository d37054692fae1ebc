"""What a plan of failures has to know of a job: stages, steps, checkpoints, units, hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.config import Config
from tpupipe.job import Infer, Job, Preprocess, Train

# A kill to the first new step takes about 12 s on a faked slice of two cores.
RECOVERY_MIN_S = 60.0
RECOVERY_FACTOR = 3.0

StageKind = Literal["preprocess", "train", "infer"]


@dataclass(frozen=True)
class StageFacts:
    """One stage.

    Args:
        name: Its name.
        kind: What it is.
        by_unit: Whether it works unit by unit (``Preprocess(dataset=...)`` does not).
        total: Units, or steps for training; ``None`` where only a run can tell.
        every: Training: steps between checkpoints; ``None`` where only the clock decides.
        batch_size: Training: rows of a step.
    """

    name: str
    kind: StageKind
    by_unit: bool = True
    total: int | None = None
    every: int | None = None
    batch_size: int = 0

    @property
    def first_save(self) -> int | None:
        """The first checkpoint that is not the last one, if there is one."""
        return self.every if self.every is not None and self.total is not None and self.every < self.total else None

    @property
    def next_save(self) -> int:
        """The checkpoint after the first one, or the only one."""
        total = self.total or 1
        return total if self.first_save is None else min(2 * self.first_save, total)

    @property
    def middle(self) -> int:
        """A step half-way between these two (or half-way to the only one): work to lose, and a checkpoint to go back to."""
        begins = self.first_save or 0
        return begins + (self.next_save - begins) // 2


@dataclass(frozen=True)
class JobFacts:
    """A job, as far as a plan depends on it.

    Args:
        stages: In the order they run.
        hosts: Hosts of the reservation.
        faked: Whether its hosts are faked ones, which may be killed.
        emulated: Whether its store is the embedded one, which may be made to fail.
        save_s: Seconds until a checkpoint is durable, as the reference run measured it.
        step_s: Seconds of a step, likewise.
        unit_s: Seconds of the longest stage of units, likewise.
        startup_s: Seconds of the run in which no work was done: what a new driver spends until there is some, likewise.
    """

    stages: tuple[StageFacts, ...]
    hosts: int
    faked: bool
    emulated: bool
    save_s: float = 1.0
    step_s: float = 0.1
    unit_s: float = 1.0
    startup_s: float = 10.0

    @property
    def recovery_s(self) -> float:
        """What one recovery may take. Several times what it should: it is for one that waits for what never comes.

        All of a start is done again, and a restore takes about as long as a save. New work of a stage of units is seen
        when a unit is done.
        """
        return max(RECOVERY_MIN_S, RECOVERY_FACTOR * (self.startup_s + self.save_s + self.step_s)) + self.unit_s

    def first(self, kind: StageKind) -> StageFacts | None:
        """The first stage of a kind that failures can be placed in."""
        return next((stage for stage in self.stages if stage.kind == kind and stage.by_unit), None)


def job_facts(job: Job, config: Config) -> JobFacts:
    """What the declaration and the configuration say; no input is listed."""
    spec = config.cluster.slice_spec()
    return JobFacts(
        stages=tuple(_stage_facts(stage) for stage in job.stages),
        hosts=spec.hosts_per_slice * spec.slices if spec else config.cluster.gpus or 1,
        faked=config.cluster.kind == "fake",
        emulated=config.store.embedded,
    )


def _stage_facts(stage: Preprocess | Train | Infer) -> StageFacts:
    if isinstance(stage, Train):
        every = SavePolicy.of(stage.checkpoint).steps
        # Where only the data says how many steps there are, the plan's names are those of a long training.
        total = stage.steps or 10 * (every or 1)
        return StageFacts(stage.name, "train", total=total, every=every, batch_size=stage.batch_size)
    if isinstance(stage, Preprocess):
        return StageFacts(stage.name, "preprocess", by_unit=stage.dataset is None)
    return StageFacts(stage.name, "infer")


def measured(
    facts: JobFacts, result: Mapping[str, Any], events: Sequence[Mapping[str, Any]], seconds: float
) -> JobFacts:
    """The facts with what the reference run showed: units, steps of epochs, seconds.

    Args:
        facts: From the declaration.
        result: The reference run's, as ``--json`` prints it.
        events: Its events.
        seconds: How long its process took.
    """
    stages = tuple(replace(s, total=result["stages"][s.name]["total"]) for s in facts.stages)
    saves = [e["seconds"] for e in events if e["kind"] == "checkpoint"]
    paces = [
        result["stages"][s.name]["seconds"].get("working", 0.0) / max(1, s.total or 1)
        for s in stages
        if s.kind == "train"
    ]
    units = [sum(result["stages"][s.name]["seconds"].values()) for s in stages if s.kind != "train"]
    at_work_s = sum(result["seconds"].get(kind, 0.0) for kind in ("working", "saving"))
    return replace(
        facts,
        stages=stages,
        save_s=max(saves, default=facts.save_s),
        step_s=max(paces, default=facts.step_s),
        unit_s=max(units, default=facts.unit_s),
        startup_s=max(0.0, seconds - at_work_s),
    )
