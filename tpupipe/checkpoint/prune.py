"""Retention: which checkpoints may go. The newest intact one never does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpupipe.checkpoint.verify import (
    Found,
    list_checkpoints,
    overtaken_by,
    problems,
    read_commit,
    take_over_times,
)
from tpupipe.errors import CheckpointError, UsageError
from tpupipe.store.layout import COMMIT_NAME, RunPaths
from tpupipe.store.objects import Store


@dataclass(frozen=True)
class Judged:
    """A committed checkpoint and whether it is intact; a late one never is."""

    found: Found
    intact: bool


def superfluous(judged: Sequence[Judged], keep: int) -> list[Found]:
    """The checkpoints that retention gives up, oldest last.

    Only what is older than the ``keep`` newest *intact* ones goes; a damaged one neither counts nor shields.

    Args:
        judged: Committed checkpoints, in any order.
        keep: How many intact ones stay, at least 1.

    Raises:
        UsageError: ``keep`` is below 1.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: at least one checkpoint stays.")
    newest_first = sorted(judged, key=lambda j: j.found.age, reverse=True)
    kept = 0
    for position, candidate in enumerate(newest_first):
        if kept == keep:
            return [j.found for j in newest_first[position:]]
        kept += candidate.intact
    return []


def judge(store: Store, paths: RunPaths, stage: str, *, deep: bool = False) -> list[Judged]:
    """All committed checkpoints of a stage with a verdict each, newest first."""
    judged = []
    for found in list_checkpoints(store, paths, stage):
        if not found.committed:
            continue
        try:
            commit = read_commit(store, found)
            intact = not any(True for _ in problems(store, found, commit, deep=deep))
        except CheckpointError:
            intact = False
        judged.append(Judged(found, intact))
    return judged


def in_time(judged: Sequence[Judged], taken_s: Mapping[int, float]) -> list[Judged]:
    """The same, but late ones are not intact: no restore takes one, so it must not count for one that is kept; pure.

    Args:
        judged: Committed checkpoints.
        taken_s: When each lease of the run was taken, see ``overtaken_by``.
    """
    return [replace(each, intact=each.intact and overtaken_by(each.found, taken_s) is None) for each in judged]


def prune(store: Store, paths: RunPaths, stage: str, keep: int, verified: set[str] | None = None) -> list[Found]:
    """Deletes what ``superfluous`` names and gives it. The record goes first: half-deleted is uncommitted.

    Before anything goes, what stays is looked at byte by byte where the store keeps no checksums (``file://``).

    Args:
        store: The run's store.
        paths: The run.
        stage: The training stage.
        keep: Intact checkpoints to keep.
        verified: Folders that were read whole already, to be read no more; added to.
    """
    judged = judge(store, paths, stage)
    if not superfluous(judged, keep):
        return []
    judged = in_time(judged, take_over_times(store, paths, [each.found for each in judged]))
    verified = set() if verified is None else verified
    gone = superfluous([_looked_at(store, each, verified) for each in judged], keep)
    for found in gone:
        remove(store, found)
    return gone


def remove(store: Store, found: Found) -> None:
    """Deletes one checkpoint. The record goes first: half-deleted is uncommitted."""
    store.delete(f"{found.folder}/{COMMIT_NAME}")
    store.delete_prefix(found.folder)


def _looked_at(store: Store, judged: Judged, verified: set[str]) -> Judged:
    found = judged.found
    vouched = all(info.crc32c is not None for info in found.objects.values())
    if not judged.intact or vouched or found.folder in verified:
        return judged
    if any(True for _ in problems(store, found, read_commit(store, found), deep=True)):
        return Judged(found, intact=False)
    verified.add(found.folder)
    return judged
