"""Zones and prices by the packaged facts."""

from __future__ import annotations

import pytest

from tpupipe.preflight.checks import run_checks
from tpupipe.preflight.findings import Status


def zone_findings(context, **sections):
    return {f.check: f for f in run_checks(context(**sections), ["zone"])}


@pytest.mark.parametrize(
    ("generation", "topology", "zone", "status"),
    [
        ("v6e", "4x4", "us-central1-b", Status.OK),
        ("v6e", "4x4", "asia-northeast1-b", Status.OK),
        ("v4", "2x2x1", "us-central2-b", Status.OK),
        ("v7x", "2x2x1", "us-central1-ai1a", Status.OK),
        ("v7x", "2x2x1", "asia-northeast1-b", Status.FAILURE),
        ("v4", "2x2x1", "us-central1-b", Status.FAILURE),
    ],
)
def test_whether_the_zone_has_the_generation(context, generation, topology, zone, status):
    """A listing says that it is none of capacity, and has its source; a refusal says where else."""
    cluster = {"generation": generation, "topology": topology, "zone": zone}
    offer = zone_findings(context, cluster=cluster)["zone.offer"]
    assert offer.status is status
    assert "2026" in offer.message
    assert ("not capacity" in offer.message) is (status is Status.OK)
    if status is Status.FAILURE:
        assert set(offer.facts["zones"]) & set(offer.hint.replace(",", "").replace(".", "").split())


def test_a_zone_of_the_same_region_is_proposed_first(context):
    """us-central1-f has no v6e, others of us-central1 do."""
    offer = zone_findings(context, cluster={"zone": "us-central1-f"})["zone.offer"]
    assert "us-central1-b" in offer.hint
    assert "europe" not in offer.hint


def test_no_zone_is_a_warning_and_a_faked_slice_has_none(context):
    """Without it neither the zone nor the bucket's region can be compared."""
    assert zone_findings(context, cluster={"zone": None})["zone.offer"].status is Status.WARNING
    assert zone_findings(context, cluster={"kind": "fake"})["zone.offer"].status is Status.SKIPPED


def test_prices_of_another_region_are_a_warning(context):
    """us-east5 prices for a slice in us-central1; the list's own; the configuration's; none."""
    prices = lambda **cost: zone_findings(context, cost=cost)["zone.prices"]  # noqa: E731 - short
    assert prices(region="us-east5").status is Status.WARNING
    assert (prices().status, prices().facts["region"]) == (Status.OK, "us-central1")
    assert "3 USD" in prices(usd_per_chip_hour=3.0).message
