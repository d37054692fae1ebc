"""What becomes of an inference worker that says why it could not start."""

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
from tpupipe.stages.infer_pool import InferPool
from tpupipe.stages.unit_failures import UnitFailures
from tpupipe.stop import StopRequest

UNREAD = CheckpointReadError("Reading the arrays of step 3 failed: 503")


@pytest.fixture
def start(run, job):
    """Charges errors of starting workers; gives the kinds of what was charged."""

    def charged(*errors, whole=True, allowed=1):
        with EventLog(run.store, run.paths, 1) as log:
            facts = {"log": log, "stop": StopRequest(), "settings": lambda _: SimpleNamespace(concurrency=None)}
            place = SimpleNamespace(**vars(run) | facts)
            plan = SimpleNamespace(params=SimpleNamespace(reads_whole=lambda: whole))
            budget = Budget(BudgetsConfig(store_failures=allowed), "score")
            failures = UnitFailures("score", 3, frozenset())
            pool = InferPool(job.stage("score"), place, plan, budget, failures=failures, bad_rows=0, seconds=Seconds())
            pool._errors.extend(errors)
            pool._charge_start()
            assert pool._errors == []
        return [e["failure"]["kind"] for e in read_events(run.store, run.paths) if e["kind"] == "failure"]

    return charged


@pytest.mark.parametrize("error", [UNREAD, StoreTimeoutError("nothing")])
def test_a_store_that_was_away_is_charged(start, error):
    """Parameters that could not be read are whole; or the store said nothing at all."""
    assert start(error) == ["store_failures"]


def test_parameters_that_are_damaged_end_the_stage(start):
    """They cannot be read because they are not there any more: no second try reads them."""
    with pytest.raises(CheckpointReadError, match="step 3"):
        start(UNREAD, whole=False)


@pytest.mark.parametrize("error", [CheckpointMismatchError("another tree"), UserCodeError("its load raised")])
def test_any_other_error_ends_the_stage(start, error):
    """Whoever else met an absent store."""
    with pytest.raises(type(error)):
        start(UNREAD, error)


def test_the_budget_bounds_it(start):
    """None is allowed: the error says what the store said."""
    with pytest.raises(BudgetExceededError, match="503"):
        start(UNREAD, allowed=0)
