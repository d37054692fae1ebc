"""Processes that hold one model together: how they join, and how they notice that they are not at the same batch.

They dispatch the same programs in the same order, or their collectives mix what does not belong together. Nothing but
the batches themselves can tell: each carries a checksum of what it is, which all processes must have.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.sharding import named_sharding, put_whole

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


class Turns:
    """A checksum of the batch on every device, equal on all if all processes have the same batch.

    Args:
        mesh: The devices.
    """

    def __init__(self, mesh: Any) -> None:
        import jax

        self._each = named_sharding(mesh, tuple(mesh.axis_names))
        self._whole = named_sharding(mesh)
        self._devices = int(mesh.size)
        self._batches = 0
        self.abstract = jax.ShapeDtypeStruct((self._devices,), np.int32, sharding=self._each)

    def joined(self, apply: Callable[[Any, Any], Any]) -> Any:
        """The jitted ``fn(params, batch, turn) -> (outputs, together)``; every process gets all of both."""
        import jax

        def model(params: Any, batch: Any, turn: Any) -> Any:
            return apply(params, batch), turn.min() == turn.max()

        return jax.jit(model, out_shardings=self._whole)

    def next(self, unit: str, feed: Mapping[str, Any]) -> Any:
        """The next batch's: ``int32[devices]``.

        Args:
            unit: What it is of.
            feed: Its arrays.
        """
        self._batches += 1
        number = zlib.crc32(f"{unit} {self._batches}".encode())
        for name in sorted(feed):
            number = zlib.crc32(np.ascontiguousarray(feed[name]).view(np.uint8).data, number)
        return put_whole(np.full(self._devices, number & 0x7FFFFFFF, np.int32), self._each)
