"""The commit record of a checkpoint, ``COMMIT.json``: a checkpoint exists when this object does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpupipe.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class SavedObject:
    """One object of a checkpoint.

    Args:
        name: Relative to the checkpoint's folder.
        size: Bytes.
        crc32c: Checksum of the content.
    """

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True)
class Leaf:
    """One array of the saved tree: its path (``jax.tree_util.keystr``), shape and dtype name."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Commit:
    """What ``COMMIT.json`` says.

    Args:
        step: Optimizer steps done; also the data position: the next batch is number ``step``.
        lease_epoch: Lease epoch of the driver that wrote it.
        arrays: Folder of the arrays, relative to the checkpoint's folder.
        objects: Every object below ``arrays``.
        leaves: The saved tree, in tree order.
        sample_digest: Additive hash of all rows fed up to ``step`` (64 bits).
        metrics: The step's metrics.
        devices: Number of devices it was saved from; any number can restore it.
        created_s: Seconds since 1970.
    """

    step: int
    lease_epoch: int
    arrays: str
    objects: tuple[SavedObject, ...]
    leaves: tuple[Leaf, ...]
    sample_digest: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    devices: int = 0
    created_s: float = 0.0

    @property
    def tree_digest(self) -> str:
        """sha256 over paths, shapes and dtypes."""
        return tree_digest(self.leaves)

    @property
    def fingerprint(self) -> str:
        """What tells this checkpoint's content from any other: hash over its tree and object checksums."""
        text = json.dumps([self.step, self.tree_digest, [[o.name, o.size, o.crc32c] for o in self.objects]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(o.size for o in self.objects)

    def to_json(self) -> bytes:
        """The object's content."""
        record = {"format": FORMAT, **asdict(self), "tree_digest": self.tree_digest}
        return json.dumps(record, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, uri: str) -> Commit:
        """Reads a record.

        Raises:
            CheckpointError: It is not a whole record of a known format.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            if record["format"] != FORMAT:
                raise CheckpointError(
                    f"{uri} has checkpoint format {record['format']}; this version reads {FORMAT}.",
                    hint="Use the version of tpupipe that wrote it.",
                    uri=uri,
                )
            commit = cls(
                step=record["step"],
                lease_epoch=record["lease_epoch"],
                arrays=record["arrays"],
                objects=tuple(SavedObject(**o) for o in record["objects"]),
                leaves=tuple(Leaf(leaf["path"], tuple(leaf["shape"]), leaf["dtype"]) for leaf in record["leaves"]),
                sample_digest=record["sample_digest"],
                metrics=record["metrics"],
                devices=record["devices"],
                created_s=record["created_s"],
            )
            if commit.tree_digest != record["tree_digest"]:
                raise CheckpointError(f"{uri}: the tree digest does not match its leaves.", uri=uri)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{uri} is not a commit record: {error!r}.", uri=uri) from error
        return commit


def tree_digest(leaves: Iterable[Leaf]) -> str:
    """sha256 (hex) over paths, shapes and dtypes, in tree order."""
    text = json.dumps([[leaf.path, list(leaf.shape), leaf.dtype] for leaf in leaves])
    return hashlib.sha256(text.encode()).hexdigest()


def tree_differences(saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> tuple[list[str], list[str], list[str]]:
    """Paths that are missing in ``saved``, unexpected in it, and there with another shape or dtype."""
    have = {leaf.path: leaf for leaf in saved}
    want = {leaf.path: leaf for leaf in wanted}
    changed = [
        f"{path}: saved {have[path].dtype}{list(have[path].shape)}, wanted {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in want.items()
        if path in have and have[path] != leaf
    ]
    return [p for p in want if p not in have], [p for p in have if p not in want], changed
