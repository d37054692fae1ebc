"""Where in a job failures go: steps, saves and units that it has for certain. Pure."""

from __future__ import annotations

from tpupipe.drill.facts import JobFacts, StageFacts

# Until a reference run has measured it: how long a process is held so that the save before is durable.
HOLD_FACTOR = 3.0
HOLD_MIN_S = 1.5


class Impossible(Exception):  # noqa: N818 - not an error: the reason is reported
    """The job has no place for a failure."""


class Places:
    """Where in a job failures go. Faults of stages that a job does not have are left out.

    Args:
        facts: The job.
    """

    def __init__(self, facts: JobFacts) -> None:
        self.facts = facts
        self.prepare = facts.first("preprocess")
        self.training = facts.first("train")
        self.inference = facts.first("infer")
        self.last_rank = facts.hosts - 1

    def train(self) -> StageFacts:
        """The training stage.

        Raises:
            Impossible: There is none.
        """
        if self.training is None:
            raise Impossible("the job has no Train stage")
        return self.training

    def between(self) -> StageFacts:
        """The training stage, if a checkpoint comes before its last one.

        Raises:
            Impossible: It does not.
        """
        stage = self.train()
        if stage.first_save is None:
            raise Impossible(f"stage {stage.name} has no checkpoint by steps before its last one: nothing to restore")
        return stage

    def failing_store(self) -> None:
        """Refuses where the store cannot be made to fail.

        Raises:
            Impossible: It is a real one.
        """
        if not self.facts.emulated:
            raise Impossible("only the embedded store can be made to fail (store.embedded: true)")

    def unit(self, stage: StageFacts | None, fault: str) -> list[str]:
        """``fault`` with ``{at}`` filled in, if the job has the stage: the unit in the middle of it."""
        if stage is None:
            return []
        return [fault.format(at=f"={(stage.total or 1) // 2},stage={stage.name}")]

    def units(self, fault: str) -> list[str]:
        """The same failure in preprocessing and in inference."""
        return [*self.unit(self.prepare, fault), *self.unit(self.inference, fault)]

    @property
    def hold_s(self) -> float:
        """Seconds in which a save becomes durable."""
        return max(HOLD_MIN_S, HOLD_FACTOR * self.facts.save_s)

    def held(self, stage: StageFacts, step: int, rank: int) -> list[str]:
        """Holds a process before a step, so that the save before it is durable (or under way) when the failure comes."""
        return [f"slow@train.step={step},rank={rank},stage={stage.name},seconds={self.hold_s:.1f}"]

    def held_if_taken(self, stage: StageFacts, step: int, rank: int) -> list[str]:
        """As ``held``, where the training takes that step."""
        return self.held(stage, step, rank) if step < (stage.total or 1) else []

    def step(self, action: str, stage: StageFacts, step: int, rank: int, more: str = "") -> list[str]:
        """A failure before a step, with the checkpoint before it durable."""
        return [*self.held(stage, step, rank), f"{action}@train.step={step},rank={rank},stage={stage.name}{more}"]

    def before_work(self, seconds: int) -> list[str]:
        """Holds the first stage that the job has before it can be complete."""
        if self.prepare is not None:
            return self.unit(self.prepare, f"slow@unit.read{{at}},seconds={seconds}")
        if self.training is not None:
            return [f"slow@train.step=0,rank=0,stage={self.training.name},seconds={seconds}"]
        return self.unit(self.inference, f"slow@unit.read{{at}},seconds={seconds}")
