"""A run, top to bottom: identity, lease, cluster, reservation, stages, result."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tpupipe.config import Config, Environment, environment
from tpupipe.data.sample import parse_sample
from tpupipe.errors import InterruptedRunError, TpupipeError
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import Fault
from tpupipe.faults.points import arm, point
from tpupipe.identity import Identity, identify, settle_identity
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.ledger.events import EventLog
from tpupipe.local.server import embedded_store
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Lease, acquire
from tpupipe.store.objects import Store, open_store
from tpupipe.store.owner import Owner
from tpupipe.store.wiring import fsspec_options, process_environment

logger = logging.getLogger("tpupipe")


@dataclass(frozen=True)
class RunOptions:
    """What is asked of one attempt; nothing here changes the result.

    Args:
        name: The run's name; by default derived from job and configuration.
        faults: Faults to inject.
        allow_change: Go on with a run although its job, inputs or code changed, and record it.
        take_over: Take the run from a driver that holds it.
    """

    name: str | None = None
    faults: tuple[Fault, ...] = ()
    allow_change: bool = False
    take_over: bool = False


@dataclass(frozen=True)
class RunResult:
    """How a run stands after an attempt. ``to_json`` is what ``--json`` prints.

    Args:
        job: The job's name.
        run: The run's name.
        run_uri: Its folder in the store.
        status: ``done``, ``failed`` or ``interrupted``.
        attempt: Lease epoch of this attempt.
        stages: By name, in order: ``StageResult`` as a mapping; stages that did not begin are ``pending``.
        seconds: This attempt's, by kind, over all stages, with waiting and starting of the run itself.
        error: The message, if the attempt failed.
    """

    job: str
    run: str
    run_uri: str
    status: str
    attempt: int
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self))


def run(job: Job, config: Config, options: RunOptions | None = None) -> RunResult:
    """Runs a job, or resumes it, to the end.

    Args:
        job: The declaration, with the configuration's changes applied (``resolve`` does that).
        config: The configuration.
        options: What is asked of this attempt.

    Returns:
        The result; its status is ``done``.

    Raises:
        UsageError: (exit 2) Nothing was reserved or written.
        RunHeldError: (exit 4) Another driver owns the run.
        InterruptedRunError: (exit 130) Ctrl-C or SIGTERM; what was committed stays.
        TpupipeError: A stage failed. ``data["result"]`` is the ``RunResult``.
    """
    options = options or RunOptions()
    env = environment()
    check_before_anything(job, config)
    with _stop_on_signals() as stop, _endpoint(config, env) as endpoint:
        store = open_store(
            config.store.uri, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts
        )
        with _process_environment(endpoint, env, config.store.timeout_s) as worker_environment:
            input_options = fsspec_options("gs://any/any", endpoint) if endpoint else {}
            identity = identify(job, config, input_options=input_options)
            paths = RunPaths(job.name, options.name or identity.default_run)
            with _lease(store, paths, options, stop) as lease, EventLog(store, paths, lease.epoch) as log:
                attempt = Attempt(
                    job, config, options, env, store, paths, lease, log, stop, endpoint, input_options, worker_environment
                )
                return attempt.execute(identity)


def check_before_anything(job: Job, config: Config) -> None:
    """Refuses what cannot work, before anything is reserved, started or written.

    Raises:
        UsageError: The slice does not exist, or a stage does not fit it.
    """
    spec = config.cluster.slice_spec()
    if spec is None:
        return
    from tpupipe.cluster.reservation import check_slice
    from tpupipe.stages.sharding import check_batch, mesh_shape

    check_slice(spec)
    for stage in job.stages:
        if isinstance(stage, Train):
            check_batch(stage.batch_size, mesh_shape(stage.mesh, spec.devices), stage.batch_axes)


class Attempt:
    """One driver's life on a run: owns the lease while it works through the stages."""

    def __init__(
        self,
        job: Job,
        config: Config,
        options: RunOptions,
        env: Environment,
        store: Store,
        paths: RunPaths,
        lease: Lease,
        log: EventLog,
        stop: Any,
        endpoint: str | None,
        input_options: Mapping[str, Any],
        worker_environment: Mapping[str, str],
    ) -> None:
        self._job = job
        self._config = config
        self._options = options
        self._env = env
        self._store = store
        self._paths = paths
        self._lease = lease
        self._log = log
        self._stop = stop
        self._endpoint = endpoint
        self._input_options = input_options
        self._worker_environment = worker_environment
        self._stages: dict[str, Mapping[str, Any]] = {name: {"status": "pending"} for name in job.stage_names}
        self._waiting_s = 0.0
        self._starting_s = 0.0

    def execute(self, identity: Identity) -> RunResult:
        """Settles the identity, works through the stages, writes the result."""
        existed = settle_identity(self._store, self._paths, identity, allow_change=self._options.allow_change)
        self._log.emit(
            "run",
            f"run {self._paths.run} of {self._job.name}: {'resumed' if existed else 'new'}, attempt {self._lease.epoch}, "
            f"{self._store.uri(self._paths.root)}",
            run=self._paths.run,
            attempt=self._lease.epoch,
        )
        try:
            self._work(identity)
        except KeyboardInterrupt as error:
            interrupted = InterruptedRunError("Interrupted at once, without saving.", reason="a second Ctrl-C")
            raise self._ended("interrupted", interrupted) from error
        except TpupipeError as error:
            status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
            raise self._ended(status, error) from error.__cause__
        result = self._result("done")
        self._store.put(self._paths.result, result.to_json().encode())
        return result

    def _work(self, identity: Identity) -> None:
        if all(self._store.exists(self._paths.manifest(name)) for name in self._job.stage_names):
            self._log.emit("complete", "every stage is complete already: nothing to reserve")
            self._run_stages(identity, cluster=None, reservation=None)
            return
        from tpupipe.cluster.connect import connected

        _arm_driver(self._options.faults)
        point("run.lease_acquired", epoch=self._lease.epoch)
        began = time.monotonic()
        with connected(
            self._config.cluster,
            root=local_root(self._config, self._env),
            worker_environment=self._worker_environment,
            ray_address=self._env.ray_address,
            say=self._say,
        ) as cluster:
            self._starting_s = time.monotonic() - began
            if cluster.dashboard:
                self._say(f"Ray dashboard: {cluster.dashboard}")
            with self._reserved() as reservation:
                point("run.reserved", hosts=len(reservation.hosts) if reservation else 0)
                try:
                    self._run_stages(identity, cluster, reservation)
                finally:
                    self._waiting_s = reservation.waited_s if reservation else 0.0

    def _reserved(self) -> Any:
        from tpupipe.cluster.reservation import Reservation

        cluster = self._config.cluster
        spec = cluster.slice_spec()
        if spec is None:
            return contextlib.nullcontext()
        return Reservation(
            spec,
            timeout_s=cluster.timeout_s,
            name=f"tpupipe/{self._job.name}/{self._paths.run}",
            say=self._say,
            fixed=cluster.kind == "fake",
        )

    def _run_stages(self, identity: Identity, cluster: Any, reservation: Any) -> None:
        from tpupipe.stages.base import StageRun
        from tpupipe.stages.coordinator import CoordinatorHandle
        from tpupipe.stages.infer import run_infer
        from tpupipe.stages.preprocess import run_preprocess
        from tpupipe.stages.train import run_train

        runners: Mapping[type, Callable[..., Any]] = {Preprocess: run_preprocess, Train: run_train, Infer: run_infer}
        stage_run = StageRun(
            job=self._job,
            config=self._config,
            store=self._store,
            paths=self._paths,
            lease=self._lease,
            cluster=cluster,
            reservation=reservation,
            coordinator=CoordinatorHandle.create() if cluster is not None else None,
            log=self._log,
            stop=self._stop,
            faults=self._options.faults,
            sample=parse_sample(self._config.sample),
            endpoint=self._endpoint,
            input_options=self._input_options,
            code=identity.code,
        )
        for stage in self._job.stages:
            self._stop.check()
            self._stages[stage.name] = {"status": "failed"}
            began = time.monotonic()
            result = runners[type(stage)](stage, stage_run)
            self._stages[stage.name] = asdict(result)
            self._log.emit(
                "stage_done",
                f"{stage.name}: done in {time.monotonic() - began:.1f} s, {result.rows_out} rows, {result.uri}",
                stage=stage.name,
                result=asdict(result),
            )

    def _say(self, text: str) -> None:
        self._log.emit("say", text)

    def _result(self, status: str, error: TpupipeError | None = None) -> RunResult:
        kinds: dict[str, float] = {"waiting": self._waiting_s, "starting": self._starting_s}
        for stage in self._stages.values():
            for kind, seconds in stage.get("seconds", {}).items():
                kinds[kind] = kinds.get(kind, 0.0) + seconds
        return RunResult(
            job=self._job.name,
            run=self._paths.run,
            run_uri=self._store.uri(self._paths.root),
            status=status,
            attempt=self._lease.epoch,
            stages=dict(self._stages),
            seconds={kind: round(value, 3) for kind, value in kinds.items()},
            error=None if error is None else error.message,
        )

    def _ended(self, status: str, error: TpupipeError) -> TpupipeError:
        """Notes how the attempt ended in the run's folder and on the error."""
        if status == "interrupted":
            resume = f"the same command with --run {self._paths.run} resumes"
            self._stages = {n: {**s, "status": status} if s["status"] == "failed" else s for n, s in self._stages.items()}
            error.hint = error.hint or f"{resume[0].upper()}{resume[1:]}."
        result = self._result(status, error)
        self._log.emit("ended", f"run {self._paths.run}: {status}", level=logging.ERROR, status=status)
        error.data["result"] = result
        if not self._lease.lost:
            try:
                self._store.put(self._paths.result, result.to_json().encode())
            except OSError as failed:
                logger.warning("The result could not be kept in the run's folder: %s", failed)
        return error


# -- what surrounds an attempt --------------------------------------------------------------


def local_root(config: Config, env: Environment) -> Path:
    """Folder of local state: the embedded store's data and warm clusters."""
    root = Path(config.store.root)
    return root if root.is_absolute() else Path(env.root or Path.cwd()) / root


@contextlib.contextmanager
def _endpoint(config: Config, env: Environment) -> Iterator[str | None]:
    """The emulated Cloud Storage to use: the embedded one, that of the environment, or none."""
    if config.store.embedded:
        with embedded_store(local_root(config, env)) as endpoint:
            yield endpoint
    else:
        yield env.emulator if config.store.uri.startswith("gs://") else None


@contextlib.contextmanager
def _process_environment(endpoint: str | None, env: Environment, timeout_s: float) -> Iterator[dict[str, str]]:
    """Points this process's storage clients at the endpoint, and gives the variables for the workers'."""
    variables = {**env.storage, **process_environment(endpoint, timeout_s)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield variables
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _lease(store: Store, paths: RunPaths, options: RunOptions, stop: Any) -> Iterator[Lease]:
    with acquire(
        store,
        paths,
        Owner.here(),
        take_over=options.take_over,
        on_wait=lambda standing, waited_s: logger.info(
            "run %s: watching for a sign of life of its owner, %.0f s", paths.run, waited_s
        ),
    ) as lease:
        yield lease


def _arm_driver(faults: Sequence[Fault]) -> None:
    """Makes the driver's own fault points live; each fires in one process, so counting here is enough."""
    if not faults:
        arm(None)
        return
    fired: dict[int, int] = {}

    def claim(position: int, facts: Mapping[str, Any]) -> bool:
        fired[position] = fired.get(position, 0) + 1
        return fired[position] <= faults[position].times

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Injection(faults, identity={}, claim=claim, kill_driver=kill).arm()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Any]:
    """Turns the first Ctrl-C or SIGTERM into a request to save and end, the second into an interruption at once."""
    from tpupipe.stages.base import StopRequest

    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        stop.ask(name)
        logger.warning("%s: saving and ending; once more ends at once", name)
        if not stop.graceful:
            stop.check()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

