"""What every stage is given by the run."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tpupipe.cluster.connect import Cluster
from tpupipe.cluster.reservation import Reservation
from tpupipe.config import Config, StageConfig
from tpupipe.data.sources import Source, Unit
from tpupipe.errors import StageError, TpupipeError, UserCodeError
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import Fault
from tpupipe.job import Job
from tpupipe.ledger.events import EventLog, event
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stop import StopRequest
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Lease
from tpupipe.store.objects import Store


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
        records = self.coordinator.drain()
        for record in records:
            self.log.add({"stage": stage, **record})
        return records


@contextlib.contextmanager
def reported(coordinator: CoordinatorHandle, **where: Any) -> Iterator[None]:
    """Tells the driver of an error before it goes on its way: Ray's wrappers do not bring it there whole."""
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
            )
        )
        raise


@contextlib.contextmanager
def user_code(function: str, stage: str, **where: Any) -> Iterator[None]:
    """Turns what the job's own function raises into a ``UserCodeError`` with its last lines.

    Raises:
        UserCodeError: The function raised. Errors of our own tree pass as they are.
    """
    try:
        yield
    except TpupipeError:
        raise
    except Exception as error:
        place = "".join(f", {key} {value}" for key, value in where.items())
        lines = traceback.format_exc(limit=-3)
        raise UserCodeError(
            f"{function} of stage {stage!r} raised {type(error).__name__}: {error}{place}\n{lines}",
            stage=stage,
            **where,
        ) from error


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
    text = run.faults[record["position"]].text
    run.log.emit("fault_fired", f"{stage}: injected fault {text!r} fires", level=logging.WARNING, stage=stage)


def last_lines(error: BaseException) -> str:
    """The end of a remote traceback, as Ray carries it in the message."""
    return "\n".join([line for line in str(error).splitlines() if line.strip()][-12:])


def arm_worker(
    faults: tuple[Fault, ...], coordinator: CoordinatorHandle, *, stage: str, rank: int | None = None
) -> None:
    """Makes this worker process's fault points live (they stay inert without faults)."""
    identity: dict[str, Any] = {"stage": stage} if rank is None else {"stage": stage, "rank": rank}
    Injection(
        faults,
        identity=identity,
        claim=lambda position, facts: coordinator.claim_fault(position, faults[position].times, facts),
        kill_driver=coordinator.request_driver_kill,
    ).arm()
