"""A run, top to bottom: identity, lease, cluster, reservation, stages, result."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tpupipe.config import Config, Environment, environment, process_variables
from tpupipe.data.sample import parse_sample
from tpupipe.data.sources import Source, Unit
from tpupipe.errors import FencedError, InterruptedRunError, StageError, StoreError, TpupipeError, UsageError
from tpupipe.faults.driver import armed_driver, check_faults, counted, failing_store
from tpupipe.faults.plan import Fault, parse_faults
from tpupipe.faults.points import point
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.hardware.mesh import check_batch, mesh_shape
from tpupipe.hardware.slices import SliceSpec
from tpupipe.identity import Identity, check_identity, identify, plan_inputs, settle_identity
from tpupipe.incremental import check_incremental, run_tick
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.ledger.events import EventLog
from tpupipe.ledger.lost_driver import tell_lost_driver
from tpupipe.local.server import embedded_store
from tpupipe.preflight.bucket import refuse_other_region
from tpupipe.stages.finished import finished
from tpupipe.stop import StopRequest
from tpupipe.store.layout import RunPaths, TickPaths
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
        faults: Faults to inject; those of the configuration come after them.
        allow_change: Go on with a run although its job, inputs or code changed, and record it.
        take_over: Take the run from a driver that holds it.
        store_faults: Faults of the emulated store to inject; those of the configuration come after them.
        as_of: Incremental: the tick; by default now, truncated to ``schedule.every``.
        reprocess: Incremental: make a new generation of partitions, from all inputs.
        backfilled: Incremental: the tick takes only inputs that were modified up to its time.
        left: Incremental: earlier ticks that are not tried again.
    """

    name: str | None = None
    faults: tuple[Fault, ...] = ()
    allow_change: bool = False
    take_over: bool = False
    store_faults: StoreFaults = field(default_factory=StoreFaults)
    as_of: datetime | None = None
    reprocess: bool = False
    backfilled: bool = False
    left: frozenset[str] = frozenset()

    def with_configured_faults(self, config: Config) -> RunOptions:
        """With the faults of the configuration appended.

        Raises:
            UsageError: One of them cannot be read.
        """
        return replace(
            self,
            faults=(*self.faults, *parse_faults(config.faults)),
            store_faults=StoreFaults((*self.store_faults.faults, *StoreFaults.parse(*config.store_faults).faults)),
        )


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
        error_kind: The error's class.
        tick: Incremental: the tick; ``run`` is the dataset then.
        generation: Incremental: the generation of the dataset.
    """

    job: str
    run: str
    run_uri: str
    status: str
    attempt: int
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    error_kind: str | None = None
    tick: str | None = None
    generation: int | None = None

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self))


def run(job: Job, config: Config, options: RunOptions | None = None, stop: StopRequest | None = None) -> RunResult:
    """Runs a job, or resumes it, to the end.

    Args:
        job: The declaration, with the configuration's changes applied (``resolve`` does that).
        config: The configuration.
        options: What is asked of this attempt.
        stop: Of several runs, one after the other: who asked one of them to end has asked all.

    Returns:
        The result; its status is ``done``.

    Raises:
        UsageError: (exit 2) Nothing was reserved or written.
        CheckFailedError: (exit 3) The bucket is in another region than ``cluster.zone``. Nothing was reserved or written.
        RunHeldError: (exit 4) Another driver owns the run.
        InterruptedRunError: (exit 130) Ctrl-C or SIGTERM; what was committed stays.
        TpupipeError: A stage failed. ``data["result"]`` is the ``RunResult``.
    """
    options = (options or RunOptions()).with_configured_faults(config)
    env = environment()
    check_before_anything(job, config, options)
    check_faults(
        options.faults,
        options.store_faults,
        config,
        env.emulator,
        {stage.name: type(stage).__name__ for stage in job.stages},
    )
    fired: dict[int, list[dict[str, str]]] = {}  # over all ticks of this driver
    stop = stop or StopRequest()
    with (
        stop.on_signals(),
        endpoint_of(config, env) as upstream,
        failing_store(upstream, options.store_faults, local_root(config, env)) as proxy,
    ):
        endpoint = proxy.endpoint if proxy else upstream
        store = open_store(
            config.store.uri, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts
        )
        refuse_other_region(config, store)
        worker_environment = {**env.storage, **process_environment(endpoint, config.store.timeout_s)}
        with process_variables(worker_environment):

            @contextlib.contextmanager
            def owned(paths: RunPaths, take_over: bool) -> Iterator[Attempt]:
                stop.listen()  # again, after the end of an earlier tick
                stop.check()
                with (
                    _lease(store, paths, take_over, stop) as lease,
                    EventLog(store, paths, lease.epoch) as log,
                    armed_driver(options.faults, log, store, paths, fired),
                    counted(proxy, log),
                ):
                    yield Attempt(
                        job=job,
                        config=config,
                        options=options,
                        env=env,
                        store=store,
                        paths=paths,
                        lease=lease,
                        log=log,
                        stop=stop,
                        endpoint=endpoint,
                        worker_environment=worker_environment,
                    )
                    log.emit("ended", status="done")

            if config.mode == "incremental":
                with armed_driver(options.faults, None, store, None, fired):
                    return run_tick(
                        job,
                        config,
                        options,
                        store,
                        input_options=input_options(endpoint),
                        owned=owned,
                        params_now=lambda stage: params_now(stage, config, endpoint),
                    )
            inputs = plan_inputs(job, config, input_options(endpoint))
            identity = identify(job, config, input_options=input_options(endpoint), inputs=inputs)
            paths = RunPaths(job.name, options.name or identity.default_run)
            check_identity(store, paths, identity, allow_change=options.allow_change)
            with owned(paths, options.take_over) as attempt:
                attempt.inputs = inputs
                return attempt.execute(identity)


def check_before_anything(job: Job, config: Config, options: RunOptions) -> None:
    """Refuses what cannot work, before anything is reserved, started or written.

    Raises:
        UsageError: The slice does not exist, a stage does not fit it, or an option or a stage does not fit the mode.
    """
    if config.mode == "incremental":
        check_incremental(job)
    elif options.as_of is not None or options.reprocess or options.backfilled:
        raise UsageError(
            "--as-of, --reprocess and --backfill are for mode: incremental, and it is full.",
            hint="--set mode=incremental, or leave them out.",
        )
    spec = config.cluster.slice_spec()
    if spec is None:
        return
    from tpupipe.cluster.reservation import check_slice

    check_slice(spec)
    for stage in job.stages:
        if isinstance(stage, Train):
            check_batch(stage.batch_size, mesh_shape(stage.mesh, spec.devices), stage.batch_axes)
        elif isinstance(stage, Infer):
            sharded = stage.parallel == "sharded"
            mesh_shape(stage.mesh, spec.devices_per_slice if sharded else spec.devices_per_host)


@dataclass
class Attempt:
    """One driver's life on a run: owns the lease while it works through the stages.

    Args:
        job: The declaration.
        config: The configuration.
        options: What is asked of this attempt.
        env: What the process was started with.
        store: The store.
        paths: Names of the run in it.
        lease: Ownership of the run.
        log: The event log.
        stop: Whether somebody asked the run to end.
        endpoint: Emulated Cloud Storage, or ``None``.
        worker_environment: Variables for every worker process.
        inputs: The units of each source.
        settle_params: See ``StageRun``.
    """

    job: Job
    config: Config
    options: RunOptions
    env: Environment
    store: Store
    paths: RunPaths
    lease: Lease
    log: EventLog
    stop: StopRequest
    endpoint: str | None
    worker_environment: Mapping[str, str]
    inputs: Mapping[Source, Sequence[Unit]] = field(default_factory=dict)
    settle_params: Callable[[str, str], None] = lambda _stage, _fingerprint: None
    stages: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    waiting_s: float = 0.0
    starting_s: float = 0.0

    def execute(self, identity: Identity) -> RunResult:
        """Settles the identity, works through the stages, writes the result."""
        self.stages = {name: {"status": "pending"} for name in self.job.stage_names}
        point("run.identity", epoch=self.lease.epoch)
        existed = settle_identity(self.store, self.paths, identity, allow_change=self.options.allow_change)
        self.log.emit(
            "run",
            f"run {self.paths.run} of {self.job.name}: {'resumed' if existed else 'new'}, attempt {self.lease.epoch}, "
            f"{self.store.uri(self.paths.root)}",
            run=self.paths.run,
            attempt=self.lease.epoch,
        )
        tell_lost_driver(self.store, self.paths, self.lease.before, self.log)
        try:
            try:
                self._work(identity)
            finally:
                self.stop.ending()
        except KeyboardInterrupt as error:
            raise self._ended("interrupted", self.stop.interruption()) from error
        except TpupipeError as error:
            status = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
            ended = self._ended(status, error)
            raise ended from ended.__cause__
        except Exception as error:
            unexpected = StageError(f"Unexpected {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}")
            raise self._ended("failed", unexpected) from error
        point("run.result", epoch=self.lease.epoch)
        result = self._result("done")
        try:
            self.lease.check()
            self.store.put(self.paths.result, result.to_json().encode())
        except (FencedError, StoreError) as error:  # every stage is committed; all of it was allowed
            logger.warning("The result is not kept in the run's folder: %s", error.message)
        return result

    def complete(self) -> RunResult:
        """The result of a run that is complete already; nothing is compared, reserved or written."""
        found = {stage.name: finished(stage, self.store, self.paths) for stage in self.job.stages}
        self.stages = {name: asdict(result) for name, result in found.items() if result is not None}
        self._say("complete already: nothing to do")
        return self._result("done")

    def _work(self, identity: Identity) -> None:
        for stage in self.job.stages:
            result = finished(stage, self.store, self.paths)
            if result is not None:
                self.stages[stage.name] = asdict(result)
        if all(stage["status"] == "done" for stage in self.stages.values()):
            self._say("every stage is complete already: nothing to reserve")
            return
        point("run.lease_acquired", epoch=self.lease.epoch)
        from tpupipe.cluster.connect import connected
        from tpupipe.stages.coordinator import CoordinatorHandle

        began = time.monotonic()
        with connected(
            self.config.cluster,
            root=local_root(self.config, self.env),
            worker_environment=self.worker_environment,
            ray_address=self.env.ray_address,
            say=self._say,
        ) as cluster:
            self.starting_s = time.monotonic() - began
            if cluster.dashboard:
                self._say(f"Ray dashboard: {cluster.dashboard}")
            coordinator = CoordinatorHandle.create()  # its process starts while the slice is being reserved
            with self._reserved(cluster.declared) as reservation:
                point("run.reserved", hosts=len(reservation.hosts) if reservation else 0)
                try:
                    self._run_stages(identity, cluster, reservation, coordinator)
                finally:
                    self.stop.ending()
                    self.waiting_s = reservation.waited_s if reservation else 0.0

    def _reserved(self, declared: Sequence[SliceSpec] | None) -> Any:
        from tpupipe.cluster.reservation import Reservation

        cluster = self.config.cluster
        spec = cluster.slice_spec()
        if spec is None:
            return contextlib.nullcontext()
        return Reservation(
            spec,
            timeout_s=cluster.timeout_s,
            name=f"tpupipe/{self.job.name}/{self.paths.run}",
            say=self._say,
            declared=declared,
        )

    def _run_stages(self, identity: Identity, cluster: Any, reservation: Any, coordinator: Any) -> None:
        from tpupipe.stages.base import StageRun
        from tpupipe.stages.infer import run_infer
        from tpupipe.stages.preprocess import run_preprocess
        from tpupipe.stages.train import run_train

        runners: Mapping[type, Callable[..., Any]] = {Preprocess: run_preprocess, Train: run_train, Infer: run_infer}
        stage_run = StageRun(
            job=self.job,
            config=self.config,
            store=self.store,
            paths=self.paths,
            lease=self.lease,
            cluster=cluster,
            reservation=reservation,
            coordinator=coordinator,
            log=self.log,
            stop=self.stop,
            faults=self.options.faults,
            sample=parse_sample(self.config.sample),
            endpoint=self.endpoint,
            input_options=input_options(self.endpoint),
            code=identity.code,
            inputs=self.inputs,
            settle_params=self.settle_params,
        )
        for stage in self.job.stages:
            if self.stages[stage.name]["status"] == "done":
                self._say(f"{stage.name}: complete already")
                continue
            self.stop.check()
            self.stages[stage.name] = {"status": "failed"}
            began = time.monotonic()
            result = runners[type(stage)](stage, stage_run)
            point("stage.done", stage=stage.name)
            self.stages[stage.name] = asdict(result)
            self.log.emit(
                "stage_done",
                f"{stage.name}: done in {time.monotonic() - began:.1f} s, {result.rows_out} rows, {result.uri}",
                stage=stage.name,
                result=asdict(result),
            )

    def _say(self, text: str) -> None:
        self.log.emit("say", text)

    def _result(self, status: str, error: TpupipeError | None = None) -> RunResult:
        kinds: dict[str, float] = {"waiting": self.waiting_s, "starting": self.starting_s}
        for stage in self.stages.values():
            for kind, seconds in stage.get("seconds", {}).items():
                kinds[kind] = kinds.get(kind, 0.0) + seconds
        return RunResult(
            job=self.job.name,
            run=self.paths.run,
            run_uri=self.store.uri(self.paths.root),
            status=status,
            attempt=self.lease.epoch,
            stages=dict(self.stages),
            seconds={kind: round(value, 3) for kind, value in kinds.items()},
            error=None if error is None else error.message,
            error_kind=None if error is None else type(error).__name__,
            tick=self.paths.date if isinstance(self.paths, TickPaths) else None,
            generation=self.paths.number if isinstance(self.paths, TickPaths) else None,
        )

    def _ended(self, status: str, error: TpupipeError) -> TpupipeError:
        """Notes how the attempt ended in the run's folder and on the error.

        A driver that lost its run says so, whatever the loss showed itself as, and leaves the run's result alone.
        """
        ours = True
        try:
            self.lease.check()
        except FencedError as fenced:
            ours = False
            fenced.__cause__ = error
            status, error = "failed", fenced
        except StoreError as failed:
            ours = False
            logger.warning("The result is not kept in the run's folder: %s", failed.message)
        if status == "interrupted":
            tick = f" --as-of {self.paths.date}" if isinstance(self.paths, TickPaths) else ""
            resume = f"the same command with --run {self.paths.run}{tick} resumes"
            self.stages = {n: {**s, "status": status} if s["status"] == "failed" else s for n, s in self.stages.items()}
            error.hint = error.hint or f"{resume[0].upper()}{resume[1:]}."
        result = self._result(status, error)
        self.log.emit("ended", f"run {self.paths.run}: {status}", level=logging.ERROR, status=status)
        error.data["result"] = result
        if ours:
            try:
                self.store.put(self.paths.result, result.to_json().encode())
            except OSError as failed:
                logger.warning("The result could not be kept in the run's folder: %s", failed)
        return error


# -- what surrounds an attempt --------------------------------------------------------------


def local_root(config: Config, env: Environment) -> Path:
    """Folder of local state: the embedded store's data and warm clusters."""
    return base_folder(env) / config.store.root


def base_folder(env: Environment) -> Path:
    """Folder that a relative ``store.root`` is in."""
    return Path(env.root or Path.cwd())


def params_now(stage: Infer, config: Config, endpoint: str | None) -> str:
    """Fingerprint of the parameters that a stage of an incremental job would be given now.

    Raises:
        NoIntactCheckpointError: There are none.
    """
    from tpupipe.stages.infer_params import find_params_elsewhere

    return find_params_elsewhere(stage, config.store, endpoint, input_options(endpoint)).fingerprint


def input_options(endpoint: str | None) -> Mapping[str, Any]:
    """Options of fsspec for opening inputs on Cloud Storage; none where the real one is used."""
    return fsspec_options("gs://inputs", endpoint) if endpoint else {}


@contextlib.contextmanager
def endpoint_of(config: Config, env: Environment) -> Iterator[str | None]:
    """The emulated Cloud Storage to use: the embedded one, that of the environment, or none."""
    if config.store.embedded:
        with embedded_store(local_root(config, env)) as endpoint:
            yield endpoint
    else:
        yield env.emulator if config.store.uri.startswith("gs://") else None


@contextlib.contextmanager
def _lease(store: Store, paths: RunPaths, take_over: bool, stop: StopRequest) -> Iterator[Lease]:
    with acquire(
        store,
        paths,
        Owner.here(),
        take_over=take_over,
        on_wait=lambda _, waited_s: logger.info(
            "run %s: watching for a sign of life of its owner, %.0f s", paths.run, waited_s
        ),
        # Nothing that follows could be committed: end now, and give the slice to the driver that took over.
        on_lost=lambda _: stop.ask("the loss of the run"),
    ) as lease:
        yield lease
