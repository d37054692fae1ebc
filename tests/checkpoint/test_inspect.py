"""What a run's checkpoints look like, and which of them may go."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.checkpoint.inspect import (
    CheckpointView,
    Depth,
    ObjectProblem,
    StageView,
    content_crc32c,
    plan_prune,
    stage_names,
    view_stage,
)
from tpupipe.checkpoint.verify import Found, newest_intact
from tpupipe.errors import NoIntactCheckpointError, StoreDeniedError, StoreUnavailableError, UsageError
from tpupipe.store.layout import COMMIT_NAME
from tpupipe.store.objects import ObjectInfo, crc32c_of

STAGE = "lm"
DAMAGES = ["deleted", "truncated", "flipped", "record cut", "record of another"]


def steps(views):
    return [view.found.step for view in views]


class Instead:
    """A store that does one thing differently."""

    def __init__(self, store, **operations):
        self._store = store
        self._operations = operations

    def __getattr__(self, name):
        return self._operations.get(name) or getattr(self._store, name)


@pytest.fixture
def vouches(shelf) -> bool:
    """Whether the store lists checksums."""
    shelf.store.put("any", b"x")
    known = next(iter(shelf.store.list("any"))).crc32c is not None
    shelf.store.delete("any")
    return known


# -- what is there ------------------------------------------------------------------------------


def test_every_folder_is_listed_newest_first(shelf):
    """By step, lease epoch and start of the workers; with size, number of objects and whether it is committed."""
    for step, epoch, restart in ((10, 1, 0), (20, 1, 0), (20, 2, 0), (20, 2, 1)):
        shelf.put(step, epoch, restart)
    contents = shelf.arrays(30, 3)
    view = view_stage(shelf.store, shelf.paths, STAGE, Depth.LISTING)
    found = [v.found for v in view.checkpoints]
    assert [(f.step, f.lease_epoch, f.restart) for f in found] == [
        (30, 3, 0),
        (20, 2, 1),
        (20, 2, 0),
        (20, 1, 0),
        (10, 1, 0),
    ]
    assert [v.intact for v in view.checkpoints] == [None, True, True, True, True]
    half, newest = view.checkpoints[:2]
    assert (half.size_bytes, len(half.found.objects)) == (sum(map(len, contents.values())), 2)
    record = shelf.store.info(f"{newest.found.folder}/{COMMIT_NAME}")
    assert (newest.size_bytes, len(newest.found.objects)) == (half.size_bytes + record.size, 3)
    assert view.newest_intact == newest


def test_the_json_of_a_view_has_full_uris(shelf):
    """With the age against the given clock, never below zero."""
    folder = shelf.put(20, 2)
    shelf.damage(folder, "deleted")
    (view,) = view_stage(shelf.store, shelf.paths, STAGE, Depth.LISTING).checkpoints
    said = view.as_json(shelf.store, view.written_s + 90)
    assert said["uri"] == shelf.store.uri(folder)
    assert (said["step"], said["lease_epoch"], said["restart"], said["age_s"]) == (20, 2, 0, 90)
    assert said["problems"] == [{"object": shelf.store.uri(f"{folder}/arrays/d/a"), "problem": "is missing"}]
    assert view.as_json(shelf.store, view.written_s - 5)["age_s"] == 0


def test_what_is_not_named_as_a_checkpoint_is_told_and_left_alone(shelf):
    """A copy under another name and a loose object: named beside the checkpoints, in no plan."""
    shelf.put(10)
    folder = shelf.paths.checkpoints(STAGE)
    shelf.store.create(f"{folder}/0000000005-000001.bak/COMMIT.json", b"{}")
    shelf.store.create(f"{folder}/notes.txt", b"x")
    view = view_stage(shelf.store, shelf.paths, STAGE, Depth.LISTING)
    assert steps(view.checkpoints) == [10]
    assert view.other == (f"{folder}/0000000005-000001.bak", f"{folder}/notes.txt")


def test_stages_are_those_of_the_run(shelf):
    """Of this run only, checkpoints or not; none at all is an empty list."""
    assert stage_names(shelf.store.sub("nothing"), shelf.paths) == []
    shelf.put(10)
    shelf.store.create(shelf.paths.manifest("tokens"), b"{}")
    shelf.store.create("job/run-2/stages/other/manifest.json", b"{}")
    assert stage_names(shelf.store, shelf.paths) == ["lm", "tokens"]


def test_a_stage_without_checkpoints_has_none(shelf):
    """An empty view, not an error; a stage whose name begins alike is another one."""
    shelf.put(10)
    assert view_stage(shelf.store, shelf.paths, "l", Depth.CONTENTS) == StageView("l", ())


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("depth", [Depth.CHECKSUMS, Depth.CONTENTS, Depth.RESTORE])
def test_damage_is_found_and_the_object_named(shelf, how, depth):
    """Whatever was damaged: that checkpoint alone, with the object, and nothing changes in the store."""
    shelf.put(10)
    shelf.damage(shelf.put(20), how)
    before = shelf.names()
    damaged, whole = view_stage(shelf.store, shelf.paths, STAGE, depth).checkpoints
    assert (damaged.found.step, damaged.intact, whole.intact) == (20, False, True)
    assert [p.name for p in damaged.problems] == [COMMIT_NAME if "record" in how else "arrays/d/a"]
    assert shelf.names() == before


def test_every_damaged_object_is_named(shelf):
    """One missing and one cut: both, each once, in the order of the record."""
    folder = shelf.put(10)
    shelf.damage(folder, "deleted")
    shelf.store.put(f"{folder}/arrays/d/b", b"short")
    (view,) = view_stage(shelf.store, shelf.paths, STAGE, Depth.CONTENTS).checkpoints
    size = len(b"b of 10-1" * 50)
    assert view.problems == (
        ObjectProblem("arrays/d/a", "is missing"),
        ObjectProblem("arrays/d/b", f"has 5 bytes, committed were {size}"),
    )


def test_what_was_compared_is_said(shelf, vouches):
    """The listing compares checksums only where the store lists them; the rest is read unless only listed."""
    shelf.put(10)
    compared = {d: view_stage(shelf.store, shelf.paths, STAGE, d).checkpoints[0].compared for d in Depth}
    assert compared == {
        Depth.LISTING: "checksums" if vouches else "sizes",
        Depth.CHECKSUMS: "checksums" if vouches else "contents",
        Depth.CONTENTS: "contents",
        Depth.RESTORE: "contents",
    }


@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_contents_that_the_store_vouches_for_wrongly_are_found_by_reading(shelf):
    """The listed checksum is the committed one, the bytes are others: only reading them shows it."""
    shelf.put(10)

    def read(name, start=0, end=None):
        data = shelf.store.read(name, start, end)
        return b"?" + data[1:] if name.endswith("arrays/d/a") else data

    lying = Instead(shelf.store, read=read)
    (shallow,) = view_stage(lying, shelf.paths, STAGE, Depth.CHECKSUMS).checkpoints
    (deep,) = view_stage(lying, shelf.paths, STAGE, Depth.CONTENTS).checkpoints
    assert (shallow.intact, deep.intact) == (True, False)
    assert [p.name for p in deep.problems] == ["arrays/d/a"]


def test_more_objects_than_the_record_names_are_no_damage(shelf):
    """What a dead try left in the folder is counted in its size only."""
    folder = shelf.put(10)
    shelf.store.create(f"{folder}/other/half", b"123")
    (view,) = view_stage(shelf.store, shelf.paths, STAGE, Depth.CONTENTS).checkpoints
    assert (view.intact, len(view.found.objects)) == (True, 4)


@pytest.mark.parametrize("operation", ["list", "children", "read"])
def test_a_refusal_is_an_error_not_damage(shelf, operation):
    """403 on a listing or a read is raised as it is."""
    shelf.put(10)

    def refuse(*_):
        raise StoreDeniedError(f"{operation} was refused: 403.", operation=operation)

    with pytest.raises(StoreDeniedError):
        view_stage(Instead(shelf.store, **{operation: refuse}), shelf.paths, STAGE, Depth.CONTENTS)


def test_a_store_that_is_away_is_an_error_not_damage(shelf):
    """The record cannot be read, by any way: StoreUnavailableError."""
    shelf.put(10)

    def fail(*_):
        raise StoreUnavailableError("503", operation="read")

    with pytest.raises(StoreUnavailableError):
        view_stage(Instead(shelf.store, read=fail), shelf.paths, STAGE, Depth.LISTING)


@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_a_record_whose_content_is_not_the_listed_one_is_damage(shelf):
    """The store refuses the whole read because of the checksum, parts of it arrive: named, and the next one is looked at."""
    shelf.put(10)
    folder = shelf.put(20)

    def read(name, start=0, end=None):
        if not name.startswith(folder):
            return shelf.store.read(name, start, end)
        if end is None:
            raise StoreUnavailableError("the bytes that arrived do not have the stored crc32c", operation="read")
        return b"?" * (end - start)

    damaged, whole = view_stage(Instead(shelf.store, read=read), shelf.paths, STAGE, Depth.LISTING).checkpoints
    assert (damaged.intact, whole.intact) == (False, True)
    assert [p.name for p in damaged.problems] == [COMMIT_NAME]


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(shelf):
    """A driver prunes step 10 between the listing and the reading: it is gone, not damaged; 20 is judged as ever."""
    old = shelf.put(10)
    shelf.put(20)

    def read(name, start=0, end=None):
        if name.startswith(f"{old}/arrays"):  # the record was read already
            shelf.store.delete(f"{old}/{COMMIT_NAME}")
            shelf.store.delete_prefix(old)
        return shelf.store.read(name, start, end)

    view = view_stage(Instead(shelf.store, read=read), shelf.paths, STAGE, Depth.CONTENTS)
    assert [(v.found.step, v.intact) for v in view.checkpoints] == [(20, True)]


def test_a_record_that_is_removed_meanwhile_is_left_out(shelf):
    """The same, right after the listing."""
    old = shelf.put(10)
    shelf.put(20)

    def read(name, start=0, end=None):
        shelf.store.delete(f"{old}/{COMMIT_NAME}")
        return shelf.store.read(name, start, end)

    view = view_stage(Instead(shelf.store, read=read), shelf.paths, STAGE, Depth.LISTING)
    assert steps(view.checkpoints) == [20]


def test_what_is_read_is_told_before(shelf, vouches):
    """The checkpoint and the bytes of its objects; nothing where nothing is read."""
    shelf.put(10)
    told = []
    size = len(b"a of 10-1" * 50) * 2
    for depth in (Depth.LISTING, Depth.CHECKSUMS, Depth.CONTENTS):
        view_stage(shelf.store, shelf.paths, STAGE, depth, on_read=lambda found, size: told.append((found.step, size)))
    assert told == [(10, size)] * (1 if vouches else 2)


def test_once_enough_are_intact_older_ones_are_only_listed(shelf):
    """enough=1, the newest is damaged: two are read, the oldest is not."""
    shelf.put(10)
    shelf.put(20)
    shelf.damage(shelf.put(30), "flipped")
    told = []
    view_stage(
        shelf.store, shelf.paths, STAGE, Depth.CONTENTS, enough=1, on_read=lambda found, _: told.append(found.step)
    )
    assert told[-1] == 20
    assert 10 not in told


def test_no_thread_stays(shelf):
    """The readers end with the call."""
    shelf.put(10)
    view_stage(shelf.store, shelf.paths, STAGE, Depth.CONTENTS)
    assert [t.name for t in threading.enumerate() if t.name.startswith("tpupipe-verify")] == []


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 3])
def test_content_checksum_over_slices(file_store, size):
    """The same as of the whole, around the slices' borders."""
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    file_store.create("x", data)
    assert content_crc32c(file_store, "x", size) == crc32c_of(data)


# -- what may go --------------------------------------------------------------------------------


def made(step: int, epoch: int, state: str) -> CheckpointView:
    """A view of a checkpoint that is ``intact``, ``damaged`` or ``half`` (has no record)."""
    objects = {} if state == "half" else {COMMIT_NAME: ObjectInfo(COMMIT_NAME, 1, None, "1", 0.0)}
    problems = (ObjectProblem("a", "is missing"),) if state == "damaged" else ()
    return CheckpointView(STAGE, Found(step, epoch, 0, f"{step}-{epoch}", objects), None, problems, 0.0)


views = st.dictionaries(
    st.tuples(st.integers(0, 20), st.integers(1, 3)), st.sampled_from(["intact", "damaged", "half"]), max_size=12
).map(
    lambda found: StageView(
        STAGE,
        tuple(sorted((made(*key, state) for key, state in found.items()), key=lambda v: v.found.age, reverse=True)),
    )
)


@given(views, st.integers(1, 5), st.booleans())
def test_a_plan_never_touches_the_newest_intact_one_or_what_is_newer(view, keep, uncommitted):
    """Every folder is in exactly one half, ``keep`` intact ones stay, and nothing goes that is not older than the newest."""
    plan = plan_prune(view, keep, uncommitted=uncommitted)
    assert sorted([*plan.go, *plan.stay], key=lambda v: v.found.age, reverse=True) == list(view.checkpoints)
    intact = [v for v in view.checkpoints if v.intact]
    assert [v for v in plan.stay if v.intact] == intact[:keep]
    if not intact:
        assert plan.go == ()
    else:
        assert all(v.found.age < intact[0].found.age for v in plan.go)
    halves = [v for v in plan.go if not v.found.committed]
    if uncommitted and intact:
        assert halves == [v for v in view.checkpoints if not v.found.committed and v.found.age < intact[0].found.age]
    else:
        assert halves == []


def test_a_plan_by_example():
    """Half 60, damaged 50, intact 40, half 35, intact 30, damaged 25, half 20; keep 1 and 2, without and with halves."""
    names = {60: "half", 50: "damaged", 40: "intact", 35: "half", 30: "intact", 25: "damaged", 20: "half"}
    view = StageView(STAGE, tuple(made(step, 1, state) for step, state in names.items()))
    assert steps(plan_prune(view, 1).go) == [30, 25]
    assert steps(plan_prune(view, 1, uncommitted=True).go) == [35, 30, 25, 20]
    assert steps(plan_prune(view, 2).go) == [25]
    assert steps(plan_prune(view, 2, uncommitted=True).go) == [35, 25, 20]
    assert steps(plan_prune(view, 3, uncommitted=True).go) == [35, 20]


def test_keeping_none_is_refused():
    """At least one checkpoint stays."""
    with pytest.raises(UsageError):
        plan_prune(StageView(STAGE, (made(1, 1, "intact"),)), 0)


@pytest.mark.parametrize("how", DAMAGES)
def test_intact_means_what_it_means_for_a_restore(shelf, how):
    """The one that a plan keeps is the one that a restore takes; where that finds none, nothing goes."""
    shelf.put(10)
    shelf.put(20)
    shelf.damage(shelf.put(30), how)
    view = view_stage(shelf.store, shelf.paths, STAGE, Depth.RESTORE)
    assert view.newest_intact.found.folder == newest_intact(shelf.store, shelf.paths, STAGE).folder
    assert steps(plan_prune(view, 1).go) == [10]
    for step in (10, 20):
        shelf.damage(shelf.paths.checkpoint(STAGE, step=step, epoch=1), how)
    with pytest.raises(NoIntactCheckpointError):
        newest_intact(shelf.store, shelf.paths, STAGE)
    assert plan_prune(view_stage(shelf.store, shelf.paths, STAGE, Depth.RESTORE), 1, uncommitted=True).go == ()
