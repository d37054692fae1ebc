"""The account of a small run, from a result and events."""

from __future__ import annotations

from typing import Any

from tpupipe.dry_run.account import account, projection, run_findings
from tpupipe.preflight.findings import Status
from tpupipe.preflight.plan import StageEstimate

KILL = "kill-worker@train.step=5,rank=1,stage=t"
RESULT: dict[str, Any] = {
    "seconds": {"working": 3.0},
    "stages": {
        "p": {"status": "done", "rows_in": 4, "rows_out": 40, "metrics": {}},
        "t": {"status": "done", "rows_in": 96, "rows_out": 96, "metrics": {"loss": 1.0}},
        "i": {
            "status": "done",
            "rows_in": 7,
            "rows_out": 7,
            "metrics": {"padding_share": 0.25, "compilations": 3.0, "buckets": 3.0},
        },
    },
}


def events(*, fired: bool = True, restored: bool = True) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"kind": "train_start", "stage": "t", "step": 0, "time_s": 0.0},
        {"kind": "save", "stage": "t", "step": 4, "blocked_s": 0.5, "time_s": 1.0},
        {"kind": "checkpoint", "stage": "t", "step": 4, "seconds": 2.0, "size_bytes": 1000, "time_s": 3.0},
        {"kind": "metrics", "stage": "t", "step": 5, "time_s": 3.5},
    ]
    if fired:
        found.append({"kind": "fault", "text": KILL, "stage": "t", "step": "5", "point": "train.step", "time_s": 4.0})
    if restored:
        found += [
            {"kind": "train_start", "stage": "t", "step": 4, "time_s": 5.0},
            {"kind": "restored", "stage": "t", "step": 4, "seconds": 0.7, "time_s": 6.0},
            {"kind": "recovered", "stage": "t", "seconds": 3.25, "time_s": 7.0},
        ]
    return found


def test_the_account_counts_saves_restores_recovery_and_padding():
    found = account(RESULT, events(), (KILL,))
    assert found.rows == {"p": (4, 40), "t": (96, 96), "i": (7, 7)}
    assert (found.saves, found.save_s, found.save_blocked_s, found.save_bytes) == (1, 2.0, 0.5, 1000)
    assert (found.restore_s, found.recovery_s, found.lost_steps) == (0.7, (3.25,), (1,))
    assert (found.padding, found.compilations) == ({"i": 0.25}, {"i": 3})
    assert found.fired == 1
    assert [f.status for f in run_findings(found, "", trained=True)] == [Status.OK] * 3


def test_a_failure_that_never_came_proves_nothing():
    found = account(RESULT, events(fired=False, restored=False), (KILL,))
    failed = [f for f in run_findings(found, "", trained=True) if f.status is Status.FAILURE]
    assert [f.check for f in failed] == ["run.killed"]
    assert "0 fired" in failed[0].message


def test_a_run_that_restored_nothing_is_to_be_fixed():
    found = account(RESULT, events(restored=False), (KILL,))
    assert [f.check for f in run_findings(found, "", trained=True) if f.status is Status.FAILURE] == ["run.restored"]
    assert not [f for f in run_findings(found, "", trained=False) if f.status is Status.FAILURE]


def test_a_failed_run_is_the_first_thing_to_fix():
    [failed] = run_findings(None, "step of stage 't' raised", trained=True)
    assert (failed.check, failed.status) == ("run.done", Status.FAILURE)
    assert "step of stage 't' raised" in failed.message


def test_the_projection_adds_up_stages_and_has_no_price_if_one_has_none():
    priced = StageEstimate("t", "v6e:4x4", 64, 100, (1.0, 5.0), (40.0, 200.0))
    other = StageEstimate("i", "v6e:4x4", 64, 10, (0.5, 2.5), None)
    both = projection([priced, priced], [], None, 0.2)
    assert both is not None
    assert (both.hours, both.usd) == ((2.0, 10.0), (80.0, 400.0))
    mixed = projection([priced, other], [], None, 0.2)
    assert mixed is not None
    assert (mixed.hours, mixed.usd) == ((1.5, 7.5), None)
    assert projection([], [], None, 0.2) is None
