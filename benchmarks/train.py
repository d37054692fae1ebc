"""Training speed of tpupipe, of plain Ray and of a bare loop, side by side on one faked slice.

    python benchmarks/train.py [--quick] [--json] [--out FILE]

A v6e 2x4 is faked as two hosts of four chips. The three contenders train the model of ``jobs.stdlib_lm`` on the same
rows, one after the other, and that again: a shared machine is noisy, so ratios are taken within a repetition, and of the fastest interval between two saves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import (
    NOT_QUIET,
    SLICE,
    BenchmarkError,
    Deadline,
    Measured,
    Work,
    World,
    busy_share,
    last_json,
    run_python,
    say,
    world,
)
from benchmarks.ours import Inputs, run_job, stage_events, take_inputs

OURS, PLAIN, BARE = "tpupipe", "plain_ray", "bare_loop"
ONE_RUN_TIMEOUT_S = 120.0
TOTAL_TIMEOUT_S = {"quick": 115.0, "full": 350.0}
STOP_MARGIN_S = 15.0
QUIET_SHARE = 0.2
"""With more of the cores in use by others, the numbers say more about them than about the contenders."""


def measure_ours(work: Work, place: World, name: str, timeout_s: float) -> tuple[Measured, dict[str, Any]]:
    """Runs the job as a user does; takes the times from the run's own events."""
    result = run_job(work, place, name, timeout_s)
    events = stage_events(place, name)

    def at(kind: str, step: int) -> dict[str, Any]:
        return next(e for e in events if e["kind"] == kind and e["step"] == step)

    saves = [at("save", step) for step in range(work.save_every, work.steps + 1, work.save_every)]
    began = next(e for e in events if e["kind"] == "train_start")["time_s"]
    measured = Measured(
        intervals_s=[after["time_s"] - before["time_s"] for before, after in itertools.pairwise(saves)],
        blocked_s=sum(e["blocked_s"] for e in saves[1:]),
        # The reservation is part of plain Ray's fit(), so it counts here too.
        startup_s=at("metrics", 1)["time_s"] - began + result["seconds"]["waiting"],
        loss=at("metrics", work.steps)["metrics"]["loss"],
    )
    return measured, result


def measure_plain(work: Work, place: World, inputs: Inputs, name: str, timeout_s: float) -> Measured:
    """Plain Ray, on the same slice."""
    folder = place.base / f"plain-{name}"
    arguments = [work.to_json(), str(inputs.parquet), str(folder), place.address]
    [output] = run_python([["-m", "benchmarks.peers.plain_jax_trainer", *arguments]], timeout_s=timeout_s)
    return Measured(**last_json(output))


def measure_bare(work: Work, inputs: Inputs, timeout_s: float) -> Measured:
    """The loop with nothing around it: one process per host, with the slice's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    commands = [
        ["-m", "benchmarks.peers.bare_loop", work.to_json(), str(inputs.batches), coordinator, str(rank), "2"]
        for rank in range(SLICE.hosts)
    ]
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={SLICE.devices_per_host}",
        "OMP_NUM_THREADS": "1",  # as Ray gives its workers
    }
    outputs = run_python(commands, timeout_s=timeout_s, variables=[variables] * SLICE.hosts)
    return Measured(**last_json(outputs[0]))


@dataclass(frozen=True)
class Repetition:
    """All contenders, once.

    Args:
        busy_before: Share of the cores that were in use just before it, by others; ``None`` if unknown.
        measured: By contender.
    """

    busy_before: float | None
    measured: Mapping[str, Measured]


def measure(work: Work, repetitions: int, total_s: float) -> list[Repetition]:
    """Takes turns: tpupipe, plain Ray, bare loop, and again, until done or out of time.

    Raises:
        BenchmarkError: Not even one repetition could be taken.
    """
    deadline = Deadline(total_s)
    taken: list[Repetition] = []
    with world() as place:
        inputs: Inputs | None = None
        longest_s = 0.0
        for repetition in range(repetitions):
            if taken and deadline.left_s < longest_s + STOP_MARGIN_S:
                say(f"{repetition} of {repetitions} repetitions: no time for another")
                break
            began, busy = time.monotonic(), busy_share()

            def bound() -> float:
                return min(ONE_RUN_TIMEOUT_S, max(5.0, deadline.left_s - STOP_MARGIN_S))

            name = f"rep-{repetition}"
            ours, _ = measure_ours(work, place, name, bound())
            _tell(name, OURS, work, ours)
            inputs = inputs or take_inputs(work, place, name)
            plain = measure_plain(work, place, inputs, name, bound())
            _tell(name, PLAIN, work, plain)
            bare = measure_bare(work, inputs, bound())
            _tell(name, BARE, work, bare)
            taken.append(Repetition(busy, {OURS: ours, PLAIN: plain, BARE: bare}))
            longest_s = max(longest_s, time.monotonic() - began)
    return taken


def _tell(name: str, who: str, work: Work, measured: Measured) -> None:
    rates = f"{work.rate(measured):.1f} rows/s (best interval {work.best_rate(measured):.1f})"
    say(f"{name} {who}: {rates}, first step after {measured.startup_s:.1f} s, loss {measured.loss:.4f}")


def summary(work: Work, repetitions: Sequence[Repetition]) -> dict[str, Any]:
    """The measurement as one JSON value. Ratios are of rates: above 1, tpupipe is faster."""
    taken = [repetition.measured for repetition in repetitions]
    rates = {who: [work.rate(one[who]) for one in taken] for who in (OURS, PLAIN, BARE)}
    best = {who: max(work.best_rate(one[who]) for one in taken) for who in rates}

    def ratios(other: str) -> dict[str, Any]:
        each = [ours / theirs for ours, theirs in zip(rates[OURS], rates[other], strict=True)]
        return {
            "median": round(statistics.median(each), 3),
            "best_interval": round(best[OURS] / best[other], 3),
            "each": [round(ratio, 3) for ratio in each],
        }

    return {
        "slice": f"{SLICE.generation} {SLICE.topology}, {SLICE.hosts} hosts, faked",
        "steps": work.steps,
        "save_every": work.save_every,
        "batch_size": work.batch_size,
        "repetitions": len(taken),
        "cores": os.cpu_count(),
        "busy_before": [None if r.busy_before is None else round(r.busy_before, 2) for r in repetitions],
        "quiet": all(r.busy_before is not None and r.busy_before <= QUIET_SHARE for r in repetitions),
        "rows_per_s": {
            who: {
                "median": round(statistics.median(each), 1),
                "best_interval": round(best[who], 1),
                "each": [round(rate, 1) for rate in each],
            }
            for who, each in rates.items()
        },
        "vs_plain_ray": ratios(PLAIN),
        "vs_bare": ratios(BARE),
        "saving_share": {
            who: round(statistics.median(one[who].blocked_s / one[who].seconds for one in taken), 4)
            for who in (OURS, PLAIN)
        },
        "startup_s": {
            who: round(statistics.median(one[who].startup_s for one in taken), 2) for who in (OURS, PLAIN, BARE)
        },
        "last_loss": {who: round(taken[-1][who].loss, 4) for who in (OURS, PLAIN, BARE)},
        # tpupipe and the bare loop are fed the same rows in the same order, so they must compute the same.
        "same_loss_as_bare": all(bool(np.isclose(one[OURS].loss, one[BARE].loss, rtol=1e-4)) for one in taken),
    }


def table(result: Mapping[str, Any]) -> str:
    """The same for people."""
    work = f"{result['steps']} steps of {result['batch_size']} rows, a save every {result['save_every']}"
    lines = [
        f"{result['slice']}; {work}; {result['repetitions']} repetition(s)",
        "",
        f"{'':12}{'rows/s median':>15}{'best interval':>15}{'saving share':>14}{'first step after':>18}",
    ]
    for who, rate in result["rows_per_s"].items():
        share = result["saving_share"].get(who)
        blocked = "-" if share is None else f"{share:.1%}"
        lines.append(
            f"{who:12}{rate['median']:>15.1f}{rate['best_interval']:>15.1f}{blocked:>14}{result['startup_s'][who]:>16.1f} s"
        )
    lines.append("")
    for key, other in (("vs_plain_ray", "plain Ray"), ("vs_bare", "the bare loop")):
        ratio = result[key]
        each = ", ".join(f"{value:.2f}" for value in ratio["each"])
        lines.append(
            f"tpupipe / {other}: median {ratio['median']:.2f} ({each}), best interval {ratio['best_interval']:.2f}"
        )
    if not result["quiet"]:
        lines.append(NOT_QUIET)
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--quick", action="store_true", help="one short repetition, within two minutes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="a multiple of --save-every, at least twice that")
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    work = Work(steps=options.steps, save_every=options.save_every)
    repetitions = options.repetitions
    if options.quick:
        work, repetitions = replace(work, steps=40, save_every=10), 1
    if work.steps % work.save_every or work.steps < 2 * work.save_every or repetitions < 1:
        parser.error("--steps must be a multiple of --save-every, at least twice that; --repetitions at least 1")
    try:
        result = summary(work, measure(work, repetitions, TOTAL_TIMEOUT_S["quick" if options.quick else "full"]))
    except BenchmarkError as error:
        say(str(error))
        return 1
    sys.stdout.write((json.dumps(result) if options.json else table(result)) + "\n")
    if not result["same_loss_as_bare"]:
        say("tpupipe and the bare loop ended with different losses: they did not do the same work")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
