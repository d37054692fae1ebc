"""Slices as arithmetic, against Ray's own answers."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.errors import SliceError
from tpupipe.hardware import GENERATION_NAMES, SliceSpec, generation_name, topology_dims

KNOWN = [
    ("v2", "4x4"),
    ("v3", "8x16"),
    ("v4", "2x2x1"),
    ("v4", "2x4x4"),
    ("v5e", "1x1"),
    ("v5e", "2x4"),
    ("v5e", "4x4"),
    ("v5p", "2x2x2"),
    ("v5p", "4x4x8"),
    ("v6e", "2x2"),
    ("v6e", "2x4"),
    ("v6e", "2x8"),
    ("v6e", "16x16"),
    ("v7x", "2x2x1"),
    ("v7x", "4x4x4"),
]


@pytest.mark.parametrize(("generation", "topology"), KNOWN)
def test_ray_counts_the_same(generation, topology):
    """Pod type, chips per host, hosts and resource names are those the reservation will ask Ray for."""
    from ray.util import tpu

    spec = SliceSpec(generation, topology)
    assert tpu.get_tpu_version_from_type(spec.accelerator_type) == spec.ray_version
    assert tpu.infer_tpu_pod_type_from_topology(topology, spec.ray_version) == spec.pod_type
    assert tpu.get_chips_per_host(topology, spec.ray_version) == spec.chips_per_host
    workers, resources = tpu.get_tpu_worker_resources(topology, spec.ray_version)
    assert (workers, resources["TPU"]) == (spec.hosts, spec.chips_per_host)


@pytest.mark.parametrize(("generation", "topology"), KNOWN)
def test_ray_counts_the_same_for_several_slices_and_a_chosen_vm(generation, topology):
    """Also for two slices of one-chip VMs."""
    from ray.util import tpu

    spec = SliceSpec(generation, topology, chips_per_vm=1, slices=2)
    workers, resources = tpu.get_tpu_worker_resources(topology, spec.ray_version, num_slices=2, chips_per_vm=1)
    assert (workers, resources["TPU"]) == (spec.hosts, spec.chips_per_host)


def test_the_faked_slice_of_the_demo():
    """v6e 2x4 is one VM of eight chips by default, two of four when told so."""
    assert SliceSpec("v6e", "2x4").hosts == 1
    spec = SliceSpec("v6e", "2x4", chips_per_vm=4)
    assert (spec.hosts, spec.chips, spec.devices_per_host, spec.devices) == (2, 8, 4, 8)
    assert (spec.pod_type, spec.accelerator_type, spec.cores) == ("v6e-8", "TPU-V6E", 8)
    assert str(spec) == "v6e 2x4 (8 chips, 2 hosts)"


def test_pod_types_count_cores_and_chips_are_what_is_paid_for():
    """Two cores per chip on v4: 8 chips are v4-16; two slices double chips and hosts, not the pod type."""
    spec = SliceSpec("v4", "2x2x2", slices=2)
    assert (spec.pod_type, spec.chips, spec.chips_per_slice, spec.hosts, spec.hosts_per_slice) == ("v4-16", 16, 8, 4, 2)


@pytest.mark.parametrize(
    ("generation", "per_chip"), [("v3", 2), ("v4", 1), ("v5e", 1), ("v5p", 1), ("v6e", 1), ("v7x", 2)]
)
def test_devices_are_those_of_a_real_host(generation, per_chip):
    """v4 and v5p run two cores as one device; v3 and v7x list both."""
    topology = "2x2x1" if generation in ("v4", "v5p", "v7x") else "2x2"
    assert SliceSpec(generation, topology).devices_per_host == 4 * per_chip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("V6E", "v6e"),
        ("TPU-V6E", "v6e"),
        ("v5litepod", "v5e"),
        ("TPU-V5LITEPOD", "v5e"),
        ("tpu7x", "v7x"),
        (" v4 ", "v4"),
    ],
)
def test_a_generation_has_one_spelling(text, name):
    """The usual spellings of Ray, GKE and Cloud TPU mean the same."""
    assert generation_name(text) == name
    assert SliceSpec(text, "2x2x1" if name in ("v4", "v7x") else "2x2").generation == name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("v6e", "3x5"), "15 chips, which is no whole number of hosts with 4"),
        (("v6e", "2x4", 3), "no whole number of hosts with 3"),
        (("v6e", "2x2", 8), "no whole number of hosts with 8"),
        (("v6e", "2x2x1"), "has 3 sides"),
        (("v4", "2x2"), "has 2 sides"),
        (("v6e", "0x4"), "not a topology"),
        (("v6e", "4"), "not a topology"),
        (("v6e", "4x-4"), "not a topology"),
        (("v6e", "²x4"), "not a topology"),
        (("v6e", "4x4", 0), "chips_per_vm is 0"),
        (("v6e", "4x4", 4, 0), "slices is 0"),
        (("v66", "4x4"), "not a TPU generation"),
    ],
)
def test_a_slice_that_cannot_exist_is_refused(arguments, says):
    """The message names the value and what is allowed; the error is exit status 2 and pickles."""
    with pytest.raises(SliceError, match=says) as caught:
        SliceSpec(*arguments)
    assert caught.value.exit_status == 2
    assert pickle.loads(pickle.dumps(caught.value)).data == caught.value.data


@given(
    st.sampled_from(GENERATION_NAMES),
    st.lists(st.integers(1, 16), min_size=2, max_size=3),
    st.none() | st.integers(1, 8),
    st.integers(1, 4),
)
def test_counts_agree_or_the_slice_is_refused(generation, sides, chips_per_vm, slices):
    """For every slice that is accepted, hosts x chips per host is exactly the chips, and nothing is left over."""
    topology = "x".join(map(str, sides))
    try:
        spec = SliceSpec(generation, topology, chips_per_vm, slices)
    except SliceError:
        return
    assert spec.hosts * spec.chips_per_host == spec.chips
    assert spec.hosts_per_slice * slices == spec.hosts
    assert spec.devices_per_host * spec.hosts == spec.devices
    assert topology_dims(spec.topology) == spec.dims == tuple(sides)
    assert pickle.loads(pickle.dumps(spec)) == spec
