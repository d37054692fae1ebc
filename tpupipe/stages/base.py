"""What every stage is given by the run, and what it gives back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tpupipe.cluster.connect import Cluster
from tpupipe.cluster.reservation import Reservation
from tpupipe.config import Config, StageConfig
from tpupipe.errors import InterruptedRunError
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import Fault
from tpupipe.job import Job
from tpupipe.ledger.events import EventLog
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Lease
from tpupipe.store.objects import Store


class StopRequest:
    """Ctrl-C or SIGTERM, as a thing that can be asked for. The first asks, a second one forces."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.reason = ""
        self.graceful = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While inside, somebody looks at ``asked`` often: a signal need not interrupt what is under way."""
        self.graceful = True
        try:
            yield
        finally:
            self.graceful = False

    def ask(self, reason: str) -> None:
        """Asks the run to save, release and end."""
        self.reason = self.reason or reason
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._asked.is_set()

    def check(self) -> None:
        """Ends the stage here if somebody asked.

        Raises:
            InterruptedRunError: Somebody did.
        """
        if self.asked:
            raise InterruptedRunError(f"Interrupted by {self.reason}.", reason=self.reason)


@dataclass(frozen=True)
class StageRun:
    """Everything a stage needs besides its own declaration.

    Args:
        job: The whole declaration, overrides applied.
        config: The whole configuration.
        store: The run's store.
        paths: Names of the run in it.
        lease: Ownership of the run.
        cluster: The connection; ``None`` (and no coordinator) where every stage is complete already.
        reservation: The held slice; ``None`` for ``kind: gpu``.
        coordinator: Where workers report and confer.
        log: The event log.
        stop: Whether somebody asked the run to end.
        faults: Faults to inject.
        sample: Fraction of the input.
        endpoint: Emulated Cloud Storage, or ``None``.
        input_options: fsspec's options for opening inputs.
        code: Fingerprint of the job's code.
    """

    job: Job
    config: Config
    store: Store
    paths: RunPaths
    lease: Lease
    cluster: Cluster | None
    reservation: Reservation | None
    coordinator: CoordinatorHandle
    log: EventLog
    stop: StopRequest
    faults: tuple[Fault, ...]
    sample: Fraction
    endpoint: str | None
    input_options: Mapping[str, Any]
    code: str

    def settings(self, stage: str) -> StageConfig:
        """The configuration's section for a stage."""
        return self.config.stages.get(stage, StageConfig())

    def absorb(self, stage: str) -> list[dict[str, Any]]:
        """Takes what workers reported since the last call into the event log; gives it back."""
        records = self.coordinator.drain()
        for record in records:
            self.log.add({"stage": stage, **record})
        return records


@dataclass(frozen=True)
class StageResult:
    """What a stage did. Units are work units, or steps for training.

    Args:
        status: ``done``; the run's result also knows ``failed``, ``interrupted`` and ``pending``.
        done: Units committed, over all attempts.
        total: Units in all.
        resumed_from: Units that were committed before this attempt; ``None`` where none were.
        rows_in: Input rows (training: rows fed, real ones).
        rows_out: Output rows.
        rows_dropped: Rows left out on purpose (a training tail).
        seconds: By kind, this attempt's.
        metrics: Last metrics of training.
        params_digest: sha256 over the parameters' bytes, training only.
        sample_digest: Hash over what was fed in which place, training only.
        uri: Where the outputs are.
    """

    status: str
    done: int
    total: int
    resumed_from: int | None
    rows_in: int
    rows_out: int
    uri: str
    seconds: Mapping[str, float]
    rows_dropped: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    params_digest: str | None = None
    sample_digest: str | None = None
    checkpoint: str | None = None


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
