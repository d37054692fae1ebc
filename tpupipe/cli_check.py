"""``tpupipe check``: the job, its configuration, the store, the zone and the cluster are looked at before anything is reserved.

Exit status: 0 nothing failed (warnings and skipped checks included), 2 usage or configuration, 3 a check failed, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tpupipe.checking import CheckReport, check_context
from tpupipe.cli_common import errors, finding_lines
from tpupipe.config import config_hash
from tpupipe.errors import CheckFailedError, UsageError
from tpupipe.ledger.logs import set_up_logs
from tpupipe.preflight.aot import aot_findings
from tpupipe.preflight.checks import guarded, iter_checks
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.importing import ImportReport, import_alone
from tpupipe.preflight.parity_child import parity_alone
from tpupipe.preflight.registry import GROUPS

CHECK_EPILOG = (
    "Example: tpupipe check jobs.stdlib_lm -c configs/local.yaml --skip cluster   "
    "Exit status: 0 nothing failed, 2 usage or config, 3 a check failed, 130 interrupted."
)

AOT, PARITY = "aot", "parity"
ALL_GROUPS = (*GROUPS, AOT, PARITY)


@dataclass(frozen=True)
class CheckOptions:
    """What is asked of one check.

    Args:
        groups: Groups of :data:`ALL_GROUPS` to look at.
        as_json: Whether stdout gets one JSON object instead of lines.
    """

    groups: frozenset[str]
    as_json: bool = False


def check_command(
    job: Annotated[str, typer.Argument(help="Module with build(config): jobs.stdlib_lm.")],
    config: Annotated[
        list[Path], typer.Option("-c", "--config", help="YAML file; may be repeated, later files over earlier.")
    ],
    *,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set cluster.topology=4x4.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GROUP", help=f"This group only; may be repeated: {', '.join(ALL_GROUPS)}."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GROUP", help="Not this group; may be repeated.")
    ] = None,
    aot: Annotated[
        bool | None,
        typer.Option("--aot/--no-aot", help="Compile with the TPU compiler. Default: where libtpu is installed."),
    ] = None,
    parity: Annotated[bool, typer.Option("--parity", help="Compare with bfloat16 matrix products.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object on stdout.")] = False,
) -> None:
    """Look for what would stop a job, before anything is reserved.

    Writes to the store a few objects of its own, and removes them. Starts no cluster.
    """
    with errors(as_json=as_json):
        options = CheckOptions(wanted_groups(only or (), skip or (), aot=aot, parity=parity), as_json)
        out = sys.stdout
        tell = (lambda _: None) if as_json else (lambda finding: _print(finding, out))
        with redirect_stdout(sys.stderr):  # the job's own functions may print
            report = check(job, config, overrides or (), options, tell)
        _end(report, as_json)


def wanted_groups(
    only: Sequence[str], skip: Sequence[str], *, aot: bool | None = None, parity: bool = False
) -> frozenset[str]:
    """The groups that are asked for.

    Args:
        only: Of ``--only``: these alone.
        skip: Of ``--skip``: not these.
        aot: Of ``--aot/--no-aot``; ``None`` is where libtpu can be imported.
        parity: Of ``--parity``.

    Raises:
        UsageError: There is no such group, or none is left.

    >>> sorted(wanted_groups(["store", "zone"], ["zone"]))
    ['store']
    """
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in ALL_GROUPS:
                near = difflib.get_close_matches(name, ALL_GROUPS, n=1)
                raise UsageError(
                    f"{option} {name}: there is no such group of checks; allowed: {', '.join(ALL_GROUPS)}.",
                    hint=f"Did you mean {near[0]}?" if near else "",
                )
    groups = set(only) or set(GROUPS)
    if aot or (aot is None and not only and importlib.util.find_spec("libtpu") is not None):
        groups.add(AOT)
    if aot is False:
        groups.discard(AOT)
    if parity:
        groups.add(PARITY)
    groups -= set(skip)
    if not groups:
        raise UsageError("--only and --skip leave no group of checks.", hint=f"There are {', '.join(ALL_GROUPS)}.")
    return frozenset(groups)


def check(
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    options: CheckOptions,
    tell: Callable[[Finding], None] = lambda _: None,
) -> CheckReport:
    """Runs the checks.

    Args:
        module: The job's module.
        config_files: As for a run.
        overrides: As for a run.
        options: What is asked.
        tell: Takes each finding as it is there.

    Raises:
        UsageError: The command line, the configuration or the declaration of the job is not valid.
    """
    imported: ImportReport | None = None
    if "job" in options.groups:
        _say(f"importing {module}")
        imported = import_alone(module)
        if imported.usage:
            raise UsageError(imported.error, hint=imported.hint, module=module)
    findings = []
    with check_context(module, config_files, overrides, options.groups, imported) as context:
        config = context.config
        set_up_logs(config.logs.level, config.logs.format, config.labels)
        for finding in _all_findings(context, options):
            findings.append(finding)
            tell(finding)
    return CheckReport(module, config_hash(config), tuple(findings))


def _all_findings(context: CheckContext, options: CheckOptions) -> Iterator[Finding]:
    yield from iter_checks(context, options.groups, _say)
    if AOT in options.groups:
        yield from guarded("aot.job", lambda: _aot(context))
    if PARITY in options.groups:
        yield from guarded("parity.job", lambda: _parity(context))


def _aot(context: CheckContext) -> list[Finding]:
    if context.job is None:
        return [Finding("aot.job", Status.SKIPPED, "The job's module could not be loaded.", "See job.import.")]
    return aot_findings(context.module, context.config, input_options=context.input_options, say=_say)


def _parity(context: CheckContext) -> list[Finding]:
    if context.job is None:
        return [Finding("parity.job", Status.SKIPPED, "The job's module could not be loaded.", "See job.import.")]
    _say("comparing float32 with a TPU's products on this machine's CPU: minutes for a large model")
    return parity_alone(context.module, context.config, context.input_options)


# -- what is printed ------------------------------------------------------------------------


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(finding: Finding, out: Any) -> None:
    for line in finding_lines(finding):
        typer.echo(line, file=out)


def _end(report: CheckReport, as_json: bool) -> None:
    count = Counter(finding.status for finding in report.findings)
    summary = ", ".join(f"{count[status]} {status}" for status in Status)
    if report.status is Status.FAILURE:
        failed = dict.fromkeys(f.check for f in report.findings if f.status is Status.FAILURE)
        raise CheckFailedError(
            f"{report.job}: {', '.join(failed)} failed ({summary}).",
            hint="Each failure above has its own hint; --only GROUP looks at one group again.",
            report=report.to_dict(),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "exit_status": 0}))
    else:
        typer.echo(f"{report.job}: nothing failed ({summary}); configuration {report.config_hash[:12]}.")
