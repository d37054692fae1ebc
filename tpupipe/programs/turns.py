"""How processes that hold one model together notice that they are not at the same batch.

They dispatch the same programs in the same order, or their collectives mix what does not belong together. Nothing but
the batches themselves can tell: each carries a checksum of what it is, which all processes must have.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpupipe.programs.sharding import named_sharding, put_whole


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
