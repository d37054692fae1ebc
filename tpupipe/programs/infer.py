"""A model's ``apply`` as it is compiled: one program for each static batch shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpupipe.errors import StageError
from tpupipe.hardware.mesh import mesh_shape
from tpupipe.job import Infer
from tpupipe.programs.infer_batches import LENGTHS, MASK, Spec
from tpupipe.programs.sharding import make_mesh, named_sharding
from tpupipe.programs.turns import Turns
from tpupipe.programs.user_code import user_code


def abstract_feed(stage: Infer, spec: Spec, shape: tuple[int, int], rows: Any) -> dict[str, Any]:
    """Shapes, dtypes and placement of what ``apply`` is fed.

    Args:
        stage: The declaration, bucket lengths chosen.
        spec: What the columns look like.
        shape: ``(rows, length)`` of the batch.
        rows: Sharding of its rows.
    """
    import jax

    feed = {name: (column.shape(*shape), column.dtype) for name, column in spec.items()}
    if stage.buckets is not None:
        feed[LENGTHS] = ((shape[0],), np.dtype(np.int32))
    feed[MASK] = ((shape[0],), np.dtype(np.bool_))
    return {name: jax.ShapeDtypeStruct(sides, dtype, sharding=rows) for name, (sides, dtype) in feed.items()}


def check_outputs(stage: Infer, params: Any, spec: Spec, shape: tuple[int, int], rows: Any) -> dict[str, Any]:
    """The shapes of ``apply``'s outputs; ``params`` may be shapes.

    Raises:
        StageError: They are not a mapping of arrays with a value per row.
    """
    import jax

    with user_code("apply", stage.name):
        outputs = jax.eval_shape(stage.apply, params, abstract_feed(stage, spec, shape, rows))
    if not isinstance(outputs, Mapping):
        raise StageError(f"apply of stage {stage.name!r} returned {type(outputs).__name__}, not a mapping of outputs.")
    for name, value in outputs.items():
        if len(value.shape) < 1 or value.shape[0] != shape[0]:
            raise StageError(
                f"apply of stage {stage.name!r}: output {name!r} has shape {list(value.shape)}; its "
                f"first dimension must be the batch's {shape[0]} rows."
            )
    return dict(outputs)


def unread_columns(stage: Infer, params: Any, spec: Spec, shape: tuple[int, int], rows: Any) -> frozenset[str]:
    """Kept columns that ``apply`` is fed and does not look at; ``params`` may be shapes."""
    import jax
    from jax.interpreters.partial_eval import dce_jaxpr

    kept = frozenset(stage.keep) & spec.keys()
    if not kept:
        return kept
    feed = abstract_feed(stage, spec, shape, rows)
    with user_code("apply", stage.name):
        traced = jax.make_jaxpr(stage.apply)(params, feed).jaxpr
    _, read = dce_jaxpr(traced, [True] * len(traced.outvars))
    return kept - {name for name, is_read in zip(sorted(feed), read[-len(feed) :], strict=True) if is_read}


def infer_mesh(stage: Infer, devices: Sequence[Any]) -> tuple[Any, Any]:
    """The mesh over the devices that hold a copy of the model, and the sharding of a batch's rows.

    Raises:
        JobError: The stage's mesh does not cover them.
    """
    mesh = make_mesh(mesh_shape(stage.mesh, len(devices)), devices)
    return mesh, named_sharding(mesh, stage.batch_axes) if stage.batch_axes else named_sharding(mesh)


def row_multiple(stage: Infer, mesh: Any) -> int:
    """Rows of a batch are a multiple of this: the devices over which its rows are split."""
    return math.prod(mesh.shape[axis] for axis in stage.batch_axes)


def lower_apply(
    stage: Infer,
    params: Any,
    spec: Spec,
    shapes: Sequence[tuple[int, int]],
    rows: Any,
    *,
    turns: Turns | None = None,
) -> list[Any]:
    """Traces the jitted ``apply`` for some batch shapes; ``params`` may be shapes.

    Args:
        stage: The declaration.
        params: The parameters.
        spec: What the columns look like.
        shapes: ``(rows, length)`` of each batch.
        rows: Sharding of a batch's rows.
        turns: Where several processes hold the model together: then a program also takes a turn and gives whether all
            had the same.

    Returns:
        ``jax.stages.Lowered`` for each.
    """
    import jax

    jitted = jax.jit(stage.apply, out_shardings=rows) if turns is None else turns.joined(stage.apply)
    turn = [] if turns is None else [turns.abstract]
    with user_code("apply", stage.name):
        return [jitted.lower(params, abstract_feed(stage, spec, shape, rows), *turn) for shape in shapes]
