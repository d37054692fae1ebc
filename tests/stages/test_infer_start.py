"""What becomes of inference workers that say why they could not start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tpupipe.config import BudgetsConfig
from tpupipe.errors import (
    BudgetExceededError,
    CheckpointMismatchError,
    CheckpointReadError,
    StoreTimeoutError,
    UserCodeError,
)
from tpupipe.ledger.events import EventLog, Seconds, read_events
from tpupipe.stages.failures import Budget
from tpupipe.stages.infer_pool import InferPool, _Worker
from tpupipe.stages.unit_failures import UnitFailures
from tpupipe.stop import StopRequest

UNREAD = CheckpointReadError("Reading the arrays of step 3 failed: 503")
SILENT = StoreTimeoutError("nothing")


class Started(_Worker):
    """A worker without processes."""

    def __init__(self, rank):
        super().__init__([None], rank, [])
        self.ended = False

    def has_started(self):
        return False

    def end(self):
        self.ended = True


@pytest.fixture
def pool(run, job, monkeypatch):
    """A pool of three workers; ``charged()`` are the kinds of what was charged."""

    def make(whole=True, allowed=9):
        log = EventLog(run.store, run.paths, 1)
        log.__enter__()
        facts = {
            "log": log,
            "stop": StopRequest(),
            "settings": lambda _: SimpleNamespace(concurrency=None),
            "absorb": lambda _: [],
            "reservation": None,
        }
        place = SimpleNamespace(**vars(run) | facts)
        plan = SimpleNamespace(params=SimpleNamespace(reads_whole=lambda: whole))
        budget = Budget(BudgetsConfig(store_failures=allowed, worker_failures=allowed), "score")
        failures = UnitFailures("score", 3, frozenset())
        pool = InferPool(job.stage("score"), place, plan, budget, failures=failures, bad_rows=0, seconds=Seconds())
        monkeypatch.setattr(pool, "_start", Started)
        monkeypatch.setattr(place.stop, "wait", lambda _: None)  # back-offs are not what is tested
        pool._start_all(3)

        def charged():
            log.__exit__(None, None, None)
            return [e["failure"]["kind"] for e in read_events(run.store, run.paths) if e["kind"] == "failure"]

        return pool, charged

    return make


def lose(pool, number, *errors):
    """The worker is gone; ``errors``, by rank, were told by then. Gives which workers were replaced."""
    before = list(pool._workers)
    pool._errors.extend(errors)
    pool._replace(before[number], "gone")
    assert [each.ended for each in before] == [each not in pool._workers for each in before]
    return [each.rank for each in before if each.ended]


@pytest.mark.parametrize("error", [UNREAD, SILENT])
def test_a_store_that_was_away_is_charged_once_for_all_that_met_it(pool, error):
    """Parameters that could not be read are whole; or the store said nothing at all. The third worker goes on."""
    workers, charged = pool()
    assert lose(workers, 0, (0, error), (2, error)) == [0, 2]
    assert charged() == ["store_failures"]


def test_a_death_beside_an_absent_store_is_a_death(pool):
    """The worker that died had said nothing; the one that had keeps its turn."""
    workers, charged = pool()
    assert lose(workers, 1, (2, SILENT)) == [1]
    assert lose(workers, 2) == [2]
    assert charged() == ["worker_failures", "store_failures"]


def test_parameters_that_are_damaged_end_the_stage(pool):
    """They cannot be read because they are not there any more: no second try reads them."""
    workers, _ = pool(whole=False)
    with pytest.raises(CheckpointReadError, match="step 3"):
        lose(workers, 0, (0, UNREAD))


@pytest.mark.parametrize("error", [CheckpointMismatchError("another tree"), UserCodeError("its load raised")])
def test_any_other_error_ends_the_stage(pool, error):
    """Whoever else met an absent store."""
    workers, _ = pool()
    with pytest.raises(type(error)):
        lose(workers, 0, (0, UNREAD), (1, error))


def test_the_budget_bounds_it(pool):
    """None is allowed: the error says what the store said."""
    workers, _ = pool(allowed=0)
    with pytest.raises(BudgetExceededError, match="503"):
        lose(workers, 0, (0, UNREAD))


def test_the_same_again_from_a_store_that_can_be_read_ends_the_stage(pool):
    """Something else than the store keeps the parameters from being read."""
    workers, charged = pool()
    for error in (UNREAD, SILENT, CheckpointReadError("another"), UNREAD):
        lose(workers, 0, (0, error))
    with pytest.raises(CheckpointReadError, match="step 3"):
        lose(workers, 0, (0, CheckpointReadError(UNREAD.message)))
    assert charged() == ["store_failures"] * 4
