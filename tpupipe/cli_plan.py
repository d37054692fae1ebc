"""``tpupipe plan``: a grid of slices and batch sizes, compiled here, with what each would cost."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tpupipe.cli_common import console, errors
from tpupipe.config import Config, environment
from tpupipe.errors import UsageError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.job import Job, Preprocess, Train
from tpupipe.ledger.events import read_events
from tpupipe.preflight.aot import COMPILE_TIMEOUT_S, compile_programs
from tpupipe.preflight.fit import size_text, time_text
from tpupipe.preflight.plan import (
    ASSUMED_EFFICIENCY,
    ASSUMED_SAVE_S,
    Plan,
    Row,
    SaveCost,
    StageEstimate,
    cheapest,
    checkpoint_plan,
    fastest,
    measured_save,
    parse_batches,
    parse_targets,
    rows_of,
)
from tpupipe.resolve import load_build, resolve
from tpupipe.run import endpoint_of, input_options
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

EPILOG = (
    "Example: tpupipe plan jobs.stdlib_lm -c configs/v6e-16.yaml --targets v5e:4x4,v6e:4x4 --batches 64,128   "
    "Exit status: 0 the table is printed, 2 usage or config, 3 nothing could be compiled."
)

HEADINGS = ("target", "chips", "stage", "batch", "fits", "HBM", "step >=", "bound", "samples/s <=", "USD/M samples >=")


def plan_command(
    job: Annotated[str, typer.Argument(help="Module with build(config): jobs.stdlib_lm.")],
    config: Annotated[
        list[Path], typer.Option("-c", "--config", help="YAML file; may be repeated, later files over earlier.")
    ],
    targets: Annotated[
        str | None,
        typer.Option("--targets", metavar="SLICES", help="v5e:4x4,v6e:2x4:4; default: the one of the configuration."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option("--batches", metavar="ROWS", help="Global batch sizes of training: 64,128; default: the job's."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set job.width=1024.")
    ] = None,
    save_s: Annotated[float | None, typer.Option("--save-s", help="Seconds that one save holds training up.")] = None,
    events: Annotated[
        str | None,
        typer.Option("--events", metavar="RUN", help="Take that from an earlier run: <store>/<job>/<run>."),
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option("--mtbf-hours", help="Mean hours between failures of a slice; else 24 are assumed.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Bound of compiling one program, seconds.")
    ] = COMPILE_TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object on stdout.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the table and a plot as one HTML file.")
    ] = None,
) -> None:
    """Compile a job for several slices and batch sizes, here, and compare fit, speed and price."""
    with errors(as_json=as_json):
        began = time.monotonic()
        if html is not None:
            _check_html(html)
        built, loaded = resolve(load_build(job), config, overrides or ())
        configured = loaded.cluster.slice_spec()
        specs = _targets(targets, loaded)
        sizes = None if batches is None else parse_batches(batches)
        trained = next((stage.name for stage in built.stages if isinstance(stage, Train)), None)
        if sizes is not None and trained is None:
            raise UsageError(
                f"--batches is for training stages, and job {built.name!r} has none.", hint="Leave it out."
            )
        save = _save_cost(save_s, events, trained, loaded)
        checkpoints = None if trained is None else checkpoint_plan(save, mtbf_hours)
        with endpoint_of(loaded, environment()) if _reads_cloud(built) else contextlib.nullcontext() as endpoint:
            compilation = compile_programs(
                job,
                loaded,
                specs,
                batches=sizes,
                input_options=input_options(endpoint),
                compile_timeout_s=timeout_s,
                say=lambda text: typer.echo(text, err=True),
            )
        rows = rows_of(compilation, loaded.cost, configured.generation if configured else None)
        plan = Plan(compilation.job, tuple(rows), compilation.work, checkpoints, time.monotonic() - began)
        if html is not None:
            from tpupipe.preflight.plan_html import plan_html

            page = plan_html(plan, (HEADINGS, [cells(row) for row in rows]), lines_of(plan))
            html.write_text(page, encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(plan.to_json()))
        else:
            print_plan(plan, console())
    if not any(row.fits for row in plan.rows):
        raise typer.Exit(3)


def _targets(targets: str | None, config: Config) -> list[SliceSpec]:
    configured = config.cluster.slice_spec()
    if targets is not None:
        return parse_targets(targets)
    if configured is None:
        raise UsageError(
            f"cluster.kind is {config.cluster.kind}, so --targets must name the slices.", hint="--targets v6e:4x4"
        )
    return [configured]


def _check_html(html: Path) -> None:
    from tpupipe.preflight.plan_html import check_plots

    if not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: there is no folder {html.absolute().parent}.", hint="Make it first.")
    check_plots()


def _save_cost(save_s: float | None, events: str | None, stage: str | None, config: Config) -> SaveCost:
    if save_s is not None and events is not None:
        raise UsageError("--save-s and --events both say what a save costs; give one of them.")
    if save_s is not None:
        return SaveCost(save_s, "given")
    if events is None:
        return SaveCost(ASSUMED_SAVE_S, "assumed")
    root, _, tail = events.rstrip("/").rpartition("/")
    place, _, job_name = root.rpartition("/")
    if not place or not job_name or not tail:
        raise UsageError(f"--events {events!r} is not a run.", hint="<store>/<job>/<run>, as `tpupipe run` prints it.")
    with endpoint_of(config, environment()) if place.startswith("gs://") else contextlib.nullcontext() as endpoint:
        store = open_store(place, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts)
        found = measured_save(list(read_events(store, RunPaths(job_name, tail))), stage or "", tail)
    if found is None:
        raise UsageError(
            f"Run {events} has no save of stage {stage!r} in its events.", hint="--save-s gives it by hand."
        )
    return found


def _reads_cloud(job: Job) -> bool:
    sources = [stage.source if isinstance(stage, Preprocess) else stage.data for stage in job.stages]
    return any(path.startswith("gs://") for source in sources if not isinstance(source, str) for path in source.pattern)


def print_plan(plan: Plan, screen: Console) -> None:
    """The table, the best rows, and what a run would do."""
    table = Table(title=f"{plan.job}: step times are bounds, not predictions", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in plan.rows:
        table.add_row(*cells(row))
    screen.print(table)
    for row in plan.rows:
        if row.reason:
            screen.print(f"{row.program.label} on {row.program.place}: {row.reason}", soft_wrap=True)
    for line in lines_of(plan):
        screen.print(line, soft_wrap=True)


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table."""
    program, bound = row.program, row.program.roofline
    target = f"{program.spec.generation} {program.spec.topology}"
    batch = f"{program.batch}" + (f" x {program.length}" if program.length else "")
    first = (target, str(program.spec.chips), program.stage, batch)
    if program.skipped:
        return (*first, "not tried", "", "", "", "", "")
    if bound is None:
        needed = program.refusal.needed_bytes if program.refusal else None
        share = f"{needed / program.hbm_bytes:.0%}" if needed else ""
        return (*first, "no" if needed else "fails", share, "", "", "", "")
    rate, usd = program.samples_per_s, row.usd_per_million
    return (
        *first,
        "yes",
        f"{program.hbm_share or 0:.1%}",
        time_text(bound.step_s),
        bound.bound,
        "" if rate is None else f"{rate:,.0f}",
        "no price" if usd is None else f"{usd:.3g}",
    )


def lines_of(plan: Plan) -> list[str]:
    """What is said below the table."""
    lines = []
    for stage in plan.stages:
        rows = plan.of(stage)
        for name, row in (("best per USD", cheapest(rows)), ("fastest", fastest(rows))):
            if row is not None:
                lines.append(f"{name}: {row.program.label} on {row.program.spec}")
    if plan.checkpoints is not None:
        lines.append(plan.checkpoints.sentence())
    if isinstance(plan.work, str):
        lines.append(f"What a run would do is not known: {plan.work}")
    else:
        lines += [_work_line(work) for work in plan.work]
    lines += [_estimate_line(each) for each in plan.estimates()]
    sources = sorted({f"{row.program.spec.generation} {row.price.source}" for row in plan.rows if row.price})
    lines += [f"prices: {'; '.join(sources)}"] if sources else []
    notes = sorted({note for row in plan.rows for note in row.program.notes})
    lines += [f"note: {note}" for note in notes]
    lines.append(
        "Step times are what the products at peak and the HBM traffic at full bandwidth allow: bounds, not predictions. "
        "Communication, input and the host come on top."
    )
    lines.append(f"planned in {plan.seconds:.0f} s")
    return lines


def _work_line(work: object) -> str:
    assert isinstance(work, dict)  # noqa: S101 - one JSON object per stage
    parts = []
    if "units" in work:
        parts.append(f"{work['units']} units, {size_text(work['bytes_read'])} read")
    if work.get("rows"):
        parts.append(f"about {work['rows']:,} rows")
    if work.get("steps"):
        about = "about " if work.get("estimated") else ""
        parts.append(f"{about}{work['steps']:,} steps of {work['batch']} rows")
    return f"run: {work['stage']} ({work['kind']}): {', '.join(parts) or 'not known before it runs'}"


def _estimate_line(each: StageEstimate) -> str:
    low, high = each.hours
    usd = "no price" if each.usd is None else f"{each.usd[0]:.3g} to {each.usd[1]:.3g} USD"
    return (
        f"run: {each.stage} on {each.target}, batch {each.batch}: {each.steps:,} steps, {low:.3g} to {high:.3g} slice-hours, "
        f"{usd} (from the roofline to {ASSUMED_EFFICIENCY:.0%} of it; without start, compilation and waiting)"
    )
