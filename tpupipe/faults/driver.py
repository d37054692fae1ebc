"""The driver's side of faults: what is refused before anything, its own fault points, and a store that fails."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpupipe.config import Config
from tpupipe.errors import ClusterError, UsageError
from tpupipe.faults.damage import damage_newest
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import Action, Fault
from tpupipe.faults.points import arm
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.faults.store_proxy import StoreProxy, store_proxy
from tpupipe.ledger.events import EventLog, event
from tpupipe.local.guard import running
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

logger = logging.getLogger("tpupipe")

_KEEP_FOLDER_S = 120.0


def check_faults(faults: Sequence[Fault], store_faults: StoreFaults, config: Config, emulator: str | None) -> None:
    """Refuses faults that this world cannot have.

    Args:
        faults: Of processes and hosts.
        store_faults: Of the store.
        config: The configuration.
        emulator: ``STORAGE_EMULATOR_HOST``.

    Raises:
        UsageError: One of them.
    """
    for fault in faults:
        if fault.action is Action.LOSE_SLICE and config.cluster.kind != "fake":
            raise UsageError(
                f"Fault {fault.text!r}: lose-slice works on a faked slice, and cluster.kind is {config.cluster.kind}.",
                hint="cluster.kind: fake; kill-host and drain-host work on any cluster.",
            )
        if fault.action is Action.CORRUPT_CHECKPOINT and config.mode == "incremental":
            raise UsageError(
                f"Fault {fault.text!r}: corrupt-checkpoint damages a checkpoint of the run, and mode: incremental makes none.",
                hint="Damage those of the run that trains.",
            )
    store = config.store
    if store_faults.faults and not (store.embedded or (emulator and store.uri.startswith("gs://"))):
        raise UsageError(
            f"Store fault {store_faults.texts[0]!r}: only an emulated store can be made to fail, and {store.uri} is not.",
            hint="store.embedded: true, or STORAGE_EMULATOR_HOST with a gs:// store.",
            uri=store.uri,
        )


@contextlib.contextmanager
def armed_driver(
    faults: Sequence[Fault],
    log: EventLog | None,
    store: Store,
    paths: RunPaths | None,
    fired: dict[int, list[dict[str, str]]] | None = None,
) -> Iterator[None]:
    """Makes the driver's own fault points live while inside.

    Each of them fires in this process only, so counting here is enough. What fires is durable in the run's events
    before it happens: it may be this process's end.

    Args:
        faults: The faults.
        log: The run's events; ``None`` where no run is owned yet (incremental runs, before their tick).
        store: The store.
        paths: The run, as ``log``.
        fired: What fired already, for a driver that owns several runs one after the other.
    """
    fired = {} if fired is None else fired

    def claim(position: int, facts: Mapping[str, Any]) -> bool:
        fault, said = faults[position], {key: str(value) for key, value in facts.items()}
        if not fault.may_fire(fired.setdefault(position, []), said):
            return False
        fired[position].append(said)
        told = f"injected fault {fault.text!r} fires"
        if log is None:
            logger.warning("%s", told)
            return True
        log.add(fault_event(position, fault, {**said, "pid": os.getpid()}))
        log.emit("fault_fired", told, level=logging.WARNING)
        log.flush()
        return True

    def corrupt(fault: Fault, position: int) -> None:
        assert log is not None and paths is not None  # noqa: S101, PT018 - check_faults refuses it where they may be
        log.emit("fault_effect", **effect_facts(position, fault, damage_newest(store, paths, fault.how, position)))

    injection = Injection(
        faults,
        identity={},
        claim=claim,
        kill_driver=lambda: os.kill(os.getpid(), signal.SIGKILL),
        effects={Action.CORRUPT_CHECKPOINT: corrupt},
    )
    injection.arm()
    try:
        yield
    finally:
        arm(None)


def fault_event(position: int, fault: Fault, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The event of a fault that fires: what, where, and all facts of the place, as text."""
    said = {key: str(value) for key, value in facts.items()}
    return event(
        "fault",
        **{**said, "position": position, "text": fault.text, "action": fault.action.value, "point": fault.point},
    )


def effect_facts(position: int, fault: Fault, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a fault did beyond firing, for its ``fault_effect`` event."""
    said = ", ".join(f"{key} {value}" for key, value in facts.items())
    return {**facts, "position": position, "text": fault.text, "message": f"injected fault {fault.text!r}: {said}"}


# -- the store -------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_store(endpoint: str | None, faults: StoreFaults, root: Path) -> Iterator[StoreProxy | None]:
    """Puts a proxy that fails as told in front of an emulated store; ``None`` without faults.

    Args:
        endpoint: The emulator; ``check_faults`` says that there is one.
        faults: What fails.
        root: Folder of local state; the proxy's own files are below it.
    """
    if not faults.faults or endpoint is None:
        yield None
        return
    folder = root.absolute() / "store-faults"
    for old in folder.glob("run-*"):  # not at the run's end: the guard outlives it by a moment
        if running(old / "store-proxy") is None and time.time() - old.stat().st_mtime > _KEEP_FOLDER_S:
            shutil.rmtree(old, ignore_errors=True)
    own = folder / f"run-{uuid.uuid4().hex[:8]}"
    own.mkdir(parents=True)
    with store_proxy(endpoint, faults, own) as proxy:
        yield proxy


@contextlib.contextmanager
def counted(proxy: StoreProxy | None, log: EventLog) -> Iterator[None]:
    """Tells and keeps what the proxy did, however the block ends."""
    try:
        yield
    finally:
        if proxy is not None:
            _tell_counts(proxy, log)


def _tell_counts(proxy: StoreProxy, log: EventLog) -> None:
    try:
        counts = proxy.counts()
    except ClusterError as error:
        log.emit("store_faults", f"what the store proxy did is not known: {error.message}", level=logging.WARNING)
        return
    hit = ", ".join(f"{text} {number} time(s)" for text, number in counts.fired.items()) or "none"
    log.emit(
        "store_faults",
        f"store faults, of {sum(counts.requests.values())} requests: {hit}",
        level=logging.WARNING,
        requests=dict(counts.requests),
        fired=dict(counts.fired),
    )
