"""Every check, in the order in which they run."""

from __future__ import annotations

from tpupipe.preflight import bucket, cluster, job, store, topology, zone
from tpupipe.preflight.checks import Check

CHECKS: tuple[Check, ...] = (
    Check("topology.slice", topology.slice_findings),
    Check("topology.gke", topology.gke_findings),
    Check("topology.ray", topology.ray_findings),
    Check("topology.mesh", topology.mesh_findings, needs_job=True),
    Check("topology.batch", topology.batch_findings, needs_job=True),
    Check("topology.axes", topology.axes_findings, needs_job=True),
    Check("zone.offer", zone.offer_findings),
    Check("zone.prices", zone.price_findings),
    Check("store.space", store.space_findings),
    Check("store.create", store.create_findings),
    Check("store.read", store.read_findings),
    Check("store.list", store.list_findings),
    Check("store.overwrite", store.overwrite_findings),
    Check("store.rewrite", store.rewrite_findings),
    Check("store.throughput", store.throughput_findings),
    Check("store.delete", store.delete_findings),
    Check(bucket.REGION, bucket.region_findings),
    Check("store.retention", bucket.retention_findings),
    Check("cluster.connect", cluster.connect_findings),
    Check("cluster.slices", cluster.slices_findings),
    Check("cluster.versions", cluster.versions_findings),
    Check("cluster.libtpu", cluster.libtpu_findings),
    Check("job.import", job.import_findings),
    Check("job.sources", job.source_findings, needs_job=True),
    Check("job.sample", job.sample_findings, needs_job=True),
    Check("job.map", job.map_findings, needs_job=True),
    Check("job.schema", job.schema_findings, needs_job=True),
    Check("job.pickle", job.pickle_findings, needs_job=True),
)
"""The registry."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(check.group for check in CHECKS))
"""What ``--only`` and ``--skip`` take, besides ``aot`` and ``parity``."""
