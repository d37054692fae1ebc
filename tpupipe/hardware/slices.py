"""What a TPU slice is: generation, topology, hosts, chips, devices. Arithmetic only.

Whether Google offers a topology is not decided here: Ray refuses the ones it does not know when the slice is
reserved. What is refused here cannot exist at all: no whole number of hosts, no such generation.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from tpupipe.errors import SliceError
from tpupipe.hardware.facts import GENERATION_NAMES, Generation, generation_facts

# Ray and Cloud TPU call v5e "v5litepod" in pod types and resource names (ray.util.tpu.get_tpu_version_from_type).
_RAY_VERSIONS = {"v5e": "v5litepod"}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7": "v7x", "7x": "v7x", "tpu7x": "v7x"}

# A VM of these generations carries all chips of a small slice (Ray's and GKE's default); every other VM has four.
_SINGLE_VM_GENERATIONS = ("v5e", "v6e")
_SINGLE_VM_MAX_CHIPS = 8
_DEFAULT_CHIPS_PER_VM = 4


def generation_name(text: str) -> str:
    """Give the one spelling of a TPU generation.

    Args:
        text: Any usual spelling: ``"v6e"``, ``"V6E"``, ``"TPU-V6E"``, ``"v5litepod"``, ``"tpu7x"``.

    Returns:
        One of :data:`tpupipe.hardware.facts.GENERATION_NAMES`.

    Raises:
        SliceError: No such generation.

    >>> generation_name("TPU-V5LITEPOD"), generation_name("tpu7x"), generation_name("v4")
    ('v5e', 'v7x', 'v4')
    """
    name = text.strip().lower().removeprefix("tpu-")
    name = _ALIASES.get(name, name)
    if name not in GENERATION_NAMES:
        near = difflib.get_close_matches(name, GENERATION_NAMES, n=2)
        raise SliceError(
            f"{text!r} is not a TPU generation; allowed: {', '.join(GENERATION_NAMES)}",
            hint=f"nearest: {', '.join(near)}" if near else "",
            generation=text,
        )
    return name


def topology_dims(text: str) -> tuple[int, ...]:
    """Read a topology into its sides, in chips.

    Raises:
        SliceError: Not two or three positive whole numbers joined by ``x``.

    >>> topology_dims("4x4"), topology_dims("2x2x1")
    ((4, 4), (2, 2, 1))
    """
    sides = text.strip().lower().split("x")
    if len(sides) not in (2, 3) or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
        raise SliceError(
            f"{text!r} is not a topology; allowed: two or three positive whole numbers joined by 'x', "
            "such as 2x4 or 2x2x1",
            topology=text,
        )
    return tuple(int(side) for side in sides)


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """One or several equal TPU slices.

    Args:
        generation: ``"v6e"`` and so on; usual spellings are brought to one (:func:`generation_name`).
        topology: Sides of one slice in chips, ``"4x4"`` (v2, v3, v5e, v6e) or ``"2x2x1"`` (v4, v5p, v7x).
        chips_per_vm: Chips of one TPU VM, where the default is not what the node pool has.
        slices: Number of slices.

    Raises:
        SliceError: Such a slice cannot exist. ``data`` names generation, topology and chips_per_vm.

    >>> spec = SliceSpec("v6e", "2x4", chips_per_vm=4)
    >>> spec.chips, spec.hosts, spec.devices_per_host, spec.pod_type
    (8, 2, 4, 'v6e-8')
    """

    generation: str
    topology: str
    chips_per_vm: int | None = None
    slices: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "generation", generation_name(self.generation))
        dims = topology_dims(self.topology)
        object.__setattr__(self, "topology", "x".join(map(str, dims)))
        facts: dict[str, Any] = {
            "generation": self.generation,
            "topology": self.topology,
            "chips_per_vm": self.chips_per_vm,
        }
        if self.slices < 1:
            raise SliceError(f"slices is {self.slices}; allowed: 1 or more", slices=self.slices, **facts)
        if self.chips_per_vm is not None and self.chips_per_vm < 1:
            raise SliceError(f"chips_per_vm is {self.chips_per_vm}; allowed: 1 or more", **facts)
        wanted_sides = self.facts.topology_sides
        if len(dims) != wanted_sides:
            example = "4x4" if wanted_sides == 2 else "2x2x1"
            raise SliceError(
                f"topology {self.topology} has {len(dims)} sides, a {self.generation} slice has {wanted_sides}, "
                f"such as {example}",
                **facts,
            )
        if self.chips_per_slice % self.chips_per_host:
            raise SliceError(
                f"a {self.generation} slice of {self.topology} has {self.chips_per_slice} chips, which is no whole "
                f"number of hosts with {self.chips_per_host} chips each",
                hint="choose another topology, or set chips_per_vm to what one TPU VM of the node pool has",
                **facts,
            )

    @property
    def facts(self) -> Generation:
        """What is known about one chip of this generation."""
        return generation_facts(self.generation)

    @classmethod
    def parse(cls, text: str) -> SliceSpec:
        """Reads ``generation:topology[:chips per VM]``.

        Raises:
            SliceError: It is not of that form, or no such slice can exist.

        >>> SliceSpec.parse("v6e:2x4:4").hosts, SliceSpec.parse("v5e:2x2").hosts
        (2, 1)
        """
        generation, _, rest = text.partition(":")
        topology, has_chips, chips = rest.partition(":")
        if not topology or (has_chips and not chips.isdigit()):
            raise SliceError(f"{text!r} is not a slice; allowed: generation:topology[:chips per VM].", hint="v6e:2x4:4")
        return cls(generation, topology, int(chips) if has_chips else None)

    @property
    def dims(self) -> tuple[int, ...]:
        """Sides of one slice, in chips."""
        return topology_dims(self.topology)

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.dims)

    @property
    def chips(self) -> int:
        """Chips of all slices: what is paid for."""
        return self.chips_per_slice * self.slices

    @property
    def chips_per_host(self) -> int:
        """Chips of one TPU VM: ``chips_per_vm``, or the default of ``ray.util.tpu`` and GKE.

        v5e and v6e slices of up to 8 chips are one VM, every other VM has 4 chips (a smaller slice has fewer).
        """
        if self.chips_per_vm is not None:
            return self.chips_per_vm
        chips = self.chips_per_slice
        if self.generation in _SINGLE_VM_GENERATIONS and chips <= _SINGLE_VM_MAX_CHIPS:
            return chips
        return min(chips, _DEFAULT_CHIPS_PER_VM)

    @property
    def hosts_per_slice(self) -> int:
        """TPU VMs of one slice (GKE's ``numOfHosts``)."""
        return self.chips_per_slice // self.chips_per_host

    @property
    def hosts(self) -> int:
        """TPU VMs of all slices; a run has one JAX process on each."""
        return self.hosts_per_slice * self.slices

    @property
    def devices_per_chip(self) -> int:
        """What ``jax.local_devices()`` lists per chip on a real host (:attr:`Generation.devices_per_chip`)."""
        return self.facts.devices_per_chip

    @property
    def devices_per_host(self) -> int:
        """JAX devices of one host."""
        return self.chips_per_host * self.devices_per_chip

    @property
    def devices_per_slice(self) -> int:
        """JAX devices of one slice."""
        return self.chips_per_slice * self.devices_per_chip

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * self.devices_per_chip

    @property
    def cores(self) -> int:
        """TensorCores of one slice: the number in the pod type."""
        return self.chips_per_slice * self.facts.cores_per_chip

    @property
    def ray_version(self) -> str:
        """The generation as ``ray.util.tpu`` spells it (``accelerator_version=``)."""
        return _RAY_VERSIONS.get(self.generation, self.generation)

    @property
    def pod_type(self) -> str:
        """Pod type of one slice, ``v6e-16``: generation and TensorCores (two per chip for v2, v3, v4, v5p, v7x)."""
        return f"{self.ray_version}-{self.cores}"

    @property
    def accelerator_type(self) -> str:
        """Ray's accelerator type, ``TPU-V6E``: the node label and the name in ``accelerator_type:TPU-V6E``."""
        return f"TPU-{self.ray_version.upper()}"

    def __str__(self) -> str:
        """``v6e 4x4 (16 chips, 4 hosts)``, for messages."""
        many = f"{self.slices} x " if self.slices > 1 else ""
        return f"{many}{self.generation} {self.topology} ({self.chips} chips, {self.hosts} hosts)"
