"""Whether the zone has the hardware, by the packaged facts."""

from __future__ import annotations

from collections.abc import Iterator

from tpupipe.hardware.facts import price_regions, tpu_price, zone_region, zone_sources, zones
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status

NO_ZONE = "Set cluster.zone to the zone of the node pool, as us-central1-b."


def offer_findings(context: CheckContext) -> Iterator[Finding]:
    """``zone.offer``: the zone is listed with the generation. A listing is not capacity, and the facts have dates."""
    name, cluster = "zone.offer", context.config.cluster
    if cluster.kind != "tpu":
        yield Finding(name, Status.SKIPPED, f"cluster.kind is {cluster.kind}: the facts are of TPU zones.")
        return
    if cluster.zone is None:
        yield Finding(name, Status.WARNING, "cluster.zone is not set: nothing says where the slice would be.", NO_ZONE)
        return
    generation = str(cluster.generation)
    listed, sources = zones(generation), zone_sources(generation)
    facts = {"zone": cluster.zone, "zones": listed, "sources": sources}
    if cluster.zone in listed:
        yield Finding(
            name,
            Status.OK,
            f"{cluster.zone} is listed with {generation} ({'; '.join(sources)}). A listing is not capacity.",
            facts=facts,
        )
        return
    region = zone_region(cluster.zone)
    near = [zone for zone in listed if zone_region(zone) == region]
    yield Finding(
        name,
        Status.FAILURE,
        f"{cluster.zone} is not listed with {generation} ({'; '.join(sources)}).",
        f"Zones of {region} that are: {', '.join(near)}."
        if near
        else f"Zones that are: {', '.join(listed) or 'none'}.",
        facts,
    )


def price_findings(context: CheckContext) -> Iterator[Finding]:
    """``zone.prices``: the prices are those of the slice's region."""
    name, cluster, cost = "zone.prices", context.config.cluster, context.config.cost
    if cluster.kind != "tpu":
        yield Finding(name, Status.SKIPPED, f"cluster.kind is {cluster.kind}.")
        return
    region = zone_region(cluster.zone) if cluster.zone else None
    if cost.region is not None and region is not None and cost.region != region:
        message = f"cost.region is {cost.region}, and cluster.zone {cluster.zone} is in {region}."
        yield Finding(name, Status.WARNING, message, f"Set cost.region to {region}, or leave it out.")
        return
    if cost.usd_per_chip_hour is not None:
        yield Finding(name, Status.OK, f"{cost.usd_per_chip_hour:g} USD per chip-hour, as configured.")
        return
    where = cost.region or region
    if where is None:
        yield Finding(name, Status.SKIPPED, "Neither cluster.zone nor cost.region is set.", NO_ZONE)
        return
    generation = str(cluster.generation)
    price = tpu_price(generation, where, spot=cost.spot)
    kind = "Spot" if cost.spot else "on demand"
    if price is None:
        known = ", ".join(price_regions(generation)) or "none"
        message = f"The price list has no {generation} {kind} in {where}; it has {known}."
        yield Finding(name, Status.WARNING, message, "Set cost.usd_per_chip_hour to what you pay.")
        return
    message = f"{price.usd_per_chip_hour:g} USD per chip-hour {kind} in {where}, list price ({price.source})."
    yield Finding(name, Status.OK, message, facts={"usd_per_chip_hour": price.usd_per_chip_hour, "region": where})
