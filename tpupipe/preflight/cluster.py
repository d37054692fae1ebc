"""What a cluster has, judged. The facts are gathered with Ray in ``tpupipe.cluster.inspect``; here is no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpupipe.config import ClusterConfig
from tpupipe.errors import TpupipeError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.findings import Finding, Status

if TYPE_CHECKING:
    from tpupipe.preflight.context import CheckContext

NO_CLUSTER = "Set cluster.address or RAY_ADDRESS; for a faked slice: tpupipe cluster up -c CONFIG."
COMPARED = ("python", "ray", "jax", "jaxlib")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What one node of the cluster says of itself.

    Args:
        node: Ray's id of the node.
        address: Its IP address.
        chips: TPU chips that it has.
        slice_name: The slice that it belongs to, or empty.
        versions: Package to version, of ``python``, ``ray``, ``jax``, ``jaxlib`` and ``libtpu``; what is not installed is
            not in it.
        error: Why it did not answer; empty if it did.
    """

    node: str
    address: str
    chips: int = 0
    slice_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.slice_name})" if self.slice_name else self.address


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """One slice of the cluster.

    Args:
        name: Its name.
        topology: ``4x4``, or empty.
        pod_type: ``v6e-16``, or empty.
        hosts: Hosts that are up.
        chips: Chips of those.
        chips_free: Chips that no placement group holds.
        held_by: Names of the placement groups that hold the others.
    """

    name: str
    topology: str
    pod_type: str
    hosts: int
    chips: int
    chips_free: int
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A cluster at one moment.

    Args:
        address: Of Ray's control service.
        hosts: Every node that is up.
        slices: Every TPU slice.
        gpus: GPUs, and how many of them are free.
        driver: Versions where the driver runs.
        fixed: Whether nodes can never be added: a faked slice.
    """

    address: str
    hosts: tuple[HostFacts, ...]
    slices: tuple[SliceFacts, ...] = ()
    gpus: tuple[float, float] = (0.0, 0.0)
    driver: dict[str, str] = field(default_factory=dict)
    fixed: bool = False


def connect_findings(context: CheckContext) -> Iterator[Finding]:
    """``cluster.connect``: the cluster answers, and so does each of its nodes."""
    name = "cluster.connect"
    facts = context.cluster
    if facts is None:
        yield _skipped(name)
    elif isinstance(facts, TpupipeError):
        raise facts
    else:
        yield from judge_answers(facts)


def slices_findings(context: CheckContext) -> Iterator[Finding]:
    """``cluster.slices``: the slices are there, and free; if not, who holds them."""
    name, facts = "cluster.slices", _facts(context)
    if facts is None:
        yield _skipped(name)
    elif context.slices is not None:
        yield from judge_slices(facts, context.slices)
    else:
        yield judge_gpus(facts, context.config.cluster)


def versions_findings(context: CheckContext) -> Iterator[Finding]:
    """``cluster.versions``: Python, Ray and JAX are the same on all hosts and here."""
    facts = _facts(context)
    yield from [_skipped("cluster.versions")] if facts is None else judge_versions(facts)


def libtpu_findings(context: CheckContext) -> Iterator[Finding]:
    """``cluster.libtpu``: libtpu is on every TPU host."""
    name, facts = "cluster.libtpu", _facts(context)
    if facts is None:
        yield _skipped(name)
    elif context.config.cluster.kind != "tpu":
        yield Finding(
            name, Status.SKIPPED, f"cluster.kind is {context.config.cluster.kind}: JAX does not need libtpu there."
        )
    else:
        yield from judge_libtpu(facts)


def _facts(context: CheckContext) -> ClusterFacts | None:
    return context.cluster if isinstance(context.cluster, ClusterFacts) else None  # cluster.connect says why


def _skipped(name: str) -> Finding:
    return Finding(name, Status.SKIPPED, "No cluster is connected.", NO_CLUSTER)


# -- judgements: pure -----------------------------------------------------------------------


def judge_answers(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether every node answered."""
    name = "cluster.connect"
    silent = [host for host in facts.hosts if host.error]
    for host in silent:
        hint = "Look at the node in the Ray dashboard; a run would wait for it in vain."
        yield Finding(name, Status.FAILURE, f"Host {host} does not answer: {host.error}", hint, {"node": host.node})
    if not silent:
        tpu = sum(1 for host in facts.hosts if host.chips)
        message = f"Ray at {facts.address}: {len(facts.hosts)} node(s) answer, {tpu} of them with TPU."
        yield Finding(
            name, Status.OK, message, facts={"address": facts.address, "nodes": len(facts.hosts), "tpu_nodes": tpu}
        )


def judge_slices(facts: ClusterFacts, spec: SliceSpec) -> Iterator[Finding]:
    """Whether enough slices of the wanted kind are there, whole, and free.

    Too few are a failure where nodes cannot be added, else a warning: an autoscaler may bring them. Busy ones are a
    warning that names who holds them: a run would wait ``cluster.timeout_s``.
    """
    name = "cluster.slices"
    kind = [s for s in facts.slices if (s.topology, s.pod_type) == (spec.topology, spec.pod_type)]
    whole = [s for s in kind if s.hosts == spec.hosts_per_slice]
    free = [s for s in whole if s.chips_free == s.chips]
    wanted = (
        f"{spec.slices} x {spec.generation} {spec.topology}"
        if spec.slices > 1
        else f"{spec.generation} {spec.topology}"
    )
    values = {
        "wanted": spec.slices,
        "present": len(whole),
        "free": len(free),
        "slices": [_plain(s) for s in facts.slices],
    }
    for part in kind:
        if part not in whole:
            yield Finding(
                name,
                Status.WARNING,
                f"{part.name} has {part.hosts} of its {spec.hosts_per_slice} hosts.",
                "It cannot be reserved until the others are up, with cluster.chips_per_vm as the node pool has it.",
            )
    if len(whole) < spec.slices:
        there = ", ".join(f"{s.name} ({s.pod_type or '?'} {s.topology or '?'})" for s in facts.slices) or "no slice"
        yield Finding(
            name,
            Status.FAILURE if facts.fixed else Status.WARNING,
            f"Wanted {wanted}; {len(whole)} such slice(s) are up. The cluster has {there}.",
            "A faked cluster does not grow: tpupipe cluster up with another -c or --add."
            if facts.fixed
            else "If the node pool scales up from zero, it comes when the run asks for it; otherwise change cluster.topology.",
            values,
        )
    elif len(free) < spec.slices:
        busy = "; ".join(f"{s.name} by {', '.join(s.held_by) or 'tasks'}" for s in whole if s not in free)
        message = f"Wanted {wanted}; {len(whole)} are up, {len(free)} free. Held: {busy}."
        yield Finding(name, Status.WARNING, message, "A run waits for them, cluster.timeout_s at most.", values)
    else:
        names = ", ".join(s.name for s in free)
        yield Finding(
            name, Status.OK, f"{len(free)} free slice(s) of {spec.generation} {spec.topology}: {names}.", facts=values
        )


def judge_gpus(facts: ClusterFacts, config: ClusterConfig) -> Finding:
    """Whether the cluster has the GPUs, and has them free."""
    name, (total, free), wanted = "cluster.slices", facts.gpus, config.gpus or 0
    values = {"wanted": wanted, "gpus": total, "gpus_free": free}
    message = f"Wanted {wanted} GPUs; the cluster has {total:g}, {free:g} of them free."
    if total < wanted:
        return Finding(
            name, Status.WARNING, message, "Add nodes, unless an autoscaler does; or lower cluster.gpus.", values
        )
    if free < wanted:
        return Finding(name, Status.WARNING, message, "A run waits for them.", values)
    return Finding(name, Status.OK, message, facts=values)


def judge_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether all nodes and the driver have the same versions. A package that is missing is a version, too."""
    name = "cluster.versions"
    answered = [host for host in facts.hosts if not host.error]
    wrong = False
    for package in COMPARED:
        here = facts.driver.get(package, "none")
        others: dict[str, list[str]] = {}
        for host in answered:
            version = host.versions.get(package, "none")
            if version != here:
                others.setdefault(version, []).append(str(host))
        if others:
            wrong = True
            listed = "; ".join(f"{version} on {_some(hosts)}" for version, hosts in sorted(others.items()))
            yield Finding(
                name,
                Status.FAILURE,
                f"{package} is {here} here, {listed}.",
                "Use one image for head, workers and submitter; functions and arrays go between them.",
                {"package": package, "driver": here, "others": others},
            )
    if not wrong:
        listed = ", ".join(f"{package} {facts.driver.get(package, 'none')}" for package in COMPARED)
        yield Finding(
            name, Status.OK, f"{listed} on all {len(answered)} node(s) and here.", facts={"versions": facts.driver}
        )


def judge_libtpu(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether every TPU host has libtpu, and all the same."""
    name = "cluster.libtpu"
    hosts = [host for host in facts.hosts if host.chips and not host.error]
    missing = [str(host) for host in hosts if "libtpu" not in host.versions]
    versions = sorted({host.versions["libtpu"] for host in hosts if "libtpu" in host.versions})
    if missing:
        message = f"libtpu is not installed on {_some(missing)}: JAX would find no TPU there."
        yield Finding(
            name, Status.FAILURE, message, "pip install 'tpupipe[tpu]' in the workers' image.", {"missing": missing}
        )
    if len(versions) > 1:
        message = f"TPU hosts have different versions of libtpu: {', '.join(versions)}."
        yield Finding(name, Status.FAILURE, message, "Use one image for all workers.", {"versions": versions})
    if not hosts:
        yield Finding(name, Status.SKIPPED, "No TPU host is up.", "Its image is looked at when one is.")
    elif not missing and len(versions) == 1:
        yield Finding(
            name, Status.OK, f"libtpu {versions[0]} on all {len(hosts)} TPU host(s).", facts={"version": versions[0]}
        )


def _some(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more


def _plain(facts: SliceFacts) -> dict[str, Any]:
    return {"name": facts.name, "topology": facts.topology, "pod_type": facts.pod_type, "chips_free": facts.chips_free}
