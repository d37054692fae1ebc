"""A slice as the TPU compiler names it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpupipe.errors import SliceError
from tpupipe.hardware.slices import SliceSpec

# libtpu knows v7x by its product name.
_NAMES = {"v7x": "tpu7x"}


@dataclass(frozen=True)
class CompilerTopology:
    """Arguments of ``jax.experimental.topologies.get_topology_desc``.

    Args:
        name: ``v6e:4x4``.
        host_bounds: Chips of one host along three sides.
        slices: Number of slices.
    """

    name: str
    host_bounds: tuple[int, int, int]
    slices: int = 1


def whole_slice(spec: SliceSpec) -> CompilerTopology:
    """All slices: what a training step is compiled for."""
    return CompilerTopology(_name(spec, spec.topology), host_bounds(spec), spec.slices)


def one_slice(spec: SliceSpec) -> CompilerTopology:
    """One of the slices: what an inference program is compiled for whose model all its hosts hold."""
    return CompilerTopology(_name(spec, spec.topology), host_bounds(spec))


def one_host(spec: SliceSpec) -> CompilerTopology:
    """One host as a slice of its own: what an inference program is compiled for.

    A program for some devices of a larger topology makes the compiler abort as soon as they communicate.
    """
    bounds = host_bounds(spec)
    sides = "x".join(map(str, bounds[: len(spec.dims)]))
    return CompilerTopology(_name(spec, sides), bounds)


def host_bounds(spec: SliceSpec) -> tuple[int, int, int]:
    """How a host's chips lie in the slice: the squarest rectangle that tiles it.

    Raises:
        SliceError: There is none.

    >>> host_bounds(SliceSpec("v6e", "4x4")), host_bounds(SliceSpec("v5e", "2x4")), host_bounds(SliceSpec("v6e", "1x1"))
    ((2, 2, 1), (2, 4, 1), (1, 1, 1))
    """
    chips, dims = spec.chips_per_host, spec.dims
    fitting = [
        (a, chips // a)
        for a in range(1, chips + 1)
        if chips % a == 0 and dims[0] % a == 0 and dims[1] % (chips // a) == 0
    ]
    if not fitting:
        raise SliceError(
            f"{chips} chips per host do not tile a {spec.generation} slice of {spec.topology}.",
            hint="Leave chips_per_vm out, or choose another topology.",
            topology=spec.topology,
        )
    a, b = min(fitting, key=lambda sides: (abs(sides[0] - sides[1]), math.hypot(*sides)))
    return a, b, 1


def _name(spec: SliceSpec, sides: str) -> str:
    return f"{_NAMES.get(spec.generation, spec.generation)}:{sides}"
