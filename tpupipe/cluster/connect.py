"""Connects the driver to Ray: a real cluster, one that is already warm, or a faked slice of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from tpupipe.cluster.fake import FakeClusterSpec, FakeClusterState
from tpupipe.config import ClusterConfig, process_variables
from tpupipe.errors import ClusterError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.local.guard import Child, guarded, running

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0

# Ray restricts a worker to the chips it asked for by hiding the others. Train's workers ask for none: the
# reservation holds the chips, and the worker must see all of its host.
WORKER_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1"}

# Ray Data counts its use in a thread that outlives the connection, and Ray ends a process that asks anything of it
# after that: a program that goes on after a run would end with status 1.
DRIVER_VARIABLES = {"RAY_DATA_USAGE_DISABLED": "1"}


@dataclass(frozen=True)
class Cluster:
    """The cluster a driver is connected to.

    Args:
        address: ``host:port`` of Ray's control service.
        dashboard: URL of the dashboard and job server, or empty.
        started: Whether this run started it (and stops it).
        declared: Slices that a faked cluster has when none of its hosts is down; ``None`` for others, which may grow.
    """

    address: str
    dashboard: str
    started: bool
    declared: tuple[SliceSpec, ...] | None = None


@contextlib.contextmanager
def connected(
    config: ClusterConfig,
    *,
    root: Path,
    worker_environment: Mapping[str, str],
    ray_address: str | None = None,
    say: Callable[[str], None],
) -> Iterator[Cluster]:
    """Connects to the cluster that the configuration describes; starts a faked one if need be.

    Args:
        config: The ``cluster`` section.
        root: Folder of local state; a warm faked cluster is looked for below it.
        worker_environment: Variables for every worker process (storage end point, credentials).
        ray_address: ``RAY_ADDRESS``, used where the configuration names no address.
        say: Takes progress lines.

    Raises:
        ClusterError: No cluster answers, or the faked one did not start.
    """
    address = config.address or ray_address
    with contextlib.ExitStack() as stack:
        state: FakeClusterState | None = None
        started = False
        if config.kind == "fake" and address is None:
            state = warm_cluster(root)
            if state is None:
                state = stack.enter_context(_own_faked_cluster(config, root, say))
                started = True
            address = state.address
        elif config.kind == "fake":
            state = warm_cluster(root)
            if state is not None and state.address != address:
                state = None
        dashboard = stack.enter_context(open_connection(address or "auto", worker_environment))
        yield Cluster(
            address=ray.get_runtime_context().gcs_address,
            dashboard=dashboard,
            started=started,
            declared=tuple(SliceSpec(**s) for s in state.spec["slices"]) if state else None,
        )


@contextlib.contextmanager
def open_connection(address: str, worker_environment: Mapping[str, str]) -> Iterator[str]:
    """Connects to a cluster that is there, and yields the dashboard's URL, or an empty text.

    Raises:
        ClusterError: None answers, or this process is connected already.
    """
    if ray.is_initialized():
        raise ClusterError(
            "This process is already connected to Ray, and a run needs a connection of its own.",
            hint="Call ray.shutdown() first: the reservation ends with the connection that made it.",
        )
    # Ray's own actors look for "the" cluster of the machine, and with two of them find the wrong one: Ray Train's would
    # take a training group for an orphan and end it.
    at_this_one = {} if address == "auto" else {"RAY_ADDRESS": address}
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)  # also if it was interrupted half-way
        try:
            with _own_signals():
                context = ray.init(
                    address=address,
                    runtime_env={"env_vars": {**at_this_one, **WORKER_ENVIRONMENT, **worker_environment}},
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"No Ray cluster answers at {address!r}: {error}",
                hint="Set cluster.address or RAY_ADDRESS to the head's host:port, or submit with `ray job submit`.",
                address=address,
            ) from error
        stack.enter_context(process_variables(DRIVER_VARIABLES))
        yield f"http://{context.dashboard_url}" if context.dashboard_url else ""


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Leaves SIGTERM to whom it belongs: connecting to Ray takes it, and leaves the process with its number as status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # Ray's handler, while it connects
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


# -- faked clusters -------------------------------------------------------------------------


def _folder(root: Path) -> Path:
    return root.absolute() / "cluster"


@contextlib.contextmanager
def _own_faked_cluster(config: ClusterConfig, root: Path, say: Callable[[str], None]) -> Iterator[FakeClusterState]:
    """A faked cluster that ends with this process, also if this process is killed."""
    spec = _fake_spec(config)
    _remove_old_folders(_folder(root))
    folder = _folder(root) / f"run-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    state_file = folder / "faked.json"
    say(f"starting a faked slice: {', '.join(str(s) for s in spec.slices)}")
    began = time.monotonic()
    with guarded(
        folder,
        lambda: Child(_server_command(spec, state_file), {"state": str(state_file)}),
        lambda facts: Path(facts["state"]).exists(),
        timeout_s=START_TIMEOUT_S,
        starts=1,
    ):
        state = _read_state(state_file)
        if state is None:
            raise ClusterError(f"The faked slice's server ended as soon as it was up; log: {folder / 'child.log'}.")
        say(f"faked slice up in {time.monotonic() - began:.1f} s ({len(state.hosts)} hosts, Ray at {state.address})")
        yield state


def _remove_old_folders(folder: Path) -> None:
    """Removes the files of faked clusters whose guard is gone; not at the run's end, which the guard outlives."""
    for old in folder.glob("run-*"):
        if running(old) is None and time.time() - old.stat().st_mtime > START_TIMEOUT_S:
            shutil.rmtree(old, ignore_errors=True)


def _fake_spec(config: ClusterConfig) -> FakeClusterSpec:
    spec = config.slice_spec()
    if spec is None:
        raise ClusterError("cluster.kind fake needs generation and topology.")
    return FakeClusterSpec((spec,), config.cpus_per_host)


def _server_command(spec: FakeClusterSpec, state_file: Path) -> list[str]:
    spec_file = state_file.with_name("spec.json")
    spec_file.write_text(spec.to_json())
    return [sys.executable, "-m", "tpupipe.cluster.fake", "--spec", str(spec_file), "--state", str(state_file)]


def _read_state(path: Path) -> FakeClusterState | None:
    try:
        return FakeClusterState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def warm_cluster(root: Path) -> FakeClusterState | None:
    """The faked cluster that ``tpupipe cluster up`` keeps below ``root``, or ``None``."""
    state = _read_state(_folder(root) / "warm.json")
    return state if state is not None and state.alive else None


def cluster_up(spec: FakeClusterSpec, base: Path, store_root: str, say: Callable[[str], None]) -> FakeClusterState:
    """Starts a faked cluster that stays until ``cluster_down``.

    Args:
        spec: The slices.
        base: Folder that a relative ``store.root`` is in, for the jobs submitted to it too.
        store_root: ``store.root``; the cluster's own files are below it.
        say: Takes progress lines.

    Raises:
        ClusterError: One is up already, or it does not come up.
    """
    root = base / store_root
    state = warm_cluster(root)
    if state is not None:
        raise ClusterError(
            f"A faked cluster is already up: Ray at {state.address}, process {state.pid}.",
            hint="tpupipe cluster down",
            address=state.address,
        )
    folder = _folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    state_file, log = folder / "warm.json", folder / "warm.log"
    state_file.unlink(missing_ok=True)  # of a server that was killed
    say(f"starting a faked slice: {', '.join(str(s) for s in spec.slices)}")
    launched = subprocess.run(  # noqa: S603 - our own interpreter and module
        [*_server_command(spec, state_file), "--detach", str(log)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "TPUPIPE_ROOT": str(base.absolute())},
        text=True,
        check=True,
        timeout=START_TIMEOUT_S,
    )
    pid = int(launched.stdout)
    try:
        _wait(lambda: state_file.exists() or not _alive(pid), START_TIMEOUT_S)
    except TimeoutError as error:
        os.kill(pid, signal.SIGTERM)
        raise ClusterError(f"The faked cluster was not up after {START_TIMEOUT_S:.0f} s; log: {log}.") from error
    state = _read_state(state_file)
    if state is None:
        raise ClusterError(f"The faked cluster's server ended as it started; log: {log}.")
    return state


def cluster_down(root: Path) -> bool:
    """Stops the warm cluster; ``False`` if there was none.

    Raises:
        ClusterError: It did not stop.
    """
    state = warm_cluster(root)
    if state is None:
        return False
    os.kill(state.pid, signal.SIGTERM)
    try:
        _wait(lambda: not state.alive, STOP_TIMEOUT_S)
    except TimeoutError as error:
        raise ClusterError(
            f"The faked cluster (process {state.pid}) did not stop in {STOP_TIMEOUT_S:.0f} s.",
            hint=f"kill -9 {state.pid}",
        ) from error
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.05)


def ship_by_value(module: ModuleType) -> None:
    """Has functions of a module sent to workers themselves rather than by name: workers need not have the module."""
    ray.cloudpickle.register_pickle_by_value(module)


def pickled(function: Any) -> bytes:
    """A function as it is sent to workers. Raises whatever pickling it raises."""
    data: bytes = ray.cloudpickle.dumps(function)
    return data


def describe(state: FakeClusterState) -> dict[str, Any]:
    """What ``tpupipe cluster status`` prints."""
    return {
        "address": state.address,
        "dashboard": state.dashboard,
        "pid": state.pid,
        "hosts": dict(state.hosts),
        "slices": state.spec["slices"],
    }
