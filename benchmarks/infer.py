"""Batch inference of tpupipe, of Ray Data and of a bare loop over rows of different lengths, side by side.

    python benchmarks/infer.py [--json] [--parts speed,resume,ray-resume]

A v6e 2x4 is faked as two hosts of four devices. All contenders run the encoder of ``benchmarks.encoder`` over the same
rows on two workers of four devices each, and the vectors they give are compared row by row.

Rows/s is throughput without start-up, by one rule for all: all rows, over the time from "compiled" (the mean of the two
workers' times) to the last output written (bare loop: in memory). Reading, packing, the model, writing, the end where one
worker waits for the other are all in it. Starting processes and compiling are reported beside it.

Killed runs: the driver is killed with SIGKILL when 90 % of the units are committed (Ray Data, which commits by its own
rule: when 90 % of the rows came out of the model), and started again. Their time is that of the whole command, from
the start of its process to its end, with all start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import NOT_QUIET, SLICE, BenchmarkError, Deadline, busy_share, say, world
from benchmarks.contenders import Contenders
from benchmarks.rows import Encoded, RowsWork, read_vectors, require_each_once, require_same

OURS, PADDED, BUCKETED, PACKED, BARE = "tpupipe", "ray_padded", "ray_bucketed", "ray_packed", "bare_loop"
SPEED, RESUME, RAY_RESUME = "speed", "resume", "ray-resume"
PARTS = (SPEED, RESUME, RAY_RESUME)
KILLED_AT = 0.9
TOTAL_TIMEOUT_S = {SPEED: 600.0, RESUME: 600.0, RAY_RESUME: 900.0}
STOP_MARGIN_S = 10.0
QUIET_SHARE = 0.2
"""With more of the cores in use by others, the numbers say more about them than about the contenders."""

TARGETS = {
    "vs_padded": (3.0, "at least"),
    "vs_same_buckets": (1.1, "at least"),
    "vs_bare": (0.9, "at least"),
    "padding": (0.12, "at most"),
    "resume_share": (0.2, "at most"),
}


# -- speed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repetition:
    """All contenders, once.

    Args:
        busy_before: Share of the cores in use by others just before it; ``None`` if unknown.
        measured: By contender; the padded and the packed one only in the first repetition.
        differences: Largest difference of the vectors to tpupipe's, by contender.
        stage: The result of tpupipe's stage.
    """

    busy_before: float | None
    measured: Mapping[str, Encoded]
    differences: Mapping[str, float]
    stage: Mapping[str, Any]


def measure_speed(work: RowsWork, repetitions: int) -> list[Repetition]:
    """Takes turns, until done or out of time.

    Raises:
        BenchmarkError: Not even one repetition could be taken, or results differ.
    """
    deadline = Deadline(TOTAL_TIMEOUT_S[SPEED])
    taken: list[Repetition] = []
    with world() as place:
        contenders = Contenders(work, place)
        longest_s = 0.0
        for number in range(repetitions):
            if taken and deadline.left_s < longest_s + STOP_MARGIN_S:
                say(f"{number} of {repetitions} repetitions: no time for another")
                break
            began = time.monotonic()
            taken.append(_take(contenders, number, deadline))
            longest_s = max(longest_s, time.monotonic() - began)
    return taken


def _take(contenders: Contenders, number: int, deadline: Deadline) -> Repetition:
    work, busy = contenders.work, busy_share()
    names = {who: f"{who.replace('_', '-')}-{number}" for who in (BARE, OURS, BUCKETED, PACKED, PADDED)}
    measured = {BARE: contenders.bare(names[BARE], _bound(deadline))}
    _tell(BARE, work, measured[BARE])
    measured[OURS], stage = contenders.ours(names[OURS], _bound(deadline))
    _tell(OURS, work, measured[OURS])
    measured[BUCKETED] = contenders.bucketed(names[BUCKETED], _bound(deadline))
    _tell(BUCKETED, work, measured[BUCKETED])
    if not number:
        measured[PACKED] = contenders.packed(names[PACKED], _bound(deadline))
        _tell(PACKED, work, measured[PACKED])
        measured[PADDED] = contenders.padded(names[PADDED], _bound(deadline))
        _tell(PADDED, work, measured[PADDED])
    vectors = {}
    for who in measured:
        folder = contenders.our_output(names[who]) if who == OURS else contenders.folder(names[who]) / "out"
        ids, vectors[who] = read_vectors(folder)
        require_each_once(who, ids, work.rows)
    differences = {who: require_same(OURS, vectors[OURS], who, vectors[who]) for who in measured if who != OURS}
    return Repetition(busy, measured, differences, stage)


def _bound(deadline: Deadline) -> float:
    return max(5.0, deadline.left_s - STOP_MARGIN_S)


def _tell(who: str, work: RowsWork, measured: Encoded) -> None:
    say(
        f"{who}: {work.rows / measured.seconds:.1f} rows/s in {measured.seconds:.1f} s after {measured.startup_s:.1f} s "
        f"of start-up ({measured.compile_s:.1f} s compiling), padding {measured.padding:.1%}"
    )


def speed_summary(work: RowsWork, taken: Sequence[Repetition]) -> dict[str, Any]:
    """The first part as JSON. Ratios are of rates within a repetition, their median: above 1, tpupipe is faster."""
    each = {
        who: [r.measured[who] for r in taken if who in r.measured] for who in (OURS, PADDED, BUCKETED, PACKED, BARE)
    }

    def ratios(other: str) -> list[float]:
        pairs = [(r.measured[OURS], r.measured[other]) for r in taken if other in r.measured]
        return [round(theirs.seconds / ours.seconds, 3) for ours, theirs in pairs]

    metrics = taken[-1].stage["metrics"]
    versus = {"vs_padded": PADDED, "vs_same_buckets": BUCKETED, "vs_bare": BARE, "vs_packed": PACKED}
    medians = {
        name: {who: round(statistics.median(getattr(m, name) for m in ms), 3) for who, ms in each.items()}
        for name in ("seconds", "startup_s", "compile_s", "total_s", "padding")
    }
    return {
        **{key: statistics.median(ratios(who)) for key, who in versus.items()},
        "padding": metrics["padding_share"],
        "compilations": int(metrics["compilations"]),
        "buckets": int(metrics["buckets"]),
        "ratios": {key: ratios(who) for key, who in versus.items()},
        "rows": work.rows,
        "rows_per_s": {who: round(work.rows / seconds, 1) for who, seconds in medians["seconds"].items()},
        **{name: medians[name] for name in ("startup_s", "compile_s", "total_s")},
        "padding_of": medians["padding"],
        "largest_difference": {
            who: max(r.differences.get(who, 0.0) for r in taken) for who in (PADDED, BUCKETED, PACKED, BARE)
        },
        "repetitions": len(taken),
        "busy_before": [None if r.busy_before is None else round(r.busy_before, 2) for r in taken],
        "quiet": all(r.busy_before is not None and r.busy_before <= QUIET_SHARE for r in taken),
    }


# -- killed runs ----------------------------------------------------------------------------


def measure_resume(work: RowsWork) -> dict[str, Any]:
    """A whole run of tpupipe, one killed at 90 % of the units, and the run that ends that one's work."""
    deadline = Deadline(TOTAL_TIMEOUT_S[RESUME])
    with world() as place:
        busy = busy_share()
        contenders = Contenders(work, place)
        full, _ = contenders.ours("full", _bound(deadline))
        say(f"{OURS}: whole run {full.total_s:.1f} s, start-up {full.startup_s:.1f} s of it")
        committed = contenders.kill_ours("killed", KILLED_AT, _bound(deadline))
        say(f"{OURS}: killed with {committed} of {work.units} units committed")
        resumed, stage = contenders.ours("killed", _bound(deadline))
        say(f"{OURS}: resumed run {resumed.total_s:.1f} s, start-up {resumed.startup_s:.1f} s of it")
        if not KILLED_AT * work.units <= (stage["resumed_from"] or 0) <= work.units:
            raise BenchmarkError(f"The second run began with {stage['resumed_from']} of {work.units} units done.")
        (ids, vectors), (_, others) = (read_vectors(contenders.our_output(name)) for name in ("killed", "full"))
        require_each_once(f"{OURS}, resumed", ids, work.rows)
        require_same(f"{OURS}, resumed,", vectors, "an undisturbed run", others)
    return {
        "resume_share": round(resumed.total_s / full.total_s, 3),
        "resume": {
            "rows": work.rows,
            "units": work.units,
            "units_kept": stage["resumed_from"],
            "full_s": round(full.total_s, 2),
            "resumed_s": round(resumed.total_s, 2),
            "full_startup_s": round(full.startup_s, 2),
            "resumed_startup_s": round(resumed.startup_s, 2),
            "busy_before": busy and round(busy, 2),
        },
    }


def measure_ray_resume(work: RowsWork) -> dict[str, Any]:
    """The same of Ray Data with buckets by hand and its checkpoint by row id."""
    deadline = Deadline(TOTAL_TIMEOUT_S[RAY_RESUME])
    with world() as place:
        busy = busy_share()
        contenders = Contenders(work, place)
        full = contenders.bucketed("full", _bound(deadline), place.base / "checkpoint-full")
        say(f"{BUCKETED}: whole run {full.total_s:.1f} s, start-up {full.startup_s:.1f} s of it")
        checkpoint = place.base / "checkpoint"
        kept = contenders.kill_bucketed("killed", KILLED_AT, _bound(deadline), checkpoint)
        say(f"{BUCKETED}: killed with {kept} of {work.rows} rows in its checkpoint")
        resumed = contenders.bucketed("killed", _bound(deadline), checkpoint)
        say(f"{BUCKETED}: resumed run {resumed.total_s:.1f} s")
        ids, _ = read_vectors(contenders.folder("killed") / "out")
    return {
        "ray_resume_share": round(resumed.total_s / full.total_s, 3),
        "ray_resume": {
            "rows": work.rows,
            "rows_kept": kept,
            "full_s": round(full.total_s, 2),
            "resumed_s": round(resumed.total_s, 2),
            "rows_written": len(ids),
            "rows_missing": int(work.rows - len(np.unique(ids))),
            "busy_before": busy and round(busy, 2),
        },
    }


# -- telling --------------------------------------------------------------------------------


def met(result: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the targets that were measured are met."""
    found = {
        key: result[key] >= bound if how == "at least" else result[key] <= bound
        for key, (bound, how) in TARGETS.items()
        if key in result
    }
    return found | ({"compilations": result["compilations"] == result["buckets"]} if "buckets" in result else {})


def table(result: Mapping[str, Any]) -> str:
    """The measurement for people."""
    lines = [f"{result['slice']}; {result['cores']} cores"]
    if "rows_per_s" in result:
        lines += [
            f"{result['rows']} rows, {result['repetitions']} repetition(s)",
            "",
            f"{'':14}{'rows/s':>9}{'padding':>9}{'start-up':>11}{'compiling':>11}{'whole':>9}",
        ]
        lines += [
            f"{who:14}{rate:>9.1f}{result['padding_of'][who]:>9.1%}{result['startup_s'][who]:>9.1f} s"
            f"{result['compile_s'][who]:>9.1f} s{result['total_s'][who]:>7.1f} s"
            for who, rate in result["rows_per_s"].items()
        ]
        largest = max(result["largest_difference"].values())
        lines += ["", f"{result['compilations']} compilations, {result['buckets']} buckets"]
        lines += [f"the same vectors from all: numbers differ by {largest:.1e} at most"]
    if "resume" in result:
        r = result["resume"]
        lines.append(
            f"tpupipe killed with {r['units_kept']} of {r['units']} units: second run {r['resumed_s']} s, whole run {r['full_s']} s"
        )
    if "ray_resume" in result:
        r = result["ray_resume"]
        lines.append(
            f"Ray Data killed at 90 % with {r['rows_kept']} of {r['rows']} rows in its checkpoint: second run "
            f"{r['resumed_s']} s, whole run {r['full_s']} s (share {result['ray_resume_share']:.2f}); "
            f"{r['rows_written']} rows written in all"
        )
    lines.append("")
    for key, (bound, how) in TARGETS.items():
        if key in result:
            verdict = "met" if met(result)[key] else "NOT met"
            lines.append(f"{key:16}{result[key]:>8.3f}   wanted: {how} {bound}: {verdict}")
    if not result.get("quiet", True):
        lines.append(NOT_QUIET)
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help=f"some of {','.join(PARTS)}; ten minutes at most for the first two, fifteen for the last",
    )
    parser.add_argument("--repetitions", type=int, default=3, help="of the first part; fewer when time is short")
    parser.add_argument("--units", type=int, default=6, help="input files of 1024 rows, first part")
    parser.add_argument(
        "--resume-units", type=int, default=80, help="the same where runs are killed; start-up is a part"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(map(repr, unknown))} is not one of {', '.join(PARTS)}")
    if options.repetitions < 1 or options.units < 2 or options.resume_units < 10:
        parser.error("--repetitions must be at least 1, --units at least 2, --resume-units at least 10")
    work = RowsWork(units=options.units)
    longer = replace(work, units=options.resume_units)
    result: dict[str, Any] = {
        "slice": f"{SLICE.generation} {SLICE.topology}, {SLICE.hosts} hosts, faked",
        "cores": os.cpu_count(),
    }
    try:
        if SPEED in parts:
            result |= speed_summary(work, measure_speed(work, options.repetitions))
        if RESUME in parts:
            result |= measure_resume(longer)
        if RAY_RESUME in parts:
            result |= measure_ray_resume(longer)
    except BenchmarkError as error:
        say(str(error))
        return 1
    result["met"] = met(result)
    sys.stdout.write((json.dumps(result) if options.json else table(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
