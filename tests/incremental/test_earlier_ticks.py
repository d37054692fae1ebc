"""Earlier ticks that fail: told of, kept, and never in the way of later ones."""

from __future__ import annotations

import os

import pytest

from tests.incremental.world import STAGE, World
from tpupipe import errors
from tpupipe.claims import read_claims
from tpupipe.errors import (
    BadRowError,
    BudgetExceededError,
    CheckpointError,
    ClusterError,
    DataError,
    FencedError,
    InterruptedRunError,
    OutOfStepError,
    RecompileError,
    ReservationError,
    RunChangedError,
    StageError,
    StoreDeniedError,
    StoreError,
    TpupipeError,
    UnitsSetAsideError,
    UsageError,
    UserCodeError,
)
from tpupipe.incremental import done_ticks, failed_before, is_the_ticks_own
from tpupipe.run import RunResult

ONE, TWO, THREE, FOUR = (f"2026-11-{day}T02:00" for day in (27, 28, 29, 30))


def claimed_only(world: World, tick: str, *left: str) -> None:
    """A tick that dies once it has its inputs; ``left`` are not tried before it."""

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.tick(tick, before_work=die, left=frozenset(left))


def claimed_files(world: World) -> list[str]:
    return [file.path for claim in read_claims(world.store, world.generation()) for file in claim.inputs[STAGE]]


def test_a_poisoned_tick_does_not_block_later_ones(world):
    """Night after night its error ends the driver, but each later tick is done; mended, it is completed as it was claimed."""
    file = world.write("a.jsonl", 1)
    poison = file.read_text().replace("}", "]")
    modified_ns = file.stat().st_mtime_ns
    good = file.read_text()
    file.write_text(poison)
    os.utime(file, ns=(modified_ns, modified_ns))
    with pytest.raises(DataError, match="is not JSON lines"):
        world.tick(ONE)
    world.write("b.jsonl", 2)
    with pytest.raises(
        DataError, match=rf"Tick {TWO} is complete, but 1 earlier one\(s\) failed again: {ONE}"
    ) as caught:
        world.tick(TWO)
    assert "is not JSON lines" in caught.value.message
    assert (caught.value.exit_status, caught.value.data["earlier"], caught.value.data["at_hand"].tick) == (
        1,
        (ONE,),
        TWO,
    )
    world.write("c.jsonl", 3)
    with pytest.raises(DataError, match=f"Tick {THREE} is complete"):
        world.tick(THREE)
    assert world.rows() == {TWO: [2], THREE: [3]}
    file.write_text(good)
    os.utime(file, ns=(modified_ns, modified_ns))
    world.tick(FOUR)
    assert world.rows() == {ONE: [1], TWO: [2], THREE: [3]}
    assert done_ticks(world.store, world.generation()) == [ONE, TWO, THREE, FOUR]
    assert len(claimed_files(world)) == len(set(claimed_files(world))) == 3


def test_a_deleted_input_of_an_earlier_tick_does_not_block_later_ones(world):
    """It can not be completed; its claim stays."""
    file = world.write("a.jsonl", 1)
    claimed_only(world, ONE)
    file.unlink()
    world.write("b.jsonl", 2)
    with pytest.raises(DataError, match=r"a\.jsonl does not exist"):
        world.tick(TWO)
    assert world.rows() == {TWO: [2]}


def test_a_changed_input_of_an_earlier_tick_does_not_block_later_ones(world):
    """Refused with its own exit status; the new version goes to the tick at hand, once."""
    world.write("a.jsonl", 1)
    claimed_only(world, ONE)
    world.write("a.jsonl", 1, 2)
    with pytest.raises(RunChangedError, match=f"1 input file.*of tick {ONE} changed") as caught:
        world.tick(TWO)
    assert caught.value.exit_status == 2
    with pytest.raises(RunChangedError):
        world.tick(THREE)
    assert world.rows() == {TWO: [1, 2]}


def test_the_first_of_several_is_raised_and_all_are_named(world):
    """Each of them is tried; none is taken for done."""
    for tick, name in ((ONE, "a.jsonl"), (TWO, "b.jsonl")):
        file = world.write(name, 1)
        claimed_only(world, tick, ONE)
        file.unlink()
    world.write("c.jsonl", 3)
    with pytest.raises(DataError, match=f"2 earlier one.*: {ONE}, {TWO}. {ONE}: .*a.jsonl") as caught:
        world.tick(THREE)
    assert caught.value.data["tick"] == ONE
    assert done_ticks(world.store, world.generation()) == [THREE]


def test_an_earlier_tick_that_is_left_is_not_tried(world):
    """What a backfill asks for after it failed once under the same command."""
    file = world.write("a.jsonl", 1)
    claimed_only(world, ONE)
    file.unlink()
    world.write("b.jsonl", 2)
    assert world.tick(TWO, left=frozenset({ONE})).status == "done"
    assert done_ticks(world.store, world.generation()) == [TWO]


def test_what_is_about_the_driver_ends_it_at_once(world):
    """Ctrl-C while the earlier tick is resumed: the tick at hand does not even claim."""
    world.write("a.jsonl", 1)
    claimed_only(world, ONE)
    world.write("b.jsonl", 2)

    def interrupted() -> None:
        raise InterruptedRunError("Interrupted.")

    with pytest.raises(InterruptedRunError):
        world.tick(TWO, before_work=interrupted)
    assert [claim.tick for claim in read_claims(world.store, world.generation())] == [ONE]


def test_the_tick_at_hand_that_fails_too_says_so_itself(world):
    """Its own error; that of the earlier one is in the log."""
    for tick, name in ((ONE, "a.jsonl"), (TWO, "b.jsonl")):
        file = world.write(name, 1)
        claimed_only(world, tick, ONE)
        file.unlink()
    with pytest.raises(DataError, match=r"^The input \S*b\.jsonl does not exist") as caught:
        world.tick(TWO)
    assert "earlier" not in caught.value.data


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (RunChangedError, True),
        (UsageError, True),
        (DataError, True),
        (StageError, True),
        (UserCodeError, True),
        (BadRowError, True),
        (UnitsSetAsideError, True),
        (OutOfStepError, True),
        (RecompileError, True),
        (StoreDeniedError, True),
        (BudgetExceededError, False),
        (InterruptedRunError, False),
        (FencedError, False),
        (StoreError, False),
        (errors.StoreUnavailableError, False),
        (errors.StoreTimeoutError, False),
        (CheckpointError, False),
        (errors.NoIntactCheckpointError, False),
        (ClusterError, False),
        (ReservationError, False),
        (errors.ReservationTimeoutError, False),
        (TpupipeError, False),
    ],
)
def test_which_errors_are_a_ticks_own(kind, own):
    """Its inputs, its rows and what was made of them; not the driver, the store, the slice or the budget."""
    assert is_the_ticks_own(kind("x")) is own


def test_the_error_of_an_earlier_tick_keeps_its_kind_hint_and_facts():
    """A caller that catches it, and the exit status, see no difference."""
    at_hand = RunResult("job", "nightly", "gs://x", "done", 1, tick=TWO)
    first = UnitsSetAsideError("set aside", hint="again", stage="scores", units={"u": "bad"})
    told = failed_before(at_hand, {ONE: first})
    assert (type(told), told.hint, told.data["units"], told.data["tick"]) == (
        UnitsSetAsideError,
        "again",
        {"u": "bad"},
        ONE,
    )
    assert told.data["at_hand"] is at_hand
