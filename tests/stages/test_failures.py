"""What happens after a failure: retry, or give up. Pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from ray.train.v2.api.exceptions import WorkerGroupError

from tpupipe.config import BudgetsConfig
from tpupipe.errors import (
    BudgetExceededError,
    CheckpointMismatchError,
    CheckpointReadError,
    CheckpointSaveError,
    DataError,
    FencedError,
    JobError,
    NoIntactCheckpointError,
    ObjectNotFoundError,
    StageError,
    StoreDeniedError,
    StoreTimeoutError,
    StoreUnavailableError,
    UsageError,
    UserCodeError,
)
from tpupipe.stages.failures import (
    BACK_OFFS,
    Budget,
    Failure,
    GiveUp,
    Kind,
    Retry,
    decide,
    final_error,
    loss,
    unreachable,
)
from tpupipe.stages.train import Ending, classify

kinds = st.sampled_from(list(Kind))


def charges(budget: Budget, failures: list[Failure]) -> int:
    """How many failures were survived before it was enough."""
    for survived, failure in enumerate(failures):
        try:
            budget.charge(failure)
        except BudgetExceededError:
            return survived
    return len(failures)


@given(kinds, st.integers(0, 6))
def test_each_kind_has_its_own_budget(kind, allowed):
    """So many of one kind at different steps are retried, the next one is not."""
    budget = Budget(BudgetsConfig(**{kind.value: allowed}), "lm")
    assert charges(budget, [Failure(kind, step, "died") for step in range(10)]) == allowed


@given(st.lists(kinds, max_size=20))
def test_kinds_do_not_share_a_budget(order):
    """Two of each are allowed: it ends at the third of one kind, whatever came between."""
    budget = Budget(BudgetsConfig(**{kind.value: 2 for kind in Kind}), "lm")
    third = next((i for i in range(len(order)) if order[: i + 1].count(order[i]) == 3), len(order))
    assert charges(budget, [Failure(kind, step, "x") for step, kind in enumerate(order)]) == third


PLENTY = BudgetsConfig(**{kind.value: 99 for kind in Kind})


@pytest.mark.parametrize("kind", [Kind.APP, Kind.WORKER, Kind.STALLED])
def test_the_same_failure_at_the_same_step_is_not_retried_twice(kind):
    """It would fail there for ever: the second time ends the run although the budget is large."""
    budget = Budget(PLENTY, "lm")
    budget.charge(Failure(kind, 41, "boom"))
    with pytest.raises(BudgetExceededError, match="repeats at step 41: not retried"):
        budget.charge(Failure(kind, 41, "boom"))


@pytest.mark.parametrize("kind", [Kind.APP, Kind.WORKER, Kind.STALLED])
def test_what_came_between_does_not_hide_a_repetition(kind):
    """A host was lost between the two: the error at step 41 is the same one."""
    earlier = [Failure(kind, 41, "boom"), Failure(Kind.HOST, 41, "lost")]
    assert isinstance(decide(PLENTY, earlier, Failure(kind, 41, "boom")), GiveUp)
    assert isinstance(decide(PLENTY, earlier, Failure(kind, 42, "boom")), Retry)


@pytest.mark.parametrize(
    "second",
    [
        Failure(Kind.APP, 8, "boom"),
        Failure(Kind.APP, 7, "other"),
        Failure(Kind.APP, None, "boom"),
        Failure(Kind.WORKER, 7, "boom"),
    ],
)
def test_another_step_or_error_is_another_failure(second):
    """Progress was made, or something else went wrong."""
    assert charges(Budget(PLENTY, "lm"), [Failure(Kind.APP, 7, "boom"), second]) == 2


@pytest.mark.parametrize("kind", [Kind.HOST, Kind.SLICE, Kind.PREEMPTED, Kind.STORE])
def test_what_the_platform_does_at_one_step_is_bad_luck(kind):
    """It took a host at the same step twice, or the store was away twice: nothing about the job repeats."""
    budget = Budget(BudgetsConfig(), "lm")
    assert charges(budget, [Failure(kind, 7, "lost")] * 3) == 3


def test_a_failure_of_unknown_step_never_repeats():
    """Without a step there is no "same step"; the budget still ends it."""
    budget = Budget(BudgetsConfig(worker_failures=3), "lm")
    assert charges(budget, [Failure(Kind.WORKER, None, "died")] * 9) == 3


def test_the_last_error_says_what_was_allowed_and_how_to_go_on():
    """Kind, numbers, detail, the key of the configuration, and where the log and the stacks are."""
    budget = Budget(BudgetsConfig(app_errors=0), "lm", "gs://b/run/events")
    with pytest.raises(BudgetExceededError) as caught:
        budget.charge(Failure(Kind.APP, 3, "ValueError: no", "Traceback ...", "gs://b/run/stalls/1.txt"))
    places = {"log": "gs://b/run/events", "stacks": "gs://b/run/stalls/1.txt"}
    assert caught.value.data == {"stage": "lm", "kind": "app_errors", "failures": 1, "allowed": 0, "step": 3, **places}
    for part in ("'lm'", "ValueError: no", "Traceback ...", "budgets.app_errors", "resumes", *places.values()):
        assert part in str(caught.value)


# -- when to try again ---------------------------------------------------------------------------


def waits(kind: Kind, failures: int) -> list[float]:
    """Seconds before each retry, for failures of one kind at different steps."""
    budget = Budget(PLENTY, "lm")
    return [budget.charge(Failure(kind, step, "x")) for step in range(failures)]


def test_a_first_loss_costs_no_wait():
    """Nothing is gained by waiting after one dead worker, host, slice or stall, or after any preemption."""
    for kind in (Kind.WORKER, Kind.HOST, Kind.SLICE, Kind.STALLED):
        assert waits(kind, 2)[0] == 0 < waits(kind, 2)[1]
    assert waits(Kind.PREEMPTED, 16) == [0] * 16


def test_a_store_that_is_away_is_asked_less_and_less_often():
    """1, 2, 4 s up to a minute; the 8 failures that are allowed wait for about three minutes."""
    assert waits(Kind.STORE, 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert BudgetsConfig().store_failures == 8


@given(kinds, st.integers(1, 10_000))
def test_no_wait_is_without_end(kind, failures):
    """Whatever happened before: a minute at most, and never less than the time before."""
    now, before = BACK_OFFS[kind].after_s(failures), BACK_OFFS[kind].after_s(failures - 1)
    assert 0 <= before <= now <= 60


@given(st.lists(kinds, max_size=12), kinds)
def test_other_kinds_do_not_lengthen_the_wait(others, kind):
    """Ten lost hosts do not make the first look at the store wait longer."""
    earlier = [Failure(other, step, "x") for step, other in enumerate(others) if other is not kind]
    assert decide(PLENTY, earlier, Failure(kind, None, "x")) == Retry(BACK_OFFS[kind].after_s(1))


# -- what kind it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "lost", "kind"),
    [
        ([0, 0], [0], Kind.HOST),
        ([0, 0], [0, 0], Kind.SLICE),
        ([0, 0, 1, 1], [0, 1], Kind.HOST),
        ([0, 0, 1, 1], [1, 1], Kind.SLICE),
        ([0, 0, 1, 1], [0, 1, 1], Kind.SLICE),
        ([0], [0], Kind.HOST),
        ([0, 1], [0, 1], Kind.HOST),
    ],
)
def test_a_slice_is_lost_when_all_its_hosts_are(hosts, lost, kind):
    """Slice numbers of all hosts and of the dead ones; a slice of one host is a host."""
    assert loss(hosts, lost)[0] is kind


def test_a_store_is_unreachable_when_it_did_not_answer():
    """A refusal and a missing object are answers."""
    assert unreachable(StoreUnavailableError("503"))
    assert unreachable(StoreTimeoutError("nothing"))
    for answer in (StoreDeniedError("403"), ObjectNotFoundError("404"), CheckpointSaveError("no"), OSError(), None):
        assert not unreachable(answer)


FINAL = [
    UserCodeError("step raised"),
    FencedError("not ours"),
    CheckpointMismatchError("other tree"),
    CheckpointSaveError("403"),
    DataError("ragged"),
    JobError("mesh"),
    UsageError("what"),
]
PASSING = [
    StageError("waited in vain"),
    CheckpointReadError("cannot read arrays"),
    NoIntactCheckpointError("none"),
    StoreUnavailableError("503"),
]


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_what_no_retry_mends_is_final(error):
    """Raised as it is, also when other workers' errors came before it."""
    assert final_error([error]) is error
    assert final_error([*PASSING, error]) is error


def test_what_may_pass_is_not_final():
    """A damaged checkpoint (an older one may do), a store that was away, a wait that ended."""
    assert final_error(PASSING) is None
    assert final_error([]) is None


# -- classify ------------------------------------------------------------------------------------


def reported(what: str) -> dict:
    return {"what": what, "traceback": f"Traceback of {what}", "error": None}


def died(*ranks: int) -> WorkerGroupError:
    return WorkerGroupError("workers failed", {rank: RayActorError() for rank in ranks})


def test_a_dead_process_on_a_living_host():
    """SIGKILL of ranks 1 and 3: a worker failure that names them."""
    failure = classify(died(3, 1), Ending(step=7), None)
    assert (failure.kind, failure.step) == (Kind.WORKER, None)
    assert "rank 1, 3 died" in failure.what


def test_a_dead_process_at_a_step_that_is_known():
    """The processes had agreed to confer after the next step, and did not; after the one after it, it may be either."""
    assert classify(died(1), Ending(step=7, between=(7, 8)), None).step == 7
    assert classify(died(1), Ending(step=7, between=(7, 9)), None).step is None


def test_a_lost_host():
    """The same, and a host is gone: that is the host's budget."""
    failure = classify(died(1), Ending(step=7), loss([0, 0], [0]))
    assert (failure.kind, failure.step) == (Kind.HOST, 7)
    assert "1 host" in failure.what
    assert classify(died(0, 1), Ending(step=7), loss([0, 0], [0, 0])).kind is Kind.SLICE


def stalled(step: int, rank: int) -> dict:
    return {
        "step": step,
        "rank": rank,
        "phase": "no progress in a step",
        "uri": f"gs://b/{rank}",
        "traceback": "File x",
    }


def test_a_process_that_made_no_progress():
    """Its watchdog ended it: a stall at the step of the one that is furthest behind, and where its stacks are."""
    ending = Ending(stalls=[stalled(8, 0), stalled(6, 1)], errors=[reported("JaxRuntimeError: peer")], step=5)
    failure = classify(died(1), ending, None)
    assert failure == Failure(Kind.STALLED, 6, "no progress in a step", "File x", "gs://b/1")


def test_a_stall_for_want_of_a_host_is_the_loss_of_the_host():
    """The others waited for a host that is gone."""
    assert classify(died(1), Ending(stalls=[stalled(8, 0)]), loss([0, 0], [0])).kind is Kind.HOST


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("503"), StoreTimeoutError("nothing"), CheckpointReadError("cannot")]
)
def test_a_store_that_a_worker_could_not_reach(error):
    """Reading data or a checkpoint that turned out to be whole: the store's budget, whoever else fell over."""
    errors = [reported("JaxRuntimeError: peer"), {**reported("X: away"), "error": error}]
    assert classify(RuntimeError("x"), Ending(errors=errors, step=4), None).kind is Kind.STORE


def test_an_error_carries_the_step_of_the_process_that_raised_it():
    """What was last told to the driver may be some steps ago, and would take two errors for one."""
    ending = Ending(errors=[{**reported("ValueError: no"), "step": 9}], step=4)
    assert classify(RuntimeError("x"), ending, None).step == 9


def test_a_group_that_stopped_for_a_preemption():
    """It saved and ended by itself, without an error."""
    ending = Ending(stopped={"step": 9, "reason": "a host is about to be preempted"}, step=9)
    assert classify(None, ending, loss([0, 0], [0])).kind is Kind.PREEMPTED


@pytest.mark.parametrize("what", ["ValueError: no", "KeyError: 'x'", "RuntimeError: boom"])
def test_an_exception_of_the_job(what):
    """One line, the step it had reached, and the worker's traceback as detail."""
    error = WorkerGroupError("workers failed", {0: RuntimeError(what)})
    failure = classify(error, Ending(errors=[reported(f"{what}\nmore")], step=4), None)
    assert failure == Failure(Kind.APP, 4, what, f"Traceback of {what}\nmore")


@pytest.mark.parametrize(
    "what", ["JaxRuntimeError: ABORTED: peer", "XlaRuntimeError: x", "ValueError: Gloo all-reduce"]
)
def test_what_jax_raises_when_another_process_went_away(what):
    """It is charged to the workers, not to the job's code."""
    assert classify(RuntimeError("x"), Ending(errors=[reported(what)]), None).kind is Kind.WORKER


@pytest.mark.parametrize(
    "what",
    [
        "JaxRuntimeError: INTERNAL: CpuCallback error calling callback: Traceback ...",  # jax.pure_callback that raises
        "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
        "XlaRuntimeError: INVALID_ARGUMENT: size mismatch",
    ],
)
def test_what_jax_raises_about_the_program_itself(what):
    """It would come again: charged to the job, with its step."""
    failure = classify(RuntimeError("x"), Ending(errors=[reported(what)], step=7), None)
    assert (failure.kind, failure.step) == (Kind.APP, 7)


def test_the_cause_counts_not_who_spoke_first():
    """Rank 0 reports that a peer went away before rank 1 reports why it did: the job's error is the failure."""
    errors = [reported("JaxRuntimeError: connection closed by peer"), reported("ValueError: no")]
    failure = classify(RuntimeError("x"), Ending(errors=errors, step=4), None)
    assert (failure.kind, failure.what) == (Kind.APP, "ValueError: no")


def test_an_end_without_a_word_is_a_worker_failure():
    """Nothing was reported, nobody is known dead: retried within the workers' budget, with the error's name."""
    failure = classify(TimeoutError("start"), Ending(), None)
    assert (failure.kind, failure.step) == (Kind.WORKER, None)
    assert "TimeoutError" in failure.what
