"""Which checkpoints are there, and which of them are intact. Looks at the store, never at what should be in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tpupipe.checkpoint.commit import Commit
from tpupipe.errors import CheckpointError, NoIntactCheckpointError, ObjectNotFoundError
from tpupipe.store.layout import ARRAYS, COMMIT_NAME, RunPaths, parse_checkpoint
from tpupipe.store.lease import lease_times
from tpupipe.store.objects import ObjectInfo, Store, crc32c_of

# A restore is preceded by reading the whole checkpoint and recomputing its checksums, up to this size. Above it the
# store's own checksums are compared: reading hundreds of gigabytes twice would cost more than it saves.
DEEP_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Found:
    """One checkpoint folder as the store lists it.

    Args:
        step: From its name.
        lease_epoch: From its name.
        restart: From its name.
        folder: Relative to the store.
        objects: All objects below it, by name relative to the folder.
    """

    step: int
    lease_epoch: int
    restart: int
    folder: str
    objects: dict[str, ObjectInfo]

    @property
    def age(self) -> tuple[int, int, int]:
        """Sorts older before newer."""
        return self.step, self.lease_epoch, self.restart

    @property
    def committed(self) -> bool:
        """Whether it has a commit record (intact or not)."""
        return COMMIT_NAME in self.objects


@dataclass(frozen=True)
class Damage:
    """A committed checkpoint that cannot be used, and why."""

    step: int
    lease_epoch: int
    folder: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.reasons[:3]) + (f"; and {len(self.reasons) - 3} more" if len(self.reasons) > 3 else "")
        return f"checkpoint of step {self.step} ({self.folder}) is damaged: {shown}"


@dataclass(frozen=True)
class Late:
    """A checkpoint whose record was made by a driver that had lost the run: it does not count, whatever is in it.

    Args:
        found: The folder.
        taken_over_by: Lease epoch that owned the run by then.
    """

    found: Found
    taken_over_by: int

    def __str__(self) -> str:
        return (
            f"checkpoint of step {self.found.step} ({self.found.folder}) is late: its record was written after epoch "
            f"{self.taken_over_by} took over"
        )


@dataclass(frozen=True)
class Selection:
    """What to restore: the newest intact checkpoint, and the newer ones that were passed over.

    ``commit`` is ``None`` only where the stage has no committed checkpoint at all, but for late ones.
    """

    commit: Commit | None
    folder: str
    damaged: tuple[Damage, ...]
    uncommitted: tuple[Found, ...]
    late: tuple[Late, ...] = ()


def list_checkpoints(store: Store, paths: RunPaths, stage: str) -> list[Found]:
    """All checkpoint folders of a stage, newest first. One listing.

    Raises:
        StoreError: The listing failed: that is never "no checkpoints".
    """
    prefix = paths.checkpoints(stage) + "/"
    folders: dict[str, dict[str, ObjectInfo]] = {}
    for info in store.list(prefix):
        name, _, rest = info.name.removeprefix(prefix).partition("/")
        if rest:
            folders.setdefault(name, {})[rest] = info
    found = []
    for name, objects in folders.items():
        parsed = parse_checkpoint(name)
        if parsed is not None:
            found.append(Found(*parsed, folder=prefix + name, objects=objects))
    return sorted(found, key=lambda f: f.age, reverse=True)


def overtaken_by(found: Found, taken_s: Mapping[int, float]) -> int | None:
    """The lease epoch that owned the run already when a checkpoint's record was made, if there was one; pure.

    A saver asks whether it still owns the run when all arrays are durable, and then creates the record. So a record is
    late if it is newer than a later lease although its arrays are not: the driver was stopped between these two requests.
    Arrays that are newer as well were copied or restored since, and then the times say nothing. Times that are equal,
    as far as the store tells times apart, count as in time: the new owner had not looked for checkpoints yet.

    Args:
        found: The folder as listed.
        taken_s: When each lease was taken, see ``lease_times``. All times are the store's, so no machine's clock matters.
    """
    record = found.objects.get(COMMIT_NAME)
    if record is None:
        return None
    arrays_s = max((o.updated_s for name, o in found.objects.items() if name.startswith(f"{ARRAYS}/")), default=0.0)
    later = (epoch for epoch in sorted(taken_s) if epoch > found.lease_epoch)
    return next((epoch for epoch in later if arrays_s <= taken_s[epoch] < record.updated_s), None)


def take_over_times(store: Store, paths: RunPaths, checkpoints: Iterable[Found]) -> dict[int, float]:
    """What ``overtaken_by`` needs to judge these checkpoints; a listing only where one of them is committed.

    Call it after they were listed: a lease that is taken in between was taken after all of their records.

    Raises:
        StoreError: The listing failed.
    """
    return lease_times(store, paths) if any(found.committed for found in checkpoints) else {}


def read_commit(store: Store, found: Found) -> Commit:
    """The commit record of a folder that has one.

    Raises:
        CheckpointError: The record is not readable as one, or belongs to another checkpoint.
    """
    name = f"{found.folder}/{COMMIT_NAME}"
    listed = found.objects[COMMIT_NAME]
    # By range: a whole read refuses content that differs from the store's checksum as a broken transfer, and here that
    # is damage to be told from an outage.
    content = store.read(name, 0, listed.size)
    if listed.crc32c is not None and crc32c_of(content) != listed.crc32c:
        raise CheckpointError(f"{store.uri(name)} does not have the content that was written.", uri=store.uri(name))
    commit = Commit.from_json(content, store.uri(name))
    if (commit.step, commit.lease_epoch) != (found.step, found.lease_epoch):
        raise CheckpointError(f"{store.uri(name)} is the record of step {commit.step}, epoch {commit.lease_epoch}.")
    return commit


def problems(store: Store, found: Found, commit: Commit, *, deep: bool) -> Iterator[str]:
    """What is wrong with a committed checkpoint, object by object.

    Args:
        store: Where it is.
        found: Its listing.
        commit: Its record.
        deep: Also compute the checksum of the content where the store only repeats what was once written (``file://``
            and emulators; the real Cloud Storage vouches for its own).
    """
    for wanted in commit.objects:
        info = found.objects.get(wanted.name)
        if info is None:
            yield f"{wanted.name} is missing"
        elif info.size != wanted.size:
            yield f"{wanted.name} has {info.size} bytes, committed were {wanted.size}"
        elif info.crc32c is not None and info.crc32c != wanted.crc32c:
            yield f"{wanted.name} has crc32c {info.crc32c:08x}, committed was {wanted.crc32c:08x}"
        elif deep:
            yield from _content_problem(store, f"{found.folder}/{wanted.name}", wanted.name, wanted.crc32c)


def reads_whole(store: Store, folder: str, commit: Commit) -> bool:
    """Whether a checkpoint that could not be restored is intact byte by byte: then the store or the network failed.

    Args:
        store: Where it is.
        folder: Its folder.
        commit: Its record.

    Raises:
        StoreError: That cannot be said.
    """
    parsed = parse_checkpoint(folder)
    if parsed is None:
        return False
    objects = {info.name.removeprefix(f"{folder}/"): info for info in store.list(f"{folder}/")}
    return not any(True for _ in problems(store, Found(*parsed, folder, objects), commit, deep=True))


def _content_problem(store: Store, name: str, shown: str, crc32c: int) -> Iterator[str]:
    try:
        actual = store.checksum(name)
    except ObjectNotFoundError:
        yield f"{shown} is missing"
        return
    if actual != crc32c:
        yield f"{shown} has content with crc32c {actual:08x}, committed was {crc32c:08x}"


def newest_intact(
    store: Store,
    paths: RunPaths,
    stage: str,
    *,
    exclude: Collection[str] = (),
    only: str | None = None,
    deep_limit_bytes: int = DEEP_LIMIT_BYTES,
) -> Selection:
    """Chooses what to restore. Deletes and writes nothing.

    Args:
        store: The run's store.
        paths: The run.
        stage: The training stage.
        only: Look at this folder alone.
        exclude: Folders that turned out to be unreadable although they look intact.
        deep_limit_bytes: Checkpoints up to this size are read whole and their checksums recomputed.

    Raises:
        NoIntactCheckpointError: There are committed checkpoints, and none is intact; or ``only`` is late.
        StoreError: A listing or read failed; that is never taken for "no checkpoints".
    """
    everything = [f for f in list_checkpoints(store, paths, stage) if only in (None, f.folder)]
    taken_s = take_over_times(store, paths, everything)
    uncommitted = tuple(f for f in everything if not f.committed)
    damaged: list[Damage] = []
    late: list[Late] = []
    for found in everything:
        if not found.committed:
            continue
        reasons: list[str] = []
        commit = None
        if found.folder in exclude:
            reasons.append("restoring it failed")
        else:
            try:
                commit = read_commit(store, found)
                if (by := overtaken_by(found, taken_s)) is not None:
                    late.append(Late(found, by))
                    continue
                deep = commit.size_bytes <= deep_limit_bytes
                reasons.extend(problems(store, found, commit, deep=deep))
            except CheckpointError as error:
                reasons.append(error.message)
        if commit is not None and not reasons:
            return Selection(commit, found.folder, tuple(damaged), uncommitted, tuple(late))
        damaged.append(Damage(found.step, found.lease_epoch, found.folder, tuple(reasons)))
    if damaged:
        raise NoIntactCheckpointError(
            f"All {len(damaged)} committed checkpoints of stage {stage!r} are damaged: {_list(damaged)}",
            hint="Nothing was deleted. Restore the objects from a backup or object versions, or use another --run.",
            stage=stage,
            damaged=[d.folder for d in damaged],
        )
    if only is not None and late:
        raise NoIntactCheckpointError(
            f"The {late[0]}.",
            hint="What a driver wrote that had lost its run is not read. Name another checkpoint of the stage, or the stage.",
            stage=stage,
            damaged=[],
        )
    return Selection(None, "", (), uncommitted, tuple(late))


def _list(damaged: Iterable[Damage]) -> str:
    return " | ".join(str(d) for d in damaged)
