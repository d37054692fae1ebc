"""From the kill of one worker to the first new step: tpupipe and plain Ray, side by side on one faked slice.

    python benchmarks/recovery.py [--repetitions N] [--json]

A v6e 2x4 is faked as two hosts of four chips. Both train the model of ``jobs.stdlib_lm`` with the same batch size and save
interval; in both, rank 1 sends itself SIGKILL right before the same step. They take turns, since a shared machine is noisy;
the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import (
    SLICE,
    BenchmarkError,
    Deadline,
    Work,
    World,
    busy_share,
    last_json,
    run_python,
    say,
    world,
)
from benchmarks.ours import run_job, stage_events, take_inputs

WORK = Work(steps=240, save_every=20, batch_size=64)
KILL_AT_STEP = 230
RESTORED_STEP = 220
ONE_RUN_TIMEOUT_S = 900.0
TOTAL_TIMEOUT_S = 3600.0

# By key of the result: the most it may be.
TARGETS = {"ratio": 0.5, "compiled_anew": 0}

# By name of the part: the event that ends it. Of processes that do a part side by side, the last one counts.
ENDS = {
    "detect": "workers_failed",
    "stop": "group_ended",
    "start": "workers_up",
    "import": "imported",
    "connect": "starting",
    "restore": "restored",
    "compile": "compiling",
    "first_step": "metrics",
}


@dataclass(frozen=True)
class Recovered:
    """One recovery.

    Args:
        seconds: From the kill to the end of the first step after the restore.
        parts_s: What that time went into; sums up to it.
        compiled_anew: Processes that compiled the step again, where known.
    """

    seconds: float
    parts_s: Mapping[str, float]
    compiled_anew: int | None = None


def timeline(events: Sequence[Mapping[str, Any]]) -> Recovered:
    """The recovery in one training stage's events.

    Raises:
        BenchmarkError: There was none, or it did not begin at the expected checkpoint.
    """
    killed_s = next((e["time_s"] for e in events if e["kind"] == "fault"), None)
    if killed_s is None:
        raise BenchmarkError("No worker was killed.")
    after = [e for e in events if e["time_s"] > killed_s]
    first = next((e for e in after if e["kind"] == "metrics"), None)
    if first is None or first["step"] != RESTORED_STEP + 1:
        raise BenchmarkError(f"The first new step was to be {RESTORED_STEP + 1}: {first}.")
    new = [e for e in after if e["time_s"] <= first["time_s"]]
    before, parts = killed_s, {}
    for part, kind in ENDS.items():
        # Parts may overlap (restoring and compiling do): what has ended already costs nothing more.
        ended = max([before, *(e["time_s"] for e in new if e["kind"] == kind)])
        parts[part], before = round(ended - before, 3), ended
    anew = sum(not e["from_cache"] for e in new if e["kind"] == "compiling")
    return Recovered(first["time_s"] - killed_s, parts, anew)


def measure_ours(work: Work, place: World, name: str, timeout_s: float) -> Recovered:
    """A run of the job with the kill as its fault; the times are those of its own events."""
    run_job(work, place, name, timeout_s, "--fault", f"kill-worker@train.step={KILL_AT_STEP},rank=1")
    return timeline(stage_events(place, name))


def measure_peer(work: Work, place: World, rows: str, name: str, timeout_s: float) -> Recovered:
    """Plain Ray on the same slice, with Ray's own restart of the workers."""
    folder = place.base / f"plain-{name}"
    arguments = [work.to_json(), rows, str(folder), place.address, str(KILL_AT_STEP)]
    [output] = run_python([["-m", "benchmarks.peers.plain_jax_trainer", *arguments]], timeout_s=timeout_s)
    told = last_json(output)["recovery"]
    if told["restored_step"] != RESTORED_STEP:
        raise BenchmarkError(f"Plain Ray went on from step {told['restored_step']}, not {RESTORED_STEP}.")
    marks = [told[key] for key in ("killed_s", "loop_s", "restored_s", "first_step_s")]
    parts = zip(("detect_stop_start", "restore", "compile_first_step"), marks, marks[1:], strict=False)
    return Recovered(marks[-1] - marks[0], {name: round(after - before, 3) for name, before, after in parts})


def measure(work: Work, repetitions: int) -> dict[str, Any]:
    """Takes turns; gives the measurement as one JSON value. A ratio below 1 says that tpupipe is faster.

    Raises:
        BenchmarkError: A measurement failed, or there was no time for even one.
    """
    deadline = Deadline(TOTAL_TIMEOUT_S)
    ours: list[Recovered] = []
    peer: list[Recovered] = []
    busy: list[float | None] = []
    with world() as place:
        rows = ""
        for repetition in range(repetitions):
            if ours and deadline.left_s < 2 * ONE_RUN_TIMEOUT_S:
                say(f"{repetition} of {repetitions} repetitions: no time for another")
                break
            busy.append(busy_share())
            name = f"rep-{repetition}"
            ours.append(measure_ours(work, place, name, ONE_RUN_TIMEOUT_S))
            say(f"{name} tpupipe: first new step after {ours[-1].seconds:.1f} s")
            rows = rows or str(take_inputs(work, place, name).parquet)
            peer.append(measure_peer(work, place, rows, name, ONE_RUN_TIMEOUT_S))
            say(f"{name} plain Ray: first new step after {peer[-1].seconds:.1f} s")
    ours_s, peer_s = (statistics.median(one.seconds for one in many) for many in (ours, peer))
    return {
        "ours_s": round(ours_s, 2),
        "peer_s": round(peer_s, 2),
        "ratio": round(ours_s / peer_s, 3),
        "parts": {"ours": _median_parts(ours), "peer": _median_parts(peer)},
        "each": {"ours": [round(r.seconds, 2) for r in ours], "peer": [round(r.seconds, 2) for r in peer]},
        "compiled_anew": max(r.compiled_anew or 0 for r in ours),
        "slice": f"{SLICE.generation} {SLICE.topology}, {SLICE.hosts} hosts, faked",
        "cores": os.cpu_count(),
        "busy_before": [None if share is None else round(share, 2) for share in busy],
    }


def met(result: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the targets are met."""
    return {key: result[key] <= most for key, most in TARGETS.items()}


def _median_parts(taken: Sequence[Recovered]) -> dict[str, float]:
    return {part: round(statistics.median(one.parts_s[part] for one in taken), 2) for part in taken[0].parts_s}


def table(result: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [f"{result['slice']}; from the SIGKILL of one worker to the end of the first new step"]
    for who, name in (("ours", "tpupipe"), ("peer", "plain Ray")):
        each = ", ".join(f"{seconds:.1f}" for seconds in result["each"][who])
        lines.append(f"{name:10}{result[f'{who}_s']:7.1f} s  (each: {each})")
        lines += [f"{'':12}{part:20}{seconds:6.2f} s" for part, seconds in result["parts"][who].items()]
    lines.append(
        f"tpupipe / plain Ray: {result['ratio']:.2f}; processes that compiled again: {result['compiled_anew']}"
    )
    lines.append("")
    for key, most in TARGETS.items():
        verdict = "met" if met(result)[key] else "NOT met"
        lines.append(f"{key:16}{result[key]:>8.3f}   wanted: at most {most}: {verdict}")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        result = measure(WORK, options.repetitions)
    except BenchmarkError as error:
        say(str(error))
        return 1
    result["met"] = met(result)
    sys.stdout.write((json.dumps(result) if options.json else table(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
