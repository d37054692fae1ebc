"""When ``--reprocess`` makes a new generation, and what becomes of ticks that are half done with other parameters."""

from __future__ import annotations

import uuid

import pytest

from tests.incremental.test_ticks_of_a_dataset import Child
from tests.incremental.world import STAGE, World
from tpupipe.checkpoint.commit import Commit, Leaf, SavedObject
from tpupipe.errors import RunChangedError
from tpupipe.run import RunOptions, params_now, run
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import crc32c_of
from tpupipe.ticks import parse_tick

ONE, TWO, THREE, FOUR = (f"2026-11-{day}T02:00" for day in (27, 28, 29, 30))


def half_done(world: World, tick: str) -> None:
    """A tick that dies with its first unit committed, of three."""
    world.write(f"{uuid.uuid4().hex}.jsonl", *range(15))
    assert Child(world, tick, "kill-driver@unit.after_commit=0").status() == -9
    assert len(list(world.store.list(world.tick_paths(tick).units(STAGE) + "/"))) == 1


def generations(world: World) -> int:
    number = 0
    while world.store.exists(world.generation(number + 1).begun):
        number += 1
    return number


def test_newer_parameters_are_used_although_the_tick_is_complete(world):
    """The same tick that began the generation, a newer checkpoint at the same URI: all inputs again, with that one."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.tick(TWO, reprocess=True)
    world.params = "p2"
    world.tick(TWO, reprocess=True)
    assert generations(world) == 3
    assert world.rows(3) == {TWO: [1]}
    world.tick(TWO, reprocess=True)
    assert generations(world) == 3, "given again with nothing changed, it is done"


def test_newer_parameters_are_used_where_the_tick_is_half_done(world):
    """It is not refused with a hint that does what was done already."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    assert Child(world, TWO, "kill-driver@unit.after_commit=0", reprocess=True).status() == -9
    world.params = "p2"
    assert world.tick(TWO, reprocess=True).stages[STAGE]["rows_out"] == 1
    assert generations(world) == 3


@pytest.mark.parametrize("where", ["generation.begun", "tick.claimed", "unit.after_commit=1", "tick.before_done"])
def test_an_interrupted_reprocess_goes_on_where_it_stopped(world, where):
    """Killed anywhere, the same command begins nothing anew: the unit that is committed stays the very object."""
    world.write("a.jsonl", *range(15))
    world.tick(ONE)
    assert Child(world, TWO, f"kill-driver@{where}", reprocess=True).status() == -9
    before = {(i.name, i.generation) for i in world.store.list(world.tick_paths(TWO, 2).units(STAGE) + "/")}
    world.tick(TWO, reprocess=True)
    assert before <= {(i.name, i.generation) for i in world.store.list(world.tick_paths(TWO, 2).units(STAGE) + "/")}
    assert world.rows(2) == {TWO: list(range(15))}
    assert generations(world) == 2


def test_a_generation_that_was_begun_otherwise_is_never_taken_for_a_reprocess(world):
    """The dataset's first tick began it; to reprocess that tick makes all of it again."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.tick(ONE, reprocess=True)
    assert world.rows(2) == {ONE: [1]}


@pytest.mark.parametrize("change", [{"width": 2}, {"params": "p2"}])
def test_a_generation_with_an_allowed_change_in_it_is_not_gone_on_with(world, change):
    """Its first tick is complete, but was made before the change: the new generation is made with one only."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.tick(TWO, reprocess=True)
    for name, value in change.items():
        setattr(world, name, value)
    world.write("b.jsonl", 2)
    world.tick(THREE, allow_change=True)
    world.tick(TWO, reprocess=True)
    assert world.rows(3) == {TWO: [1, 2]}


@pytest.mark.parametrize("allow_change", [False, True])
def test_a_half_done_tick_is_not_finished_with_other_parameters(world, allow_change):
    """Whatever is allowed; nothing is noted, and what the hint says works: the old ones finish it, --reprocess leaves it."""
    half_done(world, ONE)
    world.params = "p2"
    with pytest.raises(RunChangedError, match=rf"Tick {ONE} .* is half done.*p1 then, p2 now") as caught:
        world.tick(ONE, allow_change=allow_change)
    assert caught.value.exit_status == 2
    assert "--reprocess" in caught.value.hint
    assert [i.name for i in world.store.list(world.generation().params(STAGE))] == [world.generation().param(STAGE, 1)]
    world.tick(ONE, reprocess=True)
    assert world.rows(2) == {ONE: list(range(15))}


def test_a_half_done_tick_is_finished_with_the_parameters_it_was_begun_with(world):
    """They are named, which is a change of the job; meanwhile the next tick went on with the new ones, as allowed."""
    half_done(world, ONE)
    world.params = "p2"
    world.write("b.jsonl", 20)
    with pytest.raises(RunChangedError, match=f"Tick {TWO} is complete, but 1 earlier"):
        world.tick(TWO, allow_change=True)
    with pytest.raises(RunChangedError, match=f"Tick {THREE} is complete, but 1 earlier"):
        world.tick(THREE)
    world.params, world.model = "p1", f"{world.model}/checkpoints/0000000010-000001"
    world.tick(ONE, allow_change=True)
    assert world.rows() == {ONE: list(range(15)), TWO: [20]}


def test_parameters_are_compared_with_the_checkpoint_there_is_now(world):
    """``run`` itself: the same checkpoint is a complete tick, at no cluster's cost; a newer one is told from it."""

    def train(step: int) -> None:
        paths, data = RunPaths("models", "a"), f"arrays of {step}".encode()
        world.store.create(f"{paths.checkpoint('fit', step=step, epoch=1)}/arrays/a", data)
        saved = (SavedObject("arrays/a", len(data), crc32c_of(data)),)
        commit = Commit(step, 1, "arrays", saved, (Leaf("['w']", (1,), "float32"),), 0)
        world.store.create(paths.checkpoint_commit("fit", step=step, epoch=1), commit.to_json())

    train(10)
    world.model = f"{world.uri}/models/a/stages/fit"
    world.params = params_now(world.job.stage(STAGE), world.config, None)
    world.write("a.jsonl", 1)
    world.tick(ONE, reprocess=True)
    again = run(world.job, world.config, RunOptions("nightly", as_of=parse_tick(ONE), reprocess=True))
    assert (again.status, again.generation) == ("done", 1)
    train(20)
    assert params_now(world.job.stage(STAGE), world.config, None) != world.params
