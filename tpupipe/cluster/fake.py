"""The faked slice: one raylet per TPU host on this machine.

Nothing that the reservation, the trainer or the placement look at tells it from a real one.

Each faked host gets the resources, labels and environment that KubeRay and GKE give a real one;
JAX runs there with ``JAX_PLATFORMS=cpu`` and one virtual device per chip, one process per host.

``python -m tpupipe.cluster.fake --spec FILE --state FILE`` is the server: it starts the hosts,
writes the state file once all of them are up, and stops them on SIGTERM. It runs under
``local.guard`` when a run owns it and alone when ``tpupipe cluster up`` keeps it warm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpupipe.config import FAKED_SLICES_VARIABLE, environment
from tpupipe.hardware.slices import SliceSpec
from tpupipe.store.owner import Owner, is_running, same_machine

# All of 127.0.0.0/8 is the loopback on Linux, and Ray replaces the spelling 127.0.0.1 by the machine's outward
# address, which would open the faked slice to the network. Elsewhere Ray stays on 127.0.0.1 by itself.
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
HEAD_CPUS = 4
REPLACE_AFTER_S = 2.0
OBJECT_STORE_BYTES = 200 * 1024 * 1024


@dataclass(frozen=True)
class FakeHost:
    """What one faked TPU host is started with."""

    slice_name: str
    worker_id: int
    resources: dict[str, float]
    labels: dict[str, str]
    environment: dict[str, str]


@dataclass(frozen=True)
class FakeClusterSpec:
    """What the server is asked to start: ``slices`` (possibly of several generations)."""

    slices: tuple[SliceSpec, ...]
    cpus_per_host: int

    def to_json(self) -> str:
        """The form that ``--spec`` reads."""
        return json.dumps({"slices": [asdict(s) for s in self.slices], "cpus_per_host": self.cpus_per_host})

    @classmethod
    def from_json(cls, text: str) -> FakeClusterSpec:
        """Reads what ``to_json`` wrote."""
        data = json.loads(text)
        return cls(tuple(SliceSpec(**s) for s in data["slices"]), data["cpus_per_host"])


@dataclass(frozen=True)
class FakeClusterState:
    """What a running server says of itself in its state file.

    ``hosts`` maps ``"<slice name>/<worker id>"`` to the raylet's process id. ``server`` is the server's ``Owner``: its number
    alone may be that of another process by now.
    """

    address: str
    dashboard: str
    pid: int
    hosts: dict[str, int]
    spec: dict[str, Any]
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the server still runs, on this machine and since its last boot."""
        if not self.server:  # of an older version: by its number alone
            return is_running(replace(Owner.here(), pid=self.pid, pid_start=0))
        server = Owner(**self.server)
        return same_machine(server, Owner.here()) and is_running(server)


def hosts_of(spec: SliceSpec, first_slice: int = 0) -> list[FakeHost]:
    """The hosts of ``spec.slices`` slices, worker 0 of each slice first."""
    hosts = []
    for index in range(first_slice, first_slice + spec.slices):
        name = f"fake-{spec.generation}-{spec.topology}-{index}"
        for worker in range(spec.hosts_per_slice):
            resources: dict[str, float] = {
                "TPU": spec.chips_per_host,
                name: 1,
                f"accelerator_type:{spec.accelerator_type}": 1,
            }
            if worker == 0:
                resources[f"TPU-{spec.pod_type}-head"] = 1
            hosts.append(
                FakeHost(
                    slice_name=name,
                    worker_id=worker,
                    resources=resources,
                    labels={
                        "ray.io/tpu-slice-name": name,
                        "ray.io/tpu-worker-id": str(worker),
                        "ray.io/tpu-topology": spec.topology,
                        "ray.io/tpu-pod-type": spec.pod_type,
                        "ray.io/accelerator-type": spec.accelerator_type,
                    },
                    environment={
                        "TPU_NAME": name,
                        "TPU_WORKER_ID": str(worker),
                        "TPU_ACCELERATOR_TYPE": spec.pod_type,
                        "TPU_TOPOLOGY": spec.topology,
                        "JAX_PLATFORMS": "cpu",
                        "XLA_FLAGS": f"--xla_force_host_platform_device_count={spec.devices_per_host}",
                    },
                )
            )
    return hosts


class _Server:
    """Starts the hosts, keeps them up as a node pool does, stops them."""

    def __init__(self, spec: FakeClusterSpec, state_file: Path) -> None:
        from ray.cluster_utils import Cluster

        # cluster_utils notes its address below this folder and does not make it.
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        self._spec = spec
        self._state_file = state_file
        self._session = Path(tempfile.mkdtemp(prefix="tpupipe-"))
        self._cluster = Cluster(shutdown_at_exit=True)
        self._dashboard = ""
        self._nodes: dict[str, tuple[FakeHost, Any]] = {}

    def start(self) -> None:
        """Starts the head and all hosts, and tells once they are up."""
        head = self._cluster.add_node(
            num_cpus=HEAD_CPUS,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=0,
            dashboard_agent_listen_port=0,  # the default is one fixed port a machine
            node_ip_address=LOOPBACK,
            object_store_memory=OBJECT_STORE_BYTES,
            temp_dir=str(self._session),
        )
        self._dashboard = f"http://{head.webui_url}" if head.webui_url else ""
        first: dict[tuple[str, str], int] = {}
        for wanted in self._spec.slices:
            key = (wanted.generation, wanted.topology)
            for host in hosts_of(wanted, first.get(key, 0)):
                self._add(host)
            first[key] = first.get(key, 0) + wanted.slices
        self._cluster.wait_for_nodes()
        self._tell()

    def keep(self) -> None:
        """Replaces hosts whose raylet died, as a node pool replaces a lost VM. Ends only by a signal."""
        while True:
            time.sleep(REPLACE_AFTER_S)  # a signal ends it: its handler raises
            self._end_drained()
            lost = [(host, node) for host, node in self._nodes.values() if _raylet(node).poll() is not None]
            for host, node in lost:
                self._cluster.remove_node(node, allow_graceful=False)
                self._add(host)
            if lost:
                self._tell()

    def _end_drained(self) -> None:
        """Takes hosts down at the time for which that was announced, as the platform does. Ray ends them when they are idle."""
        draining = self._cluster.global_state.get_draining_nodes()
        for _, node in self._nodes.values():
            if 0 < draining.get(node.node_id, 0) <= time.time() * 1000:
                _raylet(node).kill()

    def stop(self) -> None:
        """Stops everything."""
        self._state_file.unlink(missing_ok=True)
        # Not gracefully: there is nothing to drain, the workers end with their raylet, and Linux ends the raylets
        # with this process even if it is killed here.
        for node in reversed(self._cluster.list_all_nodes()):
            self._cluster.remove_node(node, allow_graceful=False)
        shutil.rmtree(self._session, ignore_errors=True)

    def _add(self, host: FakeHost) -> None:
        node = self._cluster.add_node(
            wait=False,
            num_cpus=self._spec.cpus_per_host,
            node_ip_address=LOOPBACK,
            resources=host.resources,
            labels=host.labels,
            env_vars={**host.environment, FAKED_SLICES_VARIABLE: str(self._state_file.absolute())},
            object_store_memory=OBJECT_STORE_BYTES,
            temp_dir=str(self._session),
        )
        self._nodes[f"{host.slice_name}/{host.worker_id}"] = (host, node)
        # Each add_node installs Ray's own handler, which drains that one host for 30 s.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _raise_stop)

    def _tell(self) -> None:
        state = FakeClusterState(
            address=self._cluster.address,
            dashboard=self._dashboard,
            pid=os.getpid(),
            hosts={name: _raylet(node).pid for name, (_, node) in self._nodes.items()},
            spec=json.loads(self._spec.to_json()),
            server=asdict(Owner.here()),
        )
        draft = self._state_file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(state)))
        draft.replace(self._state_file)  # readers see all of it or nothing


def serve(spec: FakeClusterSpec, state_file: Path) -> None:
    """Starts the hosts, writes the state file, replaces lost hosts, stops when SIGTERM or SIGINT comes."""
    # The raylets pick their workers' interpreter from PATH for submitted jobs; without our own
    # first, `ray job submit`'s `python` would be one that has no Ray.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment().path}"
    os.environ["RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS"] = "1"
    server = _Server(spec, state_file)
    try:
        server.start()
        server.keep()
    except _Stop:
        pass
    finally:
        server.stop()


class _Stop(BaseException):
    """Raised by the signal handler; not an Exception, so no library catches it."""


def _raise_stop(*_: object) -> None:
    raise _Stop


def _raylet(node: Any) -> Any:
    """The raylet's process (``subprocess.Popen``)."""
    return node.all_processes["raylet"][0].process


def _go_on_in_the_background(log: Path) -> None:
    """Leaves a child in a session of its own, with its output in ``log``; the parent prints its id and ends."""
    child = os.fork()
    if child:
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for standard, target in ((0, null), (1, output), (2, output)):
        os.dup2(target, standard)


def main() -> None:
    """Entry point of the server process."""
    parser = argparse.ArgumentParser(prog="python -m tpupipe.cluster.fake", description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--state", required=True, type=Path)
    parser.add_argument("--detach", type=Path, metavar="LOG", help="go on in the background, print its process id")
    options = parser.parse_args()
    if options.detach is not None:
        _go_on_in_the_background(options.detach)
    serve(FakeClusterSpec.from_json(options.spec.read_text()), options.state)


if __name__ == "__main__":
    main()
