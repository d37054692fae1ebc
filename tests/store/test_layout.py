import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.errors import UsageError
from tpupipe.store.layout import (
    GenerationPaths,
    RunPaths,
    checkpoint_name,
    parse_checkpoint,
    parse_claim,
    parse_event_segment,
    parse_lease,
    parse_tick_done,
    parse_unit,
)
from tpupipe.store.objects import check_object_name

PATHS = RunPaths("lm", "run-1")
numbers = st.integers(0, 10**12)


CHECKPOINT = "lm/run-1/stages/train/checkpoints/0000000020-000002"
GOLDEN = [
    (PATHS.root, "lm/run-1"),
    (PATHS.identity, "lm/run-1/run.json"),
    (PATHS.result, "lm/run-1/result.json"),
    (PATHS.change(3), "lm/run-1/changes/0003.json"),
    (PATHS.lease(7), "lm/run-1/lease/000007.json"),
    (PATHS.beat(7), "lm/run-1/lease/000007.beat.json"),
    (PATHS.event_segment(7, 12), "lm/run-1/events/000007-000012.jsonl"),
    (PATHS.manifest("train"), "lm/run-1/stages/train/manifest.json"),
    (PATHS.unit("tokens", "000012-ab12"), "lm/run-1/stages/tokens/units/000012-ab12.parquet"),
    (PATHS.unit_errors("tokens", "000012-ab12"), "lm/run-1/stages/tokens/errors/000012-ab12.parquet"),
    (PATHS.checkpoint("train", step=20, epoch=2), CHECKPOINT),
    (PATHS.checkpoint_arrays("train", step=20, epoch=2), f"{CHECKPOINT}/arrays"),
    (PATHS.checkpoint_commit("train", step=20, epoch=2), f"{CHECKPOINT}/COMMIT.json"),
    (PATHS.checkpoint_arrays("train", step=20, epoch=2, restart=3), f"{CHECKPOINT}-0003/arrays"),
    (PATHS.stacks("train", "rank-0"), "lm/run-1/stages/train/stalls/rank-0.txt"),
]


@pytest.mark.parametrize(("name", "golden"), GOLDEN)
def test_the_layout_stays_what_it_is(name, golden):
    """Golden: these names are in stores that exist; changing one loses runs."""
    assert name == golden


def test_every_name_is_an_object_name_of_its_run():
    """All names are valid on every backend and below the root of the run."""
    for name, _ in GOLDEN:
        assert check_object_name(name).startswith(PATHS.root)


@given(*[st.tuples(st.integers(0, 10**10 - 1), st.integers(0, 10**6 - 1), st.integers(0, 9999))] * 2)
def test_checkpoints_sort_by_step_then_epoch_then_restart(one, other):
    """While the numbers have their usual digits, names sort like (step, epoch, restart)."""
    assert (checkpoint_name(*one) < checkpoint_name(*other)) == (one < other)


@given(numbers, numbers, numbers)
def test_checkpoint_names_read_back(step, epoch, restart):
    """Names give back what they were made of, however long the numbers are."""
    name = checkpoint_name(step, epoch, restart)
    assert parse_checkpoint(name) == (step, epoch, restart) == parse_checkpoint(f"x/checkpoints/{name}/")


@given(numbers, numbers)
def test_names_read_back(epoch, sequence):
    """Lease and event names give their numbers back; a beat is no lease."""
    assert parse_lease(PATHS.lease(epoch)) == epoch
    assert parse_lease(PATHS.beat(epoch)) is None
    assert parse_event_segment(PATHS.event_segment(epoch, sequence)) == (epoch, sequence)


@pytest.mark.parametrize(
    "name", ["", "x.json", "20-1", "0000000020", "0000000020-000001.tmp", "0000000020-000001-1", "tmp"]
)
def test_foreign_names_are_not_ours(name):
    """Whatever else lies around in a folder is recognised as something else."""
    assert parse_checkpoint(name) is None
    assert parse_lease(name) is None
    assert parse_unit(name) is None
    assert parse_event_segment(name) is None


def test_unit_ids_read_back():
    """The id of a committed unit comes from its object's name."""
    assert parse_unit(PATHS.unit("tokens", "000012-ab12cd34")) == "000012-ab12cd34"
    assert parse_unit("000012-ab12cd34") is None
    assert parse_unit("manifest.json") is None


@pytest.mark.parametrize("bad", ["", "A", "-a", ".a", "a/b", "a b", "é", "a" * 64, "..", "a\n"])
def test_bad_names_are_refused(bad):
    """Job, run, stage and unit names that could leave the layout are usage errors."""
    for make in (
        lambda: RunPaths(bad, "run"),
        lambda: RunPaths("job", bad),
        lambda: PATHS.manifest(bad),
        lambda: PATHS.checkpoint(bad, step=1, epoch=1),
    ):
        with pytest.raises(UsageError, match="is not a"):
            make()
    with pytest.raises(UsageError, match="negative"):
        checkpoint_name(-1, 1)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "-a", "a b", "a" * 201])
def test_bad_unit_ids_are_refused(bad):
    """A unit id is one part of a name."""
    with pytest.raises(UsageError, match="is not a unit id"):
        PATHS.unit("tokens", bad)


def test_a_tick_has_the_names_of_a_run_and_its_tables_units_elsewhere():
    """One Hive partition per tick below the generation's table; everything else is the tick's own."""
    generation = GenerationPaths("job", "nightly", 2)
    root = "job/datasets/nightly/generations/0002"
    assert generation.identity == f"{root}/run.json"
    assert generation.tick_done("2026-11-30T02:00") == f"{root}/done/2026-11-30T02:00.json"
    assert parse_tick_done(generation.tick_done("2026-11-30T02:00")) == "2026-11-30T02:00"
    assert parse_tick_done(f"{root}/done/README") is None
    assert parse_claim(generation.claim(7)) == 7
    assert parse_claim(f"{root}/claims/7.parquet") is None
    tick = pickle.loads(pickle.dumps(generation.tick("2026-11-30T02:00", ("scores",))))
    assert tick.generation == generation
    own = f"{root}/ticks/2026-11-30T02:00"
    assert tick.lease(1) == f"{own}/lease/000001.json"
    assert tick.manifest("scores") == f"{own}/stages/scores/manifest.json"
    assert tick.unit("scores", "000000-ab") == f"{root}/tables/scores/date=2026-11-30T02:00/000000-ab.parquet"
    assert tick.unit("tokens", "000000-ab") == f"{own}/stages/tokens/units/000000-ab.parquet"
    assert (tick.outputs("scores"), tick.outputs("tokens")) == (f"{root}/tables/scores", f"{own}/stages/tokens")
    assert tick.unit_errors("scores", "u") == f"{root}/errors/scores/date=2026-11-30T02:00/u.parquet"
    assert tick.compile_cache == generation.compile_cache
    with pytest.raises(UsageError):
        GenerationPaths("job", "not/a/name", 1)
