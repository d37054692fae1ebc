"""What runs in each training process: restore, compile, step, confer, save."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.checkpoint.saver import SaveTarget
from tpupipe.checkpoint.tree import params_digest
from tpupipe.data.stream import Stream
from tpupipe.errors import JobError, StageError
from tpupipe.faults.plan import Fault
from tpupipe.faults.points import point
from tpupipe.job import Train
from tpupipe.ledger.events import event
from tpupipe.programs.recompile import Guarded
from tpupipe.programs.sharding import forget_slices, named_sharding
from tpupipe.programs.train import abstract_state, lower_step, shardings_of, train_mesh
from tpupipe.programs.user_code import user_code
from tpupipe.stages.base import arm_worker, reported
from tpupipe.stages.compiled import Compiled, compiled, use_compile_cache
from tpupipe.stages.context import FedBatch, Restorable, StageContext
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.finished import read_manifest
from tpupipe.stages.stall import Bounds, Phase, Watchdog
from tpupipe.stages.units import require_rows

RUN_AHEAD_STEPS = 2


@dataclass(frozen=True)
class TrainPlan:
    """All that one start of the workers needs. Sent to every process.

    Args:
        stage: The declaration, overrides applied.
        target: Where checkpoints go.
        policy: When they are saved.
        start: The checkpoint to begin from, if any.
        stream_options: Keyword arguments of ``Stream`` beside the chunks.
        devices: Devices there must be over all processes.
        hosts_per_slice: For several slices: processes of one.
        slices: Number of slices.
        coordinator: Where to confer and report.
        faults: Faults to inject.
        log_every_s: Seconds between metrics.
        started_s: When the driver began this start, seconds since 1970.
        bounds: How long a phase may be without progress.
    """

    stage: Train
    target: SaveTarget
    policy: SavePolicy
    start: Restorable | None
    stream_options: Mapping[str, Any]
    devices: int
    hosts_per_slice: int
    slices: int
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]
    log_every_s: float
    started_s: float
    bounds: Bounds

    @property
    def finishing(self) -> Phase:
        """The wait for the last save, or for one operation of it on a store that is slow to answer."""
        bound_s = self.target.silence_s + self.bounds.stall_timeout_s
        return Phase(bound_s, "while waiting for the last save", key="")


def train_worker(coordinator: CoordinatorHandle, group: str) -> None:
    """Entry point of each Ray Train worker. Reports how it ended, then returns or raises."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    plan: TrainPlan = coordinator.plan_of(group)
    first = plan.start.commit.step if plan.start else 0
    together = f"stalled/{plan.stage.name}/{plan.target.restart}", ray.train.get_context().get_world_size()
    watchdog = Watchdog(
        plan.bounds.starting, f"rank {rank}", plan.target, coordinator, step=first, peers=together, rank=rank
    )
    with reported(coordinator, reached=watchdog.reached, rank=rank), watchdog.watching():
        _set_slice_environment(plan, rank)
        arm_worker(plan.faults, coordinator, plan.target, stage=plan.stage.name, rank=rank)
        _train(plan, watchdog)


def _set_slice_environment(plan: TrainPlan, rank: int) -> None:
    """Sets ``MEGASCALE_*`` for this group before JAX first touches a device, whatever the host came with."""
    from ray.util.tpu import get_tpu_coordinator_env_vars

    forget_slices()
    group = f"slices-{plan.target.restart}"
    if plan.slices > 1:
        import ray

        address = ray.util.get_node_ip_address()
        if rank:
            address = plan.coordinator.first_address(group)
        else:
            plan.coordinator.set_first_address(group, address)
        os.environ.update(get_tpu_coordinator_env_vars(address, plan.slices, rank // plan.hosts_per_slice))


def _preemption() -> tuple[bool, float | None]:
    import ray.train

    info = ray.train.get_preemption_info()
    if info is None:
        return False, None
    return True, None if info.deadline_ms is None else info.deadline_ms / 1000 - time.time()


def _train(plan: TrainPlan, watchdog: Watchdog) -> None:
    import jax

    stage = plan.stage
    use_compile_cache(plan.target.store, plan.target.paths)
    if jax.device_count() != plan.devices:
        raise JobError(
            f"JAX sees {jax.device_count()} devices, {plan.devices} are reserved.",
            hint="JAX was touched before the processes were joined: do not call jax.devices(), jax.random or any "
            "computation when the job's module is imported; do it inside init, step or apply.",
            devices=jax.device_count(),
            expected=plan.devices,
        )
    mesh, rows = train_mesh(stage, jax.devices())

    manifest = read_manifest(plan.target.store, plan.target.paths, stage.data)
    if manifest is None:
        raise StageError(f"Stage {stage.data!r}, which {stage.name!r} reads, is not complete.", stage=stage.name)
    require_rows(stage.data, manifest)
    context = StageContext(
        target=plan.target,
        policy=plan.policy,
        manifest=manifest,
        stream=Stream(manifest.chunk_rows, **plan.stream_options),
        batch_size=stage.batch_size,
        sharding=rows,
        coordinator=plan.coordinator,
        start=plan.start,
        preemption=_preemption,
        recompile=stage.recompile,
        on_progress=watchdog.beat,
    )
    context.tell(event("starting", seconds=time.time() - plan.started_s))
    with context.batches() as batches:
        state, step = _prepare(plan, context, mesh, watchdog)
        watchdog.enter(plan.bounds.stepping)
        _loop(plan, context, batches, state, step, watchdog)


def _prepare(plan: TrainPlan, context: StageContext, mesh: Any, watchdog: Watchdog) -> tuple[Any, Any]:
    """The state to begin from and the compiled, guarded step. The one is read while the other is compiled."""
    import jax

    stage = plan.stage
    began = time.monotonic()
    watchdog.enter(plan.bounds.compiling)
    key = jax.random.key(stage.seed)
    abstract = abstract_state(stage, mesh)
    with ThreadPoolExecutor(1, thread_name_prefix="compile") as pool:
        compiling = pool.submit(_compile, plan, abstract, context.abstract_batch(), named_sharding(mesh))
        if plan.start is not None:
            watchdog.enter(plan.bounds.restoring)
        state = context.restore(abstract)
        watchdog.enter(plan.bounds.compiling)
        if state is None:
            with user_code("init", stage.name):
                state = jax.jit(stage.init, out_shardings=shardings_of(abstract))(key)
        else:
            context.tell(event("restored", step=context.first_step, seconds=time.monotonic() - began))
        stated = time.monotonic()
        step = compiling.result()
    seconds = {"seconds": time.monotonic() - stated, "init_seconds": stated - began}
    context.report(event("compiling", **seconds, from_cache=step.from_cache, of=context.world))
    return state, _guarded(plan, context, abstract, step, named_sharding(mesh), watchdog)


def _guarded(  # noqa: PLR0917 - one caller
    plan: TrainPlan, context: StageContext, abstract: Any, step: Compiled, replicated: Any, watchdog: Watchdog
) -> Guarded:
    import jax

    def program(arguments: Sequence[Any]) -> Any:
        state, batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tuple(arguments)
        )
        with watchdog.within(plan.bounds.compiling):
            return _compile(plan, state, batch, replicated).call

    guarded = Guarded(
        "step",
        plan.stage.name,
        ("state", "batch"),
        program,
        recompile=plan.stage.recompile,
        on_recompile=context.recompiled,
        weak_types=False,
    )
    guarded.expect((abstract, context.abstract_batch()), step.call)
    return guarded


def _compile(plan: TrainPlan, abstract: Any, batch: Mapping[str, Any], replicated: Any) -> Compiled:
    with user_code("step", plan.stage.name):
        return compiled(lower_step(plan.stage, abstract, batch, replicated), plan.target.store, plan.target.paths)


def _loop(  # noqa: PLR0917 - one caller
    plan: TrainPlan,
    context: StageContext,
    batches: Iterable[FedBatch],
    state: Any,
    step_function: Any,
    watchdog: Watchdog,
) -> None:
    import jax

    stage = plan.stage
    metrics: Mapping[str, Any] = plan.start.commit.metrics if plan.start else {}
    last_fetched = dict(metrics)
    done = context.first_step
    stopped = ""
    unfinished: list[Any] = []
    saving_s = 0.0
    began = told = time.monotonic()
    told_step = done
    for batch in batches:
        point("train.step", step=batch.step)
        state, metrics = step_function(state, batch.arrays)
        done = batch.step + 1
        context.fed(batch)
        watchdog.beat(done)
        point("train.updated", step=batch.step)
        # The host may run ahead of the devices, but not far: every queued step holds its batch.
        unfinished.append(metrics)
        if len(unfinished) > RUN_AHEAD_STEPS:
            jax.block_until_ready(unfinished.pop(0))
        context.check()
        conferring = done >= context.confer_at
        decision = context.due(done)
        if conferring:
            context.tell(event("at", step=done, next=context.confer_at))
        if decision.save:
            last_fetched = _fetch(metrics)
            saving_s += context.save(done, state, last_fetched)
        now = time.monotonic()
        if now - told >= plan.log_every_s or done == context.last_step or done == context.first_step + 1:
            if not decision.save:
                last_fetched = _fetch(metrics)
            rate = (done - told_step) * stage.batch_size / max(now - told, 1e-9)
            context.tell(event("metrics", step=done, of=context.last_step, metrics=last_fetched, rows_per_s=rate))
            told, told_step = now, done
        if decision.stop:
            stopped = decision.reason
            break
    watchdog.enter(plan.finishing)
    saving_s += context.finish()
    watchdog.enter(plan.bounds.stepping)
    context.tell(event("working", seconds=time.monotonic() - began - saving_s, saving_s=saving_s))
    if stopped:
        context.tell(event("stopped", step=done, reason=stopped, saved=context.saved_step == done))
        return
    digest = params_digest(stage.params(state))
    context.tell_now(event("trained", step=done, params_digest=digest, metrics=dict(last_fetched)))
    point("train.trained", step=done)


def _fetch(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
