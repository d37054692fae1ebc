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
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DataError,
    FencedError,
    JobError,
    NoIntactCheckpointError,
    StageError,
    StoreUnavailableError,
    UsageError,
    UserCodeError,
)
from tpupipe.stages.failures import Budget, Failure, Kind, final_error
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


@pytest.mark.parametrize("kind", [Kind.APP, Kind.WORKER])
def test_the_same_failure_at_the_same_step_is_not_retried_twice(kind):
    """It would fail there for ever: the second time ends the run although the budget is large."""
    budget = Budget(BudgetsConfig(worker_failures=99, app_errors=99), "lm")
    budget.charge(Failure(kind, 7, "boom"))
    with pytest.raises(BudgetExceededError, match="repeats at step 7"):
        budget.charge(Failure(kind, 7, "boom"))


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
    budget = Budget(BudgetsConfig(worker_failures=99, app_errors=99), "lm")
    assert charges(budget, [Failure(Kind.APP, 7, "boom"), second]) == 2


@pytest.mark.parametrize("kind", [Kind.HOST, Kind.PREEMPTED])
def test_losing_hosts_at_one_step_is_bad_luck(kind):
    """The platform took a host at the same step twice: nothing about the job repeats."""
    budget = Budget(BudgetsConfig(), "lm")
    assert charges(budget, [Failure(kind, 7, "lost")] * 3) == 3


def test_a_failure_of_unknown_step_never_repeats():
    """Without a step there is no "same step"; the budget still ends it."""
    budget = Budget(BudgetsConfig(worker_failures=3), "lm")
    assert charges(budget, [Failure(Kind.WORKER, None, "died")] * 9) == 3


def test_the_last_error_says_what_was_allowed_and_how_to_go_on():
    """Kind, numbers, detail and the key of the configuration."""
    budget = Budget(BudgetsConfig(app_errors=0), "lm")
    with pytest.raises(BudgetExceededError) as caught:
        budget.charge(Failure(Kind.APP, 3, "ValueError: no", "Traceback ..."))
    assert caught.value.data == {"stage": "lm", "kind": "app_errors", "failures": 1, "allowed": 0, "step": 3}
    for part in ("'lm'", "ValueError: no", "Traceback ...", "budgets.app_errors", "resumes"):
        assert part in str(caught.value)


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
    CheckpointError("cannot read arrays"),
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
    failure = classify(died(3, 1), Ending(step=7), lost_hosts=0)
    assert failure.kind is Kind.WORKER
    assert "rank 1, 3 died" in failure.what


def test_a_lost_host():
    """The same, and a host is gone: that is the host's budget."""
    failure = classify(died(1), Ending(step=7), lost_hosts=1)
    assert (failure.kind, failure.step) == (Kind.HOST, 7)
    assert "1 host" in failure.what


def test_a_group_that_stopped_for_a_preemption():
    """It saved and ended by itself, without an error."""
    ending = Ending(stopped={"step": 9, "reason": "a host is about to be preempted"}, step=9)
    assert classify(None, ending, lost_hosts=1).kind is Kind.PREEMPTED


@pytest.mark.parametrize("what", ["ValueError: no", "KeyError: 'x'", "RuntimeError: boom"])
def test_an_exception_of_the_job(what):
    """One line, the step it had reached, and the worker's traceback as detail."""
    error = WorkerGroupError("workers failed", {0: RuntimeError(what)})
    failure = classify(error, Ending(errors=[reported(f"{what}\nmore")], step=4), lost_hosts=0)
    assert failure == Failure(Kind.APP, 4, what, f"Traceback of {what}\nmore")


@pytest.mark.parametrize(
    "what", ["JaxRuntimeError: ABORTED: peer", "XlaRuntimeError: x", "ValueError: Gloo all-reduce"]
)
def test_what_jax_raises_when_another_process_went_away(what):
    """It is charged to the workers, not to the job's code."""
    assert classify(RuntimeError("x"), Ending(errors=[reported(what)]), lost_hosts=0).kind is Kind.WORKER


def test_the_cause_counts_not_who_spoke_first():
    """Rank 0 reports that a peer went away before rank 1 reports why it did: the job's error is the failure."""
    errors = [reported("JaxRuntimeError: connection closed by peer"), reported("ValueError: no")]
    failure = classify(RuntimeError("x"), Ending(errors=errors, step=4), lost_hosts=0)
    assert (failure.kind, failure.what) == (Kind.APP, "ValueError: no")


def test_an_end_without_a_word_is_a_worker_failure():
    """Nothing was reported, nobody is known dead: retried within the workers' budget, with the error's name."""
    failure = classify(TimeoutError("start"), Ending(), lost_hosts=0)
    assert (failure.kind, failure.step) == (Kind.WORKER, None)
    assert "TimeoutError" in failure.what
