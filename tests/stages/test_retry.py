"""The wait before a retry: told, bounded, and ended by a request to stop; questions to a store that is away."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest

from tpupipe.config import BudgetsConfig
from tpupipe.errors import BudgetExceededError, InterruptedRunError, ObjectNotFoundError, StoreUnavailableError
from tpupipe.ledger.events import EventLog, read_events
from tpupipe.stages.failures import Budget, Failure, Kind
from tpupipe.stages.retry import answered, charge
from tpupipe.stop import StopRequest
from tpupipe.store.objects import open_store

GONE = open_store("gs://nobody/listens", endpoint="http://127.0.0.1:9", timeout_s=30, attempts=1)


@pytest.fixture
def told(run):
    """The run with a real event log and stop request."""
    with contextlib.ExitStack() as opened:
        log = opened.enter_context(EventLog(run.store, run.paths, 1))
        yield SimpleNamespace(**vars(run) | {"log": log, "stop": StopRequest(), "close": opened.close})


def kept(told, kind):
    """Events of a kind; closes the log, which writes what is buffered."""
    told.close()
    return [e for e in read_events(told.store, told.paths) if e["kind"] == kind]


def test_the_first_dead_worker_is_replaced_at_once_and_the_next_after_a_pause_that_is_told(told):
    """Charged, told with its kind, and "trying again in 1 s" before the second retry only."""
    budget = Budget(BudgetsConfig(), "lm")
    charge(told, budget, Failure(Kind.WORKER, 3, "died"))
    began = time.monotonic()
    charge(told, budget, Failure(Kind.WORKER, None, "died"), reached=5)
    assert time.monotonic() - began >= 1
    assert [(e["step"], e["failure"]["kind"]) for e in kept(told, "failure")] == [
        (3, "worker_failures"),
        (5, "worker_failures"),
    ]
    assert [e["message"] for e in kept(told, "back_off")] == ["lm: trying again in 1 s"]


def test_a_request_to_stop_ends_the_wait(told):
    """A minute is to be waited for; asked to stop meanwhile, it ends at once, as interrupted."""
    budget = Budget(BudgetsConfig(store_failures=99), "lm")
    for _ in range(9):
        budget.charge(Failure(Kind.STORE, None, "away"))
    asks = threading.Timer(0.2, told.stop.ask, ("SIGTERM",))
    asks.start()
    began = time.monotonic()
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        charge(told, budget, Failure(Kind.STORE, None, "away"))
    assert time.monotonic() - began < 50
    asks.join()


def test_a_store_that_comes_back_is_asked_again(told):
    """The first listing meets nobody, the second gets the real answer: charged once, and the answer is used."""
    stores = iter([GONE, told.store])
    told.store.create("a", b"1")
    names = answered(told, Budget(BudgetsConfig(), "lm"), lambda: [i.name for i in next(stores).list("a")])
    assert names == ["a"]
    assert [e["failure"]["kind"] for e in kept(told, "failure")] == ["store_failures"]


def test_a_store_that_stays_away_is_never_an_empty_listing(told):
    """The budget is used up: an error that names the place, caused by the store's own."""
    budget = Budget(BudgetsConfig(store_failures=1), "lm")
    with pytest.raises(
        BudgetExceededError, match=r"gs://nobody/listens.*2 failure\(s\) of kind store_failures"
    ) as caught:
        answered(told, budget, lambda: list(GONE.list("a")))
    assert isinstance(caught.value.__context__, StoreUnavailableError)


def test_an_answer_is_not_asked_for_again(told):
    """A missing object is raised as it is, uncharged."""
    with pytest.raises(ObjectNotFoundError):
        answered(told, Budget(BudgetsConfig(store_failures=0), "lm"), lambda: told.store.read("missing"))
    assert kept(told, "failure") == []
