"""What runs on each host during inference: read a unit, pad, apply, put back in order, commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpupipe.data.buckets import AutoBuckets, Buckets, PackedBatch, PaddedBatch, pad, plan_batches, row_lengths
from tpupipe.data.chunks import decode_unit
from tpupipe.data.columns import to_numpy, to_table
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Source, Unit
from tpupipe.errors import DataError, StageError
from tpupipe.faults.plan import Fault
from tpupipe.faults.points import point
from tpupipe.job import Infer
from tpupipe.ledger.events import event
from tpupipe.stages.base import arm_worker, reported, user_code
from tpupipe.stages.coordinator import CoordinatorHandle
from tpupipe.stages.infer_buckets import length_histogram
from tpupipe.stages.infer_params import ParamsSource
from tpupipe.stages.sharding import make_mesh, named_sharding
from tpupipe.stages.stall import Watchdog
from tpupipe.stages.units import Committed, UnitTarget, commit_unit

UNIT, ROW, MASK, LENGTHS = "unit", "row", "mask", "lengths"


@dataclass(frozen=True)
class InferPlan:
    """All that an inference worker needs. Sent to every worker.

    Args:
        stage: The declaration, overrides applied.
        target: Where units go.
        source: The inputs; ``None`` where units are committed units of an earlier stage.
        data_stage: That earlier stage.
        input_options: fsspec's options for opening inputs.
        params: Where the parameters are.
        coordinator: Where to report.
        faults: Faults to inject.
        buckets: Those of the stage, their lengths chosen.
        stall_timeout_s: Seconds after which a unit that does not end is a failure.
    """

    stage: Infer
    target: UnitTarget
    source: Source | None
    data_stage: str
    input_options: Mapping[str, Any]
    params: ParamsSource
    coordinator: CoordinatorHandle
    faults: tuple[Fault, ...]
    buckets: Buckets | None
    stall_timeout_s: float


@dataclass(frozen=True)
class UnitDone:
    """What a worker says of a unit it did.

    Args:
        committed: The committed unit.
        padded_values: Values of the bucketed column fed to the model, padding included.
        real_values: Those of real rows.
        compilations: Shapes compiled so far by this worker.
    """

    committed: Committed
    padded_values: int
    real_values: int
    compilations: int


class InferWorker:
    """The actor: one per host, with all of the host's devices, parameters replicated over them."""

    def __init__(self, plan: InferPlan, rank: int) -> None:
        self._plan = plan
        with reported(plan.coordinator, rank=rank):
            arm_worker(plan.faults, plan.coordinator, stage=plan.stage.name, rank=rank)
            self._start(rank)

    def _start(self, rank: int) -> None:
        import jax

        plan, began = self._plan, time.monotonic()
        self._mesh = make_mesh({"data": len(jax.local_devices())}, jax.local_devices())
        self._replicated = named_sharding(self._mesh)
        self._rows = named_sharding(self._mesh, "data")
        self._params = plan.params.load(self._replicated)
        self._compiled: dict[Any, Any] = {}
        point("params.loaded", step=plan.params.step)
        plan.coordinator.report(event("starting", rank=rank, seconds=time.monotonic() - began))

    def run(self, unit: Unit, index: int) -> UnitDone:
        """Does one unit, up to its commit."""
        plan = self._plan
        watchdog = Watchdog(plan.stall_timeout_s, f"unit {unit.id}", plan.target, plan.coordinator, unit=unit.id)
        with reported(plan.coordinator, unit=unit.id), watchdog.watching():
            return self._run(unit, index)

    def _run(self, unit: Unit, index: int) -> UnitDone:
        stage = self._plan.stage
        table = _read(self._plan, unit)
        rows_in = table.num_rows
        point("unit.read", index=index, unit=unit.id)
        columns = _mapped(stage, unit, table)
        missing = [name for name in stage.keep if name not in columns]
        if missing:
            raise DataError(
                f"Stage {stage.name!r} keeps {', '.join(missing)}, but its rows have {', '.join(columns)}.",
                stage=stage.name,
            )
        outputs, padded, real = self._apply_all(unit, columns)
        rows = len(next(iter(columns.values()))) if columns else 0
        result = {
            UNIT: _repeat(unit.id, rows),
            ROW: _numbers(rows),
            **{name: columns[name] for name in stage.keep},
            **outputs,
        }
        point("unit.mapped", index=index, unit=unit.id)
        committed = commit_unit(self._plan.target, unit, index, to_table(result), rows_in=rows_in)
        return UnitDone(committed, padded, real, len(self._compiled))

    # -- batches ---------------------------------------------------------------------------------

    def _apply_all(self, unit: Unit, columns: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
        """Outputs of all rows in input order, values fed, and real ones among them."""
        numeric = {name: values for name, values in columns.items() if _is_numeric(values)}
        if not numeric:
            raise DataError(
                f"Stage {self._plan.stage.name!r} has no column with numbers to feed: {', '.join(columns) or 'no columns'}.",
                hint="Give Infer a map that turns the rows into arrays.",
            )
        total = len(next(iter(numeric.values())))
        collected: list[tuple[Any, dict[str, Any]]] = []
        padded_values = real_values = 0
        for batch, padded in self._batches(numeric, total):
            with user_code("apply", self._plan.stage.name, unit=unit.id):
                outputs = self._apply(padded)
            collected.append((batch, self._cut(outputs, padded, len(batch.rows))))
            padded_values += batch.batch_rows * batch.bucket_length
            real_values += int(padded.lengths.sum()) if self._plan.buckets else len(batch.rows)
        if not collected:  # a unit without rows keeps the schema
            collected.append(self._no_rows(numeric))
        return _in_order(collected, total), padded_values, real_values

    def _batches(self, columns: Mapping[str, Any], total: int) -> Any:
        import numpy as np

        stage, buckets, devices = self._plan.stage, self._plan.buckets, self._mesh.size
        if buckets is not None:
            lengths = row_lengths(columns, buckets)
            for batch in plan_batches(lengths, buckets, default_rows=stage.batch_rows, row_multiple=devices):
                yield batch, pad(columns, batch, buckets)
            return
        ragged = [name for name, values in columns.items() if values.dtype == object]
        if ragged:
            raise DataError(
                f"Stage {stage.name!r}: column {ragged[0]!r} is ragged, and no buckets are declared.",
                hint="Infer(buckets=Buckets(lengths=(128, 256, 512))).",
                stage=stage.name,
            )
        size = -(-stage.batch_rows // devices) * devices
        for start in range(0, total, size):
            rows = np.arange(start, min(start + size, total))
            mask = np.arange(size) < len(rows)
            fed = {name: _pad_rows(values[rows], size) for name, values in columns.items()}
            yield PackedBatch(1, rows, size), PaddedBatch(fed, mask.astype(np.int32), mask)

    def _apply(self, padded: PaddedBatch) -> dict[str, Any]:
        import jax
        import numpy as np

        feed = {name: _canonical(values) for name, values in padded.columns.items()}
        if self._plan.buckets is not None:
            feed[LENGTHS] = padded.lengths
        feed[MASK] = padded.mask
        placed = {name: jax.device_put(values, self._rows) for name, values in feed.items()}
        outputs = self._compile(placed)(self._params, placed)
        fetched = {name: np.asarray(value) for name, value in outputs.items()}
        for name, value in fetched.items():
            if value.ndim < 1 or value.shape[0] != len(padded.mask):
                raise StageError(
                    f"apply of stage {self._plan.stage.name!r}: output {name!r} has shape {list(value.shape)}; its "
                    f"first dimension must be the batch's {len(padded.mask)} rows."
                )
        return fetched

    def _compile(self, placed: Mapping[str, Any]) -> Any:
        import jax

        key = tuple(sorted((name, value.shape, str(value.dtype)) for name, value in placed.items()))
        if key not in self._compiled:
            began = time.monotonic()
            jitted = jax.jit(self._plan.stage.apply, out_shardings=self._rows)
            self._compiled[key] = jitted.lower(self._params, placed).compile()
            self._plan.coordinator.report(
                event("compiling", seconds=time.monotonic() - began, init_seconds=0.0, shapes=str(key))
            )
        return self._compiled[key]

    def _cut(self, outputs: Mapping[str, Any], padded: PaddedBatch, rows: int) -> dict[str, Any]:
        cut: dict[str, Any] = {}
        for name, value in outputs.items():
            if name in self._plan.stage.ragged_outputs:
                cut[name] = [value[i, : padded.lengths[i]] for i in range(rows)]
            else:
                cut[name] = value[:rows]
        return cut

    def _no_rows(self, columns: Mapping[str, Any]) -> tuple[PackedBatch, dict[str, Any]]:
        """Outputs without rows, of the types that rows would have: the model is only traced."""
        import jax
        import numpy as np

        stage, buckets = self._plan.stage, self._plan.buckets
        length = buckets.lengths[0] if buckets else 1
        size = self._mesh.size
        feed = {
            name: jax.ShapeDtypeStruct((size, length), np.int32)
            if values.dtype == object
            else jax.ShapeDtypeStruct((size, *values.shape[1:]), _canonical(values).dtype)
            for name, values in columns.items()
        }
        if buckets:
            feed[LENGTHS] = jax.ShapeDtypeStruct((size,), np.int32)
        feed[MASK] = jax.ShapeDtypeStruct((size,), bool)
        shapes = jax.eval_shape(stage.apply, self._params, feed)
        empty = np.empty((0,), np.int64)
        return PackedBatch(length, empty, size), {
            name: np.empty((0, *shape.shape[1:]), shape.dtype) for name, shape in shapes.items()
        }


def sample_unit(plan: InferPlan, unit: Unit, auto: AutoBuckets) -> dict[int, int]:
    """A task: how many of a unit's rows have which length."""
    with reported(plan.coordinator, unit=unit.id):
        columns = _mapped(plan.stage, unit, _read(plan, unit))
        return length_histogram({name: values for name, values in columns.items() if _is_numeric(values)}, auto)


def _read(plan: InferPlan, unit: Unit) -> Any:
    if plan.source is not None:
        return read_unit(plan.source, unit, storage_options=plan.input_options)
    return decode_unit(plan.target.store.read(plan.target.paths.unit(plan.data_stage, unit.id)))


def _mapped(stage: Infer, unit: Unit, table: Any) -> dict[str, Any]:
    columns = to_numpy(table)
    if stage.map is None:
        return columns
    with user_code("map", stage.name, unit=unit.id):
        return dict(stage.map(columns))


def _in_order(collected: list[tuple[Any, dict[str, Any]]], total: int) -> dict[str, Any]:
    import numpy as np

    order = np.argsort(np.concatenate([batch.rows for batch, _ in collected]), kind="stable")
    if len(order) != total:
        raise StageError(f"{total} rows went in, {len(order)} came out: a batch was lost.")
    result: dict[str, Any] = {}
    for name in collected[0][1]:
        parts = [outputs[name] for _, outputs in collected]
        if isinstance(parts[0], list):
            flat = [row for part in parts for row in part]
            ragged = np.empty(len(flat), dtype=object)
            ragged[:] = [flat[i] for i in order]
            result[name] = ragged
        else:
            result[name] = np.concatenate(parts)[order]
    return result


def _is_numeric(values: Any) -> bool:
    import numpy as np

    if values.dtype == object:
        return all(isinstance(row, (np.ndarray, list)) for row in values)
    return values.dtype.kind in "biufc" or "float" in values.dtype.name


def _canonical(values: Any) -> Any:
    import jax

    return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)


def _pad_rows(values: Any, size: int) -> Any:
    import numpy as np

    padded = np.zeros((size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


def _repeat(text: str, rows: int) -> Any:
    import numpy as np

    return np.array([text] * rows, dtype=f"U{len(text)}") if rows else np.empty(0, dtype="U1")


def _numbers(rows: int) -> Any:
    import numpy as np

    return np.arange(rows, dtype=np.int64)
