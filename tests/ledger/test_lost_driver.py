"""What a driver that died cost is told by the next one, from the events that the dead one kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpupipe.errors import StoreError
from tpupipe.ledger.events import EventLog, read_events
from tpupipe.ledger.lost_driver import LostDriver, lost_in, tell_lost_driver
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Standing, acquire
from tpupipe.store.objects import Store, open_store
from tpupipe.store.owner import Owner

OWNER = Owner("tpu-7", 41, "boot", 7, 5.0, "python -m job")
PATHS = RunPaths("job", "a")
START = {"kind": "train_start", "time_s": 110.0, "stage": "lm", "step": 20}
AT_33 = {"kind": "at", "time_s": 130.0, "stage": "lm", "step": 33, "next": 40}
UNIT = {"kind": "unit", "time_s": 105.0, "stage": "tokens", "unit": "u"}
LOST_EARLIER = {"kind": "driver_lost", "time_s": 101.0, "stage": "lm", "step": 38, "since_s": 70.0, "attempt": 1}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in a folder."""
    return open_store(f"file://{tmp_path}/runs")


def standing(*, released: bool = False, epoch: int = 2) -> Standing:
    """A lease with its last beat at 128 s."""
    return Standing(epoch, OWNER, 3, 500.0, 128.0, released)


@pytest.mark.parametrize(
    ("events", "stage", "step", "heard_s", "since_s"),
    [
        ([], "", None, 128.0, 128.0),
        ([UNIT], "tokens", None, 128.0, 128.0),
        ([UNIT, {"kind": "stage_done", "time_s": 106.0, "stage": "tokens"}], "", None, 128.0, 128.0),
        ([UNIT, START], "lm", 20, 128.0, 128.0),
        ([START, AT_33], "lm", 33, 130.0, 130.0),
        # Its workers had been started anew: what was done before counts, until it is done again.
        ([START, AT_33, START | {"time_s": 131.0}], "lm", 33, 131.0, 131.0),
        (
            [START, {"kind": "fault", "time_s": 130.0, "stage": "lm", "step": "33", "point": "train.updated"}],
            "lm",
            34,
            130.0,
            130.0,
        ),
        # A worker's log line and an injected fault of the driver's own say nothing about the place.
        ([START, {"kind": "fault", "time_s": 129.0, "point": "lease.beat"}], "lm", 20, 129.0, 129.0),
        # It was itself on the way back, and had done nothing new: the first loss is still being paid for.
        ([LOST_EARLIER, START], "lm", 38, 128.0, 70.0),
        (
            [LOST_EARLIER, START, {"kind": "metrics", "time_s": 120.0, "stage": "lm", "step": 39}],
            "lm",
            39,
            128.0,
            128.0,
        ),
    ],
)
def test_where_a_lost_driver_was(
    events: list[dict[str, Any]], stage: str, step: int | None, heard_s: float, since_s: float
) -> None:
    """By the last of its events, and by its lease where that is newer."""
    assert lost_in(standing(), events) == LostDriver(2, "tpu-7", heard_s, since_s, stage, step)


def kept(store: Store, epoch: int, *events: dict[str, Any]) -> None:
    """Has an earlier attempt keep its events, one segment each."""
    with EventLog(store, PATHS, epoch) as log:
        for event in events:
            log.add(event)
            log.flush()


def test_the_next_driver_tells_what_it_cost(store: Store) -> None:
    """Where it was, at once; what that cost, with the first new step and once only."""
    kept(store, 2, START, AT_33)
    with EventLog(store, PATHS, 3) as log:
        tell_lost_driver(store, PATHS, standing(), log)
        log.add(START | {"time_s": 150.0})
        log.add({"kind": "at", "time_s": 158.0, "stage": "lm", "step": 21, "next": 22})
        log.add({"kind": "metrics", "time_s": 160.5, "stage": "lm", "step": 21})
        log.add({"kind": "metrics", "time_s": 170.0, "stage": "lm", "step": 30})
    events = list(read_events(store, PATHS))
    (lost,) = [e for e in events if e["kind"] == "driver_lost"]
    assert (lost["attempt"], lost["host"], lost["stage"], lost["step"]) == (2, "tpu-7", "lm", 33)
    assert "attempt 2 on tpu-7 ended without giving the run back, in stage lm with 33 step(s) done" in lost["message"]
    (back,) = [e for e in events if e["kind"] == "driver_recovered"]
    assert (back["attempt"], back["seconds"], back["lost_steps"], back["stage"]) == (2, 30.5, 13, "lm")


def test_new_work_in_another_stage_says_nothing_of_steps(store: Store) -> None:
    """The driver died after its last unit; the next one begins with the stage after it."""
    kept(store, 2, UNIT)
    with EventLog(store, PATHS, 3) as log:
        tell_lost_driver(store, PATHS, standing(), log)
        log.add(START | {"time_s": 150.0})
        log.add({"kind": "metrics", "time_s": 160.0, "stage": "lm", "step": 21})
    (back,) = [e for e in read_events(store, PATHS) if e["kind"] == "driver_recovered"]
    assert back["seconds"] == 32.0
    assert "lost_steps" not in back


def test_only_the_attempt_before_is_read(store: Store) -> None:
    """Attempt 1 was in training; attempt 2 prepared units when it died."""
    kept(store, 1, START, AT_33)
    kept(store, 2, UNIT)
    with EventLog(store, PATHS, 3) as log:
        tell_lost_driver(store, PATHS, standing(), log)
    (lost,) = [e for e in read_events(store, PATHS) if e["kind"] == "driver_lost"]
    assert (lost["stage"], lost["step"]) == ("tokens", None)


@pytest.mark.parametrize("before", [None, standing(released=True)])
def test_nothing_is_told_where_nobody_was_lost(store: Store, before: Standing | None) -> None:
    """The first driver of a run, and one after another that gave it back."""
    kept(store, 2, START)
    with EventLog(store, PATHS, 3) as log:
        tell_lost_driver(store, PATHS, before, log)
    assert [e["kind"] for e in read_events(store, PATHS)] == ["train_start"]


def test_a_driver_that_said_that_it_ended_was_not_lost(store: Store) -> None:
    """It only could not give the run back."""
    kept(store, 2, START, {"kind": "ended", "time_s": 140.0, "status": "failed"})
    with EventLog(store, PATHS, 3) as log:
        tell_lost_driver(store, PATHS, standing(), log)
    assert [e["kind"] for e in read_events(store, PATHS)] == ["train_start", "ended"]


def test_events_that_cannot_be_read_do_not_stop_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only told is not worth an error; the loss itself is told, by what the lease says."""
    kept(store, 2, START)

    def refused(name: str, *_range: int | None) -> bytes:
        raise StoreError(f"{name} could not be read.")

    with EventLog(store, PATHS, 3) as log, monkeypatch.context() as patched:
        patched.setattr(store, "read", refused)
        tell_lost_driver(store, PATHS, standing(), log)
    _, problem, lost = read_events(store, PATHS)
    assert "where attempt 2 was is not known" in problem["message"]
    assert (lost["kind"], lost["stage"], lost["heard_s"]) == ("driver_lost", "", 128.0)


def test_the_lease_says_who_was_before(store: Store) -> None:
    """Its standing when the run was taken: not given back, or given back."""
    first = acquire(store, PATHS, Owner.here())
    assert first.before is None
    with acquire(store, PATHS, Owner.here(), take_over=True) as second:
        assert second.before is not None
        assert (second.before.epoch, second.before.released) == (1, False)
    with acquire(store, PATHS, Owner.here()) as third:
        assert third.before is not None
        assert (third.before.epoch, third.before.released) == (2, True)
    first.release()
