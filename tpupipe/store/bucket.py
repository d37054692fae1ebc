"""What a bucket says of itself: where it is, and what keeps or removes objects without being asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELDS = (
    "location,locationType,customPlacementConfig,retentionPolicy,softDeletePolicy,versioning,lifecycle,"
    "defaultEventBasedHold"
)
"""The part of the JSON API's bucket resource that :func:`parse_bucket` reads."""

# Predefined dual-regions (docs.cloud.google.com/storage/docs/locations); others name their regions themselves.
_DUAL_REGIONS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What is known about a bucket.

    Attributes:
        name: Its name.
        location: ``us-central1``, or the name of a multi-region or dual-region: ``us``, ``nam4``.
        regions: The regions that it is in, where the location says so; empty for a multi-region.
        retention_s: Seconds that an object may neither be replaced nor deleted; 0 is no such policy.
        soft_delete_s: Seconds that deleted objects are kept, and paid for; 0 is at once.
        versioned: Whether replaced and deleted objects stay as old versions.
        held: Whether new objects are put on hold until somebody releases them.
        deletes_after_days: Age at which a lifecycle rule deletes objects, whatever they are; ``None`` without one.
    """

    name: str
    location: str
    regions: tuple[str, ...]
    retention_s: int = 0
    soft_delete_s: int = 0
    versioned: bool = False
    held: bool = False
    deletes_after_days: int | None = None


def parse_bucket(name: str, resource: Mapping[str, Any]) -> BucketInfo:
    """Reads the JSON API's bucket resource.

    >>> parse_bucket("b", {"location": "US-CENTRAL1", "locationType": "region"}).regions
    ('us-central1',)
    >>> parse_bucket("b", {"location": "NAM4", "locationType": "dual-region"}).regions
    ('us-central1', 'us-east1')

    Raises:
        KeyError, TypeError, ValueError: It is no such resource.
    """
    location = str(resource["location"])
    placed = resource.get("customPlacementConfig", {}).get("dataLocations", ())
    regions = tuple(str(region).lower() for region in placed) or _DUAL_REGIONS.get(location.upper(), ())
    if not regions and "-" in location:  # multi-regions are us, eu and asia
        regions = (location.lower(),)
    ages = [
        int(rule.get("condition", {})["age"])
        for rule in resource.get("lifecycle", {}).get("rule", ())
        if rule.get("action", {}).get("type") == "Delete" and set(rule.get("condition", {})) == {"age"}
    ]
    return BucketInfo(
        name=name,
        location=location.lower(),
        regions=regions,
        retention_s=int(resource.get("retentionPolicy", {}).get("retentionPeriod", 0)),
        soft_delete_s=int(resource.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0)),
        versioned=bool(resource.get("versioning", {}).get("enabled", False)),
        held=bool(resource.get("defaultEventBasedHold", False)),
        deletes_after_days=min(ages, default=None),
    )
