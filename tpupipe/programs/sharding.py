"""Placements on a mesh, and which rows of a global batch this process feeds. Import inside workers only."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpupipe.errors import JobError


def forget_slices() -> None:
    """Removes the ``MEGASCALE_*`` that a host of several slices came with, before JAX first touches a device."""
    for name in [name for name in os.environ if name.startswith("MEGASCALE_")]:
        del os.environ[name]


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any]) -> Any:
    """A mesh with automatic axes over ``devices``, in their order."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape))


def named_sharding(mesh: Any, *axes: Any) -> Any:
    """Splits dimension i over mesh axis (or tuple of axes) ``axes[i]``; without axes: replicated."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*axes))


def state_shardings(
    abstract: Any,
    mesh: Any,
    rule: str | Callable[[str, tuple[int, ...], Any], Any],
    batch_axes: Sequence[str],
) -> Any:
    """A sharding for every leaf of the state.

    Args:
        abstract: Tree of shapes.
        mesh: The mesh.
        rule: ``"replicated"``, ``"fsdp"`` or ``fn(path, shape, mesh) -> PartitionSpec``.
        batch_axes: What ``"fsdp"`` splits over; all axes if there are none.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    # Without batch axes (a model that all devices hold together, each with all rows) over all there are.
    axes = tuple(batch_axes) or tuple(mesh.axis_names)
    ways = math.prod(mesh.shape[axis] for axis in axes)

    def fsdp(shape: tuple[int, ...]) -> Any:
        fitting = [d for d in sorted(range(len(shape)), key=lambda d: -shape[d]) if shape[d] and shape[d] % ways == 0]
        spec = [axes if d == fitting[0] else None for d in range(len(shape))] if fitting else []
        return PartitionSpec(*spec)

    def sharding(path: Any, leaf: Any) -> Any:
        if callable(rule):
            spec = rule(jax.tree_util.keystr(path), tuple(leaf.shape), mesh)
        else:
            spec = fsdp(tuple(leaf.shape)) if rule == "fsdp" else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, abstract)


@dataclass(frozen=True)
class RowRange:
    """Rows of the global batch of one process.

    Args:
        start, stop: The rows its devices hold.
        own_start, own_stop: Those of them that it accounts for, so that a row held by several processes counts once.
    """

    start: int
    stop: int
    own_start: int
    own_stop: int


def row_range(sharding: Any, batch_size: int) -> RowRange:
    """Which rows this process feeds.

    Raises:
        JobError: They are not one contiguous block (a mesh that interleaves hosts).
    """
    import jax

    blocks: dict[tuple[int, int], int] = {}  # rows -> the lowest process that holds them
    mine = set()
    for device, index in sharding.devices_indices_map((batch_size,)).items():
        start, stop, _ = index[0].indices(batch_size)
        block = (start, stop)
        blocks[block] = min(blocks.get(block, device.process_index), device.process_index)
        if device.process_index == jax.process_index():
            mine.add(block)
    start, stop = _join(sorted(mine))
    own = [block for block in mine if blocks[block] == jax.process_index()]
    own_start, own_stop = _join(sorted(own)) if own else (start, start)
    return RowRange(start, stop, own_start, own_stop)


def _join(blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    for (_, end), (begin, _) in itertools.pairwise(blocks):
        if end != begin:
            raise JobError(
                f"The mesh gives one host the rows {list(blocks)} of a batch, which is not one block.",
                hint="Put the batch axes first in the mesh.",
            )
    return blocks[0][0], blocks[-1][1]


def global_array(sharding: Any, batch_size: int, first_row: int, rows: Any) -> Any:
    """A sharded global array ``[batch_size, ...]`` from this process's rows (``first_row`` on)."""
    import jax

    rows = rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype), copy=False)  # int64 is int32 to JAX by default

    def part(index: Any) -> Any:
        start, stop, _ = index[0].indices(batch_size)
        return rows[(slice(start - first_row, stop - first_row), *index[1:])]

    return jax.make_array_from_callback((batch_size, *rows.shape[1:]), sharding, part)


def put_whole(value: Any, sharding: Any) -> Any:
    """A host array on the devices of a sharding.

    Args:
        value: The whole array; where the devices are of several processes, each of them has it.
        sharding: ``jax.sharding.Sharding``.
    """
    import jax

    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
