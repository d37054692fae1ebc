"""A stage's function computed in float32 and as a TPU would, and how far apart the results are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpupipe.errors import CheckFailedError, UserCodeError
from tpupipe.job import Train
from tpupipe.preflight.parity_data import Columns
from tpupipe.preflight.parity_operations import Operation, operations
from tpupipe.preflight.parity_precision import Level
from tpupipe.preflight.parity_program import REFERENCE, Evaluator
from tpupipe.preflight.parity_sizes import ABSOLUTE, CONDITION, LOCAL, RELATIVE
from tpupipe.programs.infer_batches import MASK
from tpupipe.programs.user_code import user_code

# The program runs a few times: the compiler's time counts, not the program's.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Measured:
    """An operation and what was measured of it; see :class:`tpupipe.preflight.parity_operations.Operation`.

    Args:
        operation: The operation.
        local: Error of its own, relative in norm; 0 where it is no product.
        condition: Norm of the product of absolute values over that of the result.
        relative: Relative difference of the results.
        absolute: Largest difference of a value.
    """

    operation: Operation
    local: float
    condition: float
    relative: float
    absolute: float


@dataclass(frozen=True)
class Difference:
    """What a metric or an output differs by.

    Args:
        name: Its name.
        relative: For metrics, relative to the largest value over all batches; for outputs, in norm over the real rows. Of whole
            numbers: the share that differs.
        absolute: The largest of a value.
        is_share: Whether ``relative`` is a share of whole numbers.
    """

    name: str
    relative: float
    absolute: float
    is_share: bool = False


@dataclass(frozen=True)
class Growth:
    """How the difference between two trainings goes on: an exponential fitted to it by least squares of the logarithm.

    Args:
        series: Of each step, the distance between the parameters over the distance the reference has come from its start.
        factor: By what the fitted difference grows from the first step to the last; 1 where there is no difference.
        doubling_steps: Steps in which the fitted difference doubles; infinite where it does not grow.
    """

    series: tuple[float, ...]
    factor: float
    doubling_steps: float


@dataclass(frozen=True)
class LevelReport:
    """A stage's function at one precision against float32, each batch from the same state.

    Args:
        level: Of operations without a precision of their own.
        measured: Every measured operation, in program order; the most over all batches.
        differences: Of metrics or outputs.
        cosine: The least between the updates of the parameters; ``None`` for inference, and where nothing is updated.
    """

    level: Level
    measured: tuple[Measured, ...]
    differences: tuple[Difference, ...]
    cosine: float | None = None


@dataclass(frozen=True)
class StageReport:
    """All that was computed for a stage.

    Args:
        stage: Its name.
        levels: By level: first what a TPU does by default.
        growth: Training: how the default's difference goes on.
        drift: Training: what metrics differ by along the two trainings.
        notes: What was different from a real run.
    """

    stage: str
    levels: tuple[LevelReport, ...]
    growth: Growth | None = None
    drift: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = field(default=())


# -- training -------------------------------------------------------------------------------


class TrainingComparison:
    """A training stage's step, traced and compiled once for a reference and a precision.

    Args:
        stage: The declaration.
        state: The state to begin from.
        batches: See :func:`tpupipe.preflight.parity_data.training_batches`.
        level: The precision to compare.
        measures: Whether operations are compared one by one, which takes the compiler two to three times as long.

    Raises:
        UserCodeError: ``step`` raised, or does not give a state like the one it got and metrics.
        CheckFailedError: It has an operation that cannot be computed as a TPU does.
    """

    def __init__(
        self, stage: Train, state: Any, batches: Sequence[Columns], level: Level, *, measures: bool = True
    ) -> None:
        self._stage, self._state, self._batches, self._level = stage, state, batches, level
        self._compared = Comparison(stage.step, "step", stage.name, (state, batches[0]), level, measures=measures)
        _check_step(stage, state, self._compared.shapes)

    def single_steps(self, count: int) -> LevelReport:
        """Compares steps from the same state, ``count`` of them; the state goes on with the reference."""
        metrics: list[tuple[Mapping[str, Any], ...]] = []
        cosines = []
        state, params = self._state, self._stage.params
        for batch in self._batches[:count]:
            (after, told), (other, other_told) = self._compared(state, batch)
            metrics.append((told, other_told))
            before = _vector(params(state))
            cosines.append(_cosine(_vector(params(after)) - before, _vector(params(other)) - before))
            state = after
        known = [cosine for cosine in cosines if cosine is not None]
        return LevelReport(
            self._level, self._compared.measured(), metric_differences(metrics), min(known, default=None)
        )

    def trainings(self, steps: int) -> tuple[Growth, tuple[Difference, ...]]:
        """Trains twice from the same state, each time going on with its own, and follows how far apart they are."""
        params, states = self._stage.params, (self._state, self._state)
        start = _vector(params(self._state))
        series: list[float] = []
        metrics: list[tuple[Mapping[str, Any], ...]] = []
        for batch in self._batches[:steps]:
            (first, told), (second, other_told) = self._compared.each(states, batch)
            states = (first, second)
            metrics.append((told, other_told))
            ours, theirs = _vector(params(first)), _vector(params(second))
            series.append(_over(np.linalg.norm(theirs - ours), np.linalg.norm(ours - start)))
        return fitted_growth(series), metric_differences(metrics)


def _check_step(stage: Train, state: Any, shapes: Any) -> None:
    import jax

    good = isinstance(shapes, tuple) and len(shapes) == 2 and isinstance(shapes[1], Mapping)
    then: Any = jax.tree.structure(state)
    if not good or jax.tree.structure(shapes[0]) != then:
        raise UserCodeError(
            f"step of stage {stage.name!r} must return (state, metrics): a state like the one it got, and a mapping "
            "of scalars.",
            stage=stage.name,
        )


def fitted_growth(series: Sequence[float]) -> Growth:
    """Fits ``d(t) = a exp(b t)`` to a series of differences, by least squares of log d over t. Steps without difference are left out.

    >>> growth = fitted_growth([0.001 * 2**t for t in range(5)])
    >>> round(growth.factor, 6), round(growth.doubling_steps, 6)
    (16.0, 1.0)
    """
    if any(not math.isfinite(value) for value in series):
        return Growth(tuple(series), math.inf, 0.0)
    points = [(step, math.log(value)) for step, value in enumerate(series) if value > 0]
    if len(points) < 2:
        return Growth(tuple(series), 1.0, math.inf)
    steps, logs = np.array(points).T
    rate = float(np.polyfit(steps, logs, 1)[0])
    factor = math.exp(min(rate * (len(series) - 1), 700.0))
    return Growth(tuple(series), factor, math.log(2) / rate if rate > 1e-9 else math.inf)


def metric_differences(metrics: Sequence[tuple[Mapping[str, Any], ...]]) -> tuple[Difference, ...]:
    """Differences of metrics over some batches, relative to each one's largest value; not finite where only one is."""
    found = []
    for name in metrics[0][0]:
        ours, theirs = (np.array([float(told[lane][name]) for told in metrics]) for lane in (0, 1))
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        apart = np.where(same, 0.0, np.abs(theirs - ours))
        largest = float(apart.max()) if np.isfinite(apart).all() else math.inf
        scale = float(np.abs(ours[np.isfinite(ours)]).max(initial=0.0))
        found.append(Difference(name, _over(largest, scale), largest))
    return tuple(found)


# -- inference ------------------------------------------------------------------------------


def inference_level(
    stage: str,
    apply: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[Columns],
    level: Level,
    *,
    measures: bool = True,
) -> LevelReport:
    """Compares the outputs of some batches.

    Args:
        stage: Name of the stage.
        apply: Its function.
        params: Its parameters.
        batches: See :func:`tpupipe.preflight.parity_data.inference_batches`.
        level: The precision to compare.
        measures: Whether operations are compared one by one.

    Raises:
        UserCodeError: ``apply`` raised, or does not give a mapping.
        CheckFailedError: It has an operation that cannot be computed as a TPU does.
    """
    found: dict[str, Difference] = {}
    programs: dict[Any, Comparison] = {}  # one per shape
    for batch in batches:
        key = tuple(sorted((name, values.shape) for name, values in batch.items()))
        if key not in programs:
            programs[key] = Comparison(apply, "apply", stage, (params, batch), level, measures=measures)
        ours, theirs = programs[key](params, batch)
        if not isinstance(ours, Mapping):
            raise UserCodeError(
                f"apply of stage {stage!r} returned {type(ours).__name__}, not a mapping of outputs.", stage=stage
            )
        for name in ours:
            difference = output_difference(name, np.asarray(ours[name]), np.asarray(theirs[name]), batch[MASK])
            if name not in found or difference.relative > found[name].relative:
                found[name] = difference
    measured = [program.measured() for program in programs.values()]
    return LevelReport(level, tuple(each for some in measured for each in some), tuple(found.values()))


def output_difference(name: str, ours: NDArray[Any], theirs: NDArray[Any], real: NDArray[np.bool_]) -> Difference:
    """What an output differs by, over the rows that are real."""
    ours, theirs = ours[real], theirs[real]
    if not np.issubdtype(ours.dtype, np.inexact) and "float" not in ours.dtype.name:
        differs = ours != theirs
        return Difference(name, float(differs.mean()) if differs.size else 0.0, float(differs.any()), is_share=True)
    wide = np.complex128 if np.iscomplexobj(ours) else np.float64
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(theirs - ours))
    if not np.isfinite(apart).all():
        return Difference(name, math.inf, math.inf)
    size = np.linalg.norm(np.where(np.isfinite(ours), ours, 0.0))
    return Difference(name, _over(np.linalg.norm(apart), size), float(apart.max(initial=0.0)))


# -- two lanes of one function ---------------------------------------------------------------


class Comparison:
    """A function of two arguments, traced once and compiled for a reference lane and one of a level.

    Args:
        function: The job's function.
        name: Its name, for messages.
        stage: Its stage's name.
        example: Arguments like the ones it will be called with.
        level: Precision of the second lane.
        measures: Whether operations are measured.

    Raises:
        UserCodeError: It raised when it was traced.
        CheckFailedError: It has an operation that cannot be computed as a TPU does.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str,
        stage: str,
        example: tuple[Any, Any],
        level: Level,
        *,
        measures: bool = True,
    ) -> None:
        import jax

        self._what = f"{name} of stage {stage!r}"
        with user_code(name, stage):
            self._closed, self.shapes = jax.make_jaxpr(function, return_shape=True)(*example)
        self._operations = operations(self._closed.jaxpr, level)
        if not measures:
            self._operations = []
        self._tree = jax.tree.structure(self.shapes)
        self._most: NDArray[np.float32] | None = None
        evaluator = Evaluator((REFERENCE, level), measures=measures)

        def both(first: Sequence[tuple[Any, ...]], second: Sequence[Any]) -> Any:
            shared = [(value, value) for value in second]
            return evaluator.evaluate(self._closed, [*first, *shared])

        self._run = jax.jit(both, compiler_options=_COMPILER_OPTIONS)

    def __call__(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Results of both lanes from the same arguments; what was measured is kept."""
        (ours, theirs), rows = self._results((first, first), second)
        self._most = rows if self._most is None else np.fmax(self._most, rows)
        return ours, theirs

    def each(self, first: tuple[Any, Any], second: Any) -> tuple[Any, Any]:
        """Results of both lanes, each from a first argument of its own."""
        return self._results(first, second)[0]

    def _results(self, first: tuple[Any, Any], second: Any) -> tuple[tuple[Any, Any], NDArray[np.float32]]:
        import jax

        lanes = list(zip(*map(jax.tree.leaves, first), strict=True))
        results, rows = self._run(lanes, jax.tree.leaves(second))
        ours, theirs = (jax.tree.unflatten(self._tree, [lanes[i] for lanes in results]) for i in (0, 1))
        return (ours, theirs), np.asarray(rows)

    def measured(self) -> tuple[Measured, ...]:
        """The operations, with the most of what was measured over all calls. What is not a number counts as infinite."""
        if self._most is None or len(self._most) != len(self._operations):
            raise CheckFailedError(f"{self._what}: its operations were not all measured.")
        rows = np.where(np.isnan(self._most), np.inf, self._most)
        return tuple(
            Measured(operation, *(float(row[column]) for column in (LOCAL, CONDITION, RELATIVE, ABSOLUTE)))
            for operation, row in zip(self._operations, rows, strict=True)
        )


def _vector(tree: Any) -> NDArray[np.float64]:
    """All floating-point leaves of a tree, end to end."""
    import jax
    import jax.numpy as jnp

    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    return np.concatenate([np.zeros(0), *(np.asarray(x, np.float64).reshape(-1) for x in leaves)])


def _cosine(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> float | None:
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return -1.0
    sizes = np.linalg.norm(ours) * np.linalg.norm(theirs)
    return float(ours @ theirs / sizes) if sizes else None


def _over(value: Any, scale: Any) -> float:
    number, unit = float(value), float(scale)
    if unit > 0:
        return number / unit
    return 0.0 if number == 0 else math.inf
