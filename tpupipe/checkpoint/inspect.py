"""What the checkpoints of a run look like and which of them may go. Reads the store, changes and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tpupipe.checkpoint.commit import Commit, SavedObject
from tpupipe.checkpoint.prune import Judged, superfluous
from tpupipe.checkpoint.verify import (
    DEEP_LIMIT_BYTES,
    Found,
    list_checkpoints,
    overtaken_by,
    problems,
    read_commit,
    take_over_times,
)
from tpupipe.errors import CheckpointError, ObjectNotFoundError
from tpupipe.store.layout import COMMIT_NAME, RunPaths, parse_checkpoint
from tpupipe.store.objects import Store

_SLICE_BYTES = 8 << 20
_READERS = 8  # so many objects are read at a time, each in slices: at most 64 MiB are held


class Depth(StrEnum):
    """How closely committed checkpoints are looked at.

    ``LISTING``: the sizes, and the checksums where the store lists them. ``CHECKSUMS``: a checksum of every object; where
    the store lists none (``file://``) the content is read. ``CONTENTS``: every object is read and its checksum
    recomputed, whatever the store says. ``RESTORE``: as a restore does, ``CONTENTS`` up to ``DEEP_LIMIT_BYTES`` and
    ``CHECKSUMS`` above.
    """

    LISTING = "listing"
    CHECKSUMS = "checksums"
    CONTENTS = "contents"
    RESTORE = "restore"


@dataclass(frozen=True)
class ObjectProblem:
    """What is wrong with one object of a committed checkpoint.

    Args:
        name: Relative to the checkpoint's folder.
        problem: The end of a sentence that begins with the name.
    """

    name: str
    problem: str


@dataclass(frozen=True)
class CheckpointView:
    """One checkpoint folder.

    Args:
        stage: The training stage.
        found: The folder as the store lists it.
        compared: What was compared of every object: ``sizes``, ``checksums`` or ``contents``; ``None`` where nothing
            was (no commit record, none that is readable, or a late one).
        problems: What is wrong with it; empty without a commit record.
        written_s: When it was committed, or where that is not known last written to; seconds since 1970.
        taken_over_by: Of a late one the lease epoch that owned the run when the record was written, see
            ``overtaken_by``.
    """

    stage: str
    found: Found
    compared: str | None
    problems: tuple[ObjectProblem, ...]
    written_s: float
    taken_over_by: int | None = None

    @property
    def intact(self) -> bool | None:
        """Whether nothing is wrong with it; ``None`` where that is not asked: without a commit record, or with a late one."""
        return not self.problems if self.found.committed and self.taken_over_by is None else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects in the folder, whether the commit record names them or not."""
        return sum(info.size for info in self.found.objects.values())

    def as_json(self, store: Store, now_s: float) -> dict[str, Any]:
        """The view with full URIs, for scripts.

        Args:
            store: Where it is.
            now_s: Seconds since 1970, for the age.
        """
        return {
            "stage": self.stage,
            "step": self.found.step,
            "lease_epoch": self.found.lease_epoch,
            "restart": self.found.restart,
            "uri": store.uri(self.found.folder),
            "committed": self.found.committed,
            "intact": self.intact,
            "taken_over_by": self.taken_over_by,
            "compared": self.compared,
            "size_bytes": self.size_bytes,
            "objects": len(self.found.objects),
            "written_s": round(self.written_s, 3),
            "age_s": round(max(0.0, now_s - self.written_s), 3),
            "problems": [
                {"object": store.uri(f"{self.found.folder}/{p.name}"), "problem": p.problem} for p in self.problems
            ],
        }


@dataclass(frozen=True)
class StageView:
    """The checkpoints of one stage.

    Args:
        stage: The training stage.
        checkpoints: All folders named as checkpoints are, newest first.
        other: Whatever else lies beside them, relative to the store; never looked into and never deleted.
    """

    stage: str
    checkpoints: tuple[CheckpointView, ...]
    other: tuple[str, ...] = ()

    @property
    def newest_intact(self) -> CheckpointView | None:
        """The one that a restore takes, as far as was looked."""
        return next((view for view in self.checkpoints if view.intact), None)


@dataclass(frozen=True)
class PrunePlan:
    """What of one stage would go and what stays, both newest first."""

    stage: str
    go: tuple[CheckpointView, ...]
    stay: tuple[CheckpointView, ...]


def stage_names(store: Store, paths: RunPaths) -> list[str]:
    """Stages that have anything in the run's folder, sorted.

    Raises:
        StoreError: The listing failed: that is never "no stages".
    """
    return store.children(paths.stage("any").rpartition("/")[0])


def view_stage(
    store: Store,
    paths: RunPaths,
    stage: str,
    depth: Depth,
    *,
    enough: int | None = None,
    on_read: Callable[[Found, int], None] = lambda _, __: None,
) -> StageView:
    """Looks at the checkpoints of a stage.

    A checkpoint that its driver removes while it is looked at is left out: it is gone, not damaged.

    Args:
        store: The run's store.
        paths: The run.
        stage: The training stage.
        depth: How closely.
        enough: Once so many intact ones are found, older ones are looked at by ``Depth.LISTING`` only.
        on_read: Called with a checkpoint and the bytes that are about to be read of it.

    Raises:
        StoreError: Something could not be listed or read; that is never taken for damage.
    """
    views: list[CheckpointView] = []
    intact = 0
    everything = list_checkpoints(store, paths, stage)
    taken_s = take_over_times(store, paths, everything)
    for found in everything:
        closely = depth if enough is None or intact < enough else Depth.LISTING
        view = _view(store, stage, found, closely, overtaken_by(found, taken_s), on_read)
        if view is not None:
            views.append(view)
            intact += view.intact is True
    folder = paths.checkpoints(stage)
    other = [f"{folder}/{name}" for name in store.children(folder) if parse_checkpoint(name) is None]
    return StageView(stage, tuple(views), tuple(other))


def plan_prune(view: StageView, keep: int, *, uncommitted: bool = False) -> PrunePlan:
    """Chooses what may go; pure.

    Of the committed ones (late ones, too) those older than the ``keep`` newest intact ones, and on request folders without a
    commit record. Only what is older than the newest intact one ever goes: a newer folder may be a save under way.

    Args:
        view: The stage's checkpoints.
        keep: How many intact ones stay, at least 1.
        uncommitted: Whether folders without a commit record go too.

    Raises:
        UsageError: ``keep`` is below 1.
    """
    committed = [Judged(v.found, bool(v.intact)) for v in view.checkpoints if v.found.committed]
    going = {found.folder for found in superfluous(committed, keep)}
    newest = view.newest_intact
    if uncommitted and newest is not None:
        going |= {v.found.folder for v in view.checkpoints if not v.found.committed and v.found.age < newest.found.age}
    return PrunePlan(
        view.stage,
        go=tuple(v for v in view.checkpoints if v.found.folder in going),
        stay=tuple(v for v in view.checkpoints if v.found.folder not in going),
    )


def content_crc32c(store: Store, name: str, size: int) -> int:
    """crc32c of what the store really sends, in slices; unlike ``Store.checksum`` no stored one is trusted.

    Args:
        store: Where the object is.
        name: The object.
        size: Its bytes.

    Raises:
        ObjectNotFoundError: No such object.
    """
    import google_crc32c

    value = 0
    for start in range(0, size, _SLICE_BYTES):
        value = google_crc32c.extend(value, store.read(name, start, min(size, start + _SLICE_BYTES)))
    return value


# -- one checkpoint ---------------------------------------------------------------------------


def _view(  # noqa: PLR0917 - one caller
    store: Store,
    stage: str,
    found: Found,
    depth: Depth,
    taken_over_by: int | None,
    on_read: Callable[[Found, int], None],
) -> CheckpointView | None:
    written_s = max(info.updated_s for info in found.objects.values())
    if not found.committed:
        return CheckpointView(stage, found, None, (), written_s)
    try:
        commit = read_commit(store, found)
    except ObjectNotFoundError:
        return None  # removed since it was listed: the record goes first
    except CheckpointError as error:
        return CheckpointView(stage, found, None, (ObjectProblem(COMMIT_NAME, error.message),), written_s)
    if taken_over_by is not None:
        return CheckpointView(stage, found, None, (), written_s, taken_over_by)
    differing = dict(_listed_problems(store, found, commit))
    sound = [wanted for wanted in commit.objects if wanted.name not in differing]
    read = _to_read(found, commit, sound, depth)
    if read:
        on_read(found, sum(wanted.size for wanted in read))
        differing |= _content_problems(store, found, read)
    if differing and not store.exists(f"{found.folder}/{COMMIT_NAME}"):
        return None
    wrong = tuple(ObjectProblem(w.name, differing[w.name]) for w in commit.objects if w.name in differing)
    return CheckpointView(stage, found, _compared(found, sound, read), wrong, commit.created_s or written_s)


def _to_read(found: Found, commit: Commit, sound: Sequence[SavedObject], depth: Depth) -> Sequence[SavedObject]:
    """The objects whose content is read, of those that the listing has nothing against; pure."""
    if depth is Depth.RESTORE:
        depth = Depth.CONTENTS if commit.size_bytes <= DEEP_LIMIT_BYTES else Depth.CHECKSUMS
    if depth is Depth.LISTING:
        return ()
    return [w for w in sound if depth is Depth.CONTENTS or found.objects[w.name].crc32c is None]


def _compared(found: Found, sound: Sequence[SavedObject], read: Sequence[SavedObject]) -> str | None:
    """The least that was compared of any object; pure."""
    if not sound:
        return None
    if len(read) == len(sound):
        return "contents"
    contents = {wanted.name for wanted in read}
    trusted = [found.objects[wanted.name].crc32c for wanted in sound if wanted.name not in contents]
    return "sizes" if None in trusted else "checksums"


def _listed_problems(store: Store, found: Found, commit: Commit) -> Iterator[tuple[str, str]]:
    for wanted in commit.objects:
        for text in problems(store, found, replace(commit, objects=(wanted,)), deep=False):
            yield wanted.name, text.removeprefix(f"{wanted.name} ")


def _content_problems(store: Store, found: Found, read: Sequence[SavedObject]) -> dict[str, str]:
    def problem(wanted: SavedObject) -> str:
        try:
            actual = content_crc32c(store, f"{found.folder}/{wanted.name}", wanted.size)
        except ObjectNotFoundError:
            return "is missing"
        if actual == wanted.crc32c:
            return ""
        return f"has content with crc32c {actual:08x}, committed was {wanted.crc32c:08x}"

    with ThreadPoolExecutor(min(_READERS, len(read)), thread_name_prefix="tpupipe-verify") as pool:
        return {wanted.name: text for wanted, text in zip(read, pool.map(problem, read), strict=True) if text}
