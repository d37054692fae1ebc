"""The command line: parse, call, print. Data goes to stdout, everything else to stderr.

Exit status: 0 all committed, 1 the job failed, 2 usage or configuration, 3 a check failed, 4 the run is held by another
driver, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import tpupipe
from tpupipe.cli_check import CHECK_EPILOG, check_command
from tpupipe.cli_checkpoints import checkpoints_app
from tpupipe.cli_common import console, errors
from tpupipe.cli_drill import EPILOG, drill_command
from tpupipe.cli_dry_run import EPILOG as DRY_RUN_EPILOG
from tpupipe.cli_dry_run import dry_run_command
from tpupipe.cli_plan import EPILOG as PLAN_EPILOG
from tpupipe.cli_plan import plan_command
from tpupipe.cli_ticks import AsOf, Backfill, EveryOption, Reprocess, TickOptions, print_backfill, run_backfill
from tpupipe.config import Config, environment
from tpupipe.dry_run.record import require_passed
from tpupipe.errors import ClusterError, TpupipeError, UsageError
from tpupipe.faults.plan import parse_faults
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.hardware.slices import SliceSpec
from tpupipe.ledger.logs import set_up_logs
from tpupipe.resolve import Build, load_build, refuse_early_jax, resolve
from tpupipe.run import RunOptions, RunResult, base_folder, run
from tpupipe.stop import StopRequest

app = typer.Typer(
    name="tpupipe",
    help="Checkpointed TPU batch pipelines on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cluster_app = typer.Typer(help="Keep a faked slice warm on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cluster_app, name="cluster")
app.add_typer(checkpoints_app, name="checkpoints")
app.command("check", epilog=CHECK_EPILOG)(check_command)
app.command("dry-run", epilog=DRY_RUN_EPILOG)(dry_run_command)
app.command("drill", epilog=EPILOG)(drill_command)
app.command("plan", epilog=PLAN_EPILOG)(plan_command)

ConfigFiles = Annotated[
    list[Path], typer.Option("-c", "--config", help="YAML file; may be repeated, later files over earlier.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set cluster.topology=4x4.")
]
Name = Annotated[
    str | None, typer.Option("--run", help="Name of the run; an existing one is resumed. Default: from job and config.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
Faults = Annotated[
    list[str] | None,
    typer.Option("--fault", metavar="FAULT", help='Inject a failure: "kill-worker@train.step=40,rank=1".'),
]
StoreFaultTexts = Annotated[
    list[str] | None,
    typer.Option("--store-fault", metavar="FAULT", help='Have the emulated store fail: "503@create,rate=0.2,seed=7".'),
]
AllowChange = Annotated[
    bool, typer.Option("--allow-change", help="Go on with a run whose job, inputs or code changed, and record it.")
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Take the run from the driver that holds it; its writes are refused then.")
]
AfterDryRun = Annotated[
    bool,
    typer.Option(
        "--after-dry-run", help="Refuse unless the last `tpupipe dry-run` of this configuration and code passed."
    ),
]

_RUN_EPILOG = (
    "Example: tpupipe run jobs.stdlib_lm -c configs/local.yaml --run a --set job.steps=60   "
    "Exit status: 0 all committed, 1 failed, 2 usage or config, 3 bucket in another region, 4 held by another driver, 130 interrupted."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(tpupipe.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command("run", epilog=_RUN_EPILOG)
def run_command(
    job: Annotated[str, typer.Argument(help="Module with build(config): jobs.stdlib_lm.")],
    config: ConfigFiles,
    overrides: Overrides = None,
    name: Name = None,
    as_json: AsJson = False,
    faults: Faults = None,
    store_faults: StoreFaultTexts = None,
    allow_change: AllowChange = False,
    take_over: TakeOver = False,
    as_of: AsOf = None,
    backfill: Backfill = None,
    every: EveryOption = None,
    reprocess: Reprocess = False,
    after_dry_run: AfterDryRun = False,
) -> None:
    """Run a job, or resume it, to the end."""
    with _run_errors(as_json):
        ticks = TickOptions(as_of, backfill, every, reprocess)
        build = load_build(job)
        _run(
            build, config, overrides, name, as_json, faults, store_faults, allow_change, take_over, ticks, after_dry_run
        )


def job_main(build: Build) -> None:
    """Command line of a job module that is run as a script; see ``tpupipe.main``."""
    script = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @script.command(epilog=_RUN_EPILOG, help="Run this job, or resume it, to the end.")
    def command(
        config: ConfigFiles,
        overrides: Overrides = None,
        name: Name = None,
        as_json: AsJson = False,
        faults: Faults = None,
        store_faults: StoreFaultTexts = None,
        allow_change: AllowChange = False,
        take_over: TakeOver = False,
        as_of: AsOf = None,
        backfill: Backfill = None,
        every: EveryOption = None,
        reprocess: Reprocess = False,
        after_dry_run: AfterDryRun = False,
    ) -> None:
        with _run_errors(as_json):
            refuse_early_jax("the job's module")
            ticks = TickOptions(as_of, backfill, every, reprocess)
            _run(
                build,
                config,
                overrides,
                name,
                as_json,
                faults,
                store_faults,
                allow_change,
                take_over,
                ticks,
                after_dry_run,
            )

    script()


def _run(
    build: Build,
    config_files: list[Path],
    overrides: list[str] | None,
    name: str | None,
    as_json: bool,
    faults: list[str] | None,
    store_faults: list[str] | None,
    allow_change: bool,
    take_over: bool,
    ticks: TickOptions,
    after_dry_run: bool,
) -> None:
    options = ticks.of_one(
        RunOptions(name, parse_faults(faults or ()), allow_change, take_over, StoreFaults.parse(*(store_faults or ())))
    )
    job, config = resolve(build, config_files, overrides or ())
    _logs(config)
    if after_dry_run:
        passed = require_passed(job, config)
        logging.getLogger("tpupipe").info("dry run %s of this configuration passed at %s", passed.run, passed.at)
    _ship_by_value(build)
    with redirect_stdout(sys.stderr), StopRequest().on_signals() as stop:  # Ray prints warnings to stdout
        if ticks.backfill is None:
            results = [run(job, config, options, stop)]
        else:
            results = run_backfill(ticks, config, options, lambda asked: run(job, config, asked, stop))
    if ticks.backfill is not None:
        print_backfill(results, console(), as_json=as_json)
        return
    [result] = results
    if as_json:
        typer.echo(result.to_json())
    else:
        print_result(result, console())


def _logs(config: Config) -> None:
    set_up_logs(config.logs.level, config.logs.format, config.labels)


def _ship_by_value(build: Build) -> None:
    """Has Ray send the job module's functions themselves: workers need not have the module, or the same version."""
    module = sys.modules[build.__module__]
    if build.__module__ != "__main__":
        from tpupipe.cluster.connect import ship_by_value

        ship_by_value(module)


def print_result(result: RunResult, screen: Console) -> None:
    """The final table, and where the outputs are."""
    tick = f" @ {result.tick}" if result.tick else ""
    table = Table(title=f"{result.job} / {result.run}{tick}: {result.status}", title_justify="left")
    for heading in ("stage", "status", "done", "resumed from", "rows in", "rows out", "seconds", "result"):
        table.add_column(heading)
    for name, stage in result.stages.items():
        seconds = sum(stage.get("seconds", {}).values())
        table.add_row(
            name,
            stage["status"],
            f"{stage['done']}/{stage['total']}" if "done" in stage else "",
            "" if stage.get("resumed_from") is None else str(stage["resumed_from"]),
            str(stage.get("rows_in", "")),
            str(stage.get("rows_out", "")),
            f"{seconds:.1f}" if seconds else "",
            _facts(stage),
        )
    screen.print(table)
    screen.print("  ".join(f"{kind} {value:.1f} s" for kind, value in result.seconds.items()))
    screen.print(f"outputs: {result.run_uri}", soft_wrap=True)


def _facts(stage: Any) -> str:
    shown = [f"{name} {value:.4g}" for name, value in stage.get("metrics", {}).items()]
    shown += [f"{kind} {stage[f'rows_{kind}']}" for kind in ("quarantined", "truncated") if stage.get(f"rows_{kind}")]
    if stage.get("params_digest"):
        shown.append(f"params {stage['params_digest'][:12]}")
    if stage.get("sample_digest"):
        shown.append(f"samples {stage['sample_digest'][:12]}")
    return ", ".join(shown)


@contextmanager
def _run_errors(as_json: bool) -> Iterator[None]:
    """As ``errors``; a failed attempt's result is shown like a successful one's."""
    with errors(as_json=as_json):
        try:
            yield
        except TpupipeError as error:
            result = error.data.get("result")
            if isinstance(result, RunResult):
                error.data["report"] = asdict(result)
                if not as_json:
                    print_result(result, console(stderr=True))
            raise


# -- cluster ------------------------------------------------------------------------------------

Root = Annotated[Path | None, typer.Option("--root", help="Folder of local state; default .tpupipe.")]


def _root(root: Path | None) -> Path:
    return (root or base_folder(environment()) / ".tpupipe").absolute()


Added = Annotated[
    list[str] | None,
    typer.Option("--add", metavar="GENERATION:TOPOLOGY[:CHIPS]", help="One more slice, of any generation: v5e:2x2."),
]


@cluster_app.command("up", epilog="Example: tpupipe cluster up -c configs/local.yaml --add v6e:2x4:4 --add v5e:2x2")
def cluster_up_command(config: ConfigFiles, overrides: Overrides = None, add: Added = None) -> None:
    """Start a faked slice that stays; runs on this machine then use it."""
    from tpupipe.cluster.connect import cluster_up, describe
    from tpupipe.cluster.fake import FakeClusterSpec
    from tpupipe.config import load_config

    with errors(as_json=False):
        loaded = load_config(config, overrides or ())
        spec = loaded.cluster.slice_spec()
        if loaded.cluster.kind != "fake" or spec is None:
            raise UsageError(
                f"cluster.kind is {loaded.cluster.kind}; only a faked slice is started here.",
                hint="-c configs/local.yaml, or --set cluster.kind=fake.",
            )
        state = cluster_up(
            FakeClusterSpec((spec, *map(SliceSpec.parse, add or ())), loaded.cluster.cpus_per_host),
            base_folder(environment()),
            loaded.store.root,
            lambda text: typer.echo(text, err=True),
        )
        typer.echo(json.dumps(describe(state)))


@cluster_app.command("down", epilog="Example: tpupipe cluster down")
def cluster_down_command(root: Root = None) -> None:
    """Stop the warm faked slice."""
    from tpupipe.cluster.connect import cluster_down

    with errors(as_json=False):
        typer.echo("stopped" if cluster_down(_root(root)) else "no faked cluster was up", err=True)


@cluster_app.command("status", epilog="Example: tpupipe cluster status")
def cluster_status_command(root: Root = None) -> None:
    """Print the warm faked slice as JSON; exit status 1 if there is none."""
    from tpupipe.cluster.connect import describe, warm_cluster

    with errors(as_json=False):
        state = warm_cluster(_root(root))
        if state is None:
            raise ClusterError(
                f"No faked cluster is up below {_root(root)}.", hint="tpupipe cluster up -c configs/local.yaml"
            )
        typer.echo(json.dumps(describe(state)))
