"""How processes that hold one model together join."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import ray

from tpupipe.stages.coordinator import CoordinatorHandle

JOIN_TIMEOUT_S = 120


@dataclass(frozen=True)
class Lockstep:
    """One process of a group.

    Args:
        group: Name of this start of the group.
        process: Its number in the group.
        processes: How many there are.
    """

    group: str
    process: int
    processes: int

    def join(self, coordinator: CoordinatorHandle) -> None:
        """Joins the group with ``jax.distributed``, before JAX first touches a device.

        Raises:
            StageError: The first process did not come up.
            RuntimeError: Not all processes came in ``JOIN_TIMEOUT_S``.
        """
        import jax

        if self.process == 0:
            here = ray.util.get_node_ip_address()
            with socket.socket() as free:
                free.bind((here, 0))
                coordinator.set_first_address(self.group, f"{here}:{free.getsockname()[1]}")
        jax.distributed.initialize(
            coordinator.first_address(self.group),
            num_processes=self.processes,
            process_id=self.process,
            initialization_timeout=JOIN_TIMEOUT_S,
        )
