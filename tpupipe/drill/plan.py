"""The standard plan: which failures any job is put through, most valuable first. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpupipe.drill.facts import JobFacts
from tpupipe.drill.places import HOLD_FACTOR, Impossible, Places
from tpupipe.drill.scenario import Scenario, split_attempts
from tpupipe.drill.store_plan import kill_in_arrays, store_denied, store_fails, store_listings

STALL_MIN_S = 6.0
UNMEASURED_SAVE_S = 3.0  # how long a save may take in a job that was not run before
DEADLINE_S = 15
HELD_FOR_BEAT_S = 10  # the lease's second beat comes 5 s after the first

# For choosing what fits: what a failure costs beyond the undisturbed run, on a faked slice of this kind of machine.
RECOVERY_S = 12.0
ATTEMPT_S = 8.0


@dataclass(frozen=True)
class Skipped:
    """A scenario that is not run, and why."""

    name: str
    why: str


def standard_plan(facts: JobFacts) -> tuple[tuple[Scenario, ...], tuple[Skipped, ...]]:
    """The scenarios for a job, in the order in which they are worth their time.

    Returns:
        Those that the job has a place for, and the others with the reason.
    """
    scenarios: list[Scenario] = []
    skipped: list[Skipped] = []
    for name, make in _CATALOGUE.items():
        try:
            scenarios.append(make(name, facts))
        except Impossible as why:
            skipped.append(Skipped(name, str(why)))
    return tuple(scenarios), tuple(skipped)


def one_kill(facts: JobFacts) -> tuple[str, ...]:
    """One worker killed: in training with a checkpoint to go back to, else in the first stage of units.

    Returns:
        Faults; none for a job that no failure can be placed in.
    """
    at = Places(replace(facts, save_s=max(facts.save_s, UNMEASURED_SAVE_S)))
    if at.training is not None:
        return tuple(at.step("kill-worker", at.training, at.training.middle, at.last_rank))
    return tuple(at.units("kill-worker@unit.before_commit{at}"))[:1]


# -- the catalogue --------------------------------------------------------------------------------


def _kill_worker(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    faults = at.units("kill-worker@unit.before_commit{at}")
    if at.training is not None:
        faults += at.step("kill-worker", at.training, at.training.middle, at.last_rank)
    if not faults:
        raise Impossible("the job has no stage with a fault point")
    return Scenario(name, (tuple(faults),), about="a worker is killed in every kind of stage, before its work counts")


def _kill_driver(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    faults = ["kill-driver@run.reserved", *at.unit(at.prepare, "kill-driver@unit.before_commit{at}")]
    if at.training is not None:
        step, stage = at.training.middle, at.training.name
        faults += [*at.held(at.training, step, 0), f"kill-driver@train.updated={step},rank=0,stage={stage}"]
    faults += at.unit(at.inference, "kill-driver@unit.after_commit{at}")
    return Scenario(name, split_attempts(faults), about="the driver is killed once it has the slice and in every stage")


def _kill_between(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.train()
    step = stage.next_save
    # Rank 0 waits after it began the save, so that no step runs ahead of it.
    faults = [*at.held_if_taken(stage, step, 0), f"kill-worker@save.arrays_written={step},rank=0,stage={stage.name}"]
    faults += at.units("kill-worker@unit.after_commit{at}")
    return Scenario(name, (tuple(faults),), about="killed with the arrays durable and no record; units after theirs")


def _kill_in_restore(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.between()
    faults = at.step("kill-worker", stage, stage.middle, at.last_rank)
    faults += [
        f"kill-worker@{point}={stage.first_save},rank=0,stage={stage.name}"
        for point in ("restore.start", "restore.done")
    ]
    if at.inference is not None:
        faults.append(f"kill-worker@params.loaded,rank=0,stage={at.inference.name}")
    return Scenario(
        name, (tuple(faults),), about="killed in a step, and twice while it restores; inference while loading"
    )


def _kill_twice(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.train()
    step = stage.middle
    # Two places, as the same death at the same step would be taken for the job's own fault, and not be retried. Rank 0
    # says how far it is: step - 1 at the first kill and step at the second, where it says so after every step.
    first, second = (f"updated={step - 1}", f"step={step}") if step else ("step=0", "updated=0")
    kills = [f"kill-worker@train.{place},rank=0,stage={stage.name}" for place in (first, second)]
    faults = (*at.held(stage, max(0, step - 1), 0), *kills)
    return Scenario(name, (faults,), about="killed twice in a row before the first new checkpoint")


def _corrupt(how: str) -> Callable[[str, JobFacts], Scenario]:
    def make(name: str, facts: JobFacts) -> Scenario:
        at = Places(facts)
        stage = at.between()
        if stage.next_save >= (stage.total or 0):
            raise Impossible(f"stage {stage.name} has no two checkpoints before its last one: nothing to fall back to")
        spoil = f"corrupt-checkpoint@save.after_commit={stage.next_save},rank=0,stage={stage.name},how={how}"
        faults = [spoil, *at.step("kill-worker", stage, stage.next_save, at.last_rank)]
        about = f"the newest checkpoint is damaged ({how}), then a worker is killed: the one before it counts"
        return Scenario(name, (tuple(faults),), intervals=2, about=about)

    return make


def _on_a_host(action: str, about: str, more: str = "") -> Callable[[str, JobFacts], Scenario]:
    def make(name: str, facts: JobFacts) -> Scenario:
        at = Places(facts)
        if not facts.faked:
            raise Impossible("only a faked slice may lose hosts in the standard plan; a plan file may ask for it")
        stage = at.train()
        faults = at.step(action, stage, stage.middle, at.last_rank, more)
        return Scenario(name, (tuple(faults),), about=about, extra_s=15.0)

    return make


def _kill_in_save(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.train()
    faults = at.held(stage, stage.middle, at.last_rank)  # the save before this one is durable by then
    faults.append(f"kill-worker@save.start={stage.next_save},rank={at.last_rank},stage={stage.name}")
    return Scenario(name, ((*faults, *at.units("kill-worker@unit.mapped{at}")),), about="killed as a save begins")


def _kill_after(point: str, about: str, unit_point: str = "") -> Callable[[str, JobFacts], Scenario]:
    def make(name: str, facts: JobFacts) -> Scenario:
        at = Places(facts)
        stage = at.train()
        updated = point == "train.updated"
        step = stage.middle if updated else stage.next_save
        faults = [*at.held_if_taken(stage, step, 0), f"kill-worker@{point}={step},rank=0,stage={stage.name}"]
        if unit_point:
            faults += at.units(f"kill-worker@{unit_point}{{at}}")
        return Scenario(name, (tuple(faults),), about=about)

    return make


def _kill_when_trained(name: str, facts: JobFacts) -> Scenario:
    stage = Places(facts).train()
    faults = (f"kill-worker@train.trained,rank=0,stage={stage.name}",)
    return Scenario(name, (faults,), about="killed with everything committed: nothing is done again")


def _kill_driver_at_commits(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    faults = ["kill-driver@run.identity", "kill-driver@run.lease_acquired"]
    if held := at.before_work(HELD_FOR_BEAT_S):  # or a short run may be over before the beat
        faults += [*held, "kill-driver@lease.beat=2"]
    if at.prepare is not None:
        faults.append(f"kill-driver@stage.manifest={at.prepare.name}")
    if at.training is not None:
        step, stage = at.training.next_save, at.training.name
        faults += at.held_if_taken(at.training, step, 0)
        faults.append(f"kill-driver@save.before_commit={step},rank=0,stage={stage}")
        faults += [f"kill-driver@stage.manifest={stage}", f"kill-driver@stage.done={stage}"]
    if at.inference is not None:
        faults.append(f"kill-driver@stage.manifest={at.inference.name}")
    faults.append("kill-driver@run.result")
    about = "the driver is killed with the lease, as it beats, in a save, around manifests, before the result"
    return Scenario(name, split_attempts(faults), about=about)


def _raise(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.train()
    faults = tuple(at.step("raise", stage, stage.middle, 0))
    about = "the job's code raises once, and the budget allows it"
    return Scenario(name, (faults,), overrides=("budgets.app_errors=1",), about=about)


def _hang(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    stage = at.train()
    stall_s = stall_timeout_s(facts)
    return Scenario(
        name,
        (tuple(at.step("hang", stage, stage.middle, 0)),),
        overrides=(f"stages.{stage.name}.stall_timeout_s={stall_s}",),
        about=f"a step hangs and is ended after {stall_s} s",
        extra_s=float(stall_s),
    )


def _slow(name: str, facts: JobFacts) -> Scenario:
    at = Places(facts)
    faults = at.units("slow@unit.read{at},seconds=2")
    if at.training is not None:
        stage, step = at.training, at.training.middle
        faults += [
            f"slow@train.step={step},rank={at.last_rank},stage={stage.name},seconds=2",
            f"slow@save.start={stage.next_save},rank={at.last_rank},stage={stage.name},seconds=2",
        ]
    return Scenario(name, (tuple(faults),), about="single processes are slow; nothing fails", extra_s=6.0)


def _undisturbed(name: str, _: JobFacts) -> Scenario:
    return Scenario(name, about="nothing is done to it: whether the job gives the same answer twice at all")


_CATALOGUE: Mapping[str, Callable[[str, JobFacts], Scenario]] = {
    "kill-worker": _kill_worker,
    "kill-driver": _kill_driver,
    "kill-between-arrays-and-commit": _kill_between,
    "kill-in-restore": _kill_in_restore,
    "kill-twice": _kill_twice,
    "corrupt-flip": _corrupt("flip"),
    "store-errors": store_fails(
        "the store refuses one write in ten and one read in twenty",
        "503@create,rate=0.1,seed=1",
        "429@read,rate=0.05,seed=2",
    ),
    "kill-host": _on_a_host("kill-host", "a host is lost without notice"),
    "kill-in-save": _kill_in_save,
    "kill-in-arrays": kill_in_arrays,
    "hang": _hang,
    "store-denied": store_denied,
    "store-listings": store_listings,
    "drain-host": _on_a_host("drain-host", "a host is taken away with notice", f",deadline_s={DEADLINE_S}"),
    "lose-slice": _on_a_host("lose-slice", "all hosts of a slice are lost at once"),
    "kill-driver-at-commits": _kill_driver_at_commits,
    "raise": _raise,
    "kill-after-update": _kill_after("train.updated", "killed after an update that no save has", "unit.read"),
    "kill-after-commit": _kill_after("save.after_commit", "killed with the record there and nobody told"),
    "kill-before-commit": _kill_after("save.before_commit", "killed just before the record is created"),
    "kill-when-trained": _kill_when_trained,
    "store-outage": store_fails("the store is gone for some seconds", "outage@any,seconds=5,after=60"),
    "store-bodies": store_fails(
        "downloads break off, answers get lost, connections are reset",
        "truncate@download,rate=0.05,seed=3",
        "reset@create,rate=0.05,seed=4",
        "lost@create,rate=0.05,seed=5",
    ),
    "store-slow": store_fails(
        "every request to the store takes a tenth of a second more, some take seconds",
        "latency@any,seconds=0.1",
        "latency@any,seconds=2,rate=0.02,seed=13",
        extra_s=40.0,
    ),
    "corrupt-truncate": _corrupt("truncate"),
    "corrupt-delete": _corrupt("delete"),
    "slow": _slow,
    "undisturbed": _undisturbed,
}
STANDARD_NAMES = tuple(_CATALOGUE)


def stall_timeout_s(facts: JobFacts) -> int:
    """A time-out that a hang does not make long to wait for, and that no step of the reference run came near."""
    return math.ceil(max(STALL_MIN_S, 2 * HOLD_FACTOR * facts.save_s, 50 * facts.step_s))


# -- what fits --------------------------------------------------------------------------------------


def estimated_s(scenario: Scenario, reference_s: float) -> float:
    """Seconds that a scenario is expected to take, given the reference run's."""
    failures = sum(not fault.startswith("slow@") for fault in scenario.attempts[-1])
    return reference_s + failures * RECOVERY_S + (len(scenario.attempts) - 1) * (ATTEMPT_S + 2.0) + scenario.extra_s


def next_that_fits(
    pending: Sequence[Scenario], *, left_s: float, reference_s: float, taken: Iterable[tuple[float, float]] = ()
) -> tuple[Scenario | None, tuple[Scenario, ...]]:
    """The next scenario within a budget, in the order given; those before it do not fit any more.

    Args:
        pending: What has not been run.
        left_s: Seconds left; infinite without a budget.
        reference_s: Seconds of the reference run.
        taken: Estimated and real seconds of the scenarios run so far: their ratio corrects the estimates.

    Returns:
        The scenario, and the rest that may still be run after it.
    """
    pairs = list(taken)
    estimated, real = sum(e for e, _ in pairs), sum(r for _, r in pairs)
    factor = real / estimated if estimated else 1.0
    for position, scenario in enumerate(pending):
        if factor * estimated_s(scenario, reference_s) <= left_s:
            return scenario, tuple(pending[position + 1 :])
    return None, ()
