"""One small actor per run: workers report to it and confer through it, the driver reads it.

It has no CPU and no chips, lives beside the driver, and decides nothing that is not a pure function of what it was
told, so its loss is the loss of the driver's own node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpupipe.checkpoint.policy import SavePolicy
from tpupipe.data.stream import add_digests
from tpupipe.errors import StageError
from tpupipe.faults.driver import fault_event
from tpupipe.faults.plan import Fault

CONFER_EVERY_S = 1.0
CALL_TIMEOUT_S = 60.0
REMEMBERED_DECISIONS = 64


@dataclass(frozen=True)
class Decision:
    """What all processes of a training group do at one step, agreed on by the first that asks.

    Args:
        save: Save the state now.
        stop: End the loop after that.
        next_step: The step at which to confer again.
        reason: Why ``stop``, for the log.
    """

    save: bool
    stop: bool
    next_step: int
    reason: str = ""


def decide(
    policy: SavePolicy,
    *,
    step: int,
    seconds_per_step: float,
    since_save_s: float,
    stop_reason: str,
    preemption_notice_s: float | None,
    preempted: bool,
    since_conference: int | None = None,
    doubted: Sequence[tuple[int, int]] = (),
) -> Decision:
    """The decision at a conference; pure.

    Args:
        policy: When the stage saves.
        step: Steps done.
        seconds_per_step: As measured lately by the first that asks.
        since_save_s: Seconds since the last save began (or since the start).
        stop_reason: Why the driver wants the run to end, or empty.
        preemption_notice_s: Seconds until a host goes away, if known.
        preempted: Whether a host will go away.
        since_conference: Steps since the last conference. The measured pace may be that of dispatch, which costs
            nothing, so the interval at most doubles each time.
        doubted: First and last of the steps between which an earlier start failed, for each: there, they confer after
            every step, so that a failure that comes again is known to be at the same step.
    """
    ahead = max(1, int(CONFER_EVERY_S / max(seconds_per_step, 1e-6)))
    if since_conference is not None:
        ahead = min(ahead, 2 * max(1, since_conference))
    for first, last in doubted:
        if step < last:
            ahead = min(ahead, max(1, first - step))
    if preempted:
        reason = "a host is about to be preempted"
        return Decision(policy.due_on_preemption(preemption_notice_s), True, step + ahead, reason)
    if stop_reason:
        return Decision(True, True, step + ahead, stop_reason)
    return Decision(policy.due_by_time(since_save_s), False, step + ahead)


class _Coordinator:
    """The actor. Its methods are called from many processes; none of them blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turned = threading.Condition(self._lock)
        self._plans: dict[str, list[Any]] = {}
        self._controllers: dict[str, Any] = {}
        self._records: list[dict[str, Any]] = []
        self._fired: dict[int, list[dict[str, str]]] = {}
        self._counts: dict[str, int] = {}
        self._stop_reason = ""
        self._kill_driver = False
        self._addresses: dict[str, str] = {}
        self._reset_group(0)

    def _reset_group(self, restart: int) -> None:
        self._restart = restart
        self._doubted: Sequence[tuple[int, int]] = ()
        self._decisions: dict[int, Decision] = {}
        self._conferred = 0
        self._parts: dict[int, dict[int, int]] = {}
        self._saved_at = time.monotonic()

    def set_first_address(self, group: str, address: str) -> None:
        with self._lock:
            self._addresses[group] = address

    def first_address(self, group: str) -> str:
        with self._lock:
            return self._addresses.get(group, "")

    def report(self, records: list[dict[str, Any]]) -> None:
        with self._lock:
            self._records.extend(records)

    def drain(self) -> tuple[list[dict[str, Any]], bool]:
        with self._lock:
            records, self._records = self._records, []
            return records, self._kill_driver

    def request_stop(self, reason: str) -> None:
        with self._lock:
            self._stop_reason = reason

    def request_driver_kill(self) -> None:
        with self._lock:
            self._kill_driver = True

    def driver_kill_requested(self) -> bool:
        with self._lock:
            return self._kill_driver

    def claim_fault(self, position: int, fault: Fault, facts: dict[str, str], where: dict[str, str]) -> bool:
        with self._lock:
            fired = self._fired.setdefault(position, [])
            if not fault.may_fire(fired, facts):
                return False
            fired.append(facts)
            self._records.append(fault_event(position, fault, {**facts, **where}))
            return True

    def count(self, name: str, by: int) -> int:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by
            return self._counts[name]

    def counted(self, name: str) -> int:
        with self._lock:
            return self._counts.get(name, 0)

    def begin_group(
        self, group: str, plan: list[Any], restart: int, first_step: int, doubted: Sequence[tuple[int, int]] = ()
    ) -> None:
        with self._lock:
            self._reset_group(restart)
            self._conferred = first_step
            self._doubted = doubted
            self._plans[group] = plan
            self._turned.notify_all()

    def dismiss_group(self, group: str) -> None:
        with self._lock:
            self._plans[group] = []
            self._turned.notify_all()

    def set_controller(self, group: str, controller: Any) -> None:
        with self._lock:
            self._controllers[group] = controller

    def take_controller(self, group: str) -> Any:
        with self._lock:
            return self._controllers.pop(group, None)

    def plan_of(self, group: str, wait_s: float) -> list[Any] | None:
        with self._lock:
            self._turned.wait_for(lambda: group in self._plans, wait_s)
            return self._plans.get(group)

    def decide(  # noqa: PLR0917 - Ray calls it by position
        self,
        restart: int,
        step: int,
        seconds_per_step: float,
        policy: SavePolicy,
        preempted: bool,
        notice_s: float | None,
    ) -> Decision:
        with self._lock:
            if restart != self._restart:
                raise StageError(f"Start {restart} of the workers is over; start {self._restart} is at work.")
            if step not in self._decisions:
                decision = decide(
                    policy,
                    step=step,
                    seconds_per_step=seconds_per_step,
                    since_save_s=time.monotonic() - self._saved_at,
                    stop_reason=self._stop_reason,
                    preemption_notice_s=notice_s,
                    preempted=preempted,
                    since_conference=step - self._conferred,
                    doubted=self._doubted,
                )
                if decision.save:
                    self._saved_at = time.monotonic()
                self._conferred = step
                self._decisions[step] = decision
                # A process may be a few steps behind (dispatch is asynchronous), so older answers are kept a while.
                self._decisions = dict(sorted(self._decisions.items())[-REMEMBERED_DECISIONS:])
            return self._decisions[step]

    def add_digest(self, restart: int, step: int, rank: int, part: int) -> None:
        with self._lock:
            if restart == self._restart:
                self._parts.setdefault(step, {})[rank] = part

    def digest(self, step: int, world: int) -> int | None:
        with self._lock:
            parts = self._parts.get(step, {})
            if len(parts) < world:
                return None
            self._parts = {s: p for s, p in self._parts.items() if s >= step}
            return add_digests(*parts.values())


class CoordinatorHandle:
    """Typed, bounded calls to the coordinator; picklable, so workers get one too."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def create(cls) -> CoordinatorHandle:
        """Starts the actor on the driver's own node."""
        here = ray.get_runtime_context().get_node_id()
        actor = (
            ray.remote(_Coordinator)
            .options(
                num_cpus=0,
                max_concurrency=16,
                # Not soft: a soft affinity is no more than a hint, and on a TPU host it would be lost with it.
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote()
        )
        return cls(actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=CALL_TIMEOUT_S)

    def report(self, *records: Mapping[str, Any]) -> None:
        """Hands events to the driver; does not wait."""
        self._actor.report.remote([dict(record) for record in records])

    def report_now(self, record: Mapping[str, Any]) -> None:
        """As ``report``, and waits until it is there: what comes next may be this process's end."""
        self._call("report", [dict(record)])

    def drain(self) -> tuple[list[dict[str, Any]], bool]:
        """The driver's side of ``report``: what was reported, and whether the driver is to be killed (a fault)."""
        records, kill = self._call("drain")
        return list(records), bool(kill)

    def request_stop(self, reason: str) -> None:
        """Asks training groups to save and end at their next conference."""
        self._call("request_stop", reason)

    def request_driver_kill(self) -> None:
        """Has the driver kill itself when it next asks for reports (a fault)."""
        self._call("request_driver_kill")

    def driver_kill_requested(self) -> bool:
        """Whether a fault asked for the driver's end; takes no reports."""
        return bool(self._call("driver_kill_requested"))

    def claim_fault(self, position: int, fault: Fault, facts: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
        """Whether a fault may fire once more; counted over all processes and restarts.

        Args:
            position: Its place in the plan.
            fault: The fault.
            facts: Of the point that was passed.
            where: Of the process that passed it; for the event.
        """
        said, place = ({key: str(value) for key, value in of.items()} for of in (facts, where))
        return bool(self._call("claim_fault", position, fault, said, place))

    def count(self, name: str, by: int = 1) -> int:
        """The sum of ``by`` over all calls with that name, this one included, over all processes."""
        return int(self._call("count", name, by))

    def counted(self, name: str) -> int:
        """That sum so far."""
        return int(self._call("counted", name))

    def begin_group(
        self, group: str, plan: Any, *, restart: int, first_step: int, doubted: Sequence[tuple[int, int]]
    ) -> None:
        """Gives a training group its work, and forgets what an earlier one had agreed on.

        Args:
            group: Which group.
            plan: What its processes get from ``plan_of``.
            restart: Number of this start of the workers.
            first_step: Steps done before it.
            doubted: See ``decide``.
        """
        # A reference in a list passes through the actor unread: what the plan imports is no business of it.
        self._call("begin_group", group, [ray.put(plan)], restart, first_step, doubted)

    def dismiss_group(self, group: str) -> None:
        """Tells a group that it is not needed."""
        self._call("dismiss_group", group)

    def set_controller(self, group: str, controller: Any) -> None:
        """Says which actor controls a training group."""
        self._call("set_controller", group, controller)

    def end_controller(self, group: str) -> None:
        """Ends the actor that controls a group, and its processes with it, as soon as it is known which that is."""
        controller = self._call("take_controller", group)
        if controller is not None:
            ray.kill(controller)

    def has_turn(self, group: str) -> bool:
        """Waits until it is a group's turn; false if it is not needed any more."""
        return bool(self._turn(group))

    def plan_of(self, group: str) -> Any:
        """What a group was given to do, once ``has_turn`` has said that it is its turn."""
        [plan] = self._turn(group)
        return ray.get(plan, timeout=CALL_TIMEOUT_S)

    def _turn(self, group: str) -> list[Any]:
        while (plan := self._call("plan_of", group, CALL_TIMEOUT_S / 3)) is None:
            pass
        return list(plan)

    def decide(
        self,
        *,
        restart: int,
        step: int,
        seconds_per_step: float,
        policy: SavePolicy,
        preempted: bool,
        notice_s: float | None,
    ) -> Decision:
        """The decision of all processes at ``step``; the first that asks makes it."""
        decision: Decision = self._call("decide", restart, step, seconds_per_step, policy, preempted, notice_s)
        return decision

    def add_digest(self, restart: int, step: int, rank: int, part: int) -> None:
        """One process's part of the sample digest at ``step``."""
        self._call("add_digest", restart, step, rank, part)

    def digest(self, step: int, world: int, timeout_s: float) -> int:
        """The sum of all processes' parts, waiting for those that are missing.

        Raises:
            StageError: Not all came in time.
        """
        waited_for = f"all {world} processes to say what they were fed up to step {step}"
        return int(
            self._until(
                lambda: self._call("digest", step, world), lambda total: total is not None, waited_for, timeout_s
            )
        )

    def set_first_address(self, group: str, address: str) -> None:
        """Where the first process of a group listens; each start of a group has a name of its own."""
        self._call("set_first_address", group, address)

    def first_address(self, group: str) -> str:
        """What the first process said; waits for it.

        Raises:
            StageError: It did not say in time.
        """
        return str(
            self._until(lambda: self._call("first_address", group), bool, "the address of process 0", CALL_TIMEOUT_S)
        )

    @staticmethod
    def _until(ask: Callable[[], Any], enough: Callable[[Any], bool], what: str, timeout_s: float) -> Any:
        ends = time.monotonic() + timeout_s
        pause = threading.Event()
        while not enough(answer := ask()):
            if time.monotonic() > ends:
                raise StageError(f"Waited {timeout_s:.0f} s in vain for {what}.")
            pause.wait(0.01)
        return answer
