"""Damages a checkpoint, as a disk or a stray tool would. It is real damage to that run's data: nothing undoes it."""

from __future__ import annotations

from typing import Any

from tpupipe.checkpoint.commit import Commit, SavedObject
from tpupipe.checkpoint.inspect import stage_names
from tpupipe.checkpoint.verify import Selection, newest_intact
from tpupipe.errors import CheckpointError, NoIntactCheckpointError
from tpupipe.faults.plan import fraction
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store


def damage_newest(store: Store, paths: RunPaths, how: str, seed: int) -> dict[str, Any]:
    """Damages one array object of the newest intact checkpoint of a run, through the store.

    Real damage, on purpose: the checkpoint is lost for good. Older ones are not touched. Which object and which bit is
    a function of ``seed`` and of what the checkpoint's record lists.

    Args:
        store: The run's store, on any backend.
        paths: The run.
        how: ``flip`` a bit, ``truncate`` to half, or ``delete`` (``plan.HOW``).
        seed: Decides which object of the checkpoint, and which bit.

    Returns:
        What was done: ``step``, ``object`` (its name in the store), ``how``.

    Raises:
        CheckpointError: The run has no intact checkpoint, so there is nothing to damage.
        StoreError: The store failed.
    """
    found = [_newest(store, paths, stage) for stage in stage_names(store, paths)]
    intact = [(s.commit.created_s, s.folder, s.commit) for s in found if s is not None and s.commit is not None]
    if not intact:
        raise CheckpointError(
            f"Run {paths.run!r} has no intact checkpoint to damage yet.",
            hint="Saving goes on in the background; choose a later point or step, or put a slow@ fault before it.",
            run=paths.run,
        )
    _, folder, commit = max(intact, key=lambda item: item[:2])
    chosen = choose(commit, seed)
    name = f"{folder}/{chosen.name}"
    if how == "delete":
        store.delete(name)
    else:
        # Not by the file behind an emulator: its listing would go on to tell the old checksum.
        store.put(name, damaged(store.read(name), how, seed))
    return {"step": commit.step, "object": name, "how": how}


def _newest(store: Store, paths: RunPaths, stage: str) -> Selection | None:
    try:
        return newest_intact(store, paths, stage)
    except NoIntactCheckpointError:
        return None


def choose(commit: Commit, seed: int) -> SavedObject:
    """The object to damage: one of the larger half of those that hold anything; pure."""
    objects = sorted((o for o in commit.objects if o.size), key=lambda o: (-o.size, o.name))
    larger = objects[: max(1, (len(objects) + 1) // 2)]
    return larger[int(fraction(seed, "object") * len(larger))]


def damaged(content: bytes, how: str, seed: int) -> bytes:
    """``content`` with one bit flipped, or its first half; pure. ``content`` is not empty."""
    if how == "truncate":
        return content[: len(content) // 2]
    bit = int(fraction(seed, "bit") * len(content) * 8)
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
