"""What a stage that is complete says of itself. Needs the store only: no Ray, no slice."""

from __future__ import annotations

from tpupipe.data.chunks import Manifest
from tpupipe.job import Stage, Train
from tpupipe.ledger.events import Seconds
from tpupipe.stages.record import TrainRecord, read_train_record
from tpupipe.stages.result import StageResult
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

COUNTED = (
    "rows_in",
    "rows_bad",
    "rows_truncated",
    "values_fed",
    "values_real",
)  # in footers, and summed up in manifests


def finished(stage: Stage, store: Store, paths: RunPaths) -> StageResult | None:
    """The result of a complete stage, or ``None`` if there is work to do.

    Raises:
        StoreError: The store could not be asked: that is never "not complete".
        DataError: The stage's manifest cannot be read.
    """
    uri = store.uri(paths.outputs(stage.name))
    if isinstance(stage, Train):
        record = read_train_record(store, paths, stage.name)
        return None if record is None else trained(record, store, uri, record.steps, Seconds())
    manifest = read_manifest(store, paths, stage.name)
    return None if manifest is None else units_done(manifest, uri, len(manifest.units), Seconds())


def read_manifest(store: Store, paths: RunPaths, stage: str) -> Manifest | None:
    """The manifest of a complete stage, or ``None``.

    Raises:
        StoreError: The store could not be asked: that is never "not complete".
        DataError: The object is not a manifest.
    """
    name = paths.manifest(stage)
    return Manifest.from_json(store.read(name)) if store.exists(name) else None


def units_done(manifest: Manifest, uri: str, resumed_from: int | None, seconds: Seconds) -> StageResult:
    """The result of a stage whose work is units."""
    total = len(manifest.units)
    counted = {name: int(manifest.fingerprints.get(name, 0)) for name in COUNTED}
    fed = counted["values_fed"]
    return StageResult(
        status="done",
        done=total,
        total=total,
        resumed_from=resumed_from or None,
        rows_in=counted["rows_in"],
        rows_out=manifest.rows,
        rows_quarantined=counted["rows_bad"],
        rows_truncated=counted["rows_truncated"],
        metrics={"padding_share": round(1 - counted["values_real"] / fed, 4)} if fed else {},
        uri=uri,
        seconds=seconds.rounded(),
    )


def trained(record: TrainRecord, store: Store, uri: str, resumed_from: int | None, seconds: Seconds) -> StageResult:
    """The result of a training stage."""
    return StageResult(
        status="done",
        done=record.steps,
        total=record.steps,
        resumed_from=resumed_from or None,
        rows_in=record.rows_fed,
        rows_out=record.rows_fed,
        rows_dropped=record.rows_dropped,
        uri=uri,
        seconds=seconds.rounded(),
        metrics=record.metrics,
        params_digest=record.params_digest,
        sample_digest=record.sample_digest,
        checkpoint=store.uri(record.checkpoint),
    )
