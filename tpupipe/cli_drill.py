"""``tpupipe drill``: a job is run once undisturbed and once per forced failure, and the results must be the same.

Exit status: 0 every scenario that was run passed, 1 something differs or the reference failed, 2 usage or configuration,
130 interrupted.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from tpupipe.cli_common import console, errors
from tpupipe.drill.plan_file import duration_s, read_plan
from tpupipe.drill.report import Report
from tpupipe.drill.run import DrillOptions, run_drill
from tpupipe.errors import UsageError
from tpupipe.ledger.logs import set_up_logs

EPILOG = (
    "Example: tpupipe drill jobs.stdlib_lm -c configs/local.yaml --budget 12m --junit drill.xml   "
    "Exit status: 0 all that ran passed, 1 something differs, 2 usage or config, 130 interrupted."
)


def drill_command(
    job: Annotated[str, typer.Argument(help="Module with build(config): jobs.stdlib_lm.")],
    config: Annotated[
        list[Path], typer.Option("-c", "--config", help="YAML file; may be repeated, later files over earlier.")
    ],
    *,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set job.steps=60.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="YAML file of scenarios, instead of the standard plan.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="This scenario only; may be repeated.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Time in all, as 12m; the first that fit are run.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Bound on each attempt, as 20m.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random failures until the budget is used up, instead of the plan.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --random: gives the same failures again.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the verdicts as JUnit XML.")] = None,
) -> None:
    """Force failures on a job and prove that its results stay the same.

    The job is run once undisturbed and once per scenario, all on one cluster and in one store.
    """
    with errors(as_json=as_json):
        if junit is not None and not junit.absolute().parent.is_dir():
            raise UsageError(f"--junit {junit}: there is no folder {junit.absolute().parent}.", hint="Make it first.")
        options = DrillOptions(
            plan=None if plan is None else read_plan(plan),
            only=tuple(only or ()),
            budget_s=None if budget is None else duration_s(budget),
            timeout_s=None if timeout is None else duration_s(timeout),
            seed=seed if random else None,
            junit=junit,
        )
        set_up_logs("info", "text", {})
        with redirect_stdout(sys.stderr):  # Ray prints warnings of its nodes there
            report = run_drill(job, config, overrides or (), options, lambda text: typer.echo(text, err=True))
        _print(report, as_json)
    if report.status != "passed":
        raise typer.Exit(1)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(report.to_json())
        return
    screen = console()
    screen.print(report.table())
    for line in report.lines():
        screen.print(line, soft_wrap=True)
