"""The held reservation: a slice is taken once, kept across stages and restarts, and given back however the run ends.

Ray's ``slice_placement_group`` does the atomic part; here are the bounds (one time-out for all slices), the progress,
the all-or-nothing over several slices and the way back.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util import tpu
from ray.util.placement_group import PlacementGroup, placement_group_table

from tpupipe.errors import ReservationError, ReservationTimeoutError, SliceError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.local.periodic import periodically

_log = logging.getLogger("tpupipe")

PROGRESS_EVERY_S = 5.0
RELEASE_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 3.0
_LOOK_S = 1.0  # while Ray waits for a group, no signal is heard


@dataclass(frozen=True)
class Host:
    """One reserved TPU host.

    Args:
        node_id: Ray's id of the node.
        address: Its IP address.
        slice_name: The slice it belongs to; empty for a single-host slice without that label.
        slice_index: Position of its slice in the reservation.
        worker_id: Its number in the slice.
        bundle: Index of its bundle in ``group``.
    """

    node_id: str
    address: str
    slice_name: str
    slice_index: int
    worker_id: int
    group: PlacementGroup
    bundle: int


def check_slice(spec: SliceSpec) -> None:
    """Asks Ray whether such a slice exists. Needs no cluster.

    Raises:
        SliceError: Ray knows no such topology for the generation, or the hosts do not divide it.
    """
    manager: Any = vars(tpu)["TPUAcceleratorManager"]  # what SlicePlacementGroup itself asks; not in its __all__
    valid = manager.is_valid_tpu_accelerator_topology(spec.ray_version, spec.topology)
    if not valid:
        raise SliceError(
            f"{spec.generation} has no slice of topology {spec.topology}.",
            hint="The topologies are in Cloud TPU's documentation of the generation; 4x4 is a v6e slice of 16 chips.",
            generation=spec.generation,
            topology=spec.topology,
        )
    try:
        tpu.get_tpu_worker_resources(
            spec.topology, spec.ray_version, {"TPU": spec.chips_per_host}, spec.slices, spec.chips_per_host
        )
    except ValueError as error:
        raise SliceError(
            f"{spec} cannot be split over its hosts: {error}",
            hint="Leave cluster.chips_per_vm out, or set it to 1, 4 or 8 as the node pool has it.",
            topology=spec.topology,
            chips_per_vm=spec.chips_per_vm,
        ) from error


class Reservation:
    """All slices of one run, held until ``release``. Use ``reserved`` to make one.

    Args:
        spec: What is wanted.
        timeout_s: Seconds until all slices must be held, however many they are.
        name: Shown in Ray's placement group table.
        say: Takes progress lines.
        declared: All slices that there can be, where the cluster cannot grow: then asking for more is an error at
            once. (A slice that has lost a host comes back: that is waited for.)
    """

    def __init__(
        self,
        spec: SliceSpec,
        *,
        timeout_s: float,
        name: str,
        say: Callable[[str], None],
        declared: Sequence[SliceSpec] | None = None,
    ) -> None:
        self.spec = spec
        self.waited_s = 0.0
        self.hosts: tuple[Host, ...] = ()
        self._timeout_s = timeout_s
        self._name = name
        self._say = say
        self._declared = declared
        self._handles: list[tpu.SlicePlacementGroup] = []

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """On the way out: what cannot be given back ends with the connection, and must not hide why we leave."""
        try:
            self.release()
        except (ReservationError, RayError) as failed:
            _log.warning("%s", failed)

    def acquire(self) -> None:
        """Takes all slices or none.

        Raises:
            ReservationError: There is no such slice, and there will not be one.
            ReservationTimeoutError: Not all became free in time. Nothing is held.
        """
        if self._handles:
            return
        began = time.monotonic()
        if self._declared is not None and (there := declared_slices(self._declared, self.spec)) < self.spec.slices:
            raise ReservationError(
                f"Wanted {self.spec}; the cluster has {there} such slice(s) and cannot grow. {describe_slices()}",
                hint="Change cluster.generation, topology or slices, or start a cluster that has them.",
                wanted=str(self.spec),
                available=slice_states(),
            )
        try:
            with periodically(PROGRESS_EVERY_S, lambda: self._say(self._waiting(began)), name="reservation-progress"):
                for index in range(self.spec.slices):
                    self._handles.append(self._take(index, began))
            self.hosts = self._find_hosts()
        except BaseException:
            self._give_back()
            raise
        self.waited_s += time.monotonic() - began
        names = sorted({host.slice_name or host.node_id[:8] for host in self.hosts})
        self._say(
            f"reserved {self.spec}: {', '.join(names)}, {len(self.hosts)} host(s), after {time.monotonic() - began:.1f} s"
        )

    def _left(self, began: float) -> float:
        return max(0.0, self._timeout_s - (time.monotonic() - began))

    def _take(self, index: int, began: float) -> tpu.SlicePlacementGroup:
        try:
            handle: tpu.SlicePlacementGroup = tpu.slice_placement_group(
                topology=self.spec.topology,
                accelerator_version=self.spec.ray_version,
                resources_per_bundle={"TPU": self.spec.chips_per_host},
                chips_per_vm=self.spec.chips_per_host,
                strategy="STRICT_SPREAD",
                name=f"{self._name}-{index}",
                # A single-host slice has no head to claim; without this it could take one host out of a larger slice.
                bundle_label_selector=[{"ray.io/tpu-pod-type": self.spec.pod_type}]
                if self.spec.hosts_per_slice == 1
                else None,
                head_reservation_timeout_s=self._left(began),
            )
        except TimeoutError as error:
            raise self._timed_out(index) from error
        group = _group(handle)
        while not group.wait(_LOOK_S):
            if not self._left(began):
                handle.shutdown()
                raise self._timed_out(index)
        # Only now: until the workers' group is ready, the head group is what keeps the claim on the slice.
        handle.release_head_pgs()
        return handle

    def _timed_out(self, index: int) -> ReservationTimeoutError:
        return ReservationTimeoutError(
            f"Wanted {self.spec}; slice {index + 1} of {self.spec.slices} was not free within {self._timeout_s:g} s"
            f" (cluster.timeout_s). {describe_slices()} Nothing is held.",
            hint="Wait for the job that holds it, raise cluster.timeout_s, or ask for a topology that is there.",
            wanted=str(self.spec),
            available=slice_states(),
        )

    def _waiting(self, began: float) -> str:
        return (
            f"waiting for {self.spec}: {len(self._handles)} of {self.spec.slices} slice(s) held, "
            f"{time.monotonic() - began:.0f} s of at most {self._timeout_s:g} s. {describe_slices()}"
        )

    def _find_hosts(self) -> tuple[Host, ...]:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        hosts = []
        for index, handle in enumerate(self._handles):
            group = _group(handle)
            for bundle, node_id in placement_group_table(group)["bundles_to_node_id"].items():
                labels = nodes[node_id].get("Labels", {})
                hosts.append(
                    Host(
                        node_id=node_id,
                        address=nodes[node_id]["NodeManagerAddress"],
                        slice_name=labels.get("ray.io/tpu-slice-name", ""),
                        slice_index=index,
                        worker_id=int(labels.get("ray.io/tpu-worker-id", 0) or 0),
                        group=group,
                        bundle=int(bundle),
                    )
                )
        return tuple(sorted(hosts, key=lambda host: (host.slice_index, host.worker_id)))

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """One per host, in order: where Ray Train puts its workers."""
        return [{"ray.io/node-id": host.node_id} for host in self.hosts]

    def lost_hosts(self) -> list[Host]:
        """Hosts that are dead now: by Ray's table, or because their raylet does not answer (the table lags by seconds)."""
        ports = {node["NodeID"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]}
        return [host for host in self.hosts if host.node_id not in ports or not _answers(host, ports[host.node_id])]

    def draining_hosts(self) -> list[Host]:
        """Hosts of which it was announced that they go away. Ray places nothing on them any more, and says nothing."""
        from ray._private.state import state

        draining = state.get_draining_nodes() or {}
        return [host for host in self.hosts if host.node_id in draining]

    def renew(self, reason: str) -> None:
        """Gives the slices back and takes new ones, after a host was lost.

        Raises:
            ReservationError, ReservationTimeoutError: As ``acquire``.
        """
        self._say(f"giving the reservation back: {reason}")
        self.release()
        self.acquire()

    def release(self) -> None:
        """Gives everything back and waits until Ray says so. Idempotent.

        Raises:
            ReservationError: Ray did not remove a placement group in time.
        """
        handles, self._handles, self.hosts = self._handles, [], ()
        groups = [_group(handle) for handle in handles]
        for handle in handles:
            handle.shutdown()
        ends = time.monotonic() + RELEASE_TIMEOUT_S
        for group in groups:
            while placement_group_table(group).get("state", "REMOVED") != "REMOVED":  # removing is asynchronous
                if time.monotonic() > ends:
                    raise ReservationError(
                        f"Ray did not remove placement group {group.id.hex()} in {RELEASE_TIMEOUT_S:.0f} s.",
                        hint="It ends with this driver at the latest.",
                    )
                time.sleep(0.02)


def _answers(host: Host, port: int) -> bool:
    try:
        with socket.create_connection((host.address, port), timeout=PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def _group(handle: tpu.SlicePlacementGroup) -> PlacementGroup:
    group = handle.placement_group
    if group is None:
        raise ReservationError("The reservation's placement group is gone already.")
    return group


def slice_states() -> list[dict[str, Any]]:
    """Every slice in the cluster: name, topology, pod type, hosts, chips, free chips, and who holds the others."""
    held: dict[str, float] = {}
    holders: dict[str, set[str]] = {}
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        for bundle, node_id in group["bundles_to_node_id"].items():
            chips = group["bundles"][int(bundle)].get("TPU", 0)
            held[node_id] = held.get(node_id, 0) + chips
            if chips:
                holders.setdefault(node_id, set()).add(group["name"] or group["placement_group_id"][:8])
    slices: dict[str, dict[str, Any]] = {}
    for node in ray.nodes():
        chips = node.get("Resources", {}).get("TPU", 0)
        if not node["Alive"] or not chips:
            continue
        labels = node.get("Labels", {})
        name = labels.get("ray.io/tpu-slice-name") or node["NodeID"][:8]
        state = slices.setdefault(
            name,
            {
                "name": name,
                "topology": labels.get("ray.io/tpu-topology", ""),
                "pod_type": labels.get("ray.io/tpu-pod-type", ""),
                "hosts": 0,
                "chips": 0,
                "chips_free": 0,
                "held_by": [],
            },
        )
        state["hosts"] += 1
        state["chips"] += int(chips)
        state["chips_free"] += int(chips - held.get(node["NodeID"], 0))
        state["held_by"] = sorted({*state["held_by"], *holders.get(node["NodeID"], ())})
    return sorted(slices.values(), key=lambda s: str(s["name"]))


def declared_slices(declared: Sequence[SliceSpec], wanted: SliceSpec) -> int:
    """How many of the declared slices are of the wanted kind; pure."""

    def kind(spec: SliceSpec) -> tuple[str, str, int]:
        return spec.generation, spec.topology, spec.chips_per_host

    return sum(spec.slices for spec in declared if kind(spec) == kind(wanted))


def describe_slices() -> str:
    """One sentence: what the cluster has, and what of it is free."""
    states = slice_states()
    if not states:
        return "The cluster has no TPU slices now."
    listed = "; ".join(
        f"{s['name']} ({s['pod_type'] or '?'}, {s['topology'] or '?'}, {s['chips_free']} of {s['chips']} chips free"
        f"{', held by ' + ', '.join(s['held_by']) if s['held_by'] else ''})"
        for s in states
    )
    return f"The cluster has: {listed}."


def held_groups(names: Sequence[str] = ()) -> list[str]:
    """Names of the placement groups that are not removed, in this cluster (of those given, if any)."""
    table = placement_group_table()
    held = [str(group["name"]) for group in table.values() if group["state"] != "REMOVED"]
    return sorted(name for name in held if not names or name in names)
