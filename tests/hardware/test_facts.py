"""Facts come from the packaged tables with their sources, or are said to be unknown."""

from __future__ import annotations

import pytest

from tpupipe.errors import ConfigError
from tpupipe.hardware import GENERATION_NAMES
from tpupipe.hardware.facts import (
    generation_facts,
    gke_chips_per_host,
    gpu_price,
    price_regions,
    tpu_price,
    zones,
)


@pytest.mark.parametrize("name", GENERATION_NAMES)
def test_every_generation_has_facts_with_sources(name):
    """All numbers are there and positive, and somebody can check where they come from."""
    facts = generation_facts(name)
    assert facts.name == name
    assert min(facts.bf16_tflops, facts.hbm_gib, facts.hbm_gb_per_s, facts.cores_per_chip, facts.devices_per_chip) > 0
    assert facts.sources
    assert all(len(source) > 10 for source in facts.sources)


def test_v6e_is_what_the_documentation_says():
    """918 TFLOP/s, 32 GiB, one core: docs of August 2026."""
    facts = generation_facts("v6e")
    assert (facts.bf16_tflops, facts.hbm_gib, facts.cores_per_chip) == (918, 32, 1)
    assert facts.gke_accelerators == ("tpu-v6e-slice",)
    assert any("docs.cloud.google.com/tpu/docs/v6e" in source for source in facts.sources)


def test_prices_name_region_kind_and_source():
    """A list price, on demand and Spot."""
    price = tpu_price("v6e", "us-central1")
    assert price is not None
    assert (price.usd_per_chip_hour, price.region, price.spot) == (2.7, "us-central1", False)
    assert "skypilot" in price.source
    spot = tpu_price("v6e", "us-central1", spot=True)
    assert spot is not None
    assert spot.usd_per_chip_hour == 0.54421
    assert "us-central1" in price_regions("v6e")


def test_an_unknown_price_is_none():
    """No Spot price in the table, no such region, no price of the host: nothing is made up."""
    assert tpu_price("v6e", "southamerica-west1", spot=True) is None
    assert tpu_price("v6e", "mars-north1") is None
    assert gpu_price("H200-141GB", "us-central1") is None


def test_a_gpu_is_priced_with_its_share_of_the_host():
    """A100 80 GB: 4.4242 + 1.09962 USD per hour."""
    price = gpu_price("A100-80GB", "us-east5")
    assert price is not None
    assert price.usd_per_chip_hour == pytest.approx(5.52382)


def test_zones_are_plain_names():
    """Notes of the table are not part of a name; documentation and API lists are joined."""
    assert zones("v4") == ["us-central2-b"]
    assert "asia-northeast1-b" in zones("v6e")
    assert "europe-west4-a" in zones("v2")
    assert all(" " not in zone for name in GENERATION_NAMES for zone in zones(name))


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips"),
    [
        ("tpu-v6e-slice", "2x4", (4, 8)),
        ("tpu-v6e-slice", "3x5", None),
        ("tpu-v5p-slice", "2x2x1", (4,)),
        ("tpu-v5p-slice", "4x8x8", (4,)),
        ("tpu-v5p-slice", "8x4x4", None),
        ("tpu-v5p-slice", "4x4x6", None),
        ("tpu-v4-podslice", "16x16x20", None),
        ("tpu7x", "1x1x1", (1,)),
    ],
)
def test_gke_offers(accelerator, topology, chips):
    """Named topologies and the rule for three sides."""
    assert gke_chips_per_host(accelerator, topology) == chips


def test_an_unknown_accelerator_lists_the_known_ones():
    """The message shows what there is."""
    with pytest.raises(ConfigError, match="tpu-v6e-slice"):
        gke_chips_per_host("tpu-v6e", "2x4")
