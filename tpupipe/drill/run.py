"""A drill, top to bottom: store, cluster, reference run, scenarios, report."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpupipe.config import Config, environment
from tpupipe.drill.attempts import Ended
from tpupipe.drill.bench import Bench
from tpupipe.drill.facts import JobFacts, job_facts, measured
from tpupipe.drill.outcome import DIGESTS, Verdict, judge, reference_failed
from tpupipe.drill.plan import STANDARD_NAMES, Skipped, estimated_s, next_that_fits, standard_plan
from tpupipe.drill.plan_file import chosen
from tpupipe.drill.random_plan import random_plan
from tpupipe.drill.report import Report
from tpupipe.drill.scenario import Scenario
from tpupipe.errors import StageError, UsageError
from tpupipe.faults.driver import check_faults
from tpupipe.faults.plan import parse_faults
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.job import Job
from tpupipe.resolve import load_build, resolve
from tpupipe.run import RunOptions, check_before_anything, endpoint_of, local_root
from tpupipe.stop import terminated_as_interrupted
from tpupipe.store.objects import open_store

REFERENCE = "reference"
REFERENCE_TIMEOUT_S = 3600.0
_ATTEMPT_MIN_S = 300.0
_ATTEMPT_FACTOR = 5.0
MIN_TRIAL_S = 5.0  # no run is shorter: bounds the number of trials that are drawn
_STILL_RUNNING = "it is still running, or was killed"


@dataclass(frozen=True)
class DrillOptions:
    """What is asked of a drill.

    Args:
        plan: Scenarios of a plan file; ``None`` is the standard plan.
        only: Names of the scenarios to run; all without any.
        budget_s: Seconds within which to stay, the reference run included; ``None`` is without limit.
        timeout_s: Bound on each attempt; by default an hour for the reference, and several times its length for
            the others.
        seed: For random trials instead of a plan, until ``budget_s``, which must be given.
        junit: Where the verdicts are written as JUnit XML, after each of them.
    """

    plan: tuple[Scenario, ...] | None = None
    only: tuple[str, ...] = ()
    budget_s: float | None = None
    timeout_s: float | None = None
    seed: int | None = None
    junit: Path | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and (self.budget_s is None or self.plan is not None or self.only):
            raise UsageError(
                "--random goes on until the time is up, so it needs --budget, and it makes its own scenarios.",
                hint="--random --budget 60m --seed 7, without --plan and --only.",
            )


def run_drill(
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    options: DrillOptions,
    say: Callable[[str], None],
) -> Report:
    """Runs the job once undisturbed and once per scenario, and compares.

    Args:
        module: The job's module.
        config_files: Its configuration.
        overrides: ``KEY=VALUE``.
        options: What is asked for.
        say: Takes progress lines.

    Raises:
        UsageError: (exit 2) Before anything is started.
        StageError: The reference run failed.
        ClusterError, StoreError: The cluster or the store cannot be used.
    """
    began = time.monotonic()
    job, config = resolve(load_build(module), config_files, overrides)
    _check_undisturbed(config)
    check_before_anything(job, config, RunOptions())
    declared = job_facts(job, config)
    planned, _ = _planned(options, declared)  # names that do not exist are refused here
    env = environment()
    if options.plan is not None:
        _check_plan(planned, module, config_files, overrides, env.emulator)
    root = local_root(config, env)
    name = f"drill-{dt.datetime.now(dt.UTC):%m%d%H%M%S}-{uuid.uuid4().hex[:4]}"
    folder = root.absolute() / "drills" / name
    with terminated_as_interrupted(), contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(endpoint_of(config, env))
        from tpupipe.cluster.connect import connected

        cluster = stack.enter_context(
            connected(config.cluster, root=root, worker_environment={}, ray_address=env.ray_address, say=say)
        )
        bench = Bench(
            module=module,
            config_files=tuple(config_files),
            overrides=tuple(overrides),
            job=job.name,
            config=config,
            store=open_store(
                config.store.uri, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts
            ),
            endpoint=endpoint,
            cluster=cluster,
            name=name,
            folder=folder,
            say=say,
        )
        return _Drill(job, bench, options, declared, began).run()


def _check_undisturbed(config: Config) -> None:
    if config.mode == "incremental":
        raise UsageError(
            "A drill compares whole runs of the same inputs, and the configuration has mode: incremental.",
            hint="--set mode=full",
        )
    given = [key for key in ("faults", "store_faults") if getattr(config, key)]
    if given:
        raise UsageError(
            f"The configuration has {' and '.join(given)}, and the reference run must be undisturbed.",
            hint="Leave them out of the drill's configuration; a plan file (--plan) says what a scenario does.",
        )


def _check_plan(
    plan: Sequence[Scenario],
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    emulator: str | None,
) -> None:
    """Refuses faults that this job cannot have, and overrides that its configuration does not take.

    Raises:
        UsageError: One of them, with the scenario's name.
    """
    build = load_build(module)
    for scenario in plan:
        try:
            job, config = resolve(build, config_files, [*overrides, *scenario.overrides])
            check_faults(
                parse_faults(scenario.faults),
                StoreFaults.parse(*scenario.store_faults),
                config,
                emulator,
                {stage.name: type(stage).__name__ for stage in job.stages},
            )
        except UsageError as error:
            raise UsageError(f"Scenario {scenario.name!r}: {error.message}", hint=error.hint) from error


def _planned(options: DrillOptions, facts: JobFacts) -> tuple[tuple[Scenario, ...], tuple[Skipped, ...]]:
    scenarios, skipped = (options.plan, ()) if options.plan is not None else standard_plan(facts)
    return chosen(scenarios, skipped, options.only)


class _Drill:
    """The reference run and then the scenarios, as long as they fit."""

    def __init__(self, job: Job, bench: Bench, options: DrillOptions, facts: JobFacts, began: float) -> None:
        self._job = job
        self._bench = bench
        self._options = options
        self._facts = facts
        self._began = began
        self._about: dict[str, Any] = {"run": bench.run_name(REFERENCE)}
        self._verdicts: list[Verdict] = []
        self._left_out: list[Skipped] = []
        self._pending: tuple[Scenario, ...] = ()

    def run(self) -> Report:
        """Runs all of it. What was found so far is on disk after every verdict, and however it ends."""
        try:
            self._run()
        except BaseException as error:
            self._keep(_ended_by(error))
            self._bench.say(f"drill {self._bench.name} did not end; its report so far: {self._bench.folder}")
            raise
        return self._keep()

    def _run(self) -> None:
        bench, options = self._bench, self._options
        bench.say(f"drill {bench.name}: reference run")
        if options.seed is None:
            self._pending, _ = _planned(options, self._facts)
        reference = self._reference(options.timeout_s or REFERENCE_TIMEOUT_S)
        result = reference.result
        self._about |= {"seconds": round(reference.seconds, 1), "stages": _stage_digests(result)}
        self._keep(_STILL_RUNNING)
        events = [e for each in bench.events(REFERENCE).values() for e in each]
        self._facts = measured(self._facts, result, events, reference.seconds)
        bench.say(f"reference run: {reference.seconds:.1f} s, {_digests(result)}")
        self._pending, skipped = _after_reference(options, self._facts)
        self._left_out += skipped
        self._scenarios(result, reference.seconds)

    def _reference(self, timeout_s: float) -> Ended:
        began = time.monotonic()
        try:
            return self._bench.undisturbed(REFERENCE, timeout_s)
        except StageError as error:
            run, seconds = self._bench.run_name(REFERENCE), time.monotonic() - began
            self._verdicts.append(reference_failed(REFERENCE, run, error, seconds))
            raise

    def _keep(self, unfinished: str = "") -> Report:
        """Writes the report as it stands.

        Args:
            unfinished: Why it is not the whole drill's.
        """
        why = f"the drill ended before: {unfinished}"
        left_out = [*self._left_out, *(Skipped(scenario.name, why) for scenario in self._pending)]
        report = Report(
            job=self._job.name,
            drill=self._bench.name,
            reference=self._about,
            verdicts=tuple(self._verdicts),
            left_out=() if self._options.seed is not None else tuple(left_out),
            seconds=round(self._elapsed(), 1),
            budget_s=self._options.budget_s,
            folder=str(self._bench.folder),
            unfinished=unfinished,
        )
        self._bench.folder.mkdir(parents=True, exist_ok=True)
        (self._bench.folder / "drill.json").write_text(report.to_json() + "\n", encoding="utf-8")
        junit = report.to_junit()
        (self._bench.folder / "drill.xml").write_text(junit, encoding="utf-8")
        if self._options.junit is not None:
            self._options.junit.write_text(junit, encoding="utf-8")
        return report

    def _scenarios(self, result: dict[str, Any], reference_s: float) -> None:
        taken: list[tuple[float, float]] = []
        total = len(self._pending)
        while self._pending:
            left_s = math.inf if self._options.budget_s is None else self._options.budget_s - self._elapsed()
            before = self._pending
            scenario, rest = next_that_fits(before, left_s=left_s, reference_s=reference_s, taken=taken)
            gone = before if scenario is None else before[: before.index(scenario)]
            self._left_out += [Skipped(s.name, self._no_time(left_s)) for s in gone]
            self._pending = rest if scenario is None else (scenario, *rest)
            if scenario is None:
                break
            self._bench.say(
                f"scenario {len(self._verdicts) + 1} of at most {total}: {scenario.name} ({scenario.about})"
                + (f": {', '.join((*scenario.faults, *scenario.store_faults))}" if not scenario.must_fire else "")
            )
            verdict = self._one(scenario, result, reference_s)
            self._pending = rest
            self._keep(_STILL_RUNNING)
            taken.append((estimated_s(scenario, reference_s), verdict.seconds))
            self._bench.say(_told(verdict))

    def _one(self, scenario: Scenario, result: dict[str, Any], reference_s: float) -> Verdict:
        bench = self._bench
        began = time.monotonic()
        bound = max(_ATTEMPT_MIN_S, _ATTEMPT_FACTOR * (reference_s + scenario.extra_s))
        seen = bench.disturbed(scenario, self._facts, REFERENCE, result, self._options.timeout_s or bound)
        run = bench.run_name(scenario.name)
        verdict = judge(scenario, self._facts, result, seen, run=run, seconds=time.monotonic() - began)
        self._verdicts.append(verdict)
        return verdict

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _no_time(self, left_s: float) -> str:
        return f"does not fit into the budget of {self._options.budget_s:.0f} s ({max(0.0, left_s):.0f} s were left)"


def _after_reference(options: DrillOptions, facts: JobFacts) -> tuple[tuple[Scenario, ...], tuple[Skipped, ...]]:
    """The plan again, with the numbers of the reference run; a scenario may turn out to be impossible only now."""
    if options.seed is not None and options.budget_s is not None:
        at_most = 1 + int(options.budget_s / MIN_TRIAL_S)
        return tuple(itertools.islice(random_plan(facts, options.seed), at_most)), ()
    if options.plan is not None:
        return _planned(options, facts)
    scenarios, skipped = standard_plan(facts)
    wanted = options.only or STANDARD_NAMES
    return tuple(s for s in scenarios if s.name in wanted), tuple(s for s in skipped if s.name in wanted)


def _ended_by(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _stage_digests(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    stages = result["stages"].items()
    return {name: {d: s[d] for d in DIGESTS if s.get(d)} for name, s in stages if s.get("params_digest")}


def _digests(result: dict[str, Any]) -> str:
    found = [
        f"{name} params {digests['params_digest'][:12]} samples {digests['sample_digest'][:12]}"
        for name, digests in _stage_digests(result).items()
    ]
    return ", ".join(found) or "no training stage"


def _told(v: Verdict) -> str:
    verdict = "passed" if v.passed else f"FAILED: {v.failed[0]}"
    lost = f", lost steps {', '.join(map(str, v.lost_steps))}" if v.lost_steps else ""
    back = f", recovery {', '.join(f'{s:.1f}' for s in v.recoveries_s)} s" if v.recoveries_s else ""
    return f"{v.scenario}: {verdict} in {v.seconds:.0f} s; fired {v.fired} of {v.faults}{lost}{back}"
