"""Where a bucket is and what it does by itself, from its description; and what a run makes of it."""

from __future__ import annotations

import pytest

from tpupipe.checkpoint.policy import Every, SavePolicy
from tpupipe.config import environment
from tpupipe.preflight.bucket import judge_bucket, judge_policy, judge_region
from tpupipe.preflight.checks import run_checks
from tpupipe.preflight.findings import Status
from tpupipe.store.bucket import parse_bucket
from tpupipe.store.objects import open_store

ZONE = "us-central1-b"


def bucket(**resource):
    return parse_bucket("b", {"location": "US-CENTRAL1", "locationType": "region", **resource})


@pytest.mark.parametrize(
    ("resource", "zone", "status"),
    [
        ({}, ZONE, Status.OK),
        ({}, "us-central2-b", Status.FAILURE),
        ({}, "us-central1-ai1a", Status.OK),
        ({"location": "NAM4"}, ZONE, Status.OK),
        ({"location": "NAM4"}, "us-east5-a", Status.FAILURE),
        ({"location": "US", "customPlacementConfig": {"dataLocations": ["US-EAST5", "US-CENTRAL1"]}}, ZONE, Status.OK),
        (
            {"location": "US", "customPlacementConfig": {"dataLocations": ["US-EAST5", "US-EAST4"]}},
            ZONE,
            Status.WARNING,
        ),
        ({"location": "US"}, ZONE, Status.WARNING),
        ({"location": "EU"}, ZONE, Status.FAILURE),
        ({"location": "EU"}, "europe-west4-a", Status.WARNING),
        ({"location": "ASIA"}, "asia-northeast1-b", Status.WARNING),
    ],
)
def test_region_against_zone(resource, zone, status):
    """The same region, a dual-region with it, a multi-region around it, and everything else."""
    judged = judge_region(bucket(**resource), zone, allow_cross_region=False)
    assert judged.status is status
    assert zone in judged.message
    assert bool(judged.hint) is (status is not Status.OK)


def test_the_override_makes_a_failure_a_warning():
    """And leaves the rest as it is."""
    assert judge_region(bucket(), "us-central2-b", allow_cross_region=True).status is Status.WARNING
    assert judge_region(bucket(), ZONE, allow_cross_region=True).status is Status.OK


@pytest.mark.parametrize(
    ("resource", "says"),
    [
        ({"retentionPolicy": {"retentionPeriod": "864000"}}, "retention policy of 10 days"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "for 7 days (soft delete)"),
        ({"versioning": {"enabled": True}}, "keeps old versions"),
        ({"defaultEventBasedHold": True}, "on hold"),
        ({"lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {"age": 30}}]}}, "after 30 days"),
    ],
)
def test_what_a_bucket_does_by_itself_is_a_warning(resource, says):
    """With what to do."""
    [judged] = judge_bucket(bucket(**resource))
    assert (judged.status, says in judged.message, bool(judged.hint)) == (Status.WARNING, True, True)


@pytest.mark.parametrize(
    "resource",
    [
        {},
        {"versioning": {"enabled": False}, "softDeletePolicy": {"retentionDurationSeconds": "0"}},
        {"lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {"age": 1, "matchesPrefix": ["tmp/"]}}]}},
        {"lifecycle": {"rule": [{"action": {"type": "SetStorageClass"}, "condition": {"age": 1}}]}},
    ],
)
def test_what_touches_no_checkpoint_is_fine(resource):
    """Rules limited to a prefix, other storage classes, policies that are off."""
    assert [f.status for f in judge_bucket(bucket(**resource))] == [Status.OK]


@pytest.mark.parametrize(
    ("policy", "steps", "status"),
    [
        (Every(steps=10, keep=3), 100, Status.OK),
        (Every(minutes=5), 100, Status.OK),
        (Every(steps=10, keep=1), 100, Status.WARNING),
        (Every(steps=100), 100, Status.WARNING),
        (Every(steps=100), None, Status.OK),
        (Every(steps=100, minutes=5), 100, Status.OK),
    ],
)
def test_what_a_policy_keeps(policy, steps, status):
    """One checkpoint leaves nothing to go back to; an interval as long as the run saves once."""
    judged = judge_policy("lm", SavePolicy.of(policy), steps)
    assert judged.status is status
    assert f"keeps {policy.keep} checkpoint(s)" in judged.message


def test_a_description_that_may_not_be_read_is_a_warning(context, endpoint, proxy):
    """Runs do not need that permission: it names it, and goes on."""
    store = open_store("gs://described/x", endpoint=endpoint)
    store.create("a", b"a")
    proxy.set("403@any")
    found = run_checks(context(store=open_store("gs://described/x", endpoint=proxy.endpoint)), ["store"])
    [region] = [f for f in found if f.check == "store.region"]
    assert region.status is Status.WARNING
    assert "storage.buckets.get" in region.hint


def test_a_run_refuses_a_bucket_in_another_region_before_it_reserves(world):
    """us-central1 bucket, us-central2-b slice: refused with status 3, and nothing was written.

    https://github.com/marin-community/marin/issues/8136
    """
    settings = ["--set", f"store.uri={world.uri}", "--set", "cluster.zone=us-central2-b"]
    done = world.run("run", world.job(), "-c", "world.yaml", *settings)
    assert (done.exit_code, done.stdout) == (3, "")
    assert "is in us-central1, the slice in us-central2-b: every save and read crosses regions" in done.stderr
    assert "store.allow_cross_region=true" in done.stderr
    assert list(open_store(world.uri, endpoint=environment().emulator).list()) == []


def test_a_bucket_in_another_region_can_be_allowed_and_is_logged(world):
    """The override is accepted: the run goes on to its inputs, which are missing here, and the log has the warning.

    https://github.com/marin-community/marin/issues/8136
    """
    settings = ["--set", f"store.uri={world.uri}", "--set", "cluster.zone=us-central2-b"]
    allowed = [*settings, "--set", "store.allow_cross_region=true"]
    done = world.run("run", world.job(files={}), "-c", "world.yaml", *allowed)
    assert done.exit_code == 1
    assert "matches no file" in done.stderr
    assert "every save and read crosses regions" in done.stderr
    assert "store.allow_cross_region allows it" in done.stderr
    in_region = world.run("run", world.job(files={}), "-c", "world.yaml", "--set", f"store.uri={world.uri}")
    assert "crosses regions" not in in_region.stderr
