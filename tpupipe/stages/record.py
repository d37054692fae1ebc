"""The record that a training stage is complete: its ``manifest.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tpupipe.errors import DataError, ObjectExistsError, StageError
from tpupipe.faults.points import point
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

FORMAT = 1


@dataclass(frozen=True)
class TrainRecord:
    """What a complete training stage made.

    Args:
        steps: Optimizer steps.
        params_digest: sha256 (hex) over the parameters' bytes, in tree order.
        sample_digest: Hash (16 hex digits) over what was fed in which place.
        metrics: Of the last step.
        checkpoint: Folder of the last checkpoint, relative to the store.
        checkpoint_fingerprint: Of its commit.
        rows_fed: Real rows fed, over all steps.
        rows_dropped: Rows left out on purpose.
    """

    steps: int
    params_digest: str
    sample_digest: str
    metrics: Mapping[str, float]
    checkpoint: str
    checkpoint_fingerprint: str
    rows_fed: int
    rows_dropped: int


def read_train_record(store: Store, paths: RunPaths, stage: str) -> TrainRecord | None:
    """The record of a complete stage, or ``None``.

    Raises:
        StoreError: The store could not be asked: that is never "not complete".
        DataError: The object is not such a record.
    """
    name = paths.manifest(stage)
    if not store.exists(name):
        return None
    try:
        record: dict[str, Any] = json.loads(store.read(name))
        if record.pop("format") != FORMAT:
            raise DataError(f"{store.uri(name)} has another format than {FORMAT}.", uri=store.uri(name))
        return TrainRecord(**record)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{store.uri(name)} is not the record of a training stage: {error!r}.") from error


def write_train_record(store: Store, paths: RunPaths, stage: str, record: TrainRecord) -> None:
    """Creates the record, which makes the stage complete.

    The same one may be there already: a driver that lost the run was stopped right before it created it, or an answer got
    lost. Nothing in it tells one driver from another: the next one finds the last checkpoint and trains nothing.

    Raises:
        StageError: There is one with other content.
        DataError: What is there is no such record.
    """
    name = paths.manifest(stage)
    point("stage.manifest", stage=stage)
    try:
        store.create(name, json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode())
    except ObjectExistsError as error:
        stored = read_train_record(store, paths, stage)
        differing = [f.name for f in fields(record) if _text(record, f.name) != _text(stored, f.name)]
        if differing:
            raise StageError(
                f"Stage {stage!r} is complete already, with another result ({', '.join(differing)}): {store.uri(name)}.",
                hint="Another driver completed the stage. The same command goes on from there.",
                stage=stage,
                differing=differing,
            ) from error


def _text(record: TrainRecord | None, name: str) -> str:
    return json.dumps(getattr(record, name, None), sort_keys=True)  # as text, a loss that is no number equals itself
