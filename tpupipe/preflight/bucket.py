"""Where the bucket is, and what it does to objects by itself. Judged from its description."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.config import Config
from tpupipe.errors import CheckFailedError, StoreError
from tpupipe.hardware.facts import zone_region
from tpupipe.job import Train
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status
from tpupipe.store.bucket import BucketInfo
from tpupipe.store.objects import Store

_log = logging.getLogger("tpupipe.preflight")

REGION = "store.region"
_DAY_S = 86_400
# Which regions a multi-region may spread over (docs.cloud.google.com/storage/docs/locations).
_MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}


def judge_region(bucket: BucketInfo, zone: str, *, allow_cross_region: bool) -> Finding:
    """Compares the bucket's location with the zone of the slice. Pure.

    Returns:
        A failure where they are in different regions, or a warning if that is allowed. A multi-region around the zone
        is a warning too: its name does not say where the data is.
    """
    region = zone_region(zone)
    facts = {"location": bucket.location, "regions": list(bucket.regions), "zone": zone}
    if region in bucket.regions:
        return Finding(
            REGION, Status.OK, f"gs://{bucket.name} is in {bucket.location}, the slice in {zone}.", facts=facts
        )
    prefix = _MULTI_REGIONS.get(bucket.location)
    if prefix is not None and region.startswith(prefix):
        return Finding(
            REGION,
            Status.WARNING,
            f"gs://{bucket.name} is in the multi-region {bucket.location}, the slice in {zone}: its data may be in another region.",
            f"A bucket in {region} has the shortest way, and no charges between regions.",
            facts,
        )
    message = f"gs://{bucket.name} is in {bucket.location}, the slice in {zone}: every save and read crosses regions."
    if allow_cross_region:
        hint = "store.allow_cross_region allows it; the transfer between regions is charged."
        return Finding(REGION, Status.WARNING, message, hint, facts)
    hint = f"Use a bucket in {region}, a slice in {' or '.join(bucket.regions) or bucket.location}, or set store.allow_cross_region=true."
    return Finding(REGION, Status.FAILURE, message, hint, facts)


def compares_regions(config: Config) -> str | None:
    """The zone that a real bucket is compared with; ``None`` where there is nothing to compare."""
    if config.cluster.kind == "fake" or config.store.embedded or not config.store.uri.startswith("gs://"):
        return None
    return config.cluster.zone


def region_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.region``: the bucket is in the slice's region."""
    config, store = context.config, context.store
    if config.cluster.kind == "fake":
        yield Finding(REGION, Status.SKIPPED, "A faked slice is on this machine, in no region.")
    elif config.store.embedded or not config.store.uri.startswith("gs://"):
        yield Finding(REGION, Status.SKIPPED, "The store is on this machine, in no region.")
    elif config.cluster.zone is None:
        hint = "Set cluster.zone to the zone of the node pool, as us-central1-b."
        yield Finding(REGION, Status.WARNING, "cluster.zone is not set: the bucket may be in another region.", hint)
    elif store is None:
        yield Finding(REGION, Status.SKIPPED, "The store could not be opened.", "Mend what store.create says first.")
    else:
        bucket = _described(REGION, context)
        if isinstance(bucket, Finding):
            yield bucket
            return
        yield judge_region(bucket, config.cluster.zone, allow_cross_region=config.store.allow_cross_region)


def refuse_other_region(config: Config, store: Store) -> None:
    """For a run, before it reserves anything: a bucket in another region is refused, or logged where it is allowed.

    A bucket whose description cannot be read is logged, too: the account that trains need not see it.

    Raises:
        CheckFailedError: They are in different regions, and ``store.allow_cross_region`` is not set.
    """
    zone = compares_regions(config)
    if zone is None:
        return
    try:
        bucket = store.bucket()
    except StoreError as error:
        _log.warning("the bucket's region is not known, and may not be that of %s: %s", zone, error.message)
        return
    if bucket is None:
        return
    found = judge_region(bucket, zone, allow_cross_region=config.store.allow_cross_region)
    if found.status is Status.FAILURE:
        raise CheckFailedError(found.message, hint=found.hint, **found.facts)
    if found.status is Status.WARNING:
        _log.warning("%s %s", found.message, found.hint)


def retention_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.retention``: which checkpoints stay, and what of it is not in our hands."""
    name = "store.retention"
    for stage in context.job.stages if context.job else ():
        if isinstance(stage, Train):
            yield judge_policy(stage.name, SavePolicy.of(stage.checkpoint), stage.steps)
    if context.store is None or context.config.store.embedded or not context.config.store.uri.startswith("gs://"):
        yield Finding(name, Status.OK, "The store is on this machine: it keeps and removes nothing by itself.")
        return
    bucket = _described(name, context)
    if isinstance(bucket, Finding):
        yield bucket
        return
    yield from judge_bucket(bucket)


def judge_policy(stage: str, policy: SavePolicy, steps: int | None) -> Finding:
    """Judges when a stage saves and what it keeps. Pure."""
    name = "store.retention"
    every = " and ".join(
        [
            *([f"{policy.steps} steps"] if policy.steps else []),
            *([f"{policy.minutes:g} minutes"] if policy.minutes else []),
        ]
    )
    message = f"{stage}: saves every {every}, keeps {policy.keep} checkpoint(s) and always the newest intact one."
    facts = {"stage": stage, "steps": policy.steps, "minutes": policy.minutes, "keep": policy.keep}
    if policy.keep == 1:
        return Finding(
            name,
            Status.WARNING,
            message,
            f"With one, there is nothing to go back to when it turns out to be damaged: stages.{stage}.checkpoint.keep=3.",
            facts,
        )
    if steps is not None and policy.minutes is None and policy.steps is not None and policy.steps >= steps:
        return Finding(
            name,
            Status.WARNING,
            f"{message[:-1]}; it has {steps} steps, so only the last one is saved.",
            f"A failure starts it over: stages.{stage}.checkpoint.steps={max(1, steps // 10)}.",
            facts,
        )
    return Finding(name, Status.OK, message, facts=facts)


def judge_bucket(bucket: BucketInfo) -> list[Finding]:
    """Judges what a bucket does to objects by itself: keeps them although deleted, or deletes them unasked. Pure."""
    name, where = "store.retention", f"gs://{bucket.name}"
    found = []

    def warn(message: str, hint: str) -> None:
        found.append(Finding(name, Status.WARNING, f"{where} {message}", hint))

    if bucket.retention_s:
        warn(
            f"has a retention policy of {bucket.retention_s / _DAY_S:g} days: until then, objects are neither deleted nor "
            "replaced, and a driver must replace its beat.",
            "Use a bucket without one; old checkpoints could not be pruned either.",
        )
    if bucket.held:
        warn(
            "puts every new object on hold (default event-based hold): none can be deleted or replaced.",
            f"gcloud storage buckets update {where} --no-default-event-based-hold",
        )
    if bucket.soft_delete_s:
        warn(
            f"keeps deleted objects for {bucket.soft_delete_s / _DAY_S:g} days (soft delete), and they are paid for: pruned "
            "checkpoints cost as much until then.",
            f"gcloud storage buckets update {where} --clear-soft-delete",
        )
    if bucket.versioned:
        warn(
            "keeps old versions: deleted checkpoints stay, and are paid for.",
            f"A lifecycle rule on noncurrent versions, or: gcloud storage buckets update {where} --no-versioning",
        )
    if bucket.deletes_after_days is not None:
        warn(
            f"has a lifecycle rule that deletes every object after {bucket.deletes_after_days} days: checkpoints and committed "
            "units of a run that is resumed later are gone then.",
            "Limit the rule to a prefix, with matchesPrefix.",
        )
    return found or [Finding(name, Status.OK, f"{where} keeps and deletes nothing by itself.")]


def _described(name: str, context: CheckContext) -> BucketInfo | Finding:
    assert context.probe is not None  # noqa: S101 - there is a store
    try:
        bucket = context.probe.store.bucket()
    except StoreError as error:
        return Finding(
            name,
            Status.WARNING,
            f"The bucket's description could not be read: {error.message}",
            "It takes storage.buckets.get (roles/storage.legacyBucketReader has it); runs do not need it.",
            {"error_kind": type(error).__name__},
        )
    return bucket or Finding(name, Status.SKIPPED, "The store is no bucket.")
