"""What every stage is given by the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from tpupipe.cluster.connect import Cluster
from tpupipe.cluster.loss import drain_this_host, this_slice
from tpupipe.cluster.reservation import Reservation
from tpupipe.config import Config, StageConfig, environment
from tpupipe.data.sources import Source, Unit
from tpupipe.errors import StageError, TpupipeError
from tpupipe.faults.damage import damage_newest
from tpupipe.faults.driver import effect_facts
from tpupipe.faults.inject import Injection, raylet_of_this_worker
from tpupipe.faults.plan import Action, Fault
from tpupipe.job import Job
from tpupipe.ledger.events import EventLog, event
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stop import StopRequest
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Lease
from tpupipe.store.objects import Store

logger = logging.getLogger("tpupipe")


@dataclass(frozen=True)
class StageRun:
    """Everything a stage needs besides its own declaration.

    Args:
        job: The whole declaration, overrides applied.
        config: The whole configuration.
        store: The run's store.
        paths: Names of the run in it.
        lease: Ownership of the run.
        cluster: The connection.
        reservation: The held slice; ``None`` for ``kind: gpu``.
        coordinator: Where workers report and confer.
        log: The event log.
        stop: Whether somebody asked the run to end.
        faults: Faults to inject.
        sample: Fraction of the input.
        endpoint: Emulated Cloud Storage, or ``None``.
        input_options: fsspec's options for opening inputs.
        code: Fingerprint of the job's code.
        inputs: The units of each source, as the run planned them.
        settle_params: Called with a stage and the fingerprint of its parameters before any unit is done; refuses others
            than those of the dataset.
    """

    job: Job
    config: Config
    store: Store
    paths: RunPaths
    lease: Lease
    cluster: Cluster
    reservation: Reservation | None
    coordinator: CoordinatorHandle
    log: EventLog
    stop: StopRequest
    faults: tuple[Fault, ...]
    sample: Fraction
    endpoint: str | None
    input_options: Mapping[str, Any]
    code: str
    inputs: Mapping[Source, Sequence[Unit]]
    settle_params: Callable[[str, str], None]

    def settings(self, stage: str) -> StageConfig:
        """The configuration's section for a stage."""
        return self.config.stages.get(stage, StageConfig())

    def absorb(self, stage: str) -> list[dict[str, Any]]:
        """Takes what workers reported since the last call into the event log; gives it back."""
        records, killed = self.coordinator.drain()
        for record in records:
            self.log.add({"stage": stage, **record})
            if record["kind"] == "fault_effect":
                logger.warning("%s: %s", stage, record["message"])
        if killed:
            for record in records:
                if record["kind"] == "fault":
                    tell_fault(self, stage, record)
            self.log.flush()  # what ended this driver is to be found in the run's events
            os.kill(os.getpid(), signal.SIGKILL)
        return records


@contextlib.contextmanager
def last_look(what: str) -> Iterator[None]:
    """Around what asks the coordinator once more on the way out: that it is gone must not hide why we leave."""
    try:
        yield
    except RayError as error:
        logger.warning("%s: what its processes told last is lost: %s", what, error)


@contextlib.contextmanager
def reported(
    coordinator: CoordinatorHandle, *, reached: Callable[[], Mapping[str, Any]] = dict, **where: Any
) -> Iterator[None]:
    """Tells the driver of an error before it goes on its way: Ray's wrappers do not bring it there whole.

    Args:
        coordinator: Where to tell it.
        reached: Asked for more facts when there is an error, such as the step.
        where: Facts that are known before.
    """
    try:
        yield
    except Exception as error:
        coordinator.report_now(
            event(
                "worker_error",
                error=error if isinstance(error, TpupipeError) else None,
                what=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(limit=-12),
                **where,
                **reached(),
            )
        )
        raise


def failure_of(error: BaseException, told: Iterable[TpupipeError], stage: str) -> TpupipeError:
    """What a failed task or actor call meant.

    Args:
        error: What Ray raised.
        told: What workers told of errors.
        stage: For the message.
    """
    return next(iter(told), None) or StageError(
        f"Stage {stage!r} failed on the cluster:\n{last_lines(error)}", stage=stage
    )


def told_errors(records: Iterable[Mapping[str, Any]]) -> list[TpupipeError]:
    """The errors of our own tree among what workers reported."""
    return [r["error"] for r in records if r["kind"] == "worker_error" and isinstance(r["error"], TpupipeError)]


def tell_fault(run: StageRun, stage: str, record: Mapping[str, Any]) -> None:
    """Tells that an injected fault fires."""
    text = record["text"]
    run.log.emit("fault_fired", f"{stage}: injected fault {text!r} fires", level=logging.WARNING, stage=stage)


def last_lines(error: BaseException) -> str:
    """The end of a remote traceback, as Ray carries it in the message."""
    return "\n".join([line for line in str(error).splitlines() if line.strip()][-12:])


class RunPlace(Protocol):
    """What a unit's or a checkpoint's target says of the run."""

    @property
    def store(self) -> Store: ...  # noqa: D102 - see UnitTarget and SaveTarget

    @property
    def paths(self) -> RunPaths: ...  # noqa: D102


def arm_worker(
    faults: tuple[Fault, ...], coordinator: CoordinatorHandle, target: RunPlace, *, stage: str, rank: int | None = None
) -> None:
    """Makes this worker process's fault points live (they stay inert without faults)."""
    identity: dict[str, Any] = {"stage": stage} if rank is None else {"stage": stage, "rank": rank}
    where = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()} if faults else {}

    def told(position: int, fault: Fault, facts: Mapping[str, Any]) -> None:
        coordinator.report_now(event("fault_effect", **effect_facts(position, fault, facts)))

    def drain(fault: Fault, position: int) -> None:
        drain_this_host(fault.deadline_s, fault.text)
        told(position, fault, {"node": where["node"], "deadline_s": fault.deadline_s})

    def lose_slice(fault: Fault, position: int) -> None:
        lost = this_slice(environment().faked_slices, raylet_of_this_worker())
        told(position, fault, {"slice": lost.name, "hosts": len(lost.raylets)})
        lost.kill()

    def corrupt(fault: Fault, position: int) -> None:
        told(position, fault, damage_newest(target.store, target.paths, fault.how, position))

    Injection(
        faults,
        identity=identity,
        claim=lambda position, facts: coordinator.claim_fault(position, faults[position], facts, where),
        kill_driver=coordinator.request_driver_kill,
        effects={
            Action.DRAIN_HOST: drain,
            Action.LOSE_SLICE: lose_slice,
            Action.CORRUPT_CHECKPOINT: corrupt,
        },
    ).arm()
