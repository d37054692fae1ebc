"""``tpupipe dry-run``: a production configuration rehearsed on this machine.

Exit status: 0 passed, 2 usage or configuration, 3 something is to be fixed, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from tpupipe.cli_common import console, errors, finding_lines
from tpupipe.dry_run.run import dry_run
from tpupipe.ledger.logs import set_up_logs

EPILOG = (
    "Example: tpupipe dry-run jobs.stdlib_lm -c configs/v6e-16.yaml   "
    "Exit status: 0 passed, 2 usage or config, 3 something is to be fixed, 130 interrupted."
)


def dry_run_command(
    job: Annotated[str, typer.Argument(help="Module with build(config): jobs.stdlib_lm.")],
    config: Annotated[
        list[Path], typer.Option("-c", "--config", help="The production configuration; may be repeated.")
    ],
    *,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set dry_run.sample=5%.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Rehearse a production configuration here: checks, the TPU compiler, a small run in which a worker is killed.

    Ends with PASS or with what to fix. The verdict is kept and found again by the configuration's hash.
    """
    out = sys.stdout
    with errors(as_json=as_json), redirect_stdout(sys.stderr):
        set_up_logs("info", "text", {})
        report = dry_run(
            job,
            config,
            overrides or (),
            lambda text: typer.echo(text, err=True),
            lambda finding: None if as_json else typer.echo("\n".join(finding_lines(finding)), file=out),
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), default=str))
    else:
        screen = console()
        for line in report.lines():
            screen.print(line, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(3)
