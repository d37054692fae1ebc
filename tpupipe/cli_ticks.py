"""What the command line says of incremental runs: which ticks to run, and how they ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tpupipe.config import Config
from tpupipe.errors import TpupipeError, UsageError
from tpupipe.run import RunOptions, RunResult
from tpupipe.ticks import parse_every, parse_range, parse_tick

AsOf = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Incremental: the tick, 2026-11-30T02:00 (UTC), not in the future. Default: now.",
    ),
]
Backfill = Annotated[
    str | None,
    typer.Option("--backfill", metavar="FROM..TO", help="Incremental: run the ticks that are missing, in order."),
]
EveryOption = Annotated[
    str | None,
    typer.Option("--every", metavar="INTERVAL", help="With --backfill: 15m, 1h, 1d. Default: schedule.every."),
]
Reprocess = Annotated[
    bool,
    typer.Option(
        "--reprocess",
        help="Incremental: a new generation of partitions, from all inputs. The same again goes on with the one it began.",
    ),
]


@dataclass(frozen=True)
class TickOptions:
    """What was typed about ticks.

    Args:
        as_of: The tick.
        backfill: ``FROM..TO``.
        every: Interval of the backfill.
        reprocess: Make a new generation.
    """

    as_of: str | None = None
    backfill: str | None = None
    every: str | None = None
    reprocess: bool = False

    def of_one(self, options: RunOptions) -> RunOptions:
        """The options of a run of one tick.

        Raises:
            UsageError: They do not go together.
        """
        if self.every is not None and self.backfill is None:
            raise UsageError("--every is for --backfill.", hint="schedule.every sets the interval of the ticks.")
        if self.as_of is not None and self.backfill is not None:
            raise UsageError("--as-of names one tick, --backfill a range; give one of them.")
        return replace(options, as_of=None if self.as_of is None else parse_tick(self.as_of), reprocess=self.reprocess)


def run_backfill(
    ticks: TickOptions, config: Config, options: RunOptions, run_one: Callable[[RunOptions], RunResult]
) -> list[RunResult]:
    """Runs the ticks of a range in order; those that are complete cost a look. The first failure of one of them ends it.

    Earlier ticks that fail are tried once, and told of when the range is done.

    Args:
        ticks: What was typed.
        config: The configuration.
        options: What is asked of each.
        run_one: Runs one tick.

    Raises:
        TpupipeError: Of the tick that failed; ``data["report"]`` has the results until then.
    """
    every = parse_every(ticks.every or config.schedule.every)
    if config.mode != "incremental":
        raise UsageError("--backfill is for mode: incremental, and it is full.", hint="--set mode=incremental")
    results: list[RunResult] = []
    before: TpupipeError | None = None
    left: frozenset[str] = options.left
    for number, tick in enumerate(parse_range(ticks.backfill or "", every, datetime.now(UTC))):
        # One new generation for all of them: it is begun for the first.
        asked = replace(options, as_of=tick, backfilled=True, reprocess=options.reprocess and number == 0, left=left)
        try:
            results.append(run_one(asked))
        except TpupipeError as error:
            ended = [error.data.pop("result", None), error.data.pop("at_hand", None)]
            results += [result for result in ended if isinstance(result, RunResult)]
            if "earlier" not in error.data:
                error.data["report"] = {"status": "failed", **report(results)}
                raise
            left |= set(error.data["earlier"])
            before = before or error
    if before is not None:
        before.data["report"] = {"status": "failed", **report(results)}
        raise before
    return results


def report(results: list[RunResult]) -> dict[str, object]:
    """What ``--json`` prints of a backfill."""
    return {"ticks": [asdict(result) for result in results]}


def print_backfill(results: list[RunResult], screen: Console, *, as_json: bool) -> None:
    """One line for each tick, or one JSON object."""
    if as_json:
        typer.echo(json.dumps({"status": "done", **report(results)}))
        return
    table = Table(title="backfill", title_justify="left")
    for heading in ("tick", "status", "rows out", "run"):
        table.add_column(heading)
    for result in results:
        rows = ", ".join(f"{name} {stage.get('rows_out', 0)}" for name, stage in result.stages.items())
        table.add_row(result.tick, result.status, rows, result.run_uri)
    screen.print(table)
