"""Named fault points: the places where dying matters. Inert by default, one attribute check when off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Injector = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class PointInfo:
    """What a fault point is.

    Args:
        fact: The fact that ``POINT=VALUE`` in a fault is compared with.
        where: ``driver`` or ``worker``: the process that passes it.
        meaning: One line for ``--help`` and error messages.
    """

    fact: str
    where: str
    meaning: str


POINTS: Mapping[str, PointInfo] = {
    "run.identity": PointInfo("epoch", "driver", "the run's lease is ours, run.json is not written (or compared)"),
    "run.lease_acquired": PointInfo("epoch", "driver", "run.json is there, no cluster is connected"),
    "run.reserved": PointInfo("hosts", "driver", "the slice is held, no stage has begun"),
    "generation.begun": PointInfo(
        "generation", "driver", "a generation of the dataset is begun, its identity is not written"
    ),
    "tick.before_claim": PointInfo("tick", "driver", "the tick's lease is ours, its inputs are not claimed"),
    "tick.claimed": PointInfo("tick", "driver", "the tick's inputs are claimed, nothing is done"),
    "tick.before_done": PointInfo("tick", "driver", "every stage of the tick is complete, its record is not written"),
    "stage.manifest": PointInfo("stage", "driver", "all units (or steps) are committed, the manifest is not"),
    "stage.done": PointInfo("stage", "driver", "the manifest is there; nobody was told, and the slice is still held"),
    "run.result": PointInfo(
        "epoch", "driver", "every stage is complete, the slice is given back, no result is written"
    ),
    "lease.beat": PointInfo(
        "beat", "driver", "before beat N of the lease (from 2, one each 5 s), in a thread of its own"
    ),
    "unit.read": PointInfo("index", "worker", "an input unit was read (index: its position in the stage, from 0)"),
    "unit.mapped": PointInfo("index", "worker", "a unit was computed"),
    "unit.before_commit": PointInfo("index", "worker", "a unit's object is encoded, not yet created"),
    "unit.after_commit": PointInfo("index", "worker", "a unit's object exists, nobody was told"),
    "params.loaded": PointInfo("step", "worker", "an inference worker has its parameters"),
    "train.step": PointInfo("step", "worker", "before training step N (from 0)"),
    "train.updated": PointInfo("step", "worker", "after the update of step N, before any save"),
    "save.start": PointInfo("step", "worker", "a save begins; the state is still on the devices"),
    "save.arrays_written": PointInfo("step", "worker", "all arrays are durable, no commit record (primary process)"),
    "save.before_commit": PointInfo("step", "worker", "the lease was checked, the record is not created (primary)"),
    "save.after_commit": PointInfo("step", "worker", "the record exists, nobody was told (primary)"),
    "train.trained": PointInfo("step", "worker", "all steps are done and committed, and the driver was told"),
    "restore.start": PointInfo("step", "worker", "a restore begins"),
    "restore.done": PointInfo("step", "worker", "all arrays were read; no step is done, no row is scored"),
}

_injector: Injector | None = None


def point(name: str, **facts: Any) -> None:
    """Marks a fault point. Does nothing unless ``arm`` was called in this process.

    Args:
        name: One of ``POINTS``.
        **facts: What a fault may be conditioned on (``step``, ``unit``, ``index``…).
    """
    if _injector is not None:
        _injector(name, facts)


def arm(injector: Injector | None) -> None:
    """Sets what fault points of this process call; ``None`` makes them inert again."""
    global _injector  # noqa: PLW0603 - one switch per process is what makes the points free when off
    _injector = injector
