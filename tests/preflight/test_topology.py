"""Meshes on slices, judged without any device."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpupipe import Every, Files, Infer, Job, Preprocess, Train
from tpupipe.preflight.checks import run_checks
from tpupipe.preflight.findings import Status
from tpupipe.preflight.topology import Layout, layout_findings


def job(**train) -> Job:
    return Job(
        "job",
        [
            Preprocess("p", Files("x"), map=dict),
            Train(
                "lm", data="p", init=id, step=divmod, steps=9, checkpoint=Every(steps=3), **{"batch_size": 64, **train}
            ),
        ],
    )


def found(context, check: str, **options):
    return [f for f in run_checks(context(**options), ["topology"]) if f.check == check]


@pytest.mark.parametrize(
    ("cluster", "hosts", "chips", "devices"),
    [
        ({"generation": "v6e", "topology": "4x4"}, 4, 16, 16),
        ({"generation": "v6e", "topology": "2x4"}, 1, 8, 8),
        ({"generation": "v6e", "topology": "2x4", "chips_per_vm": 4}, 2, 8, 8),
        ({"generation": "v5e", "topology": "4x4", "slices": 2}, 8, 32, 32),
        ({"generation": "v4", "topology": "2x2x2"}, 2, 8, 8),
        ({"generation": "v7x", "topology": "2x2x2"}, 2, 8, 16),
    ],
)
def test_hosts_chips_and_devices_are_derived_and_stated(context, cluster, hosts, chips, devices):
    """The numbers of each slice, in the message and for scripts; GKE has each of them."""
    [slice_] = found(context, "topology.slice", cluster=cluster)
    assert [slice_.facts[key] for key in ("hosts", "chips", "devices")] == [hosts, chips, devices]
    assert f"{chips} chips on {hosts} hosts" in slice_.message
    assert f"{devices} JAX devices" in slice_.message
    [gke] = found(context, "topology.gke", cluster=cluster)
    assert gke.status is Status.OK


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"generation": "v6e", "topology": "2x2", "chips_per_vm": 1}, "with 1 chips per VM; it has 4"),
        ({"generation": "v5p", "topology": "2x4x2"}, "no v5p slice of topology 2x4x2"),
        ({"generation": "v5e", "topology": "16x32"}, "no v5e slice of topology 16x32"),
        ({"generation": "v2", "topology": "4x4"}, "no node pools of v2"),
    ],
)
def test_what_gke_does_not_have(context, cluster, says):
    """A failure on a real cluster, a warning on a faked one: it rehearses what cannot be had."""
    for kind, status in (("tpu", Status.FAILURE), ("fake", Status.WARNING)):
        [gke] = found(context, "topology.gke", cluster={**cluster, "kind": kind})
        assert (gke.status, says in gke.message, bool(gke.hint)) == (status, True, True)


def test_gpus_have_devices_but_no_slice(context):
    """The mesh is compared with the number of GPUs; what is about slices is skipped."""
    gpu = {"kind": "gpu", "gpus": 3, "generation": None, "topology": None}
    found_ = {f.check: f for f in run_checks(context(job(), cluster=gpu), ["topology"])}
    assert found_["topology.mesh"].facts["mesh"] == {"data": 3}
    assert found_["topology.batch"].status is Status.FAILURE  # 64 over 3
    assert {found_[f"topology.{name}"].status for name in ("gke", "ray", "axes")} == {Status.SKIPPED}


@pytest.mark.parametrize(
    ("mesh", "slices", "fsdp", "status", "says"),
    [
        ({"data": 4, "model": 4}, 1, False, Status.OK, "model within a host"),
        ({"data": 16}, 1, True, Status.OK, "data within a slice"),
        ({"data": 32}, 2, False, Status.OK, "data across slices"),
        ({"data": 32}, 2, True, Status.WARNING, "gathered over the data-centre network"),
        ({"data": 2, "model": 8}, 1, False, Status.WARNING, "'model' (8 devices) does not stay on a host"),
        ({"model": 4, "data": 4}, 1, False, Status.WARNING, "'model' (4 devices) does not stay on a host"),
        ({"model": 32, "data": 1}, 2, False, Status.FAILURE, "'model' (32 devices) crosses slices"),
        ({"model": 2, "data": 16}, 2, False, Status.FAILURE, "'model' (2 devices) crosses slices"),
    ],
)
def test_each_axis_rides_on_the_links_it_needs(mesh, slices, fsdp, status, says):
    """On v6e 4x4: hosts of 4 devices, slices of 16. Tensor parallelism on a host, data over slices."""
    judged = list(layout_findings("lm", Layout(mesh, ("data",), 4, 16), fsdp=fsdp))
    assert math.prod(mesh.values()) == 16 * slices
    assert [f.status for f in judged] == [status]
    assert says in judged[0].message


def test_rows_of_a_host_must_be_one_block():
    """A mesh that interleaves hosts is what training refuses on the slice: a failure that gives an order that works."""
    layout = Layout({"b": 2, "a": 8}, ("a", "b"), 4, 16)
    [judged] = [f for f in layout_findings("lm", layout, fsdp=False) if f.status is Status.FAILURE]
    assert "4 host(s) would hold rows of a batch that are not one block" in judged.message
    assert "a, b" in judged.hint


@settings(deadline=None)  # the machine may be busy
@given(
    st.permutations(["a", "b", "c"]),
    st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_the_blocks_are_those_of_a_sharding(order, sizes, per_host, data):
    """Against a batch that is really cut: one row per part, dealt to devices in the order of a PartitionSpec."""
    shape = dict(zip(order, sizes, strict=True))
    axes = tuple(data.draw(st.permutations(data.draw(st.lists(st.sampled_from(order), min_size=1, unique=True)))))
    total = math.prod(sizes)
    if total % per_host:
        return
    rows: dict[int, set[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for size in sizes))):
        at = dict(zip(order, place, strict=True))
        row = int(np.ravel_multi_index([at[axis] for axis in axes], [shape[axis] for axis in axes]))
        rows.setdefault(device // per_host, set()).add(row)
    expected = [host for host, held in rows.items() if max(held) - min(held) + 1 != len(held)]
    assert list(Layout(shape, axes, per_host, total).split_hosts()) == expected


def test_a_batch_for_inference_that_is_rounded_up(context):
    """6 rows on 4 devices: 8 are compiled, and it says so."""
    infer = Job("job", [Infer("i", data=Files("x"), params="gs://b/x", apply=divmod, batch_rows=6)])
    [batch] = found(context, "topology.batch", job=infer)
    assert batch.status is Status.WARNING
    assert batch.facts["compiled_rows"] == 8
    assert "multiple of 4" in batch.hint


def test_ray_is_asked_and_its_refusal_is_the_failure(context):
    """With the real rules of ray.util.tpu: 3x4 is arithmetic, but no slice."""
    from tpupipe.cluster.reservation import check_slice

    assert [f.status for f in found(context, "topology.ray", ask_ray=check_slice)] == [Status.OK]
    [refused] = found(context, "topology.ray", ask_ray=check_slice, cluster={"topology": "4x12"})
    assert refused.status is Status.FAILURE
    assert "no slice of topology 4x12" in refused.message
