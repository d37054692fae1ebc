"""Who owns a run: one driver at a time, and a zombie's writes are refused.

A driver owns a run by creating the next ``lease/NNNNNN.json``: creation is atomic, so of any number of simultaneous
starts one wins. The number is the lease epoch. While it lives, the owner rewrites its own beat object. Writers put the
epoch into what they commit, and check before each commit that no higher epoch exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self

from tpupipe.errors import (
    FencedError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunHeldError,
    StoreDeniedError,
    StoreError,
)
from tpupipe.faults.points import point
from tpupipe.store.layout import RunPaths, parse_lease
from tpupipe.store.objects import ObjectInfo, Store
from tpupipe.store.owner import Owner, is_running, same_machine

_log = logging.getLogger("tpupipe.store")

# Clocks of two machines, or of a machine and the store, may differ by this much without a live owner being robbed.
_CLOCK_SKEW_S = 60.0

# The beating thread may hang; a release waits no longer than this for it to end.
_JOIN_S = 5.0

# An owner that cannot beat says so at first, when the lease has expired, and then each minute.
_TELL_AGAIN_S = 60.0


@dataclass(frozen=True)
class Standing:
    """The newest lease of a run, as the store shows it at one moment.

    Attributes:
        epoch: Its number.
        owner: Who created it.
        beat: Number of its latest beat; 0 before the first.
        beaten_s: When the latest beat (or the lease) was written, seconds since 1970 on the store's clock.
        said_s: The same on the owner's clock.
        released: Whether the owner gave it back.
    """

    epoch: int
    owner: Owner
    beat: int
    beaten_s: float
    said_s: float
    released: bool

    @property
    def held_text(self) -> str:
        """Who and since when, for messages."""
        return (
            f"{self.owner.host}, process {self.owner.pid} ({self.owner.command}), started {_utc(self.owner.started)}, "
            f"last beat {_utc(self.beaten_s)}"
        )


Verdict = Literal["take", "held", "wait"]


def decide(
    standing: Standing | None,
    *,
    now_s: float,
    ttl_s: float,
    here: bool,
    running: bool,
    beating: bool,
    watched_s: float,
    take_over: bool,
) -> Verdict:
    """Whether the run may be taken; pure.

    Args:
        standing: The newest lease, ``None`` if there never was one.
        now_s: This machine's wall clock.
        ttl_s: A lease without a beat for so long has expired.
        here: Whether the owner is (or was) a process of this machine since its last boot.
        running: Whether that process is alive; matters only with ``here``.
        beating: Whether a beat came while we watched.
        watched_s: How long we have watched this lease without a new beat.
        take_over: Whether the user insists.

    Returns:
        ``"take"`` it, somebody has it (``"held"``), or ``"wait"`` for a beat or for the expiry.
    """
    if standing is None or standing.released or take_over or (here and not running):
        return "take"
    if beating:
        return "held"
    # An owner here has our clock; one elsewhere does not, nor does the store.
    silent_s = now_s - (standing.said_s if here else standing.beaten_s + _CLOCK_SKEW_S)
    if watched_s >= ttl_s or silent_s > ttl_s:
        return "take"
    # On this machine a live process with a recent beat needs no watching.
    return "held" if here else "wait"


def read_standing(store: Store, paths: RunPaths) -> Standing | None:
    """The newest lease of a run, or ``None`` if nobody ever owned it.

    Raises:
        StoreError: The store could not be listed or read; never taken for "nobody".
    """
    newest: tuple[int, ObjectInfo] | None = None
    for info in store.list(paths.leases + "/"):
        epoch = parse_lease(info.name)
        if epoch is not None and (newest is None or epoch > newest[0]):
            newest = epoch, info
    # Epochs follow one another and are never deleted. Looking for the next one by its name is cheap, and sees what a
    # listing that lags behind does not show.
    while True:
        following = 1 if newest is None else newest[0] + 1
        try:
            newest = following, store.info(paths.lease(following))
        except ObjectNotFoundError:
            break
    if newest is None:
        return None
    epoch, info = newest
    record = _decoded(store, info.name)
    standing = Standing(epoch, Owner(**record["owner"]), 0, info.updated_s, record["at_s"], released=False)
    with contextlib.suppress(ObjectNotFoundError):  # it was taken a moment ago and has not beaten yet
        beat = _decoded(store, paths.beat(epoch))
        if beat["token"] == record["token"]:
            updated_s = store.info(paths.beat(epoch)).updated_s
            return Standing(epoch, standing.owner, beat["beat"], updated_s, beat["at_s"], released=beat["released"])
    return standing


def lease_times(store: Store, paths: RunPaths) -> dict[int, float]:
    """When each lease of a run was taken: its epoch to seconds since 1970 on the store's clock. One listing.

    Raises:
        StoreError: The listing failed; never taken for "nobody".
    """
    times = {}
    for info in store.list(paths.leases + "/"):
        epoch = parse_lease(info.name)
        if epoch is not None:
            times[epoch] = info.updated_s  # a lease is created and never rewritten
    return times


def acquire(
    store: Store,
    paths: RunPaths,
    owner: Owner,
    *,
    ttl_s: float = 30.0,
    beat_s: float = 5.0,
    take_over: bool = False,
    on_wait: Callable[[Standing, float], None] | None = None,
    on_lost: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
    tick: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Makes the caller the owner of a run.

    Free, released, expired and orphaned leases (the owner's process is gone from this machine) are taken at once. The
    lease of an owner on another machine is watched, up to ``ttl_s``: a beat means that it lives.

    Args:
        store: Where the run is.
        paths: Names of the run.
        owner: The caller, see ``Owner.here``.
        ttl_s: A lease without a beat for so long has expired.
        beat_s: Seconds between two beats.
        take_over: Take the run whoever owns it; the other one's commits are refused from then on.
        on_wait: Called with the standing and the seconds watched, once per look, while waiting.
        on_lost: Called once with the reason, from the beating thread, if that finds that the run is ours no more.
        clock: Wall clock in seconds since 1970.
        tick: Monotonic seconds.
        pause: Waits so many seconds.

    Returns:
        The lease, beating; a context manager that releases it.

    Raises:
        RunHeldError: A live driver owns the run.
        StoreDeniedError: The lease may be made but not kept: rewriting its beat is refused.
        StoreError: The store failed.
    """
    watched: Standing | None = None
    since_s = tick()
    races = 0
    while True:
        standing = read_standing(store, paths)
        same = watched is not None and standing is not None and watched.epoch == standing.epoch
        beating = same and watched is not None and standing is not None and watched.beat != standing.beat
        if not same:
            watched, since_s = standing, tick()
        here = standing is not None and same_machine(standing.owner, owner)
        verdict = decide(
            standing,
            now_s=clock(),
            ttl_s=ttl_s,
            here=here,
            running=here and standing is not None and is_running(standing.owner),
            beating=beating,
            watched_s=tick() - since_s,
            # Insisting is about the owner the user saw, not about one that won against us just now.
            take_over=take_over and races == 0,
        )
        if standing is not None and verdict == "held":
            raise _held(standing, paths)
        if verdict == "take":
            epoch = 1 if standing is None else standing.epoch + 1
            token = uuid.uuid4().hex
            try:
                store.create(paths.lease(epoch), _encoded({"owner": asdict(owner), "token": token, "at_s": clock()}))
            except ObjectExistsError:
                races += 1  # somebody else was faster; look at who
                continue
            return Lease(
                store,
                paths,
                owner,
                epoch,
                token,
                before=standing,
                ttl_s=ttl_s,
                beat_s=beat_s,
                on_lost=on_lost,
                clock=clock,
                tick=tick,
            )
        if on_wait is not None and standing is not None:
            on_wait(standing, tick() - since_s)
        pause(min(1.0, beat_s / 2, ttl_s / 4))


@dataclass(frozen=True)
class Fence:
    """Refuses the commits of a driver that lost its run; picklable, for workers.

    Args:
        store: Where the run is.
        paths: Names of the run.
        epoch: Lease epoch under which the caller works.
    """

    store: Store
    paths: RunPaths
    epoch: int

    def check(self) -> None:
        """Returns if the epoch is still the highest; call it right before each commit.

        Raises:
            FencedError: Another driver has taken the run over.
            StoreError: The store could not be asked; that is not a permission.
        """
        # Epochs are taken one after the other and never deleted, so a higher one exists only if the next one does.
        if self.store.exists(self.paths.lease(self.epoch + 1)):
            raise _fenced(self.paths, self.epoch, "another driver has taken the run over")


class Lease:
    """Ownership of a run, with a thread that beats for it. Made by ``acquire``.

    Attributes:
        epoch: Number of the lease, put into everything that is committed under it.
        owner: The holder.
        before: The lease before it, as it stood when the run was taken; ``None`` for the first.
    """

    def __init__(
        self,
        store: Store,
        paths: RunPaths,
        owner: Owner,
        epoch: int,
        token: str,
        *,
        before: Standing | None,
        ttl_s: float,
        beat_s: float,
        on_lost: Callable[[str], None] | None,
        clock: Callable[[], float],
        tick: Callable[[], float],
    ) -> None:
        self.owner = owner
        self.epoch = epoch
        self.before = before
        self._paths = paths
        self._token = token
        self._ttl_s = ttl_s
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._clock = clock
        self._tick = tick
        self._fence = Fence(store, paths, epoch)
        # A beat that takes as long as the lease lives is no beat: it has its own, shorter limits. Five attempts outlast
        # the second in which Cloud Storage takes one write of an object: a release often follows right on a beat.
        self._beat_store = store.with_limits(timeout_s=max(0.5, ttl_s / 4), attempts=5)
        self._beats = 0
        self._lost = ""
        self._next_told_s = 0.0  # of silence
        self._beaten = tick()
        self._stop = threading.Event()
        self._releasing = threading.Lock()
        self._beating = threading.Lock()
        self._released = False
        silent = False
        try:
            self._beat(released=False)
        except StoreDeniedError:
            raise  # no waiting mends that
        except StoreError as error:
            # Others take the making of the lease for its first sign of life, so there is time to try again.
            _log.warning("lease %d of %s: no first beat yet: %s", epoch, paths.root, error)
            silent = True
        self._thread = threading.Thread(target=self._keep_beating, args=(silent,), name="tpupipe-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def lost(self) -> bool:
        """Whether the run is ours no more: another driver has taken it over."""
        return bool(self._lost)

    @property
    def fence(self) -> Fence:
        """The check alone, to send to workers."""
        return self._fence

    def check(self) -> None:
        """Returns if the run is still ours; call it right before each commit.

        A driver that was silent for ``ttl_s`` shows first that it lives. Without that nothing is committed, but the run
        is not lost: it goes on when the store is back, unless another driver has taken it meanwhile.

        Raises:
            FencedError: It is not.
            StoreError: The store could not be asked, or not be told; that is not a permission.
        """
        if self._lost:
            raise _fenced(self._paths, self.epoch, self._lost)
        if self._tick() - self._beaten > self._ttl_s:
            self._beat(released=False)
        try:
            self._fence.check()
        except FencedError as error:
            self._lost = error.data["reason"]
            raise

    def release(self) -> None:
        """Gives the run back, so that the next driver need not wait; only the first call does anything.

        A failure to say so is logged and not raised: the lease then expires by itself.
        """
        with self._releasing:
            if self._released:
                return
            self._released = True
            self._stop.set()
            try:
                self._beat(released=True)
            except StoreError as error:
                _log.warning(
                    "lease %d of %s expires instead of being released: %s", self.epoch, self._paths.root, error
                )
            self._thread.join(_JOIN_S)

    def _keep_beating(self, silent: bool) -> None:
        look = Fence(self._beat_store, self._paths, self.epoch)  # a look must not keep the next beat waiting
        while not self._stop.wait(self._beat_s / 5 if silent else self._beat_s):
            try:
                point("lease.beat", beat=self._beats + 1, epoch=self.epoch)
                self._beat(released=False)
                silent, self._next_told_s = False, 0.0
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a missed beat, and the next one may do
                silent = True
                self._tell_silence(error)
            try:
                look.check()  # also when silent: that is when others take the run
            except FencedError as error:
                self._lose(error.data["reason"])
                return
            except Exception as error:  # noqa: BLE001 - not seen now, so at the next look or commit
                _log.debug("lease %d of %s: could not be looked at: %s", self.epoch, self._paths.root, error)

    def _tell_silence(self, error: Exception) -> None:
        silent_s = self._tick() - self._beaten
        if silent_s < self._next_told_s:
            return
        over = silent_s > self._ttl_s
        self._next_told_s = silent_s + _TELL_AGAIN_S if over else self._ttl_s
        then = ": others may take the run, and this driver commits nothing before one" if over else ""
        _log.warning("lease %d of %s: no beat for %.1f s%s: %s", self.epoch, self._paths.root, silent_s, then, error)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        _log.error("lease %d of %s is lost: %s", self.epoch, self._paths.root, reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _beat(self, *, released: bool) -> None:
        with self._beating:
            if self._released and not released:
                return  # a late beat must not take back what was given up
            self._beats += 1
            record = {"beat": self._beats, "at_s": self._clock(), "released": released, "token": self._token}
            self._beat_store.put(self._paths.beat(self.epoch), _encoded(record))
            self._beaten = self._tick()


def _encoded(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _decoded(store: Store, name: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(store.read(name))
        missing = {"token", "at_s"} - record.keys()
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{store.uri(name)} is not a lease record.", uri=store.uri(name), operation="read") from error
    if missing:
        raise StoreError(f"{store.uri(name)} is not a lease record.", uri=store.uri(name), operation="read")
    return record


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _held(standing: Standing, paths: RunPaths) -> RunHeldError:
    owner = standing.owner
    return RunHeldError(
        f"run {paths.root} is held by another driver: {standing.held_text}.",
        hint=f"stop it (process {owner.pid} on {owner.host}), or take the run over with --take-over; its commits are refused then",
        run=paths.run,
        holder=asdict(owner),
        host=owner.host,
        pid=owner.pid,
        started=owner.started,
        last_beat=standing.beaten_s,
        epoch=standing.epoch,
    )


def _fenced(paths: RunPaths, epoch: int, reason: str) -> FencedError:
    return FencedError(
        f"this driver no longer owns run {paths.root} (lease {epoch}): {reason}. Nothing more is committed by it.",
        hint="the driver that took over goes on from the last commit",
        run=paths.run,
        epoch=epoch,
        reason=reason,
    )
