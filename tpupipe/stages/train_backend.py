"""How Ray Train joins and parts the processes of a training group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import UserCallback
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2.jax import JaxConfig

from tpupipe.checkpoint.saver import finish_saving
from tpupipe.errors import StageError
from tpupipe.ledger.events import event
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.stall import START_TIMEOUT_S

PARTING_S = 3.0

_JaxBackend: Any = JaxConfig().backend_cls


class GroupDismissedError(StageError):
    """A group of processes that was kept ready is not needed any more."""


def import_all(load: Callable[[], Any]) -> None:
    """Imports what a training process needs, before it is given work.

    Args:
        load: The job's own function; that it has arrived here means that its modules are imported.
    """
    import jax  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import tpupipe.stages.train_worker  # noqa: F401

    del load


class _Backend(_JaxBackend):  # type: ignore[misc]
    """JAX's backend of Ray Train. Lives once in the controller of a trainer, which is a process of its own."""

    broken = False

    def on_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        """Imports, waits until it is this group's turn, then joins the processes."""
        coordinator, group = backend_config.coordinator, backend_config.group
        up_s = time.time()
        ray.get(worker_group.execute_async(import_all, backend_config.step), timeout=START_TIMEOUT_S)
        imported_s = time.time()
        if not coordinator.has_turn(group):
            raise GroupDismissedError("Not needed any more.")
        ready = ({**event("workers_up"), "time_s": up_s}, {**event("imported"), "time_s": imported_s})
        coordinator.report(*ready, event("joining"))
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: GroupConfig) -> None:
        """Parts the processes.

        One that lost a peer cannot leave JAX's way, which is to wait for all. A save that is past the arrays may
        still end; then the process is ended, for Ray Train would give it 5 s to answer from inside a collective.
        """
        if not self.broken:
            super().on_shutdown(worker_group, backend_config)
            return
        saving = worker_group.execute_async(finish_saving, PARTING_S)
        ray.wait(saving, num_returns=len(saving), timeout=PARTING_S + 1)
        for worker in worker_group.get_workers():
            ray.kill(worker.actor)


@dataclass
class GroupConfig(JaxConfig):
    """``JaxConfig`` of a group that comes up and then waits for its turn.

    Args:
        coordinator: Who gives out turns, and is told how far a start is.
        group: Which group this is.
        step: The job's function, to have its modules imported.
    """

    coordinator: CoordinatorHandle = None  # type: ignore[assignment] # the base class has defaults, so it needs one
    group: str = ""
    step: Any = None

    @property
    def backend_cls(self) -> Any:
        """The backend."""
        return _Backend


class KnownController(ControllerCallback):
    """Tells the coordinator which actor controls a group, so that the driver can end one that waits for lost hosts."""

    def __init__(self, coordinator: CoordinatorHandle, group: str) -> None:
        self._coordinator, self._group = coordinator, group

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called in the trainer's controller, before it asks for its processes."""
        del train_run_context
        self._coordinator.set_controller(self._group, ray.get_runtime_context().current_actor)


class WatchWorkers(UserCallback):
    """Notes, as soon as Ray Train sees it, that a worker is gone or raised."""

    def __init__(self, coordinator: CoordinatorHandle) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Called in the trainer's controller, before it parts the processes."""
        del run_context
        _Backend.broken = True
        self._coordinator.report(event("workers_failed", ranks=sorted(worker_exceptions)))
