"""Whether the slice can exist, and whether the job's meshes and batches fit it. Arithmetic and packaged facts only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpupipe.errors import JobError
from tpupipe.hardware.facts import gke_chips_per_host, gke_topologies
from tpupipe.hardware.mesh import check_batch, mesh_shape
from tpupipe.job import Infer, Train
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status


def slice_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.slice``: what the configuration asks for, with hosts, chips and devices derived."""
    spec, cluster = context.slices, context.config.cluster
    if spec is None:
        message = f"{context.devices} GPU workers, one process and one JAX device each."
        yield Finding("topology.slice", Status.OK, message, facts={"devices": context.devices})
        return
    many = f"{spec.slices} slices" if spec.slices > 1 else "one slice"
    compiler = (
        " (the compiler's ahead-of-time topology lists two a chip)"
        if spec.generation == "v4"  # facts.py: two kinds of devices per chip
        else ""
    )
    yield Finding(
        "topology.slice",
        Status.OK,
        f"{many} of {spec.generation} {spec.topology}{', faked' if cluster.kind == 'fake' else ''}: {spec.chips} chips on "
        f"{spec.hosts} hosts with {spec.chips_per_host} each, {spec.devices} JAX devices, {spec.devices_per_chip} a "
        f"chip{compiler}; pod type {spec.pod_type}.",
        facts={
            "generation": spec.generation,
            "topology": spec.topology,
            "slices": spec.slices,
            "chips": spec.chips,
            "hosts": spec.hosts,
            "chips_per_host": spec.chips_per_host,
            "devices": spec.devices,
            "devices_per_chip": spec.devices_per_chip,
            "pod_type": spec.pod_type,
        },
    )


def gke_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.gke``: whether GKE has such a node pool. On a faked slice that it does not have is a warning."""
    name, spec = "topology.gke", context.slices
    if spec is None:
        yield Finding(name, Status.SKIPPED, "cluster.kind is gpu: there is no slice.")
        return
    bad = Status.WARNING if context.config.cluster.kind == "fake" else Status.FAILURE
    accelerators = spec.facts.gke_accelerators
    offers = {a: gke_chips_per_host(a, spec.topology) for a in accelerators}
    fitting = [a for a, chips in offers.items() if chips and spec.chips_per_host in chips]
    known = sorted({chips for found in offers.values() for chips in found or ()})
    if fitting:
        message = f"GKE offers {spec.generation} {spec.topology} with {spec.chips_per_host} chips per VM: {fitting[0]}."
        yield Finding(name, Status.OK, message, facts={"accelerators": fitting})
    elif not accelerators:
        hint = "Use another generation, or a cluster that is not on GKE."
        yield Finding(name, bad, f"GKE offers no node pools of {spec.generation}.", hint)
    elif known:
        allowed = " or ".join(map(str, known))
        yield Finding(
            name,
            bad,
            f"GKE has no {spec.generation} {spec.topology} with {spec.chips_per_host} chips per VM; it has {allowed}.",
            f"Set cluster.chips_per_vm to {allowed}, as the node pool's machine type has it.",
            {"chips_per_host": known},
        )
    else:
        there = "; ".join(f"{a}: {text}" for a in accelerators if (text := gke_topologies(a)))
        yield Finding(
            name,
            bad,
            f"GKE has no {spec.generation} slice of topology {spec.topology}.",
            f"Set cluster.topology to one of {there}.",
        )


def ray_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.ray``: whether Ray's ``slice_placement_group`` takes such a slice."""
    name = "topology.ray"
    if context.slices is None or context.ask_ray is None:
        why = "cluster.kind is gpu: there is no slice." if context.slices is None else "Ray was not asked."
        yield Finding(name, Status.SKIPPED, why)
        return
    context.ask_ray(context.slices)  # SliceError is the failure
    yield Finding(name, Status.OK, f"Ray takes a slice of {context.slices.generation} {context.slices.topology}.")


# -- meshes ---------------------------------------------------------------------------------


def _trainings(context: CheckContext) -> list[Train]:
    return [stage for stage in context.job.stages if isinstance(stage, Train)] if context.job else []


def mesh_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.mesh``: the axes of each training and inference stage multiply to the devices that hold its model."""
    name = "topology.mesh"
    stages = [stage for stage in context.job.stages if isinstance(stage, (Train, Infer))] if context.job else []
    for stage in stages:
        devices = context.model_devices(stage)
        try:
            shape = mesh_shape(stage.mesh, devices)
        except JobError as error:
            per_chip = f" ({context.slices.devices_per_chip} a chip)" if context.slices else ""
            yield Finding(
                name,
                Status.FAILURE,
                f"{stage.name}: {error.message.rstrip('.')}{per_chip}.",
                f"{error.hint} stages.{stage.name}.mesh changes it without changing the job.",
                {"stage": stage.name, "mesh": dict(stage.mesh), "devices": devices},
            )
            continue
        text = " x ".join(f"{axis} {size}" for axis, size in shape.items())
        facts = {"stage": stage.name, "mesh": shape, "devices": devices}
        yield Finding(name, Status.OK, f"{stage.name}: {text} covers {devices} devices.", facts=facts)
    if not stages:
        yield Finding(name, Status.SKIPPED, "The job has no Train and no Infer stage.")


def batch_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.batch``: rows of a batch divide over the devices that share them."""
    name = "topology.batch"
    for stage in context.job.stages if context.job else ():
        if isinstance(stage, Train):
            shape = _shape(stage, context.devices)
            if shape is None:
                yield Finding(name, Status.SKIPPED, f"{stage.name}: its mesh does not fit.", "See topology.mesh.")
                continue
            try:
                check_batch(stage.batch_size, shape, stage.batch_axes)
            except JobError as error:
                yield Finding(name, Status.FAILURE, f"{stage.name}: {error.message}", error.hint, {"stage": stage.name})
                continue
            ways = math.prod(shape[axis] for axis in stage.batch_axes)
            rows = stage.batch_size // ways
            message = f"{stage.name}: batch_size={stage.batch_size} gives {rows} rows to each of {ways} parts."
            yield Finding(name, Status.OK, message, facts={"stage": stage.name, "rows_per_part": rows})
        elif isinstance(stage, Infer) and stage.buckets is None:
            shape = _shape(stage, context.model_devices(stage))
            if shape is not None:  # topology.mesh tells of the others
                yield _infer_batch(name, stage, math.prod(shape[axis] for axis in stage.batch_axes))
    if context.job and not any(
        isinstance(s, Train) or (isinstance(s, Infer) and not s.buckets) for s in context.job.stages
    ):
        yield Finding(name, Status.SKIPPED, "No stage has a fixed batch: there is no Train, and Infer has buckets.")


def _infer_batch(name: str, stage: Infer, devices: int) -> Finding:
    rounded = -(-stage.batch_rows // devices) * devices
    facts = {"stage": stage.name, "batch_rows": stage.batch_rows, "compiled_rows": rounded}
    if rounded == stage.batch_rows:
        message = f"{stage.name}: batch_rows={rounded} gives {rounded // devices} rows to each of {devices} parts."
        return Finding(name, Status.OK, message, facts=facts)
    return Finding(
        name,
        Status.WARNING,
        f"{stage.name}: batch_rows={stage.batch_rows} does not divide over {devices} devices; {rounded} rows are "
        "compiled, the rest is padding.",
        f"Use a multiple of {devices}.",
        facts,
    )


def axes_findings(context: CheckContext) -> Iterator[Finding]:
    """``topology.axes``: each axis rides on the links it needs; a host's rows are one block."""
    name, spec = "topology.axes", context.slices
    if spec is None:
        yield Finding(name, Status.SKIPPED, "cluster.kind is gpu: which GPUs are linked is not known.")
        return
    for stage in _trainings(context):
        shape = _shape(stage, context.devices)
        if shape is None:
            yield Finding(name, Status.SKIPPED, f"{stage.name}: its mesh does not fit.", "See topology.mesh.")
            continue
        layout = Layout(shape, tuple(stage.batch_axes), context.devices_per_host, spec.devices // spec.slices)
        yield from layout_findings(stage.name, layout, fsdp=stage.sharding == "fsdp")
    if not _trainings(context):
        yield Finding(name, Status.SKIPPED, "The job has no Train stage.")


def _shape(stage: Train | Infer, devices: int) -> dict[str, int] | None:
    try:
        return mesh_shape(stage.mesh, devices)
    except JobError:  # topology.mesh says so
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh laid over devices in their order, as training does: hosts one after the other, slices one after the other.

    Args:
        shape: Axis to size, outermost first.
        batch_axes: Axes that split the rows of a batch.
        devices_per_host: Devices of one process.
        devices_per_slice: Devices of one slice.
    """

    shape: Mapping[str, int]
    batch_axes: tuple[str, ...]
    devices_per_host: int
    devices_per_slice: int

    def reach(self, axis: str) -> str:
        """How far the devices along ``axis`` are apart: within a ``host``, within a ``slice``, or across ``slices``.

        >>> Layout({"data": 4, "model": 4}, ("data",), 4, 16).reach("model")
        'host'
        >>> Layout({"model": 4, "data": 4}, ("data",), 4, 16).reach("model")
        'slice'
        """
        import numpy as np

        devices = np.arange(math.prod(self.shape.values())).reshape(tuple(self.shape.values()))
        lines = np.moveaxis(devices, list(self.shape).index(axis), -1)
        for reach, size in (("host", self.devices_per_host), ("slice", self.devices_per_slice)):
            groups = lines // size
            if (groups == groups[..., :1]).all():
                return reach
        return "slices"

    def split_hosts(self) -> Sequence[int]:
        """Hosts whose rows of a batch are not one block; training refuses such a mesh.

        >>> list(Layout({"model": 2, "data": 4}, ("data",), 4, 8).split_hosts())
        []
        >>> list(Layout({"model": 2, "data": 2, "more": 2}, ("more", "data"), 2, 8).split_hosts())
        [0, 1, 2, 3]
        """
        import numpy as np

        sizes = tuple(self.shape.values())
        places = dict(zip(self.shape, np.indices(sizes).reshape(len(sizes), -1), strict=True))
        block = np.zeros(math.prod(sizes), np.int64)  # which part of the batch each device holds
        for axis in self.batch_axes:
            block = block * self.shape[axis] + places[axis]
        hosts = np.arange(len(block)) // self.devices_per_host
        blocks = [np.unique(block[hosts == host]) for host in range(int(hosts[-1]) + 1)]
        return [host for host, held in enumerate(blocks) if held[-1] - held[0] + 1 != len(held)]


def layout_findings(stage: str, layout: Layout, *, fsdp: bool) -> Iterator[Finding]:
    """Judges a layout. Pure.

    Rows that are not one block per host are a failure (training would refuse them on the slice). An axis that splits no
    rows exchanges activations or parameters within every step: across slices that goes over the data-centre network,
    which is a failure; across the hosts of one slice it works and is a warning, because an axis that stays on a
    host shares its links with no other traffic. ``fsdp`` over slices gathers parameters over that network: a warning.
    """
    name = "topology.axes"
    reaches = {axis: layout.reach(axis) for axis, size in layout.shape.items() if size > 1}
    facts = {"stage": stage, "reach": reaches}
    inner = [axis for axis in layout.shape if axis not in layout.batch_axes]
    order = ", ".join([*layout.batch_axes, *inner])
    told = False
    if split := layout.split_hosts():
        told = True
        yield Finding(
            name,
            Status.FAILURE,
            f"{stage}: {len(split)} host(s) would hold rows of a batch that are not one block, the first is host {split[0]}.",
            f"Put the batch axes first in the mesh: {order}.",
            facts,
        )
    for axis, reach in reaches.items():
        size = layout.shape[axis]
        if axis in layout.batch_axes:
            if reach == "slices" and fsdp:
                told = True
                yield Finding(
                    name,
                    Status.WARNING,
                    f"{stage}: sharding fsdp splits parameters over axis {axis!r} ({size} devices), which crosses slices: "
                    "they are gathered over the data-centre network in every step.",
                    "Replicate over slices: an axis of their number first, and a sharding function that splits over the rest.",
                    facts,
                )
        elif reach == "slices":
            told = True
            yield Finding(
                name,
                Status.FAILURE,
                f"{stage}: axis {axis!r} ({size} devices) crosses slices and splits no rows: its traffic in every step "
                "would go over the data-centre network.",
                f"Only batch axes may cross slices; order the mesh as {order}, with at most {layout.devices_per_slice} devices "
                f"in {', '.join(inner)}.",
                facts,
            )
        elif reach == "slice":
            told = True
            yield Finding(
                name,
                Status.WARNING,
                f"{stage}: axis {axis!r} ({size} devices) does not stay on a host, which has {layout.devices_per_host}.",
                f"Order the mesh as {order}, and let {', '.join(inner)} divide {layout.devices_per_host}.",
                facts,
            )
    if not told:
        text = ", ".join(
            f"{axis} within a {reach}" if reach != "slices" else f"{axis} across slices"
            for axis, reach in reaches.items()
        )
        yield Finding(name, Status.OK, f"{stage}: {text or 'one device'}.", facts=facts)
