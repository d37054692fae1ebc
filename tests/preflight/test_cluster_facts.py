"""What is made of a cluster's facts. Gathering them needs Ray and is not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpupipe.errors import ClusterError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.checks import run_checks
from tpupipe.preflight.cluster import (
    ClusterFacts,
    HostFacts,
    SliceFacts,
    judge_answers,
    judge_gpus,
    judge_libtpu,
    judge_slices,
    judge_versions,
)
from tpupipe.preflight.findings import Status

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42"}
SLICE = SliceFacts("s0", "4x4", "v6e-16", hosts=4, chips=16, chips_free=16)
HOSTS = tuple(HostFacts(f"n{i}", f"10.0.0.{i}", 4, "s0", VERSIONS) for i in range(4))
FACTS = ClusterFacts("10.0.0.9:6379", HOSTS, (SLICE,), driver=VERSIONS)
SPEC = SliceSpec("v6e", "4x4")


def facts_with(host: int, **changes) -> ClusterFacts:
    """The facts with one host changed."""
    return replace(FACTS, hosts=tuple(replace(h, **changes) if i == host else h for i, h in enumerate(HOSTS)))


@pytest.mark.parametrize(
    ("slices", "wanted", "fixed", "status", "says"),
    [
        ([SLICE], 1, True, Status.OK, "1 free slice(s) of v6e 4x4: s0"),
        ([SLICE, replace(SLICE, name="s1")], 2, True, Status.OK, "s0, s1"),
        ([], 1, True, Status.FAILURE, "The cluster has no slice"),
        ([], 1, False, Status.WARNING, "0 such slice(s) are up"),
        ([replace(SLICE, topology="2x4", pod_type="v6e-8")], 1, True, Status.FAILURE, "s0 (v6e-8 2x4)"),
        ([replace(SLICE, pod_type="v5litepod-16")], 1, True, Status.FAILURE, "v5litepod-16"),
        ([SLICE], 2, False, Status.WARNING, "Wanted 2 x v6e 4x4; 1 such slice(s) are up"),
        (
            [replace(SLICE, chips_free=0, held_by=("tpupipe/lm/a",))],
            1,
            True,
            Status.WARNING,
            "1 are up, 0 free. Held: s0 by tpupipe/lm/a",
        ),
        ([replace(SLICE, chips_free=12)], 1, True, Status.WARNING, "s0 by tasks"),
    ],
)
def test_slices(slices, wanted, fixed, status, says):
    """There and free; there and held, by whom; not there, where nodes can be added and where they cannot."""
    [judged] = judge_slices(replace(FACTS, slices=tuple(slices), fixed=fixed), replace(SPEC, slices=wanted))
    assert (judged.status, says in judged.message) == (status, True), judged


def test_a_slice_that_lacks_a_host_does_not_count():
    """Three of four: a warning for it, and one that the wanted slice is not up."""
    judged = list(judge_slices(replace(FACTS, slices=(replace(SLICE, hosts=3),)), SPEC))
    assert [f.status for f in judged] == [Status.WARNING] * 2
    assert "3 of its 4 hosts" in judged[0].message


def test_equal_versions():
    """One finding that names them."""
    [judged] = judge_versions(FACTS)
    assert judged.status is Status.OK
    assert "ray 2.60.0, jax 0.10.2" in judged.message


@pytest.mark.parametrize(
    ("versions", "package"),
    [
        ({**VERSIONS, "ray": "2.55.1"}, "ray"),
        ({**VERSIONS, "jax": "0.9.0"}, "jax"),
        ({"python": "3.11.7", "ray": "2.60.0"}, "jax"),
    ],
)
def test_another_version_on_one_host_is_a_failure(versions, package):
    """The package, both versions, the host; a package that is not installed there counts."""
    judged = {f.facts["package"]: f for f in judge_versions(facts_with(2, versions=versions))}
    assert judged[package].status is Status.FAILURE
    assert "10.0.0.2 (s0)" in judged[package].message
    assert VERSIONS[package] in judged[package].message
    assert versions.get(package, "none") in judged[package].message


def test_libtpu_must_be_on_every_tpu_host():
    """Missing on one; two versions; nodes without chips need none."""
    without = {name: version for name, version in VERSIONS.items() if name != "libtpu"}
    assert [f.status for f in judge_libtpu(FACTS)] == [Status.OK]
    [missing] = judge_libtpu(facts_with(1, versions=without))
    assert (missing.status, "10.0.0.1" in missing.message) == (Status.FAILURE, True)
    [mixed] = judge_libtpu(facts_with(1, versions={**VERSIONS, "libtpu": "0.0.1"}))
    assert (mixed.status, "0.0.1, 0.0.42" in mixed.message) == (Status.FAILURE, True)
    assert [f.status for f in judge_libtpu(facts_with(1, versions=without, chips=0))] == [Status.OK]
    assert [f.status for f in judge_libtpu(replace(FACTS, hosts=()))] == [Status.SKIPPED]


def test_a_host_that_does_not_answer_is_a_failure():
    """Named with its reason; its versions are not judged."""
    silent = facts_with(3, error="no answer within 60 s", versions={})
    [judged] = judge_answers(silent)
    assert (judged.status, "10.0.0.3 (s0) does not answer: no answer" in judged.message) == (Status.FAILURE, True)
    assert [f.status for f in judge_versions(silent)] == [Status.OK]
    assert [f.status for f in judge_answers(FACTS)] == [Status.OK]


@pytest.mark.parametrize(("there", "status"), [((4, 4), Status.OK), ((4, 3), Status.WARNING), ((2, 2), Status.WARNING)])
def test_gpus(context, there, status):
    """Enough and free; busy; too few."""
    config = context(cluster={"kind": "gpu", "gpus": 4, "generation": None, "topology": None}).config.cluster
    assert judge_gpus(replace(FACTS, gpus=there), config).status is status


def test_the_cluster_is_asked_once(context):
    """All checks of the group share one answer; without a cluster they are skipped, with how to get one."""
    asked = []

    def ask():
        asked.append(1)
        return FACTS

    found = run_checks(context(ask_cluster=ask), ["cluster"])
    assert ([f.status for f in found], len(asked)) == ([Status.OK] * 4, 1)
    skipped = run_checks(context(), ["cluster"])
    assert {f.status for f in skipped} == {Status.SKIPPED}
    assert "tpupipe cluster up" in skipped[0].hint


def test_a_cluster_that_does_not_answer_fails_once(context):
    """The connection is the failure, asked for once; the rest is skipped."""
    asked = []

    def ask():
        asked.append(1)
        raise ClusterError("No Ray cluster answers at 'x'", hint="Set cluster.address")

    found = run_checks(context(ask_cluster=ask), ["cluster"])
    assert [f.status for f in found] == [Status.FAILURE, *[Status.SKIPPED] * 3]
    assert found[0].hint == "Set cluster.address"
    assert len(asked) == 1
