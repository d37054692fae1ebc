"""Meshes as arithmetic: how many devices an axis has, and whether a batch divides over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpupipe.errors import JobError


def mesh_shape(mesh: Mapping[str, int], devices: int) -> dict[str, int]:
    """Fills in the one -1.

    Args:
        mesh: Axis name to size.
        devices: Devices to cover.

    Example:
        >>> mesh_shape({"data": -1, "model": 2}, 8)
        {'data': 4, 'model': 2}

    Raises:
        JobError: The axes do not multiply to the devices.
    """
    known = math.prod(size for size in mesh.values() if size != -1)
    rest = devices // known if known and devices % known == 0 else 0
    shape = {axis: rest if size == -1 else size for axis, size in mesh.items()}
    if math.prod(shape.values()) != devices or devices < 1:
        raise JobError(
            f"mesh {dict(mesh)} does not cover {devices} devices.",
            hint="The sizes must multiply to the number of devices; -1 takes what is left.",
            mesh=dict(mesh),
            devices=devices,
        )
    return shape


def check_batch(batch_size: int, mesh: Mapping[str, int], batch_axes: Sequence[str]) -> None:
    """Checks that the rows of a batch divide over the mesh.

    Raises:
        JobError: They do not.
    """
    ways = math.prod(mesh[axis] for axis in batch_axes)
    if batch_size % ways:
        raise JobError(
            f"batch_size={batch_size} does not divide over {ways} devices (axes {', '.join(batch_axes)}).",
            hint=f"Use a multiple of {ways}: {batch_size - batch_size % ways or ways} or {batch_size + ways - batch_size % ways}.",
            batch_size=batch_size,
        )
