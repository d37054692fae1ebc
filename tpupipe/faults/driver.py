"""The driver's side of faults: what is refused before anything, its own fault points, and a store that fails."""

from __future__ import annotations

import contextlib
import difflib
import json
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
from tpupipe.errors import ClusterError, StoreError, UsageError
from tpupipe.faults.damage import damage_newest
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import ON_A_HOST, Action, Fault
from tpupipe.faults.points import arm
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.faults.store_proxy import StoreProxy, store_proxy
from tpupipe.ledger.events import EventLog, event
from tpupipe.local.guard import running
from tpupipe.store.layout import RunPaths, parse_event_segment
from tpupipe.store.objects import Store

logger = logging.getLogger("tpupipe")

_KEEP_FOLDER_S = 120.0
_TOLD_ATTEMPTS = 2  # for what is only told, while the store may be made to fail


def check_faults(
    faults: Sequence[Fault],
    store_faults: StoreFaults,
    config: Config,
    emulator: str | None,
    stages: Mapping[str, str],
) -> None:
    """Refuses faults that this world cannot have, and such as could never fire in this job.

    Args:
        faults: Of processes and hosts.
        store_faults: Of the store.
        config: The configuration.
        emulator: ``STORAGE_EMULATOR_HOST``.
        stages: The job's stages, name to kind (``Preprocess``, ``Train``, ``Infer``), in order.

    Raises:
        UsageError: One of them.
    """
    for fault in faults:
        _check_place(fault, config, stages)
        _check_host(fault, config, stages)
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


def _check_place(fault: Fault, config: Config, stages: Mapping[str, str]) -> None:
    """Refuses a stage or a rank that the job does not have: nothing would happen, and that would look like survival."""
    when = dict(fault.when)
    stage, rank = when.get("stage"), when.get("rank")
    if stage is not None and stage not in stages:
        near = difflib.get_close_matches(stage, stages, n=1)
        raise UsageError(
            f"Fault {fault.text!r}: the job has no stage {stage!r}; it has {', '.join(stages)}.",
            hint=f"Did you mean {near[0]}?" if near else "",
            stage=stage,
        )
    spec = config.cluster.slice_spec()
    processes = spec.hosts_per_slice * spec.slices if spec else config.cluster.gpus or 1
    if rank is not None and int(rank) >= processes:
        raise UsageError(
            f"Fault {fault.text!r}: there is no rank {rank}; allowed: 0 to {processes - 1}.", rank=int(rank)
        )


def _check_host(fault: Fault, config: Config, stages: Mapping[str, str]) -> None:
    """Refuses to take the driver's own host, on which a faked cluster prepares units: the whole cluster would end."""
    if fault.action not in ON_A_HOST or config.cluster.kind != "fake" or not fault.point.startswith("unit."):
        return
    named = dict(fault.when).get("stage")
    preparing = [name for name, kind in stages.items() if kind == "Preprocess" and named in (None, name)]
    if preparing:
        others = [name for name, kind in stages.items() if kind == "Infer"]
        raise UsageError(
            f"Fault {fault.text!r}: on a faked cluster the units of stage {preparing[0]!r} are prepared on the driver's "
            f"host, and {fault.action} there would end the whole cluster.",
            hint=(f"stage={others[0]}, or " if others else "") + "a point of training, or kill-worker.",
            stage=preparing[0],
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
    before it happens: it may be this process's end. What did not fire, here or in a worker, is told when the block is
    left without an error.

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
    if log is not None and paths is not None:
        _tell_unfired([f for position, f in enumerate(faults) if not fired.get(position)], log, store, paths)


def _tell_unfired(faults: Sequence[Fault], log: EventLog, store: Store, paths: RunPaths) -> None:
    """Tells of faults that did not fire in any process of this attempt: a typing mistake must not look like survival."""
    if not faults:
        return
    log.flush()
    try:
        told = _fired_texts(store.with_limits(attempts=_TOLD_ATTEMPTS), paths)
    except StoreError as error:
        log.emit("faults_unfired", f"which faults fired is not known: {error.message}", level=logging.WARNING)
        return
    unfired = [fault.text for fault in faults if fault.text not in told]
    if unfired:
        text = f"injected faults that did not fire in this attempt: {', '.join(map(repr, unfired))}"
        log.emit("faults_unfired", text, level=logging.WARNING, texts=unfired)


def _fired_texts(store: Store, paths: RunPaths) -> set[str]:
    """Faults that fired, by the events of the newest attempt, which is that of the run's owner."""
    segments: dict[int, list[str]] = {}
    for info in store.list(paths.events + "/"):
        parsed = parse_event_segment(info.name)
        if parsed is not None:
            segments.setdefault(parsed[0], []).append(info.name)
    names = segments[max(segments)] if segments else []
    events = (json.loads(line) for name in names for line in store.read(name).splitlines())
    return {event["text"] for event in events if event["kind"] == "fault"}


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
