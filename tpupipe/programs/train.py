"""A training step as it is compiled: the state's and the batch's shapes with their placement, and the jitted step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpupipe.errors import DataError, UserCodeError
from tpupipe.hardware.mesh import check_batch, mesh_shape
from tpupipe.job import Train
from tpupipe.programs.recompile import changes, recompile_error, signature_of
from tpupipe.programs.sharding import make_mesh, named_sharding, state_shardings
from tpupipe.programs.user_code import user_code

MASK = "mask"


def train_mesh(stage: Train, devices: Sequence[Any]) -> tuple[Any, Any]:
    """The stage's mesh over all devices, and the placement of a batch's rows on it.

    Args:
        stage: The declaration, overrides applied.
        devices: All devices, in JAX's order.

    Raises:
        JobError: The mesh does not cover the devices, or the batch does not divide over them.
    """
    shape = mesh_shape(stage.mesh, len(devices))
    check_batch(stage.batch_size, shape, stage.batch_axes)
    mesh = make_mesh(shape, devices)
    return mesh, named_sharding(mesh, tuple(stage.batch_axes))


def abstract_state(stage: Train, mesh: Any) -> Any:
    """Shapes, dtypes and placement of the state that ``init`` gives: ``init`` is traced, never run."""
    import jax

    with user_code("init", stage.name):
        shapes = jax.eval_shape(stage.init, jax.random.key(stage.seed))
    shardings = state_shardings(shapes, mesh, stage.sharding, stage.batch_axes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def shardings_of(abstract: Any) -> Any:
    """The placement of every leaf."""
    import jax

    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def checked_columns(stage: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of prepared rows, if a batch can be made of them.

    Args:
        stage: The stage that prepared them, for messages.
        columns: Column name to ``ndarray[0, ...]``.

    Raises:
        DataError: A column is not rectangular numbers, or takes the mask's name.
    """
    for name, values in columns.items():
        if name == MASK:
            raise DataError(f"Stage {stage!r} has a column {MASK!r}, which every batch gets anyway.")
        if values.dtype.kind not in "biufc" and "float" not in values.dtype.name:
            raise DataError(
                f"Column {name!r} of stage {stage!r} is {values.dtype}; training needs rectangular numbers.",
                hint="Let the stage's map pad or pack it, or drop it.",
                stage=stage,
                column=name,
            )
    return dict(columns)


def abstract_batch(columns: Mapping[str, Any], batch_size: int, rows: Any) -> dict[str, Any]:
    """Shapes, dtypes and placement of every global batch.

    Args:
        columns: Column name to ``ndarray[0, ...]``, from ``checked_columns``.
        batch_size: Rows of a batch, over all hosts.
        rows: ``NamedSharding`` of the rows.
    """
    import jax
    import numpy as np

    def shape(values: Any) -> Any:
        return jax.ShapeDtypeStruct(
            (batch_size, *values.shape[1:]), jax.dtypes.canonicalize_dtype(values.dtype), sharding=rows
        )

    return {**{name: shape(values) for name, values in columns.items()}, MASK: shape(np.empty((0,), bool))}


def lower_step(stage: Train, abstract: Any, batch: Mapping[str, Any], replicated: Any) -> Any:
    """Traces the jitted step; the state is donated, and comes out placed as it went in.

    Args:
        stage: The declaration.
        abstract: From ``abstract_state``.
        batch: From ``abstract_batch``.
        replicated: Placement of the metrics.

    Returns:
        ``jax.stages.Lowered``.

    Raises:
        UserCodeError: ``step`` does not give a state and a mapping of scalars.
        RecompileError: It gives another state than it gets.
    """
    import jax

    out = jax.eval_shape(stage.step, abstract, batch)
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], Mapping):
        raise UserCodeError(
            f"step of stage {stage.name!r} must return (state, metrics): a state like the one it got, and a mapping "
            "of scalars.",
            stage=stage.name,
        )
    _check_state(stage, abstract, out[0])
    vectors = [name for name, value in out[1].items() if value.shape != ()]
    if vectors:
        raise UserCodeError(
            f"step of stage {stage.name!r}: metrics {', '.join(vectors)} are not scalars.",
            hint="Reduce them in step, for example with jnp.mean.",
            stage=stage.name,
        )
    jitted = jax.jit(stage.step, donate_argnums=0, out_shardings=(shardings_of(abstract), replicated))
    return jitted.lower(abstract, batch)


def _check_state(stage: Train, before: Any, after: Any) -> None:
    """Refuses, before anything is compiled, a step that gives another state than it got: the next one would be compiled anew.

    Raises:
        RecompileError: It does; each leaf that changes is named.
    """
    plain = [signature_of(_without_placement(state), weak_types=False) for state in (before, after)]
    if stage.recompile == "forbid" and (found := changes("state", *plain)):
        raise recompile_error(stage.name, "step", found)


def _without_placement(state: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
