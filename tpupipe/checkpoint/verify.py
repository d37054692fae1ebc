"""Which checkpoints are there, and which of them are intact. Looks at the store, never at what should be in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tpupipe.checkpoint.commit import Commit
from tpupipe.errors import CheckpointError, NoIntactCheckpointError, ObjectNotFoundError
from tpupipe.store.layout import COMMIT_NAME, RunPaths, parse_checkpoint
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
class Selection:
    """What to restore: the newest intact checkpoint, and the newer ones that were passed over.

    ``commit`` is ``None`` only where the stage has no committed checkpoint at all.
    """

    commit: Commit | None
    folder: str
    damaged: tuple[Damage, ...]
    uncommitted: tuple[Found, ...]


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
        NoIntactCheckpointError: There are committed checkpoints, and none is intact.
        StoreError: A listing or read failed; that is never taken for "no checkpoints".
    """
    everything = [f for f in list_checkpoints(store, paths, stage) if only in (None, f.folder)]
    uncommitted = tuple(f for f in everything if not f.committed)
    damaged: list[Damage] = []
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
                deep = commit.size_bytes <= deep_limit_bytes
                reasons.extend(problems(store, found, commit, deep=deep))
            except CheckpointError as error:
                reasons.append(error.message)
        if commit is not None and not reasons:
            return Selection(commit, found.folder, tuple(damaged), uncommitted)
        damaged.append(Damage(found.step, found.lease_epoch, found.folder, tuple(reasons)))
    if damaged:
        raise NoIntactCheckpointError(
            f"All {len(damaged)} committed checkpoints of stage {stage!r} are damaged: {_list(damaged)}",
            hint="Nothing was deleted. Restore the objects from a backup or object versions, or use another --run.",
            stage=stage,
            damaged=[d.folder for d in damaged],
        )
    return Selection(None, "", (), uncommitted)


def _list(damaged: Iterable[Damage]) -> str:
    return " | ".join(str(d) for d in damaged)
