"""Does a compiled program fit the HBM of a device, and how long does a step take at least. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpupipe.hardware.facts import Generation

GIB = 2**30
TIGHT_SHARE = 0.9
"""Above this share of HBM a program is called tight: batches queued ahead and fragmentation need some too."""


@dataclass(frozen=True)
class Memory:
    """HBM of one device, bytes, as the compiler's ``memory_analysis()`` has it.

    Args:
        argument: State and batch that go in.
        output: What comes out.
        temporary: Activations, gradients and work space at their peak.
        alias: Outputs that take the place of donated arguments.
        code: The program itself.
    """

    argument: int
    output: int
    temporary: int
    alias: int
    code: int

    @property
    def total(self) -> int:
        """All of it, donated arguments counted once."""
        return self.argument + self.output - self.alias + self.temporary + self.code


@dataclass(frozen=True)
class Roofline:
    """The least time one step takes on one device.

    A bound, not a prediction: communication, the host, and everything that keeps a unit from its peak come on top.

    Args:
        compute_s: All products at the peak of the matrix units.
        memory_s: All HBM traffic at the full bandwidth.
    """

    compute_s: float
    memory_s: float

    @property
    def step_s(self) -> float:
        """Both at once: the longer of the two."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        """``compute`` or ``memory``: which of the two it is."""
        return "compute" if self.compute_s >= self.memory_s else "memory"


def hbm_bytes(generation: Generation, devices_per_chip: int) -> int:
    """HBM of one device.

    Args:
        generation: Facts per chip.
        devices_per_chip: Of the compiler's topology: two for v2, v3, v4 and v7x, which share the chip's HBM.
    """
    return generation.hbm_gib * GIB // devices_per_chip


def roofline(flops: float, hbm_traffic_bytes: float, generation: Generation, devices_per_chip: int) -> Roofline:
    """The roofline of one device (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009).

    Args:
        flops: Per device and step, of products.
        hbm_traffic_bytes: Per device and step.
        generation: Facts per chip: dense bfloat16 peak, bandwidth.
        devices_per_chip: Devices that share them.
    """
    return Roofline(
        compute_s=flops / (generation.bf16_tflops * 1e12 / devices_per_chip),
        memory_s=hbm_traffic_bytes / (generation.hbm_gb_per_s * 1e9 / devices_per_chip),
    )


@dataclass(frozen=True)
class Consumer:
    """Something that takes HBM: a leaf of the state, a buffer, an intermediate value."""

    what: str
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """What is known of a program that does not fit.

    Args:
        state_bytes: State per device.
        ways: Devices that a batch is split over.
        sharding: ``replicated``, ``fsdp`` or ``custom``.
        batch: Rows of the global batch.
        train: Whether there is a backward pass.
    """

    state_bytes: int
    ways: int
    sharding: str
    batch: int
    train: bool


def largest(consumers: Sequence[Consumer], count: int = 3) -> list[Consumer]:
    """The largest few, largest first; equal ones by name."""
    return sorted(consumers, key=lambda each: (-each.size_bytes, each.what))[:count]


def remedies(layout: Layout, needed_bytes: int, available_bytes: int) -> list[str]:
    """What would make a program fit, the surest first. Estimates: only compiling it tells.

    Activations are taken to grow with the rows of a device, and the state to be split evenly by ``fsdp``.

    Args:
        layout: The program.
        needed_bytes: HBM per device that it needs.
        available_bytes: HBM per device that there is.
    """
    rest = max(needed_bytes - layout.state_bytes, 0)
    found = []
    if layout.train and layout.sharding == "replicated" and layout.ways > 1:
        split = layout.state_bytes // layout.ways + rest
        verdict = (
            "about fits"
            if split <= available_bytes
            else "fits only if gradients shrink with it; else take more devices"
        )
        found.append(
            f'sharding="fsdp" splits the state of {size_text(layout.state_bytes)} over {layout.ways} devices: about '
            f"{size_text(split)} per device, which {verdict}"
        )
    room = available_bytes - layout.state_bytes
    if rest and room > 0:
        rows = math.floor(layout.batch * room / rest / layout.ways) * layout.ways
        if 0 < rows < layout.batch:
            found.append(f"a batch of about {rows} rows instead of {layout.batch}")
    if layout.train and rest > layout.state_bytes:
        found.append(
            f"rematerialisation (jax.checkpoint around a layer): activations and work space take {size_text(rest)}"
        )
    if layout.state_bytes > available_bytes and layout.sharding != "replicated":
        found.append(f"more devices: the state alone takes {size_text(layout.state_bytes)} of each")
    return found or ["a slice with more chips, or chips with more HBM"]


def size_text(size_bytes: float) -> str:
    """A size to read: binary units, as HBM is sold.

    >>> size_text(17.13 * 2**30), size_text(2**20), size_text(12)
    ('17.13 GiB', '1.00 MiB', '12 B')
    """
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """A time to read.

    >>> time_text(0.0000046), time_text(0.0125), time_text(3), time_text(2e-8)
    ('4.6 us', '12.5 ms', '3.0 s', '20.0 ns')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds * 1e9:.1f} ns"
