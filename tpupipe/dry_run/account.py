"""What a dry run measured, and what it says of the full run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpupipe.drill.history import AttemptHistory, Event, lost_steps, never_fired, recoveries_s
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.plan import Row, StageEstimate


@dataclass(frozen=True)
class Account:
    """What the small run measured.

    Args:
        rows: Rows in and out, by stage.
        saves: Checkpoints that were committed.
        save_s: Median seconds from a save's beginning until it was durable; ``None`` without a save.
        save_blocked_s: Median seconds that a save held the loop up.
        save_bytes: Size of the last checkpoint.
        restore_s: Seconds of the longest restore; ``None`` if nothing was restored.
        recovery_s: Seconds from a failure to the first new work, each.
        lost_steps: Steps done again after each failure.
        padding: Share of padding in what inference fed, by stage.
        compilations: Programs compiled in inference, by stage.
        faults: Forced failures, as they were given.
        fired: How many of them fired.
        seconds: This run's, by kind.
    """

    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    saves: int = 0
    save_s: float | None = None
    save_blocked_s: float | None = None
    save_bytes: int = 0
    restore_s: float | None = None
    recovery_s: tuple[float, ...] = ()
    lost_steps: tuple[int, ...] = ()
    padding: Mapping[str, float] = field(default_factory=dict)
    compilations: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    fired: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


def account(result: Mapping[str, Any], events: Sequence[Event], faults: Sequence[str]) -> Account:
    """What the events and the result of the small run say.

    Args:
        result: As ``--json`` prints it.
        events: All of the run's.
        faults: What it was given.
    """
    history = AttemptHistory(tuple(faults), tuple(events), killed=False, ended_s=0.0)
    saves = [e for e in events if e["kind"] == "checkpoint"]
    blocked = [float(e["blocked_s"]) for e in events if e["kind"] == "save"]
    restores = [float(e["seconds"]) for e in events if e["kind"] == "restored" and "seconds" in e]
    stages = {name: stage for name, stage in result["stages"].items() if stage.get("status") == "done"}
    metrics = {name: stage.get("metrics", {}) for name, stage in stages.items()}
    return Account(
        rows={name: (int(stage["rows_in"]), int(stage["rows_out"])) for name, stage in stages.items()},
        saves=len(saves),
        save_s=statistics.median(float(e["seconds"]) for e in saves) if saves else None,
        save_blocked_s=statistics.median(blocked) if blocked else None,
        save_bytes=int(saves[-1]["size_bytes"]) if saves else 0,
        restore_s=max(restores) if restores else None,
        recovery_s=tuple(round(seconds, 2) for seconds in recoveries_s([history])),
        lost_steps=tuple(step for name in stages for step in lost_steps([history], name)),
        padding={name: m["padding_share"] for name, m in metrics.items() if "padding_share" in m},
        compilations={name: int(m["compilations"]) for name, m in metrics.items() if "compilations" in m},
        faults=tuple(faults),
        fired=len(faults) - len(never_fired(history)),
        seconds=result.get("seconds", {}),
    )


def run_findings(account: Account | None, error: str, trained: bool) -> list[Finding]:
    """What the small run says of the job.

    Args:
        account: What it measured; ``None`` if it did not end well.
        error: Why.
        trained: Whether the job has a training stage that the failure was forced in.
    """
    if account is None:
        hint = "Run it by hand with the options above; --fault leaves the failure out or puts it elsewhere."
        return [Finding("run.done", Status.FAILURE, f"The small run failed: {error}", hint)]
    rows = ", ".join(f"{name} {rows_in} in, {rows_out} out" for name, (rows_in, rows_out) in account.rows.items())
    found = [Finding("run.done", Status.OK, f"The small run is done: {rows}.", facts=asdict(account))]
    if account.fired < len(account.faults):
        found.append(
            Finding(
                "run.killed",
                Status.FAILURE,
                f"Of {len(account.faults)} forced failures {account.fired} fired, so surviving one was not shown.",
                "Give the dry run more steps: dry_run.stages.<name>.steps.",
            )
        )
        return found
    recovery = ", ".join(f"{seconds:.1f}" for seconds in account.recovery_s) or "not measured"
    found.append(Finding("run.killed", Status.OK, f"A worker was killed and the run went on; recovery {recovery} s."))
    if not trained:
        return found
    if account.restore_s is None:
        hint = "A checkpoint must come before the failure: dry_run.stages.<name>.checkpoint.steps."
        found.append(Finding("run.restored", Status.FAILURE, "Nothing was restored after the failure.", hint))
    else:
        redone = ", ".join(map(str, account.lost_steps))
        text = f"Restored in {account.restore_s:.2f} s; steps done again: {redone or 'none'}."
        found.append(Finding("run.restored", Status.OK, text))
    return found


@dataclass(frozen=True)
class Projection:
    """What the full run may take and cost.

    Args:
        stages: By stage with a compiled program; least and most.
        hours: Of the slice, least and most.
        usd: The same in US dollars; ``None`` without a price.
        assumptions: What it rests on.
    """

    stages: tuple[StageEstimate, ...]
    hours: tuple[float, float]
    usd: tuple[float, float] | None
    assumptions: tuple[str, ...]


def projection(
    estimates: Sequence[StageEstimate], rows: Sequence[Row], account: Account | None, efficiency: float
) -> Projection | None:
    """Adds up the stages' estimates; ``None`` where nothing was compiled.

    Args:
        estimates: One for each stage, for the production slice.
        rows: The compiled programs, for their prices.
        account: For the cost of saving, as measured here.
        efficiency: Share of the roofline that the dear end assumes.
    """
    if not estimates:
        return None
    hours = (sum(e.hours[0] for e in estimates), sum(e.hours[1] for e in estimates))
    priced = [e.usd for e in estimates if e.usd is not None]
    usd = (sum(u[0] for u in priced), sum(u[1] for u in priced)) if len(priced) == len(estimates) else None
    assumptions = [
        f"from the roofline itself to {efficiency:.0%} of it: a bound, not a prediction",
        "reading, preprocessing, start-up and queueing are not in it",
    ]
    sources = sorted({row.price.source for row in rows if row.price is not None})
    assumptions += [f"price: {source}" for source in sources]
    if account is not None and account.save_blocked_s is not None:
        assumptions.append(f"saves held the small run up {account.save_blocked_s:.2f} s each; they are not in it")
    return Projection(tuple(estimates), hours, usd, tuple(assumptions))
