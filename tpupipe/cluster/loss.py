"""How the host or the slice of a worker goes away, for faults: from inside the worker that is on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ray

from tpupipe.cluster.fake import FakeClusterState
from tpupipe.errors import ClusterError

DRAIN_TIMEOUT_S = 60.0


def drain_this_host(deadline_s: float, reason: str) -> None:
    """Announces to Ray that this worker's node is going to be preempted, as the platform does; returns when Ray took it.

    Args:
        deadline_s: Seconds until the node may go away.
        reason: Shown by Ray.

    Raises:
        ClusterError: Ray refused, or did not answer.
    """
    context = ray.get_runtime_context()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
        *("--address", context.gcs_address, "--node-id", context.get_node_id()),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", reason),
        *("--deadline-remaining-seconds", str(max(1, round(deadline_s)))),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter, Ray's own command
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DRAIN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`ray drain-node` did not answer in {DRAIN_TIMEOUT_S:.0f} s.") from error
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ClusterError(f"Ray did not drain this host (exit status {done.returncode}): {last}")


@dataclass(frozen=True)
class LosableSlice:
    """One faked slice.

    Args:
        name: Its name.
        raylets: Process ids of its hosts' raylets, that of the asking host last.
    """

    name: str
    raylets: tuple[int, ...]

    def kill(self) -> None:
        """SIGKILL to all of them at once. A worker of the slice does not outlive it for long."""
        for raylet in filter(_is_raylet, self.raylets):
            try:
                os.kill(raylet, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went down in this moment


def this_slice(state_file: str | None, raylet: int) -> LosableSlice:
    """The faked slice of a host, by what the server that started its hosts says.

    Args:
        state_file: The server's state file (``Environment.faked_slices``); ``None`` where there is no such server.
        raylet: Process id of the host's raylet.

    Raises:
        ClusterError: The host is not on a faked slice.
    """
    if state_file is None:
        raise ClusterError(
            "lose-slice works on a faked slice, and this host is not on one.",
            hint="kill-host and drain-host work on any cluster.",
        )
    try:
        state = FakeClusterState(**json.loads(Path(state_file).read_text()))
    except FileNotFoundError as error:
        raise ClusterError(f"The faked cluster's server is gone: there is no {state_file}.") from error
    return slice_of(state, raylet)


def slice_of(state: FakeClusterState, raylet: int) -> LosableSlice:
    """The slice that a raylet is part of; pure.

    Raises:
        ClusterError: None of the server's hosts is that raylet.
    """
    host = next((name for name, pid in state.hosts.items() if pid == raylet), None)
    if host is None:
        raise ClusterError(
            f"Raylet {raylet} is none of the faked cluster's hosts: {state.hosts}.", hint="Was it replaced just now?"
        )
    name = host.rpartition("/")[0]
    others = [pid for each, pid in state.hosts.items() if each.rpartition("/")[0] == name and pid != raylet]
    return LosableSlice(name, (*others, raylet))


def _is_raylet(pid: int) -> bool:
    """Whether the process is (still) a raylet: the host may be down already, and its number another process's."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"
    except FileNotFoundError:
        return False
