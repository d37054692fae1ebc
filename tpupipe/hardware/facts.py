"""Facts about hardware that are not arithmetic: performance, memory, prices, zones.

They are data, not code: ``hardware/data/`` holds the tables with the source and the date of each. A fact that is
not in the tables is an error or ``None``, never a guess.

Devices per chip come in two kinds and only the first is a fact here: what the *runtime* lists on a real host (the
table's ``devices_per_chip``: v4 and v5p run their two cores as one device, v2, v3 and v7x list each core). The
TPU *compiler's* ahead-of-time topologies list two devices per chip for v4 and v7x; whoever compiles against such
a topology must count the devices it returns instead of using this table.
"""

from __future__ import annotations

import csv
import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tpupipe.errors import ConfigError

GENERATION_NAMES = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
"""Every TPU generation tpupipe knows, oldest first."""

# 3D torus generations (GKE table's rule_3d; ray.util.tpu takes only AxBxC for these).
_THREE_SIDED = ("v4", "v5p", "v7x")


@dataclass(frozen=True, slots=True)
class Generation:
    """One TPU generation; numbers are per chip.

    Args:
        name: One of :data:`GENERATION_NAMES`.
        bf16_tflops: Dense bfloat16 peak, TFLOP/s.
        hbm_gib: High-bandwidth memory, GiB.
        hbm_gb_per_s: Its bandwidth, GB/s (10^9 bytes).
        cores_per_chip: TensorCores per chip; pod types count these.
        devices_per_chip: Devices ``jax.local_devices()`` lists per chip on a real host.
        topology_sides: 2 (``4x4``) or 3 (``2x2x1``).
        gke_accelerators: Values of the node label ``cloud.google.com/gke-tpu-accelerator``; the first is the
            one for slices of several hosts.
        sources: Where the numbers were read, with dates.
    """

    name: str
    bf16_tflops: float
    hbm_gib: int
    hbm_gb_per_s: float
    cores_per_chip: int
    devices_per_chip: int
    topology_sides: int
    gke_accelerators: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """A list price, without discounts.

    Args:
        usd_per_chip_hour: US dollars for one chip (one GPU with its share of the host) for one hour.
        region: Region the price holds for.
        spot: Whether it is the Spot price.
        source: Where it was read.
    """

    usd_per_chip_hour: float
    region: str
    spot: bool
    source: str


@functools.cache
def generation_facts(name: str) -> Generation:
    """Look up a generation by its one spelling (see :func:`tpupipe.hardware.slices.generation_name`).

    Raises:
        KeyError: ``name`` is not in :data:`GENERATION_NAMES`.
    """
    table = _json("tpu_generations.json")
    row = table["generations"][name]
    labels = table["sources"]
    return Generation(
        name=name,
        bf16_tflops=float(row["bf16"]),
        hbm_gib=int(row["hbm_gib"]),
        hbm_gb_per_s=float(row["bw_gbps"]),
        cores_per_chip=int(row["cores"]),
        devices_per_chip=int(row["devices_per_chip"]),
        topology_sides=3 if name in _THREE_SIDED else 2,
        gke_accelerators=tuple(row["gke"] or ()),
        sources=tuple(labels.get(source, source) for source in row["src"]),
    )


def tpu_price(generation: str, region: str, *, spot: bool = False) -> Price | None:
    """Look up the list price of one chip-hour.

    Args:
        generation: One of :data:`GENERATION_NAMES`.
        region: Such as ``"us-central1"``.
        spot: Spot instead of on-demand.

    Returns:
        The price, or ``None`` where the table has none: set ``cost.usd_per_chip_hour`` then.
    """
    for row in _csv("tpu_prices_per_chip_hour.csv"):
        if (row["gen"], row["region"]) == (generation, region):
            usd = row["spot_usd" if spot else "on_demand_usd"]
            return Price(float(usd), region, spot, row["source"]) if usd else None
    return None


def gpu_price(gpu: str, region: str, *, spot: bool = False) -> Price | None:
    """Look up the list price of one GPU-hour including its share of the host machine.

    Args:
        gpu: As the table names it: ``"A100-80GB"``, ``"H100-80GB"``…
        region: Such as ``"us-east4"``.
        spot: Spot instead of on-demand.

    Returns:
        The price, or ``None`` where the GPU's or its host's price is not known: half a price would flatter it.
    """
    for row in _csv("gpu_prices_per_gpu_hour.csv"):
        if (row["gpu"], row["region"]) == (gpu, region):
            kind = "spot" if spot else "on_demand"
            usd, host_usd = row[f"gpu_{kind}"], row[f"host_{kind}_per_gpu"]
            return Price(float(usd) + float(host_usd), region, spot, row["source"]) if usd and host_usd else None
    return None


def price_regions(generation: str) -> list[str]:
    """List the regions :func:`tpu_price` knows for a generation, for messages."""
    return sorted(row["region"] for row in _csv("tpu_prices_per_chip_hour.csv") if row["gen"] == generation)


def zones(generation: str) -> list[str]:
    """List the zones in which the Cloud API lists a generation. A listing is not capacity.

    Args:
        generation: One of :data:`GENERATION_NAMES`.

    Returns:
        Zone names, sorted: the union of the API's list and of the documentation's pages.
    """
    table = _json("tpu_zones.json")
    found: set[str] = set()
    for section in ("docs_north_america", "docs_europe", "api_listed_zones"):
        for key, names in table[section].items():
            # "v2 (may be partial)" is a key and "us-central1-ai1 (as printed in one copy)" a zone of the table.
            if key.split(" ")[0] == generation:
                found.update(zone.split(" ")[0] for zone in names)
    return sorted(found)


def zone_sources(generation: str) -> list[str]:
    """Where :func:`zones` was read for a generation, with dates or versions."""
    table = _json("tpu_zones.json")
    return [
        str(table[section]["source"]).partition(" ; ")[0]
        for section in ("docs_north_america", "docs_europe", "api_listed_zones")
        if any(key.split(" ")[0] == generation for key in table[section])
    ]


def zone_region(zone: str) -> str:
    """The region that a zone is in.

    >>> zone_region("us-central2-b"), zone_region("us-central1-ai1a")
    ('us-central2', 'us-central1')
    """
    return zone.rpartition("-")[0]


def gke_topologies(accelerator: str) -> str:
    """The topologies that :func:`gke_chips_per_host` knows for an accelerator, for messages.

    >>> gke_topologies("tpu-v5-lite-device")
    '1x1, 2x2, 2x4'
    """
    table = _json("gke_topology_chips_per_host.json")
    limits = [key.removeprefix("3D<=").replace("*", "x") for key in table[accelerator] if key.startswith("3D<=")]
    named = [key for key in table[accelerator] if not key.startswith("3D<=")]
    return ", ".join(named + [f"AxBxC up to {limit} ({table['rule_3d']})" for limit in limits])


def gke_chips_per_host(accelerator: str, topology: str) -> tuple[int, ...] | None:
    """Look up which chips per host GKE offers for a topology.

    Args:
        accelerator: Value of ``cloud.google.com/gke-tpu-accelerator``, such as ``"tpu-v6e-slice"``.
        topology: Such as ``"2x4"``.

    Returns:
        Chips per host on offer, or ``None`` where the table names neither the topology nor a rule for it.

    Raises:
        ConfigError: No such accelerator in the table.

    >>> gke_chips_per_host("tpu-v6e-slice", "2x4"), gke_chips_per_host("tpu-v4-podslice", "2x2x2")
    ((4, 8), (4,))
    """
    table = _json("gke_topology_chips_per_host.json")
    offers = table.get(accelerator)
    if not isinstance(offers, dict):
        names = sorted(name for name, value in table.items() if isinstance(value, dict))
        raise ConfigError(f"{accelerator!r} is not a GKE TPU accelerator; allowed: {', '.join(names)}")
    if topology in offers:
        return tuple(offers[topology])
    limit = next((key.removeprefix("3D<=") for key in offers if key.startswith("3D<=")), None)
    if limit is None or not _fits_3d_rule(topology, tuple(int(side) for side in limit.split("*"))):
        return None
    return tuple(offers[f"3D<={limit}"])


def _fits_3d_rule(topology: str, limit: tuple[int, ...]) -> bool:
    """Apply the table's ``rule_3d``: small cubes of 2s and 4s, or multiples of 4, in ascending order."""
    sides = tuple(int(side) for side in topology.split("x"))
    if len(sides) != 3 or any(side > most for side, most in zip(sides, limit, strict=True)):
        return False
    if sides == (2, 2, 1):
        return True
    chips = sides[0] * sides[1] * sides[2]
    ascending = sides[0] <= sides[1] <= sides[2]
    small = chips <= 64 and all(side in (2, 4) for side in sides)
    large = chips > 64 and all(side % 4 == 0 for side in sides)
    return ascending and (small or large)


@functools.cache
def _json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_text(name))
    return loaded


@functools.cache
def _csv(name: str) -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader(_text(name).splitlines()))


def _text(name: str) -> str:
    return resources.files("tpupipe.hardware").joinpath("data", name).read_text(encoding="utf-8")
