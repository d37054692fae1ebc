"""Units: how one is committed, and the manifest that ends a stage. Shared by preprocess and infer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tpupipe.data.chunks import (
    Manifest,
    ManifestUnit,
    UnitFooter,
    decode_footer,
    decode_schema,
    encode_unit,
    merge_schemas,
    object_file,
)
from tpupipe.data.sources import Unit, fingerprint_units
from tpupipe.data.unit_writer import UnitWriter
from tpupipe.errors import DataError, ObjectExistsError, StageError
from tpupipe.faults.points import point
from tpupipe.stages.base import StageRun
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Fence
from tpupipe.store.objects import ObjectInfo, Store

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class UnitTarget:
    """Where a stage's units go, under whose authority, and what is recorded with them. Sent to workers.

    Args:
        store: The run's store.
        paths: The run.
        stage: The stage.
        fence: Refuses the commit when another driver owns the run by now.
        chunk_rows: Rows per chunk.
        params_fingerprint: Of the parameters used, or empty.
        code_fingerprint: Of the job's code.
        sample: Fraction of the input, as text.
    """

    store: Store
    paths: RunPaths
    stage: str
    fence: Fence
    chunk_rows: int
    params_fingerprint: str
    code_fingerprint: str
    sample: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed unit: what its footer says, and its object."""

    footer: UnitFooter
    schema: pa.Schema
    size_bytes: int
    crc32c: int | None
    generation: str = ""

    def __reduce__(self) -> Any:
        """As bytes of Arrow's own: pickling a schema forgets the names inside of fixed-size lists."""
        schema = self.schema.serialize().to_pybytes()
        return _committed, (self.footer, schema, self.size_bytes, self.crc32c, self.generation)


def _committed(footer: UnitFooter, schema: bytes, size_bytes: int, crc32c: int | None, generation: str) -> Committed:
    import pyarrow as pa

    return Committed(footer, pa.ipc.read_schema(pa.py_buffer(schema)), size_bytes, crc32c, generation)


def commit_unit(target: UnitTarget, unit: Unit, index: int, table: pa.Table, *, rows_in: int) -> Committed:
    """Creates the unit's one object out of its rows. See :func:`commit_written`."""
    writer = UnitWriter(unit.id, target.chunk_rows)
    writer.append(table)
    return commit_written(target, unit, index, writer, UnitFooter(unit.id, rows_in=rows_in))


def commit_written(target: UnitTarget, unit: Unit, index: int, writer: UnitWriter, counts: UnitFooter) -> Committed:
    """Creates the unit's one object: that is its commit.

    If it exists already (another try of the same task was faster), that one counts, provided it was made from the
    same input.

    Args:
        target: Where it goes.
        unit: The unit.
        index: Its position in the stage.
        writer: Its rows.
        counts: What was counted; fingerprints and the like are filled in here.

    Raises:
        FencedError: Another driver owns the run.
        StageError: The existing object was made from something else.
    """
    footer = replace(
        counts,
        input_fingerprint=unit.fingerprint,
        params_fingerprint=target.params_fingerprint,
        code_fingerprint=target.code_fingerprint,
        lease_epoch=target.fence.epoch,
        sample=target.sample,
    )
    data = writer.finish(footer)
    target.fence.check()
    point("unit.before_commit", index=index, unit=unit.id)
    name = target.paths.unit(target.stage, unit.id)
    try:
        info = target.store.create(name, data)
    except ObjectExistsError:
        committed = read_committed(target.store, target.store.info(name))
        _check_made_from(target.stage, committed, unit, target.params_fingerprint)
        return committed
    point("unit.after_commit", index=index, unit=unit.id)
    return Committed(decode_footer(data), decode_schema(data), info.size, info.crc32c, info.generation)


def commit_errors(target: UnitTarget, unit: Unit, table: pa.Table) -> None:
    """Creates the object with a unit's error records, before the unit's own: nothing is lost if this process dies between.

    The same records give the same bytes under any lease. If an earlier try, which did not get to commit the unit, left
    others, they are replaced.

    Raises:
        FencedError: Another driver owns the run.
    """
    footer = UnitFooter(
        unit.id,
        rows_bad=table.num_rows,
        input_fingerprint=unit.fingerprint,
        params_fingerprint=target.params_fingerprint,
        code_fingerprint=target.code_fingerprint,
        sample=target.sample,
    )
    data = encode_unit(table, chunk_rows=target.chunk_rows, footer=footer)
    target.fence.check()
    name = target.paths.unit_errors(target.stage, unit.id)
    try:
        target.store.create(name, data)
    except ObjectExistsError:
        committed = target.store.exists(target.paths.unit(target.stage, unit.id))
        if not committed and target.store.read(name) != data:
            target.store.put(name, data)


def clear_errors(target: UnitTarget, unit: Unit) -> None:
    """Removes the error records of a unit that has none now; call it before the unit is committed.

    An earlier driver may have died between them and the unit, and the ``map`` been mended since: the row would be in the
    output and among the errors. The tries of one driver run the same code, so under the first lease nothing is looked for.

    Raises:
        FencedError: There are some, and another driver owns the run.
    """
    name = target.paths.unit_errors(target.stage, unit.id)
    if target.fence.epoch == 1 or not target.store.exists(name):
        return
    target.fence.check()
    if not target.store.exists(target.paths.unit(target.stage, unit.id)):  # of a committed unit they are part
        target.store.delete(name)


def read_committed(store: Store, info: ObjectInfo) -> Committed:
    """What a committed unit says of itself; reads the end of its object only."""
    with object_file(store, info.name, info.size) as file:
        return Committed(decode_footer(file), decode_schema(file), info.size, info.crc32c, info.generation)


def _check_made_from(stage: str, committed: Committed, unit: Unit, params_fingerprint: str) -> None:
    footer = committed.footer
    for what, had, has in (
        ("input", footer.input_fingerprint, unit.fingerprint),
        ("parameters", footer.params_fingerprint, params_fingerprint),
    ):
        if had != has:
            raise made_from_other(stage, unit.id, what, had, has)


def made_from_other(stage: str, unit: str, what: str, had: str, has: str) -> StageError:
    """The error for a committed unit that was made from other input or parameters."""
    return StageError(
        f"Unit {unit} of stage {stage!r} is committed, but was made from other {what} ({had} then, {has} now).",
        stage=stage,
        unit=unit,
    )


def write_manifest(
    run: StageRun,
    stage: str,
    units: Sequence[Unit],
    committed: Iterable[Committed],
    fingerprints: Mapping[str, str],
) -> Manifest:
    """Ends a stage: lists every unit once, in input order.

    Raises:
        StageError: A unit is missing.
        DataError: Units have columns that do not go together, or there are no rows at all.
    """
    by_id: dict[str, tuple[ManifestUnit, int]] = {}
    schemas: list[pa.Schema] = []
    for c in committed:  # kept no longer than needed: there may be a million
        place = place_of(schemas, c.schema)
        by_id[c.footer.unit] = (
            ManifestUnit(c.footer.unit, c.footer.rows, c.footer.chunks, c.size_bytes, c.crc32c),
            place,
        )
    missing = [unit.id for unit in units if unit.id not in by_id]
    if missing:
        raise StageError(
            f"Stage {stage!r}: {len(missing)} of {len(units)} units are not committed, {missing[0]} first.",
            stage=stage,
            unit=missing[0],
        )
    manifest = Manifest(
        stage,
        tuple(by_id[u.id][0] for u in units),
        merge_schemas(schemas[place] for place in dict.fromkeys(by_id[u.id][1] for u in units)),
        {"inputs": fingerprint_units(units), **fingerprints},
    )
    return publish_manifest(run, manifest)


def place_of(schemas: list[pa.Schema], schema: pa.Schema) -> int:
    """Index of the schema among them; it is added if it is new. A stage has one or two."""
    for index, known in enumerate(schemas):
        if known.equals(schema, check_metadata=True):
            return index
    schemas.append(schema)
    return len(schemas) - 1


def publish_manifest(run: StageRun, manifest: Manifest) -> Manifest:
    """Creates the manifest's object, which makes the stage complete.

    The same one may be there already: a driver that lost the run was stopped right before it created it, or an answer got lost.

    Returns:
        What the store holds now.

    Raises:
        FencedError: Another driver owns the run.
        StageError: There is one with other content.
        DataError: What is there is no manifest.
    """
    stage, name = manifest.stage, run.paths.manifest(manifest.stage)
    run.lease.check()
    point("stage.manifest", stage=stage)
    try:
        run.store.create(name, manifest.to_json())
    except ObjectExistsError as error:
        stored = Manifest.from_json(run.store.read(name))
        if differing := manifest_differences(manifest, stored):
            raise StageError(
                f"Stage {stage!r} has a manifest already, with other {', '.join(differing)}: {run.store.uri(name)}.",
                hint="Another driver, of other code or input, completed the stage. The same command goes on from there.",
                stage=stage,
                differing=differing,
            ) from error
        return stored
    return manifest


def manifest_differences(one: Manifest, other: Manifest) -> list[str]:
    """In what two manifests of a stage differ; pure. A checksum that one of them does not know is no difference."""

    def same_unit(a: ManifestUnit, b: ManifestUnit) -> bool:
        known = None not in (a.crc32c, b.crc32c)
        return a == b if known else replace(a, crc32c=None) == replace(b, crc32c=None)

    same = {
        "units": len(one.units) == len(other.units) and all(map(same_unit, one.units, other.units)),
        "schema": one.schema.equals(other.schema, check_metadata=True),
        "fingerprints": dict(one.fingerprints) == dict(other.fingerprints),
    }
    return [what for what, is_same in same.items() if not is_same]


def require_rows(stage: str, manifest: Manifest) -> Manifest:
    """Gives the manifest back if it has rows to train on.

    Raises:
        DataError: It has none.
    """
    if manifest.rows == 0:
        raise DataError(
            f"Stage {stage!r} made no rows, so there is nothing to train on.",
            hint="Look at what its map function drops, or take a larger sample.",
            stage=stage,
        )
    return manifest
