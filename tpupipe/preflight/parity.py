"""Whether a job's numbers survive a TPU's default precision: its step and apply in float32 and with bfloat16 products."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpupipe.config import Config, ParityConfig
from tpupipe.data.pretrained import Pretrained
from tpupipe.errors import CheckFailedError, TpupipeError
from tpupipe.job import Infer, Job, Preprocess, Train, default_params
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.parity_data import Inputs, NeedsRayError, inference_batches, training_batches
from tpupipe.preflight.parity_measure import (
    Difference,
    LevelReport,
    Measured,
    StageReport,
    TrainingComparison,
    inference_level,
)
from tpupipe.preflight.parity_precision import Level
from tpupipe.programs.user_code import user_code

LEVELS = (Level.DEFAULT, Level.HIGH)
SHOWN = 5


def parity_findings(
    job: Job,
    config: Config,
    *,
    options: ParityConfig | None = None,
    input_options: Mapping[str, Any] | None = None,
    levels: Sequence[Level] = LEVELS,
) -> list[Finding]:
    """Checks every training and inference stage, on this machine's CPU in this process.

    Args:
        job: The declaration, with the configuration's changes applied.
        config: The configuration.
        options: How much is computed and what may differ; by default the configuration's ``parity`` section.
        input_options: fsspec's options for opening inputs.
        levels: The first is judged, and compared operation by operation; of the others the results are in the facts.

    Returns:
        ``parity.<stage>`` of each, in order. A stage that cannot be compared is a failure that says why, but for one whose rows only
        Ray can make, which is skipped.

    Raises:
        CheckFailedError: JAX is at work in this process, on something other than the CPU.
    """
    chosen = config.parity if options is None else options
    stages = [stage for stage in job.stages if not isinstance(stage, Preprocess)]
    _use_the_cpu()
    inputs = Inputs(job, config.sample, input_options or {})
    return [_finding(stage, inputs, chosen, levels) for stage in stages]


def _use_the_cpu() -> None:
    import jax

    bridge = sys.modules.get("jax._src.xla_bridge")
    if not getattr(bridge, "_backends", None):
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise CheckFailedError(
            f"The parity check computes on the CPU, and JAX is at work on {jax.default_backend()} in this process.",
            hint="Check in a process of its own, with JAX_PLATFORMS=cpu.",
        )


def _finding(stage: Train | Infer, inputs: Inputs, options: ParityConfig, levels: Sequence[Level]) -> Finding:
    check = f"parity.{stage.name}"
    try:
        if isinstance(stage, Train):
            report = _train_report(stage, inputs, options, levels)
        else:
            report = _infer_report(stage, inputs, options, levels)
    except NeedsRayError as error:
        return Finding(
            check, Status.SKIPPED, error.message, hint="Parity is checked for stages whose rows a map= makes."
        )
    except TpupipeError as error:
        return Finding(check, Status.FAILURE, f"Not compared: {error.message}", hint=error.hint)
    return judge(report, options)


# -- computing ------------------------------------------------------------------------------


def _train_report(stage: Train, inputs: Inputs, options: ParityConfig, levels: Sequence[Level]) -> StageReport:
    rows = min(options.rows, stage.batch_size)
    batches = training_batches(stage, inputs, rows=rows, count=max(options.steps, options.batches))
    state = _initial(stage)
    first = TrainingComparison(stage, state, batches, levels[0])
    others = (TrainingComparison(stage, state, batches, level, measures=False) for level in levels[1:])
    reports = (first.single_steps(options.batches), *(other.single_steps(options.batches) for other in others))
    growth, drift = first.trainings(options.steps)
    notes = (f"batches of {rows} rows, the run's have {stage.batch_size}",) if rows < stage.batch_size else ()
    return StageReport(stage.name, reports, growth, drift, notes)


def _infer_report(stage: Infer, inputs: Inputs, options: ParityConfig, levels: Sequence[Level]) -> StageReport:
    batches = inference_batches(stage, inputs, rows=options.rows, count=options.batches)
    params, note = _params(stage, inputs)
    reports = tuple(
        inference_level(stage.name, stage.apply, params, batches, level, measures=level is levels[0])
        for level in levels
    )
    return StageReport(stage.name, reports, notes=note)


def _initial(stage: Train) -> Any:
    import jax

    with user_code("init", stage.name):
        return jax.jit(stage.init)(jax.random.key(stage.seed))


def _params(stage: Infer, inputs: Inputs) -> tuple[Any, tuple[str, ...]]:
    import jax

    if isinstance(stage.params, Pretrained):
        contents, _ = stage.params.read(inputs.options)
        with user_code("load", stage.name):
            return jax.device_put(stage.params.load(*contents)), ()
    if "/" not in stage.params:
        trained = inputs.job.stage(stage.params)
        assert isinstance(trained, Train)  # noqa: S101 - the job has checked its references
        return trained.params(_initial(trained)), (f"parameters as {trained.name}'s init makes them, not trained ones",)
    if stage.init is None:
        raise CheckFailedError(
            f"stage {stage.name!r}: params={stage.params!r} is a URI, and init= does not say what the state looks like.",
            hint="Infer(init=lm.init, ...)",
        )
    with user_code("init", stage.name):
        params = default_params(jax.jit(stage.init)(jax.random.key(0)))
    return params, (f"parameters as init makes them, not those of {stage.params}",)


# -- judging --------------------------------------------------------------------------------


def judge(report: StageReport, allowed: ParityConfig) -> Finding:
    """What a stage's comparison means. Pure.

    It fails if a product is ill-conditioned, or if results (metrics, outputs, the parameters' updates, or the difference's growth
    together with what it has come to) are further apart than allowed. An operation whose result is far off, in a stage whose
    results are not, is a warning.
    """
    default = report.levels[0]
    products = sorted((m for m in default.measured if m.operation.is_product), key=lambda m: -m.local)
    bad = [m for m in products if m.local > allowed.product]
    first = first_beyond(default.measured, allowed)
    problems = [
        *(
            f"{_told(m)} loses {_percent(m.local)} of its result by itself (|a||b| is {m.condition:.3g} times it)"
            for m in bad[:SHOWN]
        ),
        *_result_problems(report, default, allowed),
    ]
    status, message = Status.OK, _summary(report, default)
    if problems:
        status = Status.FAILURE
        message = "; ".join(problems)
        if first is not None and first not in bad[:1]:
            message += f"; the first result that is {_percent(allowed.operation)} off is of {_told(first)}"
    elif first is not None:
        status = Status.WARNING
        message += f"; but {_told(first)} is {_percent(first.relative)} off, although nothing that comes out of it is"
    elif report.growth is not None and report.growth.factor > allowed.growth:
        status = Status.WARNING
        message += f"; but it grows {report.growth.factor:.3g}-fold over {len(report.growth.series)} steps"
    message += "".join(f" ({note})" for note in report.notes) + "."
    return Finding(f"parity.{report.stage}", status, message, _hint(report, status, bad), facts(report, allowed))


def first_beyond(measured: Sequence[Measured], allowed: ParityConfig) -> Measured | None:
    """The first operation in the program that is ill-conditioned, or whose result is off by more than is allowed."""
    return next((m for m in measured if m.local > allowed.product or m.relative > allowed.operation), None)


def _result_problems(report: StageReport, level: LevelReport, allowed: ParityConfig) -> list[str]:
    training = report.growth is not None
    found = [_off(d, "") for d in level.differences if d.relative > _limit(d, allowed, training=training)]
    if level.cosine is not None and level.cosine < allowed.cosine:
        found.append(f"the cosine between the updates is {level.cosine:.3f}, {allowed.cosine:g} is allowed")
    if report.growth is not None:
        steps, names = len(report.growth.series), {d.name for d in level.differences if d.relative > allowed.metric}
        along = f" after up to {steps} steps"
        found += [_off(d, along) for d in report.drift if d.relative > allowed.metric and d.name not in names]
        last = report.growth.series[-1]
        if report.growth.factor > allowed.growth and not last <= allowed.metric:
            found.append(
                f"the difference grows {report.growth.factor:.3g}-fold over {steps} steps, to {_percent(last)} of the way that the "
                "parameters have come"
            )
    return found


def _limit(difference: Difference, allowed: ParityConfig, *, training: bool) -> float:
    if difference.is_share:
        return allowed.mismatch
    return allowed.metric if training else allowed.output


def _off(difference: Difference, when: str) -> str:
    if difference.is_share:
        return f"{_percent(difference.relative)} of {difference.name}'s values are others{when}"
    return f"{difference.name} is {_percent(difference.relative)} off{when}"


def _summary(report: StageReport, level: LevelReport) -> str:
    worst = max((m.local for m in level.measured), default=0.0)
    products = sum(m.operation.is_product for m in level.measured)
    off = ", ".join(_off(d, "") for d in level.differences)
    text = f"at {level.level.value} precision {off or 'nothing comes out'}; {products} products, the worst {_percent(worst)} off"
    if level.cosine is not None:
        text += f"; updates' cosine {level.cosine:.4f}"
    if report.growth is not None:
        text += f"; {_percent(report.growth.series[-1])} apart after {len(report.growth.series)} steps"
    return text


def _hint(report: StageReport, status: Status, bad: Sequence[Measured]) -> str:
    if status is not Status.FAILURE:
        return ""
    for other in report.levels[1:]:
        best = max((d.relative for d in other.differences), default=0.0)
        at = f" At {other.level.value} precision results are at most {_percent(best)} off."
        break
    else:
        at = ""
    if bad:
        return f'Give that operation precision="highest", or compute it without the cancellation.{at}'
    return f'jax.default_matmul_precision("high") around the function, or precision= on the operations that matter.{at}'


def _told(measured: Measured) -> str:
    return f"{measured.operation.name} at {measured.operation.where}"


def _percent(share: float) -> str:
    return f"{share:.2g}-fold" if 10 < share < math.inf else f"{share * 100:.2g} %"


# -- facts ----------------------------------------------------------------------------------


def facts(report: StageReport, allowed: ParityConfig) -> dict[str, Any]:
    """The report as JSON values; what is infinite is the text ``inf``."""
    found: dict[str, Any] = {
        "notes": list(report.notes),
        "allowed": allowed.model_dump(mode="json"),
        "levels": {each.level.value: _level_facts(each, allowed) for each in report.levels},
    }
    if report.growth is not None:
        found["growth"] = {
            "series": [_number(value) for value in report.growth.series],
            "factor": _number(report.growth.factor),
            "doubling_steps": _number(report.growth.doubling_steps),
            "metrics": _difference_facts(report.drift),
        }
    return found


def _level_facts(level: LevelReport, allowed: ParityConfig) -> dict[str, Any]:
    first = first_beyond(level.measured, allowed)
    products = [m for m in level.measured if m.operation.is_product]
    return {
        "differences": _difference_facts(level.differences),
        "cosine": level.cosine,
        "operations": len(level.measured),
        "products": len(products),
        "first": None if first is None else _operation_facts(first),
        "worst_products": [_operation_facts(m) for m in sorted(products, key=lambda m: -m.local)[:SHOWN]],
        "worst_operations": [_operation_facts(m) for m in sorted(level.measured, key=lambda m: -m.relative)[:SHOWN]],
    }


def _difference_facts(differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        d.name: {"relative": _number(d.relative), "absolute": _number(d.absolute), "share_of_values": d.is_share}
        for d in differences
    }


def _operation_facts(measured: Measured) -> dict[str, Any]:
    return {
        "operation": measured.operation.name,
        "where": measured.operation.where,
        "shapes": measured.operation.shapes,
        "bf16_products": measured.operation.products,
        "own_error": _number(measured.local),
        "condition": _number(measured.condition),
        "relative": _number(measured.relative),
        "absolute": _number(measured.absolute),
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
