"""The operations of a traced program that are measured, and the programs inside of operations.

An operation that holds a program of its own and is not known here is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpupipe.errors import CheckFailedError
from tpupipe.preflight.parity_precision import EXACT, PRODUCTS, Level, bf16_products

# Calls of a program with the operation's own operands. Derivatives have been taken by the time a step is traced, so that of a
# function with derivatives of its own only the value is left.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Programs that are evaluated in a way of their own, in the order of evaluation.
_CONTROL: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "scan": lambda params: [open_program(params["jaxpr"])],
    "shard_map": lambda params: [open_program(params["jaxpr"])],
    "while": lambda params: [params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr],
    "cond": lambda params: [branch.jaxpr for branch in params["branches"]],
    "custom_linear_solve": lambda params: [open_program(params["jaxprs"].solve)],
}
# What these hold combines two scalars; without products in it, it stays as it is.
_COMBINERS = (
    "scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max", "reduce",
    "reduce_window", "select_and_scatter",
)  # fmt: skip

# Of other operations the relative difference of the result is about that of the operands, which is measured.
_AMPLIFY = frozenset({
    "add", "sub", "add_any", "div", "exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "pow", "reduce_sum", "cumsum",
    "scatter-add", "psum", "psum_invariant", "reduce_window_sum", "fft", "cholesky", "lu", "lu_pivots_to_permutation", "qr", "svd",
    "eigh", "eig", "triangular_solve", "tridiagonal_solve", "erf_inv", "atanh", "acosh", "digamma",
}) | PRODUCTS  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """An operation that is measured.

    Of all its executions the most is kept of each of

    - ``LOCAL`` (products): the error of its own, relative in the Euclidean norm: computed from the first lane's operands,
    - ``CONDITION`` (products): the norm of the product of absolute values over that of the result, 1 without cancellation,
    - ``RELATIVE`` and ``ABSOLUTE``: what the lanes' results differ by, in norm and in the largest difference of a value.

    For ``cond`` and ``while`` the last two are infinite if the lanes took different branches.

    Args:
        name: The primitive.
        where: File, line and function of the job's code.
        shapes: Types of operands and results, for a message.
        is_product: Whether it runs on the matrix unit.
        products: bfloat16 products it is computed with, ``EXACT`` for float32.
    """

    name: str
    where: str
    shapes: str
    is_product: bool
    products: int


def operations(jaxpr: Any, level: Level, where: str = "") -> list[Operation]:
    """The measured operations of a program, in order, those of inner programs in their places.

    Args:
        jaxpr: ``jax.extend.core.Jaxpr``.
        level: Of operations without a precision of their own.
        where: The place of what calls it, for operations of libraries.

    Raises:
        CheckFailedError: It has an operation that holds a program and is not known here.
    """
    return [found for equation in jaxpr.eqns for found in _operations_of(equation, level, where)]


def _operations_of(eqn: Any, level: Level, outer: str) -> Iterator[Operation]:
    name, where = eqn.primitive.name, where_of(eqn) or outer
    inner = inner_programs(eqn, where)
    for jaxpr in inner:
        yield from operations(jaxpr, level, where)
    if is_measured(eqn):
        is_product = name in PRODUCTS
        products = bf16_products(eqn.params["precision"], level) if is_product else EXACT
        yield Operation(name, where or "unknown", _types(eqn), is_product, products)


def is_measured(eqn: Any) -> bool:
    """Whether a row is kept of an operation."""
    import jax.numpy as jnp

    name = eqn.primitive.name
    if name in ("cond", "while"):
        return True
    dtypes = [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]
    return name in _AMPLIFY and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _types(eqn: Any) -> str:
    def told(variables: Sequence[Any]) -> str:
        return ", ".join(v.aval.str_short(short_dtypes=True) for v in variables)

    return f"{told(eqn.invars)} -> {told(eqn.outvars)}"


def inner_programs(eqn: Any, where: str) -> list[Any]:
    """The programs that are entered for an operation, in the order of evaluation."""
    from jax.extend.core import jaxprs_in_params

    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return [open_program(params[CALLS[name]])]
    if name in _CONTROL:
        return _CONTROL[name](params)
    held = list(jaxprs_in_params(params))
    if held and name not in _COMBINERS:
        raise CheckFailedError(
            f"Operation {name!r} at {where or 'an unknown place'} holds a program of its own, and it is not known how to compute "
            f"its products as a TPU does; known: {', '.join(sorted({*CALLS, *_CONTROL, *_COMBINERS}))}.",
            hint="Put a plain JAX version of the function in its place for the check, or check without parity.",
            primitive=name,
        )
    for jaxpr in held:
        if any(found.is_product for found in operations(jaxpr, Level.DEFAULT, where)):
            raise CheckFailedError(
                f"Operation {name!r} at {where or 'an unknown place'} has a matrix product in the function that combines values.",
                primitive=name,
            )
    return []


def open_program(jaxpr: Any) -> Any:
    """The program of a closed one, or the one itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> list[Any]:
    """The constants of a closed program; none of an open one."""
    return list(getattr(jaxpr, "consts", ()))


def where_of(eqn: Any) -> str:
    """``file:line (function)`` of the innermost frame outside JAX; empty for code of JAX itself."""
    from jax.extend import source_info_util

    told = source_info_util.summarize(eqn.source_info)
    if not told or told == "unknown":
        return ""
    place, _, function = told.partition(" (")
    path, line, *_ = [*place.rsplit(":", 2), "", ""] if place.count(":") >= 2 else [*place.rsplit(":", 1), ""]
    name = Path(path)
    short = name.relative_to(Path.cwd()) if name.is_absolute() and name.is_relative_to(Path.cwd()) else name
    return f"{short}:{line}" + (f" ({function}" if function else "")
