"""What the hardware is: slices as arithmetic, facts with their sources."""

from __future__ import annotations

from tpupipe.hardware.facts import GENERATION_NAMES, Generation, Price
from tpupipe.hardware.slices import SliceSpec, generation_name, topology_dims

__all__ = ["GENERATION_NAMES", "Generation", "Price", "SliceSpec", "generation_name", "topology_dims"]
