"""Infer: pending units over actors on the reserved hosts, each row of the input exactly once in the output."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayError

from tpupipe.data.bucket_lengths import spread
from tpupipe.data.buckets import AutoBuckets, Buckets
from tpupipe.data.chunks import Manifest, ManifestUnit
from tpupipe.data.sources import Part, Unit
from tpupipe.errors import StageError, TpupipeError
from tpupipe.job import Infer
from tpupipe.ledger.events import Seconds
from tpupipe.programs.infer_buckets import buckets_of, resolve_buckets
from tpupipe.stages.base import StageRun, failure_of, told_errors
from tpupipe.stages.committed import Compaction, resume_units
from tpupipe.stages.failures import Budget
from tpupipe.stages.finished import COUNTED, read_manifest, units_done
from tpupipe.stages.infer_params import find_params
from tpupipe.stages.infer_pool import InferPool, too_many_bad_rows
from tpupipe.stages.infer_worker import InferPlan, sample_unit
from tpupipe.stages.result import StageResult
from tpupipe.stages.retry import answered, budget_of
from tpupipe.stages.stall import Bounds
from tpupipe.stages.unit_failures import UnitFailures, first_inputs, is_the_units_own, probes_of
from tpupipe.stages.units import (
    UnitTarget,
    write_manifest,
)

CHUNK_ROWS = 4096
SAMPLE_TIMEOUT_S = 300.0  # beyond the stage's own bound for a unit


def run_infer(stage: Infer, run: StageRun) -> StageResult:
    """Runs one ``Infer`` stage to its manifest.

    Raises:
        UserCodeError: The job's functions raise on the first units they are given.
        BadRowError: More rows had to be set aside than the stage allows.
        UnitsSetAsideError: Some units failed again and again; all others are committed.
        NoIntactCheckpointError: There are no parameters to load.
        RunChangedError: Units were committed from other inputs or parameters.
        BudgetExceededError: Too many workers or hosts were lost.
        InterruptedRunError: Somebody asked the run to end; committed units stay.
    """
    seconds = Seconds()
    budget = budget_of(run, stage.name)
    units = answered(run, budget, lambda: _units(stage, run))
    params = answered(run, budget, lambda: find_params(stage, run))
    fingerprint = params.fingerprint
    answered(run, budget, lambda: run.settle_params(stage.name, fingerprint))
    pending, reused = answered(run, budget, lambda: resume_units(run, stage.name, units, fingerprint))
    run.log.emit(
        "stage",
        f"{stage.name}: {len(units)} units, {len(pending)} to do"
        + (f", {len(reused)} done before" if reused else "")
        + f"; parameters of {params.told}",
        stage=stage.name,
        units=len(units),
        pending=len(pending),
    )
    target = UnitTarget(
        run.store, run.paths, stage.name, run.lease.fence, CHUNK_ROWS, fingerprint, run.code, str(run.sample)
    )
    from_stage = stage.data if isinstance(stage.data, str) else ""
    plan = InferPlan(
        stage,
        target,
        None if isinstance(stage.data, str) else stage.data,
        from_stage,
        run.input_options,
        params,
        run.coordinator,
        run.faults,
        Bounds.of(run.settings(stage.name)),
    )
    rows_bad = reused.total("rows_bad")
    if (error := too_many_bad_rows(stage, run.store.uri(run.paths.errors(stage.name)), rows_bad)) is not None:
        raise error
    began = time.monotonic()
    if pending and isinstance(stage.buckets, AutoBuckets):
        stage = replace(stage, buckets=_chosen(plan, stage.buckets, run, pending, budget))
        plan = replace(plan, stage=stage)
    allowed = run.config.budgets.unit_failures
    failures = UnitFailures(stage.name, allowed, probes_of(pending), succeeded=bool(reused))
    with Compaction(run, stage.name, reused) as compaction:
        pool = InferPool(stage, run, plan, budget, failures=failures, bad_rows=rows_bad, seconds=seconds)
        if pending:
            pool.work(pending, compaction)
    committed = compaction.committed
    failures.check(first_inputs(pending, failures.set_aside), len(committed))
    facts = {"code": run.code, "params": fingerprint, **{name: str(committed.total(name)) for name in COUNTED}}
    manifest = answered(run, budget, lambda: write_manifest(run, stage.name, units, committed, facts))
    seconds.add("working", time.monotonic() - began - sum(seconds.rounded().values()))
    result = units_done(manifest, run.store.uri(run.paths.outputs(stage.name)), len(reused), seconds)
    return replace(
        result,
        metrics={**result.metrics, **(_shapes(stage, pool.compilations) if pending else {})},
        checkpoint=params.uri,
    )


def _chosen(plan: InferPlan, auto: AutoBuckets, run: StageRun, pending: Sequence[Unit], budget: Budget) -> Buckets:
    """The recorded lengths, or those that fit the rows of some of the pending units best."""
    name = plan.stage.name

    def sample() -> list[dict[int, int]]:
        task = ray.remote(sample_unit).options(num_cpus=1)
        tasks = [task.remote(plan, unit, auto) for unit in spread(pending, auto.sample_units)]
        try:
            answers: list[dict[int, int] | TpupipeError] = ray.get(
                tasks, timeout=SAMPLE_TIMEOUT_S + plan.bounds.stall_timeout_s
            )
        except RayError as error:
            told = [e for e in told_errors(run.absorb(name)) if not is_the_units_own(e)]
            raise failure_of(error, told, name) from error
        errors = [answer for answer in answers if isinstance(answer, TpupipeError)]
        if len(errors) == len(answers):
            raise errors[0]
        return [answer for answer in answers if not isinstance(answer, TpupipeError)]

    buckets = answered(run, budget, lambda: resolve_buckets(run.store, run.paths, name, auto, sample))
    run.log.emit("stage", f"{name}: buckets of {', '.join(map(str, buckets.lengths))}", stage=name)
    return buckets


def _shapes(stage: Infer, compilations: int) -> Mapping[str, float]:
    buckets = buckets_of(stage)
    declared = 1 if buckets is None else len(buckets.lengths)
    return {"compilations": float(compilations), "buckets": float(declared)}


def _units(stage: Infer, run: StageRun) -> Sequence[Unit]:
    if not isinstance(stage.data, str):
        return run.inputs[stage.data]
    manifest = read_manifest(run.store, run.paths, stage.data)
    if manifest is None:
        raise StageError(f"Stage {stage.data!r}, which {stage.name!r} reads, is not complete.", stage=stage.name)
    return [_committed_unit(run, manifest, unit) for unit in manifest.units]


def _committed_unit(run: StageRun, manifest: Manifest, unit: ManifestUnit) -> Unit:
    """A committed unit of an earlier stage as an input."""
    uri = run.store.uri(run.paths.unit(manifest.stage, unit.unit))
    part = Part(uri, 0, unit.rows, "rows", unit.size_bytes, unit.size_bytes, "")
    return Unit(id=unit.unit, parts=(part,), fingerprint=_fingerprint(unit))


def _fingerprint(unit: ManifestUnit) -> str:
    return f"{unit.unit}-{unit.rows}-{unit.size_bytes}"
