"""``tpupipe check``: the job, its configuration, the store, the zone and the cluster are looked at before anything is reserved.

Exit status: 0 nothing failed (warnings and skipped checks included), 2 usage or configuration, 3 a check failed, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tpupipe.cli_common import errors
from tpupipe.config import Config, config_hash, environment, load_config, process_variables
from tpupipe.errors import CheckFailedError, ClusterError, TpupipeError, UsageError
from tpupipe.job import Job
from tpupipe.ledger.logs import set_up_logs
from tpupipe.preflight.checks import iter_checks
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status, worst
from tpupipe.preflight.importing import ImportReport, import_alone
from tpupipe.preflight.registry import GROUPS
from tpupipe.resolve import jax_is_awake, load_build, resolve
from tpupipe.run import endpoint_of, input_options, local_root
from tpupipe.store.objects import open_store
from tpupipe.store.uri import StoreURI
from tpupipe.store.wiring import process_environment

CHECK_EPILOG = (
    "Example: tpupipe check jobs.stdlib_lm -c configs/local.yaml --skip cluster   "
    "Exit status: 0 nothing failed, 2 usage or config, 3 a check failed, 130 interrupted."
)

AOT, PARITY = "aot", "parity"
ALL_GROUPS = (*GROUPS, AOT, PARITY)

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red", Status.SKIPPED: "bright_black"}


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


@dataclass(frozen=True)
class CheckReport:
    """What a check found, all in all.

    Args:
        job: The job's module.
        config_hash: Hash of the configuration with its defaults, by which a verdict is found again.
        findings: In the order in which they were found.
    """

    job: str
    config_hash: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst of them."""
        return worst(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "status": self.status}


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
    with _context(module, config_files, overrides, options, imported) as context:
        config = context.config
        for finding in _all_findings(context, options):
            findings.append(finding)
            tell(finding)
    return CheckReport(module, config_hash(config), tuple(findings))


def _all_findings(context: CheckContext, options: CheckOptions) -> Iterator[Finding]:
    yield from iter_checks(context, options.groups, _say)
    # ---- CALL SITE: ahead-of-time compilation (tpupipe/preflight/aot*.py) ---------------------------------------------
    # yield from guarded("aot.job", lambda: aot_findings(context.module, context.config, …))
    if AOT in options.groups:
        yield Finding("aot.job", Status.SKIPPED, "Ahead-of-time compilation is not part of this version.")
    # ---- CALL SITE: bf16 parity (tpupipe/preflight/parity*.py) --------------------------------------------------------
    # yield from guarded("parity.job", lambda: parity_findings(context.job, context.config, …))
    if PARITY in options.groups:
        yield Finding("parity.job", Status.SKIPPED, "The parity check is not part of this version.")


@contextlib.contextmanager
def _context(
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    options: CheckOptions,
    imported: ImportReport | None,
) -> Iterator[CheckContext]:
    """Everything that the checks look at, and its end."""
    from tpupipe.cluster.connect import pickled
    from tpupipe.cluster.inspect import cluster_to_ask
    from tpupipe.cluster.reservation import check_slice

    job, config, woke = _resolved(module, config_files, overrides, imported)
    env = environment()
    set_up_logs(config.logs.level, config.logs.format, config.labels)
    with contextlib.ExitStack() as stack:
        problem: TpupipeError | None = None
        endpoint: str | None = None
        try:
            endpoint = stack.enter_context(endpoint_of(config, env))
        except ClusterError as error:  # the embedded server is not installed, or does not come up: store.create says so
            problem = error
        store = None
        if problem is None:
            store = open_store(
                config.store.uri, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts
            )
            stack.enter_context(
                process_variables({**env.storage, **process_environment(endpoint, config.store.timeout_s)})
            )
        place = StoreURI.parse(config.store.uri)
        root = local_root(config, env)
        yield CheckContext(
            config=config,
            job=job,
            module=module,
            store=store,
            store_problem=problem,
            input_options=input_options(endpoint),
            local_folder=Path(place.path) if place.scheme == "file" else root if config.store.embedded else None,
            imported=imported,
            build_woke_jax=woke,
            ask_ray=check_slice,
            pickled=pickled,
            ask_cluster=cluster_to_ask(config.cluster, root=root, ray_address=env.ray_address)
            if "cluster" in options.groups
            else None,
        )


def _resolved(
    module: str, config_files: Sequence[Path], overrides: Sequence[str], imported: ImportReport | None
) -> tuple[Job | None, Config, bool]:
    """The job, the configuration, and whether ``build`` woke JAX.

    A module that cannot be imported, or must not because it wakes JAX, leaves the rest of the checks to be done.
    """
    if imported is not None and imported.error:
        return None, load_config(config_files, overrides), False
    before = jax_is_awake()
    build = load_build(module)
    job, config = resolve(build, config_files, overrides)
    from tpupipe.cluster.connect import ship_by_value

    ship_by_value(sys.modules[build.__module__])
    return job, config, jax_is_awake() and not before


# -- what is printed ------------------------------------------------------------------------


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(finding: Finding, out: Any) -> None:
    status = typer.style(f"{finding.status:<8}", fg=_COLOURS[finding.status])
    typer.echo(f"{status} {finding.check:<17} {finding.message}", file=out)
    if finding.hint and finding.status is not Status.OK:
        typer.echo(f"{'':<8} {'':<17} hint: {finding.hint}", file=out)


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
