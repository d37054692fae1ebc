"""Ticks over a growing folder, on a real store: each input in one partition, whatever dies and whoever races."""

from __future__ import annotations

import json
import multiprocessing
import os
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.incremental.world import STAGE, World, tick_in_child
from tpupipe.claims import read_claims
from tpupipe.data.sources import Files
from tpupipe.errors import DataError, JobError, RunChangedError, RunHeldError, UsageError
from tpupipe.incremental import check_incremental, done_ticks, next_generation, tick_of, unfinished
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.ledger.events import read_events
from tpupipe.run import RunOptions, run
from tpupipe.stages.finished import read_manifest
from tpupipe.store.lease import acquire
from tpupipe.store.owner import Owner
from tpupipe.ticks import parse_tick

ONE, TWO, THREE, FOUR = (f"2026-11-{day}T02:00" for day in (27, 28, 29, 30))


# The modules are imported once, in a server that the processes are forked from: each costs milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.incremental.world"])


class Child:
    """One tick in a process of its own."""

    def __init__(self, world: World, tick: str, *faults: str, **options: Any) -> None:
        self._answer = world.inputs.parent / f"answer-{uuid.uuid4().hex}.json"
        self._process = PROCESSES.Process(target=tick_in_child, args=(world, tick, faults, self._answer, options))
        self._process.start()

    def status(self) -> int | None:
        self._process.join(120)
        return self._process.exitcode

    def answer(self) -> dict[str, Any]:
        assert self.status() == 0
        found: dict[str, Any] = json.loads(self._answer.read_text())
        return found


# -- what a tick takes -------------------------------------------------------------------------


def test_each_tick_takes_what_is_new(world):
    """Three ticks over a growing folder: three partitions, each row once; the same tick again changes nothing."""
    world.write("a.jsonl", *range(10))
    assert world.tick(ONE).stages[STAGE]["rows_out"] == 10
    world.write("b.jsonl", *range(10, 15))
    world.write("c.jsonl", 15)
    world.tick(TWO)
    world.write("d.jsonl", *range(16, 30))
    world.tick(THREE)
    expected = {ONE: list(range(10)), TWO: list(range(10, 16)), THREE: list(range(16, 30))}
    assert world.rows() == expected
    world.write("e.jsonl", 99)
    again = world.tick(TWO)
    assert (again.status, again.stages[STAGE]["rows_out"], again.tick) == ("done", 6, TWO)
    assert world.rows() == expected, "a complete tick takes nothing more"
    assert done_ticks(world.store, world.generation()) == [ONE, TWO, THREE]


def test_a_tick_without_new_inputs_succeeds_with_zero_rows(world):
    """ray#28505: 0 rows, the schema is kept, and what earlier ticks wrote is untouched, object for object."""
    world.write("a.jsonl", 1, 2, 3)
    world.tick(ONE)
    before = {i.name: i.generation for i in world.store.list(world.generation().table(STAGE))}
    result = world.tick(TWO)
    assert result.status == "done"
    assert result.stages[STAGE]["rows_out"] == result.stages[STAGE]["total"] == 0
    assert {i.name: i.generation for i in world.store.list(world.generation().table(STAGE))} == before
    schemas = [read_manifest(world.store, world.tick_paths(tick), STAGE).schema for tick in (ONE, TWO)]
    assert schemas[0] == schemas[1] == pa.schema([("id", pa.int64())])
    world.write("b.jsonl", 4)
    world.tick(THREE)
    assert world.rows() == {ONE: [1, 2, 3], THREE: [4]}


def test_an_inbox_that_was_emptied_is_nothing_new_but_a_wrong_pattern_is_an_error(world):
    """No file at all: an error at the very start, success with zero rows afterwards."""
    with pytest.raises(DataError, match="matches no file"):
        world.tick(ONE)
    file = world.write("a.jsonl", 1)
    world.tick(ONE)
    file.unlink()
    assert world.tick(TWO).stages[STAGE]["rows_out"] == 0
    assert world.rows() == {ONE: [1]}
    assert world.tick(ONE).stages[STAGE]["rows_out"] == 1, "a complete tick needs its inputs no more"


def test_a_changed_file_is_taken_again_by_the_next_tick(world):
    """By fingerprint: its new version is new; a file that is merely touched counts as changed, too."""
    world.write("a.jsonl", 1, 2)
    world.write("b.jsonl", 3)
    world.tick(ONE)
    world.write("a.jsonl", 1, 2, 7)
    world.tick(TWO)
    assert world.rows() == {ONE: [1, 2, 3], TWO: [1, 2, 7]}


def test_a_backfilled_tick_takes_what_was_modified_up_to_its_time(world):
    """Files go to the first tick after their time; what is younger stays for the next one."""
    for name, day in (("a.jsonl", 26), ("b.jsonl", 27), ("c.jsonl", 29)):
        file = world.write(name, day)
        modified_s = 1_764_115_200 + (day - 26) * 86_400 + 365 * 86_400  # 2026-11-26 00:00 UTC and so on
        os.utime(file, (modified_s, modified_s))
    for tick in (ONE, TWO, THREE, FOUR):
        world.tick(tick, backfilled=True)
    assert world.rows() == {ONE: [26, 27], THREE: [29]}
    assert done_ticks(world.store, world.generation()) == [ONE, TWO, THREE, FOUR]


def test_a_claimed_file_that_changed_is_refused(world):
    """The tick died before it read the file; the new version is not taken for the claimed one, until it is allowed."""
    world.write("a.jsonl", 1)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.tick(ONE, before_work=die)
    world.write("a.jsonl", 1, 2)
    with pytest.raises(RunChangedError, match=r"a\.jsonl") as caught:
        world.tick(ONE)
    assert caught.value.exit_status == 2


def test_a_run_with_nothing_to_do_needs_no_cluster(world):
    """``run`` itself: a tick without new inputs, and a complete one; its result is kept, and no Ray is touched."""
    world.write("a.jsonl", 1, 2)
    world.tick(ONE)
    nothing = run(world.job, world.config, RunOptions("nightly", as_of=parse_tick(TWO)))
    assert (nothing.status, nothing.run, nothing.tick, nothing.generation) == ("done", "nightly", TWO, 1)
    assert nothing.stages[STAGE]["rows_out"] == nothing.stages[STAGE]["total"] == 0
    kept = json.loads(world.store.read(world.tick_paths(TWO).result))
    assert (kept["tick"], kept["status"]) == (TWO, "done")
    done = run(world.job, world.config, RunOptions("nightly", as_of=parse_tick(ONE)))
    assert (done.status, done.stages[STAGE]["rows_out"]) == ("done", 2)
    assert done.stages[STAGE]["uri"] == world.store.uri(world.generation().table(STAGE))
    assert done_ticks(world.store, world.generation()) == [ONE, TWO]
    said = [e["message"] for e in read_events(world.store, world.tick_paths(TWO)) if "message" in e]
    assert any("nothing to reserve" in text for text in said)


def test_a_tick_in_the_future_is_refused_and_nothing_is_written(world, tmp_path):
    """As by --backfill: exit status 2; it would be complete without what comes until then."""
    world.write("a.jsonl", 1)
    with pytest.raises(UsageError, match="--as-of 2999-01-01T00:00 reaches into the future") as caught:
        world.tick("2999-01-01T00:00")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "store").exists()


def test_the_tick_at_hand_is_the_one_asked_for_or_now(world):
    """Truncated to the interval where none is given; a time without an offset is UTC; this very minute is not the future."""
    now = datetime(2026, 11, 30, 2, 17, 30, tzinfo=UTC)
    assert tick_of(RunOptions(), world.config, now) == "2026-11-30T02:00"
    for as_of in (datetime(2026, 11, 30, 2, 17), datetime(2026, 11, 30, 3, 17, tzinfo=timezone(timedelta(hours=1)))):  # noqa: DTZ001
        assert tick_of(RunOptions(as_of=as_of), world.config, now) == "2026-11-30T02:17"
    with pytest.raises(UsageError, match="future"):
        tick_of(RunOptions(as_of=datetime(2026, 11, 30, 2, 18, tzinfo=UTC)), world.config, now)


# -- what changed since ------------------------------------------------------------------------


def test_another_job_is_refused_and_nothing_is_written(world):
    """A parameter of the job differs: what was and is, exit status 2, the hint of --reprocess; no claim, no lease."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.write("b.jsonl", 2)
    before = [(i.name, i.generation) for i in world.store.list()]
    world.width = 2
    with pytest.raises(RunChangedError, match=r"parameters\.width: was 1, is 2") as caught:
        world.tick(TWO)
    assert caught.value.exit_status == 2
    assert "--reprocess" in caught.value.hint
    assert [(i.name, i.generation) for i in world.store.list()] == before


def test_reprocess_makes_a_generation_beside_the_old_one(world):
    """All inputs again, under another folder; the old partitions stay; the same command again goes on in it."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.write("b.jsonl", 2)
    world.tick(TWO)
    old = world.rows(1)
    world.width = 2
    assert world.tick(THREE, reprocess=True).stages[STAGE]["rows_out"] == 2
    assert world.tick(THREE, reprocess=True).stages[STAGE]["rows_out"] == 2
    assert world.rows(1) == old
    assert world.rows(2) == {THREE: [1, 2]}
    assert not world.store.exists(world.generation(3).begun)
    world.write("c.jsonl", 3)
    world.tick(FOUR)
    assert world.rows(2) == {THREE: [1, 2], FOUR: [3]}
    assert world.rows(1) == old


def test_an_allowed_change_goes_on_in_the_same_table(world):
    """It is recorded, and the next tick compares with what was allowed."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.width = 2
    world.write("b.jsonl", 2)
    world.tick(TWO, allow_change=True)
    world.write("c.jsonl", 3)
    world.tick(THREE)
    assert world.rows() == {ONE: [1], TWO: [2], THREE: [3]}
    assert [i.name for i in world.store.list(world.generation().changes)] == [world.generation().change(1)]


def test_other_parameters_are_refused_before_any_unit_is_done(world):
    """The checkpoint that the URI names is another one: refused; --allow-change records it, --reprocess begins anew."""
    world.write("a.jsonl", 1)
    world.tick(ONE)
    world.write("b.jsonl", 2)
    world.params = "p2"
    with pytest.raises(RunChangedError, match="p1 then, p2 now"):
        world.tick(TWO)
    assert world.rows() == {ONE: [1]}
    world.tick(TWO, allow_change=True)
    world.write("c.jsonl", 3)
    world.tick(THREE)
    assert world.rows() == {ONE: [1], TWO: [2], THREE: [3]}
    world.params = "p1"
    world.tick(FOUR, reprocess=True)
    assert world.rows(2) == {FOUR: [1, 2, 3]}


@pytest.mark.parametrize(
    ("newest", "begun_for", "same", "reprocess", "number"),
    [
        (0, None, False, False, 1),
        (0, None, False, True, 1),
        (1, ONE, True, False, 1),
        (1, ONE, False, False, 1),  # refused by the comparison that follows
        (1, ONE, True, True, 2),
        (2, TWO, True, True, 2),  # the same command given again
        (2, TWO, False, True, 3),  # the same command with mended code or newer parameters
        (2, None, False, True, 3),  # begun without --reprocess, for whatever tick
    ],
)
def test_which_generation_a_tick_belongs_to(newest, begun_for, same, reprocess, number):
    """The newest, unless another one is asked for that was not begun by this very command."""
    assert next_generation(newest, begun_for, TWO, same=same, reprocess=reprocess) == number


def test_what_an_incremental_job_may_be_made_of(tmp_path):
    """Infer and Preprocess(map); Train is refused with where to put it, and so is a table made by dataset=."""
    source = Files(tmp_path)
    prepare = Preprocess("tokens", source, map=dict)
    whole = Preprocess("all", source, dataset=list)
    infer = Infer("scores", "tokens", params="gs://a/b/c/stages/d", init=print, apply=lambda _, b: b)
    assert check_incremental(Job("job", [prepare, infer])) == ("scores",)
    assert check_incremental(Job("job", [prepare])) == ("tokens",)
    train = Train("lm", "tokens", init=print, step=lambda s, _: (s, {}), batch_size=1, steps=1)
    with pytest.raises(JobError, match="'lm' trains") as caught:
        check_incremental(Job("job", [prepare, train]))
    assert "params=" in caught.value.hint
    with pytest.raises(JobError, match="dataset="):
        check_incremental(Job("job", [whole]))


# -- what dies and who races -------------------------------------------------------------------

POINTS = [
    "generation.begun",
    "tick.before_claim",
    "tick.claimed",
    "unit.before_commit=2",
    "unit.after_commit=0",
    "stage.manifest",
    "tick.before_done",
]


@pytest.mark.parametrize("where", POINTS)
def test_a_kill_anywhere_loses_and_doubles_nothing(world, where):
    """SIGKILL at every commit of the first tick; files come meanwhile; the next night finishes it first."""
    world.write("a.jsonl", *range(20))
    assert Child(world, ONE, f"kill-driver@{where}").status() == -9
    world.write("b.jsonl", 20, 21)
    claimed = [claim.tick for claim in read_claims(world.store, world.generation())]
    world.tick(TWO)
    first = {ONE: list(range(20)), TWO: [20, 21]} if claimed else {TWO: list(range(22))}
    assert world.rows() == first
    world.tick(ONE)
    assert world.rows() == first
    assert done_ticks(world.store, world.generation()) == [ONE, TWO]


def test_a_killed_tick_takes_the_same_inputs_again(world):
    """Its claim decides, not what is there when it is started again."""
    world.write("a.jsonl", 1, 2)
    assert Child(world, ONE, "kill-driver@tick.claimed").status() == -9
    world.write("b.jsonl", 3)
    world.tick(ONE)
    assert world.rows() == {ONE: [1, 2]}
    world.tick(TWO)
    assert world.rows() == {ONE: [1, 2], TWO: [3]}


def test_the_same_tick_twice_at_once_does_the_work_once(world):
    """kuberay#4849: the second is told who holds it (exit 4), or that it is done; one output set."""
    world.write("a.jsonl", *range(20))
    held: list[RunHeldError] = []

    def meanwhile() -> None:
        with pytest.raises(RunHeldError) as caught:
            world.tick(ONE)
        held.append(caught.value)

    world.tick(ONE, before_work=meanwhile)
    assert [error.exit_status for error in held] == [4]
    assert str(os.getpid()) in held[0].message
    assert world.rows() == {ONE: list(range(20))}
    racing = [Child(world, TWO) for _ in range(2)]
    for answer in (child.answer() for child in racing):
        assert answer.get("status") == "done" or answer["exit_status"] == 4
    assert world.rows() == {ONE: list(range(20))}


@pytest.mark.parametrize("take_over", [False, True])
def test_a_tick_that_is_at_work_elsewhere_is_left_to_its_driver(world, take_over):
    """The next tick does not wait for it and does not take its inputs, nor the tick itself, even if told to take over."""
    world.write("a.jsonl", 1)

    def meanwhile() -> None:
        world.write("b.jsonl", 2)
        assert world.tick(TWO, take_over=take_over).stages[STAGE]["rows_out"] == 1

    world.tick(ONE, before_work=meanwhile)
    assert world.rows() == {ONE: [1], TWO: [2]}


@pytest.mark.parametrize("backend", ["file", "gs"])
def test_different_ticks_at_once_share_out_the_inputs(tmp_path, backend, request):
    """Four ticks start together over the same 12 files: every file is in exactly one claim, every row in one partition."""
    endpoint = request.getfixturevalue("endpoint") if backend == "gs" else None
    uri = f"gs://races-{tmp_path.name[-20:].replace('_', '-')}/x" if endpoint else f"file://{tmp_path}/store"
    world = World(tmp_path / "in", uri, endpoint)
    for n in range(12):
        world.write(f"{n:02d}.jsonl", n)
    racing = [Child(world, tick) for tick in (ONE, TWO, THREE, FOUR)]
    answers = [child.answer() for child in racing]
    assert [answer["status"] for answer in answers] == ["done"] * 4
    claims = read_claims(world.store, world.generation())
    assert [claim.number for claim in claims] == [1, 2, 3, 4]
    paths = [file.path for claim in claims for file in claim.inputs[STAGE]]
    assert len(paths) == len(set(paths)) == 12
    assert sum(answer["stages"][STAGE]["rows_out"] for answer in answers) == 12
    ids = []
    for info in world.store.list(world.generation().table(STAGE) + "/"):
        ids += pq.read_table(pa.BufferReader(world.store.read(info.name)))["id"].to_pylist()
    assert sorted(ids) == list(range(12))


def test_a_zombie_claims_nothing(world):
    """A driver that lost its tick is refused before it claims."""
    world.write("a.jsonl", 1)
    from tpupipe.claims import claim_inputs
    from tpupipe.data.listing import list_files
    from tpupipe.errors import FencedError

    paths = world.tick_paths(ONE)
    listed = {STAGE: list_files((str(world.inputs),))}
    with acquire(world.store, paths, Owner.here()) as lease:
        world.store.create(paths.lease(lease.epoch + 1), b"{}")
        with pytest.raises(FencedError):
            claim_inputs(world.store, paths.generation, ONE, listed, until_s=None, check=lease.check)
    assert read_claims(world.store, paths.generation) == []


def test_a_missing_or_damaged_claim_is_never_taken_for_no_claim(world):
    """Its inputs would be taken twice: an error that names it."""
    for number, tick in enumerate((ONE, TWO)):
        world.write(f"{number}.jsonl", number)
        world.tick(tick)
    store, name = world.store, world.generation().claim(1)
    data = store.read(name)
    store.put(name, data[:-30])
    with pytest.raises(DataError, match=r"000001\.parquet is not a readable claim"):
        world.tick(THREE)
    store.delete(name)
    with pytest.raises(DataError, match="one is missing"):
        world.tick(THREE)


def test_unfinished_ticks_come_in_order(world):
    """Those before the one at hand that have a claim and no record."""
    world.write("a.jsonl", 1)
    for tick in (TWO, ONE, THREE):
        world.tick(tick)
    claims = read_claims(world.store, world.generation())
    assert unfinished(claims, [], FOUR) == [ONE, TWO, THREE]
    assert unfinished(claims, [TWO], THREE) == [ONE]
