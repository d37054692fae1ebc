"""The standard plan's scenarios of a store that fails. Pure.

What is asked of the store's faults here never reaches the commit of a run's last checkpoint with a listing that lags
behind: Cloud Storage lists what it has created, so an older listing is survived where it only costs work, and is an
error where it would hide what was just saved.
"""

from __future__ import annotations

from collections.abc import Callable

from tpupipe.drill.facts import JobFacts
from tpupipe.drill.places import HOLD_MIN_S, Places
from tpupipe.drill.scenario import Scenario
from tpupipe.store.layout import ARRAYS, COMMIT_NAME, checkpoint_name

# A save that the store keeps waiting is not there yet when a later one is lost.
_INTERVALS = 2
_LATENCY_FACTOR = 4.0  # a write that is kept waiting is not there before its process is killed
# Where each process of Orbax writes its arrays, a few objects and then their index; they are merged when all are there.
_PARTS = "ocdbt.process_"

Make = Callable[[str, JobFacts], Scenario]


def store_fails(about: str, *faults: str, extra_s: float = 10.0) -> Make:
    """A scenario in which nothing fails but the store, now and then."""

    def make(name: str, facts: JobFacts) -> Scenario:
        Places(facts).failing_store()
        return Scenario(name, store_faults=faults, intervals=_INTERVALS, about=about, extra_s=extra_s)

    return make


def store_listings(name: str, facts: JobFacts) -> Scenario:
    """A burst of failures of listings; and training that starts again by a listing without its newest checkpoints."""
    at = Places(facts)
    at.failing_store()
    faults: list[str] = []
    store_faults = ["503@list,burst=3,after=1"]
    if at.training is not None:
        stage = at.training
        faults = at.step("kill-worker", stage, stage.middle, at.last_rank)
        # The listings of all checkpoints: at the start, after each save, at the restart, at the end. The second and
        # the third are stale, so never that at the end.
        where = f"/stages/{stage.name}/checkpoints/$"
        store_faults.append(f"stale-list@list,seconds=600,name={where},after=1,times=2")
    about = "listings fail in a burst; a restart's listing lacks the newest checkpoint, so an older one counts"
    return Scenario(name, (tuple(faults),), tuple(store_faults), intervals=_INTERVALS, about=about, extra_s=10.0)


def store_denied(name: str, facts: JobFacts) -> Scenario:
    """Commits are refused with 403: the attempt ends with status 1, and the next one, of a store that works, is whole."""
    at = Places(facts)
    at.failing_store()
    refused = COMMIT_NAME if at.training is not None else "/units/"
    return Scenario(
        name,
        ((), ()),
        (f"403@create,name={refused}",),
        intervals=_INTERVALS,
        about="commits are refused (403): the run fails and guesses nothing; the same command then finishes it",
        first_status=1,
    )


def kill_in_arrays(name: str, facts: JobFacts) -> Scenario:
    """A worker is killed while some objects of a checkpoint's arrays are in the store and others are not."""
    at = Places(facts)
    stage = at.between()
    at.failing_store()
    step = stage.next_save if stage.next_save < (stage.total or 0) else stage.first_save or 0
    # The folder of the first start under the first lease: the first object of the arrays lands, the others are kept
    # waiting until the kill is over. A restart writes to a folder of its own.
    parts = f"/{stage.name}/checkpoints/{checkpoint_name(step, 1)}/{ARRAYS}/{_PARTS}"
    late = f"latency@create,seconds={_LATENCY_FACTOR * HOLD_MIN_S:.1f},name={parts},after=1"
    # Not as long as a save takes: it is not to be durable, and the one before it is, for a save waits for that.
    place = f"train.step={step},rank=0,stage={stage.name}"
    faults = (f"slow@{place},seconds={HOLD_MIN_S:.1f}", f"kill-worker@{place}")
    return Scenario(name, (faults,), (late,), about="killed with a part of a checkpoint's arrays written", extra_s=10.0)
