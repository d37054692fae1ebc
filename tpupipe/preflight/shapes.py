"""What a job's programs are fed, found without running the job: the first unit of a source is mapped here, no more.

For the child process that compiles; JAX is imported inside functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpupipe.config import Config
from tpupipe.data.bucket_lengths import choose
from tpupipe.data.buckets import AutoBuckets, Buckets
from tpupipe.data.columns import to_numpy, to_table
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.read import read_unit
from tpupipe.data.sources import Source, Unit
from tpupipe.data.windows import Origin, Window, read_windows
from tpupipe.errors import JobError, StageError
from tpupipe.identity import plan_inputs
from tpupipe.job import Infer, Job, Preprocess, Train, default_params
from tpupipe.programs.infer_batches import Spec, ready_window
from tpupipe.programs.infer_buckets import length_histogram
from tpupipe.programs.infer_rows import UnitMapper
from tpupipe.programs.sharding import state_shardings
from tpupipe.programs.train import checked_columns
from tpupipe.programs.user_code import user_code

if TYPE_CHECKING:
    import pyarrow as pa

_ANY_LENGTH = 2**31 - 1


class NeedsClusterError(StageError):
    """What a stage is fed cannot be found without running the job on Ray."""


@dataclasses.dataclass(frozen=True)
class InferShapes:
    """An inference stage, ready to be compiled.

    Args:
        stage: The declaration, with bucket lengths.
        spec: What its columns look like.
        notes: What was assumed.
    """

    stage: Infer
    spec: Spec
    notes: tuple[str, ...]


class JobShapes:
    """Shapes of what the programs of a job are fed. Lists every source; reads the first unit of those it needs.

    Args:
        job: The declaration, overrides applied.
        config: The configuration.
        input_options: fsspec's options for opening inputs.

    Raises:
        DataError: A source has no input.
    """

    def __init__(self, job: Job, config: Config, input_options: Mapping[str, Any]) -> None:
        self._job = job
        self._options = input_options
        self._inputs = plan_inputs(job, config, input_options)

    # -- what there is to do ---------------------------------------------------------------------

    def work(self) -> list[dict[str, Any]]:
        """For each stage: units and bytes of its source, rows and steps. Rows are estimated from the first unit."""
        return [self._work(stage) for stage in self._job.stages]

    def _work(self, stage: Preprocess | Train | Infer) -> dict[str, Any]:
        found: dict[str, Any] = {"stage": stage.name, "kind": type(stage).__name__.lower()}
        if isinstance(stage, Train):
            rows = self._prepared_rows(stage.data)
            steps = stage.steps
            if steps is None and rows is not None and stage.epochs is not None:
                steps = math.ceil(rows * stage.epochs / stage.batch_size)
            return {**found, "steps": steps, "estimated": stage.steps is None, "batch": stage.batch_size, "rows": rows}
        source = stage.source if isinstance(stage, Preprocess) else stage.data
        if isinstance(source, str):
            return {**found, "rows": self._prepared_rows(source)}
        units = self._inputs[source]
        return {**found, "units": len(units), "bytes_read": sum(unit.size_bytes for unit in units)}

    def _prepared_rows(self, name: str) -> int | None:
        stage = self._preprocess(name)
        if stage.map is None:
            return None
        units = self._inputs[stage.source]
        total = sum(unit.size_bytes for unit in units)
        return round(int(self.prepared(name).num_rows) * total / max(units[0].size_bytes, 1))

    def infer_rows(self, stage: Infer) -> int | None:
        """Rows of an inference stage, estimated from its first unit; ``None`` where that is not known."""
        source = stage.data
        if isinstance(source, str):
            return self._prepared_rows(source)
        units = self._inputs[source]
        first = self._first_rows(stage)
        total = sum(unit.size_bytes for unit in units)
        return round(first * total / max(units[0].size_bytes, 1))

    # -- training --------------------------------------------------------------------------------

    def train_columns(self, stage: Train) -> dict[str, Any]:
        """Columns of a training batch, ``ndarray[0, ...]``.

        Raises:
            DataError: They are not rectangular numbers.
            NeedsClusterError: The rows come out of ``dataset=``.
        """
        return checked_columns(stage.data, to_numpy(self.prepared(stage.data).schema.empty_table()))

    @functools.cache  # noqa: B019 - one of these per process
    def prepared(self, name: str) -> pa.Table:
        """The rows that a ``Preprocess`` stage makes of its first unit.

        Raises:
            UserCodeError: ``map`` raised.
            NeedsClusterError: The stage is a ``dataset=``.
        """
        stage = self._preprocess(name)
        if stage.map is None:
            raise NeedsClusterError(
                f"Stage {name!r} is a dataset= over all rows, so the shape of its rows is known only after it has run.",
                hint="map= can be tried on one unit.",
                stage=name,
            )
        unit = self._first(stage.source)
        batch = to_numpy(read_unit(stage.source, unit, storage_options=self._options))
        with user_code("map", name, unit=unit.id, first_input=unit.parts[0].path):
            mapped = stage.map(batch)
        return to_table(mapped)

    def _preprocess(self, name: str) -> Preprocess:
        stage = self._job.stage(name)
        if not isinstance(stage, Preprocess):
            raise JobError(f"{name!r} is not a Preprocess stage.")
        return stage

    def _first(self, source: Source) -> Unit:
        return self._inputs[source][0]

    # -- inference -------------------------------------------------------------------------------

    def infer(self, stage: Infer, devices: int) -> InferShapes:
        """What a stage's model is fed on one host.

        Args:
            stage: The declaration.
            devices: Devices of the host.

        Raises:
            BadRowError, DataError, UserCodeError: The first unit cannot be fed.
            NeedsClusterError: The rows come out of ``dataset=``.
        """
        window, unit = self._window(stage)
        notes: tuple[str, ...] = ()
        if isinstance(stage.buckets, AutoBuckets):
            auto = stage.buckets
            any_length = Buckets((_ANY_LENGTH,), column=auto.column, too_long="truncate")
            mapped = UnitMapper(dataclasses.replace(stage, buckets=any_length), unit).map(window)
            lengths = choose(auto, length_histogram(mapped.fed, auto))
            stage = dataclasses.replace(stage, buckets=auto.with_lengths(lengths))
            notes = (f"bucket lengths {', '.join(map(str, lengths))} were chosen from the first rows alone",)
        mapped = UnitMapper(stage, unit).map(window)
        return InferShapes(stage, ready_window(stage, unit, mapped, devices, None).spec, notes)

    def _first_rows(self, stage: Infer) -> int:
        if isinstance(stage.data, str):
            return int(self.prepared(stage.data).num_rows)
        any_length = (
            Buckets((_ANY_LENGTH,), column=stage.buckets.column, too_long="truncate") if stage.buckets else None
        )
        unit = self._first(stage.data)
        mapper = UnitMapper(dataclasses.replace(stage, buckets=any_length), unit.id)
        return sum(len(mapper.map(w).rows) for w in read_windows(stage.data, unit, storage_options=self._options))

    def _window(self, stage: Infer) -> tuple[Window, str]:
        if isinstance(stage.data, str):
            table = self.prepared(stage.data)
            return Window(table, 0, (Origin(stage.data, 0, 0, table.num_rows),)), f"of stage {stage.data}"
        unit = self._first(stage.data)
        return next(iter(read_windows(stage.data, unit, storage_options=self._options))), unit.id

    def params(self, stage: Infer, mesh: Any) -> Any:
        """Shapes of a stage's parameters, placed as a worker places them.

        Args:
            stage: The declaration.
            mesh: The devices that hold the model.

        Raises:
            JobError: The stage does not say what its parameters look like.
        """
        import jax

        if isinstance(stage.params, Pretrained):
            contents, _ = stage.params.read(self._options)
            load = stage.params.load
            with user_code("load", stage.name):
                return _placed(stage, jax.eval_shape(lambda: load(*contents)), mesh)
        else:
            trained = self._job.stage(stage.params) if "/" not in stage.params else None
            if isinstance(trained, Train):
                init, pick = trained.init, trained.params
            elif stage.init is not None:
                init, pick = stage.init, default_params
            else:
                raise JobError(
                    f"stage {stage.name!r}: params={stage.params!r} is a URI, so init= must say what the state looks like.",
                    hint="Infer(init=lm.init, ...): it is only traced, never run.",
                )
            with user_code("init", stage.name):
                state = _placed(stage, jax.eval_shape(init, jax.random.key(0)), mesh)
                picked = jax.eval_shape(pick, state)
            by_id = {id(leaf): leaf for leaf in jax.tree.leaves(state)}
            try:
                leaves = [by_id.get(id(leaf)) for leaf in jax.tree.leaves(pick(state))]
            except Exception:  # noqa: BLE001 - the job's own function, on leaves it was not made for: it computes
                leaves = [None]
            if None in leaves:  # it computes rather than picks
                return _placed(stage, picked, mesh)
            return jax.tree.unflatten(jax.tree.structure(picked), leaves)


def _placed(stage: Infer, shapes: Any, mesh: Any) -> Any:
    import jax

    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, stage.sharding, stage.batch_axes),
    )
