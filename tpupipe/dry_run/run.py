"""A dry run, top to bottom: checks, the compiler, the small run with a forced failure, the account, the verdict."""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tpupipe.checking import check_context
from tpupipe.config import Config, config_hash, environment
from tpupipe.drill.facts import job_facts
from tpupipe.drill.plan import one_kill
from tpupipe.dry_run.account import Account, account, projection, run_findings
from tpupipe.dry_run.record import FAILED, PASSED, DryRunRecord, keep, run_prefix
from tpupipe.dry_run.rehearsal import Machine, Rehearsal, rehearsal
from tpupipe.dry_run.report import DryRunReport
from tpupipe.errors import InterruptedRunError, RunHeldError, TpupipeError, UsageError
from tpupipe.faults.plan import parse_faults
from tpupipe.identity import code_fingerprint
from tpupipe.job import Job
from tpupipe.ledger.events import read_events
from tpupipe.preflight.aot import aot_findings
from tpupipe.preflight.checks import guarded, iter_checks
from tpupipe.preflight.findings import Finding
from tpupipe.preflight.importing import import_alone
from tpupipe.preflight.plan import ASSUMED_EFFICIENCY, StageEstimate, estimate, rows_of
from tpupipe.preflight.program import Compilation
from tpupipe.resolve import Build, load_build, rebuilt, resolve
from tpupipe.run import RunOptions, check_before_anything, endpoint_of, run
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store

GROUPS = ("topology", "zone", "job")
"""What can be looked at without the production cluster and store."""


def dry_run(
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    say: Callable[[str], None],
    tell: Callable[[Finding], None],
) -> DryRunReport:
    """Rehearses a production configuration on this machine.

    Args:
        module: The job's module.
        config_files: The production configuration.
        overrides: ``KEY=VALUE``.
        say: Takes progress lines.
        tell: Takes each finding as it is there.

    Raises:
        UsageError: (exit 2) The configuration, or what is to be rehearsed of it, is not valid. Nothing was started.
        StoreError, ClusterError: The embedded store or the faked slice does not come up.
    """
    began = time.monotonic()
    imported = import_alone(module)
    if imported.usage:
        raise UsageError(imported.error, hint=imported.hint, module=module)
    build = load_build(module)
    job, config = resolve(build, config_files, overrides)
    _refuse(config)
    plan = rehearsal(config, job, Machine.here())
    small = rebuilt(build, plan.config)
    check_before_anything(small, plan.config, RunOptions())
    hashed = config_hash(config)
    name = f"{run_prefix(hashed)}{dt.datetime.now(dt.UTC):%m%d%H%M%S}"
    say(f"dry run {name}: {', '.join(plan.notes)}")

    findings: list[Finding] = []
    compilation: list[Compilation] = []
    with check_context(module, config_files, overrides, GROUPS, imported) as context:
        for finding in [
            *iter_checks(context, GROUPS, say),
            *guarded(
                "aot.job",
                lambda: aot_findings(
                    module, config, input_options=context.input_options, say=say, keep=compilation.append
                ),
            ),
        ]:
            findings.append(finding)
            tell(finding)

    with endpoint_of(plan.config, environment()) as endpoint:  # one server for the run and what is read and kept of it
        settings = plan.config.store
        store = open_store(settings.uri, endpoint=endpoint, timeout_s=settings.timeout_s, attempts=settings.attempts)
        measured, error = _small_run(build, small, plan, store, name, say)
        trained = job_facts(small, plan.config).first("train") is not None
        for finding in run_findings(measured, error, trained=trained):
            findings.append(finding)
            tell(finding)
        report = DryRunReport(
            job=module,
            config_hash=hashed,
            run=name,
            notes=plan.notes,
            findings=tuple(findings),
            account=measured,
            projection=_projected(config, compilation, measured),
            seconds=time.monotonic() - began,
        )
        return _kept(report, small.name, job, store)


def _refuse(config: Config) -> None:
    if environment().ray_address:
        raise UsageError(
            f"A dry run happens on this machine, and RAY_ADDRESS={environment().ray_address} names a cluster.",
            hint="env -u RAY_ADDRESS tpupipe dry-run ...",
        )
    if given := [key for key in ("faults", "store_faults") if getattr(config, key)]:
        raise UsageError(
            f"The configuration has {' and '.join(given)}; a dry run brings a failure of its own.",
            hint="Leave them out of a production configuration.",
        )


def _small_run(  # noqa: PLR0917 - one caller
    build: Build, job: Job, plan: Rehearsal, store: Store, name: str, say: Callable[[str], None]
) -> tuple[Account | None, str]:
    """Runs the job small with one worker killed; what it measured, or why it failed."""
    from tpupipe.cluster.connect import ship_by_value

    ship_by_value(sys.modules[build.__module__])
    config = plan.config
    faults = one_kill(job_facts(job, config))
    say(f"small run with {', '.join(faults)}")
    try:
        result = run(job, config, RunOptions(name, parse_faults(faults)))
    except (UsageError, RunHeldError, InterruptedRunError):
        raise
    except TpupipeError as error:
        return None, error.message
    return account(asdict(result), list(read_events(store, RunPaths(job.name, name))), faults), ""


def _projected(config: Config, compilation: Sequence[Compilation], measured: Account | None) -> Any:
    if not compilation or isinstance(compilation[0].work, str):
        return None
    spec = config.cluster.slice_spec()
    rows = rows_of(compilation[0], config.cost, spec.generation if spec else None)
    work = {each["stage"]: each for each in compilation[0].work}
    return projection(list(_estimates(rows, work)), rows, measured, ASSUMED_EFFICIENCY)


def _estimates(rows: Sequence[Any], work: Any) -> Iterator[StageEstimate]:
    """One for each stage: of the buckets, the longest speaks for all."""
    for stage, facts in work.items():
        of = sorted((row for row in rows if row.program.stage == stage), key=lambda row: row.program.length)
        found = estimate(of[-1], facts) if of else None
        if found is not None:
            yield found


def _kept(report: DryRunReport, name: str, job: Job, store: Store) -> DryRunReport:
    """The report with its verdict in the run's folder."""
    report = replace(report, record=store.uri(RunPaths(name, report.run).dry_run))
    record = DryRunRecord(
        config_hash=report.config_hash,
        code=code_fingerprint(job),
        verdict=PASSED if report.passed else FAILED,
        at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        run=report.run,
        report=report.to_dict(),
    )
    keep(store, name, record)
    return report
