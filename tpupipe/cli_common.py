"""What all commands share: how errors end them, and the console."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from tpupipe.errors import TpupipeError
from tpupipe.preflight.findings import Finding, Status

LOG_WIDTH = 160
_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red", Status.SKIPPED: "bright_black"}


def console(*, stderr: bool = False) -> Console:
    """A console for text that is printed as it is; a log has no width of its own."""
    found = Console(stderr=stderr, markup=False, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, markup=False, highlight=False, width=LOG_WIDTH)


def finding_lines(finding: Finding) -> list[str]:
    """What a check found, for people."""
    status = typer.style(f"{finding.status:<8}", fg=_COLOURS[finding.status])
    lines = [f"{status} {finding.check:<17} {finding.message}"]
    if finding.hint and finding.status is not Status.OK:
        lines.append(f"{'':<8} {'':<17} hint: {finding.hint}")
    return lines


@contextmanager
def errors(*, as_json: bool) -> Iterator[None]:
    """Turns an error into its message on stderr and its exit status, and for ``--json`` into one object on stdout.

    An error may carry that object as ``data["report"]``.
    """
    try:
        yield
    except TpupipeError as error:
        if as_json:
            report: Mapping[str, Any] = error.data.get("report", {"status": "failed"})
            kind = {"error": error.message, "error_kind": type(error).__name__, "exit_status": error.exit_status}
            typer.echo(json.dumps({**report, **kind}))
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt as error:
        if as_json:
            typer.echo(json.dumps({"status": "interrupted", "error": "interrupted", "exit_status": 130}))
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from error
