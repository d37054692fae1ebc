"""One inference worker per reserved host, or one group of them per slice, and who does which unit."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpupipe.cluster.reservation import Host
from tpupipe.data.sources import Unit
from tpupipe.errors import BadRowError, CheckpointReadError, StageError, TpupipeError
from tpupipe.job import Infer, Quarantine
from tpupipe.ledger.events import Seconds
from tpupipe.programs.infer_rows import refused
from tpupipe.stages.base import StageRun, failure_of, last_look, tell_fault
from tpupipe.stages.committed import Compaction, PendingUnits
from tpupipe.stages.failures import Budget, Failure, Kind, unreachable
from tpupipe.stages.infer_worker import InferPlan, InferWorker, UnitDone, UnitFailed
from tpupipe.stages.lockstep import Lockstep
from tpupipe.stages.progress import UnitProgress
from tpupipe.stages.retry import answered, charge, leave_draining, loss_of
from tpupipe.stages.unit_failures import Next, UnitFailures, died_error, trial_order

IN_FLIGHT = 3  # one is read, one computed, one written
POLL_S = 0.5
LOOK_EVERY_S = 5.0
GET_TIMEOUT_S = 300.0


@dataclass(eq=False)
class _Worker:
    """The actors that hold one copy of the model, mostly a single one, and the units given to it, oldest first."""

    actors: list[Any]
    rank: int
    started: list[Any]  # resolve when the actors have started
    given: dict[Any, Unit] = field(default_factory=dict)  # by the answer of the one that commits
    others: dict[Any, Unit] = field(default_factory=dict)  # by the answers of the rest
    turn: int = 0  # units given so far
    alone: bool = False  # what it works on is suspected of killing workers: nothing else is given to it

    @property
    def ranks(self) -> range:
        """Of its processes."""
        return range(self.rank * len(self.actors), (self.rank + 1) * len(self.actors))

    def has_started(self) -> bool:
        ready, waiting = ray.wait(self.started, num_returns=len(self.started), timeout=0)
        if waiting:
            return False
        try:
            return all(ray.get(ready, timeout=GET_TIMEOUT_S))
        except RayError:
            return False

    def give(self, unit: Unit, position: int) -> None:
        first, *others = [actor.run.remote(unit, position, self.turn) for actor in self.actors]
        self.turn += 1
        self.given[first] = unit
        self.others |= dict.fromkeys(others, unit)

    def answers(self) -> list[Any]:
        return [*self.given, *self.others]

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


class InferPool:
    """Gives units to workers; those of a lost worker go back to the queue.

    Several units are in flight on a worker. When it dies, all of them are suspects, and each is tried again by itself:
    only a death (or a stall) with one unit at work counts for that unit, all others count for the kind of failure.

    Args:
        stage: The declaration.
        run: The run.
        plan: What workers are given.
        budget: What failures are charged to.
        failures: Decides what becomes of units that fail.
        bad_rows: Rows set aside in units that were committed before.
        seconds: Where time is booked.
    """

    def __init__(
        self,
        stage: Infer,
        run: StageRun,
        plan: InferPlan,
        budget: Budget,
        *,
        failures: UnitFailures,
        bad_rows: int,
        seconds: Seconds,
    ) -> None:
        self._stage = stage
        self._run = run
        self._plan = plan
        self._positions: dict[str, int] = {}  # in the stage, of units that were given out
        self._failures = failures
        self._bad_rows = bad_rows
        self._seconds = seconds
        self._in_flight = run.settings(stage.name).concurrency or IN_FLIGHT
        self._budget = budget
        self._workers: list[_Worker] = []
        self._new: Iterator[tuple[int, Unit]] = iter(())
        self._left = 0  # of them
        self._back: deque[Unit] = deque()  # given to workers that were lost
        self._again: deque[Unit] = deque()  # failed, and may be tried again
        self._suspects: deque[Unit] = deque()
        self._errors: list[tuple[int, TpupipeError]] = []  # of processes that could not start, by rank
        self._unread = ""  # parameters that could not be read although they are whole: what was said of it
        self._away: list[TpupipeError] = []  # of units for which the store could not be reached
        self._stalls: list[Mapping[str, Any]] = []
        self._looked_s = 0.0
        self.compilations = 0
        """Programs that a worker compiled, at most."""

    def work(self, pending: PendingUnits, compaction: Compaction) -> None:
        """Does all pending units that can be done. Ends the workers on every way out.

        Args:
            pending: The units.
            compaction: Takes note of what is done.
        """
        self._new = ((int(pending.positions[i]), pending[i]) for i in trial_order(len(pending)))
        self._left = len(pending)
        progress = UnitProgress(self._run, self._stage.name, len(pending))
        try:
            leave_draining(self._run, self._budget)
            self._start_all(min(len(pending), len(self._copies())))
            while self._waiting() or self._suspects or any(worker.given for worker in self._workers):
                self._run.stop.check()
                self._hand_out()
                done: list[UnitDone] = []
                self._collect(done)
                for each in done:
                    compaction.add(each.committed)
                    progress.add(each.committed)
                self._book()
                progress.tell()
        finally:
            for worker in self._workers:
                worker.end()
            with last_look(self._stage.name):
                self._book()

    def _tell(self, kind: str, text: str, level: int = logging.INFO, **facts: Any) -> None:
        self._run.log.emit(kind, f"{self._stage.name}: {text}", level=level, stage=self._stage.name, **facts)

    # -- workers ---------------------------------------------------------------------------------

    def _copies(self) -> list[list[dict[str, Any]]]:
        """By copy of the model: where its processes go."""
        sharded, reservation = self._stage.parallel == "sharded", self._run.reservation
        if reservation is None:
            gpus: list[dict[str, Any]] = [{"num_gpus": 1}] * (self._run.config.cluster.gpus or 1)
            return [gpus] if sharded else [[gpu] for gpu in gpus]
        if not sharded:
            return [[_placement(host, self._run, alone=True)] for host in reservation.hosts]
        slices = itertools.groupby(reservation.hosts, key=lambda host: host.slice_index)
        return [[_placement(host, self._run, alone=False) for host in hosts] for _, hosts in slices]

    def _start_all(self, count: int) -> None:
        self._workers = [self._start(rank) for rank in range(count)]

    def _start(self, rank: int) -> _Worker:
        # One thread more than units: a call that asks whether the worker has started must not wait for them.
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": self._in_flight + 1}
        places = self._copies()[rank]
        group = f"{self._stage.name}-{uuid.uuid4().hex[:8]}"
        actors: list[Any] = []
        for process, place in enumerate(places):
            lockstep = Lockstep(group, process, len(places)) if self._stage.parallel == "sharded" else None
            worker = ray.remote(InferWorker).options(**options, **place)
            actors.append(worker.remote(self._plan, rank * len(places) + process, lockstep))
        return _Worker(actors, rank, [actor.ready.remote() for actor in actors])

    # -- units -----------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.given:
                worker.alone = bool(self._suspects)
                if worker.alone:
                    self._give(worker, self._suspects.popleft())
            while not worker.alone and self._waiting() and len(worker.given) < self._in_flight:
                self._give(worker, self._next())

    def _waiting(self) -> bool:
        return bool(self._back or self._left or self._again)

    def _next(self) -> Unit:
        if self._back:
            return self._back.popleft()
        if not self._left:
            return self._again.popleft()
        position, unit = next(self._new)
        self._left -= 1
        self._positions[unit.id] = position
        return unit

    def _give(self, worker: _Worker, unit: Unit) -> None:
        worker.give(unit, self._positions[unit.id])

    def _collect(self, done: list[UnitDone]) -> None:
        references = [reference for worker in self._workers for reference in worker.answers()]
        if not ray.wait(references, num_returns=1, timeout=POLL_S)[0]:
            self._look_for_lost_hosts()
            return
        ready = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
        for worker in list(self._workers):
            dead: RayError | None = None
            out_of_step = False
            for reference in [r for r in worker.answers() if r in ready]:
                try:
                    answer = ray.get(reference, timeout=GET_TIMEOUT_S)
                except (RayActorError, GetTimeoutError) as error:
                    dead = error
                    continue
                except RayError as error:
                    self._book()
                    raise failure_of(error, [told for _, told in self._errors], self._stage.name) from error
                out_of_step |= isinstance(answer, UnitFailed) and len(worker.actors) > 1
                if reference in worker.given:
                    self._settle(worker, worker.given.pop(reference), answer, done)
                elif isinstance(answer, UnitFailed):  # the one that commits may wait for this one for ever
                    self._settle_other(worker, worker.others.pop(reference), answer, done)
                else:
                    del worker.others[reference]
            if dead is not None:
                self._replace(worker, str(dead))
                break  # the set of workers may be another one now
            if out_of_step:
                self._restart(worker)
        if self._away:
            self._charge_store(self._away)

    def _settle_other(self, worker: _Worker, unit: Unit, answer: UnitFailed, done: list[UnitDone]) -> None:
        """A unit failed on a process that does not commit; it is settled once, whoever says so first."""
        for reference in [r for r, given in worker.given.items() if given is unit]:
            del worker.given[reference]
            self._settle(worker, unit, answer, done)

    def _restart(self, worker: _Worker) -> None:
        """Starts a group anew of which a process failed a unit: the others may be at a batch that it will never join."""
        self._take_back([worker])
        self._workers[self._workers.index(worker)] = self._start(worker.rank)

    def _settle(self, worker: _Worker, unit: Unit, answer: UnitDone | UnitFailed, done: list[UnitDone]) -> None:
        if isinstance(answer, UnitFailed) and unreachable(answer.error):
            self._away.append(answer.error)
            (self._suspects if worker.alone else self._back).appendleft(unit)
            return
        if isinstance(answer, UnitFailed):
            self._failed(unit, self._failures.raised(unit.id, answer.error), answer.error, self._again)
            return
        self._failures.success()
        done.append(answer)
        del self._positions[unit.id]
        self.compilations = max(self.compilations, answer.compilations)
        self._bad_rows += answer.committed.footer.rows_bad
        allowed = self._stage.bad_rows
        if answer.last_bad is not None and isinstance(allowed, Quarantine) and self._bad_rows > allowed.max:
            more = f" {self._bad_rows} rows of the stage are set aside by now; bad_rows allows {allowed.max}."
            hint = "Quarantine(max=...) says how many it allows."
            raise refused(self._stage.name, unit.id, answer.last_bad, more, hint=hint, over_limit=True)

    def _failed(self, unit: Unit, decision: Next, error: TpupipeError, queue: deque[Unit]) -> None:
        if decision is Next.AGAIN:
            queue.append(unit)
            self._tell("unit_failed", f"unit {unit.id} failed and is tried again: {error.message}", logging.WARNING)
        else:
            self._tell("unit_set_aside", f"unit {unit.id} is set aside: {error.message}", logging.ERROR, unit=unit.id)

    def _look_for_lost_hosts(self) -> None:
        """Of a process that waits for its place on a host that is gone, or is about to go, Ray says nothing."""
        reservation, now = self._run.reservation, time.monotonic()
        if reservation is None or now < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now
        starting = [worker for worker in self._workers if worker.given and not worker.has_started()]
        if starting and reservation.lost_hosts():
            self._replace(starting[0], "It had not started when a host was lost.")
        elif starting and reservation.draining_hosts():
            self._take_back(self._workers)
            leave_draining(self._run, self._budget)
            self._start_all(min(len(self._workers), len(self._copies())))

    def _take_back(self, workers: Sequence[_Worker], *, died: bool = False) -> None:
        """Ends workers and takes their units back. All units of a process that died by itself are suspects."""
        for each in reversed(workers):
            suspect = each.alone or (died and each.has_started())
            (self._suspects if suspect else self._back).extendleft(reversed(each.given.values()))
            each.end()

    def _replace(self, worker: _Worker, detail: str) -> None:
        """Starts another worker in place of a lost one, on a new slice if a host was lost."""
        self._book()
        reservation = self._run.reservation
        lost = reservation.lost_hosts() if reservation else []
        lost_as = loss_of(reservation, lost) if reservation and lost else None
        said = {rank for rank, _ in self._errors}
        unstarted = [each for each in self._workers if said & set(each.ranks)]
        # It did not die if it said why it could not start; who said so, too, did for the same cause.
        together = unstarted if worker in unstarted else [worker]
        gone = self._workers if lost else together
        if worker in unstarted:
            self._charge_start()
        else:
            failure = self._failure(worker, detail, lost_as)
            if not lost and len(worker.given) == 1 and worker.has_started():
                self._blame(worker, failure)
            else:
                units_back = sum(len(each.given) for each in gone)
                charge(self._run, self._budget, failure, units_back=units_back)
        self._take_back(gone, died=not lost)
        if lost_as is not None and reservation is not None:
            reservation.renew(lost_as[1])
            self._start_all(min(len(self._workers), len(self._copies())))
        else:
            for each in gone:
                self._workers[self._workers.index(each)] = self._start(each.rank)

    def _blame(self, worker: _Worker, failure: Failure) -> None:
        """Counts a death for the only unit that was at work, and takes it from the worker."""
        [unit] = worker.given.values()
        worker.given.clear()
        text = f"{failure.what} at unit {unit.id} (charged to the unit)"
        self._tell("failure", text, logging.WARNING, unit=unit.id, failure=asdict(failure), units_back=1)
        stalled = failure.kind is Kind.STALLED
        told = f"{failure.what} (stacks: {failure.stacks})" if stalled else failure.detail
        died = died_error(self._stage.name, unit.id, told)
        self._failed(unit, self._failures.died(unit.id, died), died, self._suspects)

    def _failure(self, worker: _Worker, detail: str, lost_as: tuple[Kind, str] | None) -> Failure:
        if lost_as is not None:
            return Failure(lost_as[0], None, lost_as[1], detail)
        given, ranks = {unit.id for unit in worker.given.values()}, worker.ranks
        stalls = [s for s in self._stalls if s.get("unit") in given or s.get("rank") in ranks]
        if stalls:  # each unit in flight has a watchdog, and so has each process that starts
            self._stalls = [stall for stall in self._stalls if stall not in stalls]
            what = f"inference worker {worker.rank}: {stalls[0]['phase']}"
            return Failure(Kind.STALLED, None, what, stalls[0]["traceback"], stalls[0]["uri"])
        return Failure(Kind.WORKER, None, f"inference worker {worker.rank} died", detail)

    def _charge_start(self) -> None:
        """Charges what kept workers from starting to the store, if that is what it was; raises it otherwise."""
        errors = [error for _, error in self._errors]
        self._errors.clear()
        unread = [e for e in errors if isinstance(e, CheckpointReadError)]
        final = [e for e in errors if not unreachable(e) and e not in unread]
        if final:
            raise final[0]
        if unread:
            # The store can be read by now: the same again is not the store's.
            if unread[0].message == self._unread or not answered(
                self._run, self._budget, self._plan.params.reads_whole
            ):
                raise unread[0]
            self._unread = unread[0].message
        self._charge_store(errors)

    def _charge_store(self, errors: list[TpupipeError]) -> None:
        what = errors[0].message.splitlines()[0]
        errors.clear()
        charge(self._run, self._budget, Failure(Kind.STORE, None, what))

    def _book(self) -> None:
        for record in self._run.absorb(self._stage.name):
            match record["kind"]:
                case "starting":
                    self._seconds.add("starting", record["seconds"] / len(self._workers or [None]))
                case "compiling":
                    self._seconds.add("compiling", record["seconds"] / len(self._workers or [None]))
                    if not record["ahead"]:
                        self._tell("recompiled", f"compiled on the way: {record['shapes']}", logging.WARNING)
                case "worker_error" if "unit" not in record:  # a unit's error comes as its answer
                    told = record["error"] or StageError(
                        f"Stage {self._stage.name!r}: a worker could not start: {record['what']}\n{record['traceback']}"
                    )
                    self._errors.append((record["rank"], told))
                case "stalled":
                    self._stalls.append(record)
                    self._tell("stall", record["what"], logging.WARNING, uri=record["uri"])
                case "fault":
                    tell_fault(self._run, self._stage.name, record)


def too_many_bad_rows(stage: Infer, uri: str, rows: int) -> BadRowError | None:
    """The error of a stage in which more rows were set aside before than it allows now."""
    if not isinstance(stage.bad_rows, Quarantine) or rows <= stage.bad_rows.max:
        return None
    return BadRowError(
        f"Stage {stage.name!r}: {rows} rows were set aside already; bad_rows allows {stage.bad_rows.max}. They are in {uri}.",
        hint="Mend them in a new --run, or allow more: Quarantine(max=...).",
        stage=stage.name,
    )


def _placement(host: Host, run: StageRun, *, alone: bool) -> dict[str, Any]:
    spec = run.config.cluster.slice_spec()
    chips = spec.chips_per_host if spec else 0
    placement: dict[str, Any] = {
        "resources": {"TPU": chips},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(host.group, placement_group_bundle_index=host.bundle),
    }
    if alone and run.config.cluster.kind == "tpu":
        # Each host works alone: libtpu must not wait for the other hosts of the slice.
        placement["runtime_env"] = {"env_vars": {"TPU_PROCESS_BOUNDS": "1,1,1", "CLOUD_TPU_TASK_ID": "0"}}
    return placement
