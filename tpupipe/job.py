"""What a job is: a name and a list of stages. Declarations only, no Ray, no JAX.

The functions in a declaration are the user's own and pure; the framework jits, shards,
saves, restores and repeats them. Where they run is configuration.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tpupipe.checkpoint.policy import Every, OnPreemption, Policy, SavePolicy
from tpupipe.data.buckets import AutoBuckets, Buckets
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.sources import Source
from tpupipe.errors import JobError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")

Batch: TypeAlias = Mapping[str, Any]
"""Column name -> array; the leading dimension is the row."""


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise JobError(
            f"{kind} name {name!r} is not allowed.",
            hint="1 to 63 of a-z 0-9 . _ -, starting with a letter or digit: it names a folder in the store.",
        )


def _check_callable(stage: str, name: str, value: object, parameters: int) -> None:
    if not callable(value):
        raise JobError(f"stage {stage!r}: {name}={value!r} is not callable.")
    try:
        inspect.signature(value).bind(*range(parameters))
    except TypeError as error:
        raise JobError(
            f"stage {stage!r}: {name} must take {parameters} positional argument(s): {error}.",
            hint="init(key), step(state, batch), apply(params, batch), map(batch), dataset(ds).",
        ) from error
    except ValueError:  # a builtin without a signature: it is checked when called
        return


def _check_names(stage: str, option: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise JobError(f"stage {stage!r}: {option}={value!r} must be a list of names.", hint=f'{option}=("a", "b")')


def _check_recompile(stage: str, recompile: object) -> None:
    if recompile not in ("forbid", "warn"):
        raise JobError(f'stage {stage!r}: recompile={recompile!r} is not known; allowed: "forbid", "warn".')


def _check_positive(stage: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise JobError(f"stage {stage!r}: {name}={value!r} must be a whole number of at least 1.")


@dataclass(frozen=True)
class Preprocess:
    """Turns inputs into committed Parquet objects, one per work unit, through Ray Data.

    Args:
        name: Stage name, unique in the job.
        source: ``Files``, ``Parquet`` or ``JsonLines``.
        map: ``map(batch) -> batch`` over the rows of one unit: column name to
            ``ndarray[n, ...]`` (object arrays for text) in, any number of rows out.
            A resumed run does pending units only. Must be deterministic.
        dataset: Instead of ``map``: ``dataset(ds) -> ds`` over the whole
            ``ray.data.Dataset``, for shuffles and joins. The stage then commits as a whole:
            a kill before its end starts it over.
        chunk_rows: Rows per chunk (Parquet row group), the grain of the training order.
    """

    name: str
    source: Source
    map: Callable[[Batch], Batch] | None = None
    dataset: Callable[[Any], Any] | None = None
    chunk_rows: int = 256

    def __post_init__(self) -> None:
        _check_name("stage", self.name)
        if not isinstance(self.source, Source):
            raise JobError(
                f"stage {self.name!r}: source={self.source!r} is not a source.",
                hint="Files(pattern), Parquet(pattern) or JsonLines(pattern).",
            )
        if (self.map is None) == (self.dataset is None):
            raise JobError(
                f"stage {self.name!r}: give exactly one of map= and dataset=.",
                hint="map= works unit by unit and resumes unit by unit; dataset= sees all rows and commits as a whole.",
            )
        _check_callable(self.name, "map" if self.map else "dataset", self.map or self.dataset, 1)
        _check_positive(self.name, chunk_rows=self.chunk_rows)


def default_params(state: Any) -> Any:
    """The parameters in a training state: its ``params`` key or attribute, else all of it."""
    if isinstance(state, Mapping) and "params" in state:
        return state["params"]
    return getattr(state, "params", state)


@dataclass(frozen=True)
class Train:
    """Trains on a ``Preprocess`` stage's rows with Ray Train's ``JaxTrainer``.

    Args:
        name: Stage name, unique in the job.
        data: Name of the earlier ``Preprocess`` stage to read.
        init: ``init(key) -> state``, a pure function of a JAX PRNG key; jitted.
        step: ``step(state, batch) -> (state, metrics)``, pure; jitted with ``state``
            donated. ``batch`` maps each column to an array ``[B, ...]`` (B is the global
            batch size) plus ``mask``: ``bool[B]``, True where the row is real. ``metrics``
            maps names to scalars.
        batch_size: Rows of one global batch, over all hosts.
        steps: Optimizer steps in all. Data is read again from the start (in a new order)
            when it runs out. Give this or ``epochs``.
        epochs: Passes over the data; the short last batch is padded and masked.
        seed: Decides the data order and the key given to ``init``.
        shuffle: Whether rows are permuted anew in every data epoch; otherwise they come in input order.
        mesh: Axis name to size, in order; one may be -1 (what is left of the devices).
        batch_axes: Mesh axes that split the batch's rows.
        sharding: ``"replicated"``, ``"fsdp"`` (each array split over ``batch_axes`` along
            its largest divisible dimension) or ``fn(path, shape, mesh) -> PartitionSpec``.
        checkpoint: One policy or several. Cannot be switched off.
        params: ``params(state) -> params``, what ``Infer`` and ``params_digest`` use.
        recompile: ``"forbid"``: arguments of ``step`` of another shape, dtype or sharding than the first ones are an error that
            names them; ``"warn"``: they cost a compilation, which is told and counted.
    """

    name: str
    data: str
    init: Callable[[Any], Any]
    step: Callable[[Any, Batch], tuple[Any, Mapping[str, Any]]]
    batch_size: int
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    shuffle: bool = True
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1})
    batch_axes: tuple[str, ...] = ("data",)
    sharding: str | Callable[[str, tuple[int, ...], Any], Any] = "replicated"
    checkpoint: Policy | Sequence[Policy] = (Every(steps=100), OnPreemption())
    params: Callable[[Any], Any] = default_params
    recompile: Literal["forbid", "warn"] = "forbid"

    def __post_init__(self) -> None:
        _check_name("stage", self.name)
        _check_callable(self.name, "init", self.init, 1)
        _check_callable(self.name, "step", self.step, 2)
        _check_callable(self.name, "params", self.params, 1)
        if (self.steps is None) == (self.epochs is None):
            raise JobError(f"stage {self.name!r}: give exactly one of steps= and epochs=.")
        _check_positive(self.name, batch_size=self.batch_size, steps=self.steps, epochs=self.epochs)
        if self.batch_size is None:
            raise JobError(f"stage {self.name!r}: batch_size=None must be a whole number of at least 1.")
        seed: object = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise JobError(f"stage {self.name!r}: seed={seed!r} must be a whole number from 0 to 2**63 - 1.")
        if not isinstance(self.data, str):
            raise JobError(f"stage {self.name!r}: data={self.data!r} must be the name of a Preprocess stage.")
        _check_placement(self)
        _check_recompile(self.name, self.recompile)
        SavePolicy.of(self.checkpoint)  # refuses every spelling of "off"


@dataclass(frozen=True)
class Quarantine:
    """Rows that cannot be used are set aside with an error record each, instead of failing the stage.

    Args:
        max: Rows of the whole stage that may be set aside; one more fails the run.
    """

    max: int = 1000

    def __post_init__(self) -> None:
        if isinstance(self.max, bool) or not isinstance(self.max, int) or self.max < 1:
            raise JobError(f"Quarantine(max={self.max!r}) must be a whole number of at least 1.")


@dataclass(frozen=True)
class Infer:
    """Runs a model over every input row exactly once, one Parquet object per unit.

    Args:
        name: Stage name, unique in the job.
        data: A source, or the name of an earlier ``Preprocess`` stage.
        params: Name of an earlier ``Train`` stage, or the URI of a training stage's folder or of one checkpoint
            in a store: ``<store>/<job>/<run>/stages/<stage>[/checkpoints/<checkpoint>]``, or ``Pretrained(files, load)``.
        init: Where ``params`` is a URI: ``init(key) -> state`` of the stage that trained them. It is only traced,
            for the structure of the state.
        apply: ``apply(params, batch) -> outputs``, pure; jitted once per bucket. ``batch``
            maps columns to ``[B, ...]`` (the bucketed column padded to ``[B, L]``), plus
            ``mask``: ``bool[B]`` and, with buckets, ``lengths``: ``int32[B]``. Each output has
            leading dimension B; rows come back in input order.
        map: ``map(batch) -> batch`` over rows of one unit (a large unit comes in several batches) before the model.
            May change the number of rows only if it returns the columns needed to tell them apart.
        buckets: Declared static lengths for the ragged column, or ``Buckets.auto(...)`` to have them chosen from
            the data; without it every column must be rectangular.
        batch_rows: Rows per compiled batch where ``buckets`` does not say.
        keep: Columns of the mapped rows copied to the output beside the model's.
        ragged_outputs: Outputs ``[B, L, ...]`` with a value per padded position: each row keeps its own length of
            them. All other outputs are kept whole.
        bad_rows: What becomes of a row that ``map`` raises on: ``"fail"`` fails its unit and names it,
            ``Quarantine(max=...)`` sets it aside with an error record. With it, ``Buckets(too_long="quarantine")`` sets
            aside rows that are too long.
        recompile: ``"forbid"``: rows of a shape or dtype that the first ones did not have are an error;
            ``"warn"``: they cost a compilation, which is counted.
        parallel: ``"replica"``: each host works by itself, on units of its own. ``"sharded"``: all hosts of a slice
            hold one model together and work in lockstep on the same units.
        mesh: Axis name to size, in order, over the devices of the host (``"replica"``) or of the slice
            (``"sharded"``); one may be -1.
        batch_axes: Mesh axes that split a batch's rows; may be empty, where every device has all rows.
        sharding: As ``Train.sharding``, for the parameters. With the default mesh, ``"replicated"`` is a model per chip
            and ``"fsdp"`` is one per host (or slice). ``path`` is that in the training state where they come from one.

    Every output row also carries ``unit`` (its work unit) and ``row`` (its number in it), which name it for good.
    """

    name: str
    data: Source | str
    params: str | Pretrained
    apply: Callable[[Any, Batch], Mapping[str, Any]]
    map: Callable[[Batch], Batch] | None = None
    buckets: Buckets | AutoBuckets | None = None
    batch_rows: int = 64
    keep: tuple[str, ...] = ()
    ragged_outputs: tuple[str, ...] = ()
    init: Callable[[Any], Any] | None = None
    bad_rows: Literal["fail"] | Quarantine = "fail"
    recompile: Literal["forbid", "warn"] = "forbid"
    parallel: Literal["replica", "sharded"] = "replica"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": -1})
    batch_axes: tuple[str, ...] = ("data",)
    sharding: str | Callable[[str, tuple[int, ...], Any], Any] = "replicated"

    def __post_init__(self) -> None:
        _check_name("stage", self.name)
        _check_callable(self.name, "apply", self.apply, 2)
        if self.map is not None:
            _check_callable(self.name, "map", self.map, 1)
        if not isinstance(self.data, (Source, str)):
            raise JobError(
                f"stage {self.name!r}: data={self.data!r} is neither a source nor a stage name.",
                hint="Files(pattern), Parquet(pattern), JsonLines(pattern), or the name of a Preprocess stage.",
            )
        if not isinstance(self.params, (str, Pretrained)) or not self.params:
            raise JobError(
                f"stage {self.name!r}: params={self.params!r} must be a stage name, a checkpoint URI or Pretrained(...)."
            )
        if self.init is not None:
            _check_callable(self.name, "init", self.init, 1)
        _check_names(self.name, "keep", self.keep)
        _check_names(self.name, "ragged_outputs", self.ragged_outputs)
        if self.buckets is not None and not isinstance(self.buckets, (Buckets, AutoBuckets)):
            raise JobError(
                f"stage {self.name!r}: buckets={self.buckets!r} must be Buckets(lengths=(...)) or Buckets.auto(...)."
            )
        if self.ragged_outputs and self.buckets is None:
            raise JobError(f"stage {self.name!r}: ragged_outputs needs buckets: without them rows have no length.")
        _check_positive(self.name, batch_rows=self.batch_rows)
        if self.bad_rows != "fail" and not isinstance(self.bad_rows, Quarantine):
            raise JobError(
                f"stage {self.name!r}: bad_rows={self.bad_rows!r} is not known.", hint='"fail" or Quarantine(max=1000).'
            )
        if self.parallel not in ("replica", "sharded"):
            raise JobError(
                f'stage {self.name!r}: parallel={self.parallel!r} is not known; allowed: "replica", "sharded".'
            )
        _check_placement(self)
        _check_recompile(self.name, self.recompile)
        if self.buckets is not None and self.buckets.too_long == "quarantine" and self.bad_rows == "fail":
            raise JobError(
                f'stage {self.name!r}: Buckets(too_long="quarantine") needs bad_rows=Quarantine(max=...).',
                hint="It says how many rows may be set aside.",
            )


Stage: TypeAlias = Preprocess | Train | Infer


def _check_placement(stage: Train | Infer) -> None:
    check_mesh(stage.name, stage.mesh)
    if callable(stage.sharding):
        _check_callable(stage.name, "sharding", stage.sharding, 3)
    elif stage.sharding not in ("replicated", "fsdp"):
        raise JobError(
            f"stage {stage.name!r}: sharding={stage.sharding!r} is not known.",
            hint='"replicated", "fsdp", or fn(path, shape, mesh) -> PartitionSpec.',
        )
    for axis in stage.batch_axes:
        if axis not in stage.mesh:
            raise JobError(
                f"stage {stage.name!r}: batch_axes names {axis!r}, which mesh {dict(stage.mesh)} does not have."
            )


def check_mesh(stage: str, mesh: Mapping[str, int]) -> None:
    """Refuses a mesh that no number of devices could satisfy.

    Raises:
        JobError: No axis, a size that is neither positive nor -1, or more than one -1.
    """
    sizes = list(mesh.values())
    if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or (s < 1 and s != -1) for s in sizes):
        raise JobError(
            f"stage {stage!r}: mesh={dict(mesh)!r}: axis sizes are positive whole numbers, or -1 for the rest."
        )
    if sizes.count(-1) > 1:
        raise JobError(f"stage {stage!r}: mesh={dict(mesh)!r}: only one axis may be -1.")


@dataclass(frozen=True)
class Job:
    """A named list of stages that run in order on one reservation.

    Raises:
        JobError: Duplicate names, or a stage that refers to one that does not come before it.
    """

    name: str
    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        _check_name("job", self.name)
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise JobError(f"job {self.name!r} has no stages.")
        before: dict[str, Stage] = {}
        for stage in self.stages:
            if not isinstance(stage, (Preprocess, Train, Infer)):
                raise JobError(f"job {self.name!r}: {stage!r} is not a Preprocess, Train or Infer stage.")
            if stage.name in before:
                raise JobError(f"job {self.name!r}: two stages are named {stage.name!r}.")
            if isinstance(stage, Train) or (isinstance(stage, Infer) and isinstance(stage.data, str)):
                _check_reference(stage.name, "data", str(stage.data), Preprocess, before)
            if isinstance(stage, Infer) and isinstance(stage.params, str) and "/" not in stage.params:
                _check_reference(stage.name, "params", stage.params, Train, before)
            before[stage.name] = stage

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            JobError: There is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise JobError(f"job {self.name!r} has no stage {name!r}.", hint=f"It has: {', '.join(self.stage_names)}.")

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, in the order they run."""
        return tuple(stage.name for stage in self.stages)


def _check_reference(
    stage: str, option: str, name: str, kind: type[Stage], before: Iterable[str] | Mapping[str, Stage]
) -> None:
    known = dict(before) if isinstance(before, Mapping) else {}
    if not isinstance(known.get(name), kind):
        fitting = [n for n, s in known.items() if isinstance(s, kind)]
        raise JobError(
            f"stage {stage!r}: {option}={name!r} is not an earlier {kind.__name__} stage.",
            hint=f"Earlier {kind.__name__} stages: {', '.join(fitting) or 'none'}.",
        )
