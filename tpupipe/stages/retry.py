"""The wait before a retry, told and interruptible, and questions to a store that may be away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from tpupipe.cluster.reservation import Host, Reservation
from tpupipe.errors import StoreError
from tpupipe.stages.base import StageRun
from tpupipe.stages.failures import Budget, Failure, Kind, loss, unreachable

T = TypeVar("T")


def budget_of(run: StageRun, stage: str) -> Budget:
    """What failures of a stage of this attempt are charged to; its last error says where the run's events are."""
    return Budget(run.config.budgets, stage, run.store.uri(run.paths.events))


def charge(run: StageRun, budget: Budget, failure: Failure, reached: int | None = None, **facts: Any) -> None:
    """Tells of a failure, charges it, and waits until it may be tried again.

    Args:
        run: The run.
        budget: What it is charged to.
        failure: The failure.
        reached: The step known to be reached, where the failure's own is not exactly known.
        facts: What it cost, for the event.

    Raises:
        BudgetExceededError: It may not.
        InterruptedRunError: Somebody asked the run to end meanwhile.
    """
    run.log.emit(
        "failure",
        f"{budget.stage}: {failure.what} (charged to {failure.kind.value})",
        level=logging.WARNING,
        stage=budget.stage,
        step=reached if failure.step is None else failure.step,
        failure=asdict(failure),
        **facts,
    )
    after_s = budget.charge(failure)
    if after_s > 0:
        run.log.emit("back_off", f"{budget.stage}: trying again in {after_s:g} s", stage=budget.stage, after_s=after_s)
        run.stop.wait(after_s)
        run.stop.check()


def answered(run: StageRun, budget: Budget, ask: Callable[[], T]) -> T:
    """What ``ask`` gives, asked again while the store cannot be reached and ``budgets.store_failures`` lasts.

    "It could not be asked" is never an answer.

    Raises:
        BudgetExceededError: The store was away too often.
        StoreError: It answered, and refused.
        InterruptedRunError: Somebody asked the run to end meanwhile.
    """
    while True:
        try:
            return ask()
        except StoreError as error:
            if not unreachable(error):
                raise
            charge(run, budget, Failure(Kind.STORE, None, error.message.splitlines()[0]))


def leave_draining(run: StageRun, budget: Budget, on_leave: Callable[[], None] = lambda: None) -> None:
    """Takes other slices as long as a host of those held is being preempted. Call it before anything is started on them.

    Args:
        run: The run.
        budget: What it is charged to.
        on_leave: Called before slices are given back.

    Raises:
        BudgetExceededError: ``budgets.preemptions`` is used up.
        ReservationError, ReservationTimeoutError: There are no others.
        InterruptedRunError: Somebody asked the run to end meanwhile.
    """
    reservation = run.reservation
    while reservation is not None and (draining := reservation.draining_hosts()):
        failure = Failure(Kind.PREEMPTED, None, f"{len(draining)} host(s) of the slice are being preempted")
        charge(run, budget, failure)
        on_leave()
        reservation.renew(failure.what)


def loss_of(reservation: Reservation, lost: Sequence[Host]) -> tuple[Kind, str]:
    """What the loss of hosts of a reservation is; see ``loss``."""
    return loss((h.slice_index for h in reservation.hosts), (h.slice_index for h in lost))
