"""Products as a TPU's matrix unit computes them, on any backend: operands split into bfloat16 parts, sums in float32.

The unit multiplies bfloat16 and adds in float32. XLA computes a float32 product on it with 1, 3 or 6 such products of the
operands' bfloat16 parts, by the operation's ``precision``: ``DEFAULT`` takes the first part of each operand (8 significant bits),
``HIGH`` (bf16_3x) two parts of each and the three products that matter (about 16 bits), ``HIGHEST`` is float32's own accuracy.
https://docs.jax.dev/en/latest/_autosummary/jax.lax.Precision.html
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from tpupipe.errors import CheckFailedError

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Names of the primitives that run on the matrix unit."""

EXACT = 0
"""Instead of a number of bfloat16 products: float32."""


class Level(StrEnum):
    """What an operation without a ``precision=`` of its own is computed with; the names are JAX's."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


_PRODUCTS_OF: Mapping[str, int] = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": EXACT}
_PRODUCTS_OF_PRESET: Mapping[str, int] = {
    "BF16_BF16_F32": 1,
    "BF16_BF16_F32_X3": 3,
    "BF16_BF16_F32_X6": 6,
    "BF16_BF16_F32_X9": 9,
    "F32_F32_F32": EXACT,
}
_LARGEST_SUM = {1: 0, 3: 1, 6: 2, 9: 4}  # products of parts i and j with i + j up to this are computed


def bf16_products(precision: Any, level: Level) -> int:
    """How many bfloat16 products an operation is computed with.

    Args:
        precision: The operation's parameter: ``None``, ``jax.lax.Precision`` or a pair of them (the higher one counts),
            ``DotAlgorithmPreset`` or ``DotAlgorithm``. ``jax.default_matmul_precision`` is in it already where it was set.
        level: What ``None`` means.

    Returns:
        1, 3, 6 or 9; ``EXACT`` for float32.

    Raises:
        CheckFailedError: An algorithm that is not for TPUs.
    """
    if precision is None:
        return _PRODUCTS_OF[level.name]
    if isinstance(precision, tuple):
        counts = [bf16_products(each, level) for each in precision]
        return EXACT if EXACT in counts else max(counts)
    name = getattr(precision, "name", "")
    if type(precision).__name__ == "DotAlgorithmPreset":
        if name == "DEFAULT":
            return _PRODUCTS_OF[level.name]
        count = _PRODUCTS_OF_PRESET.get(name)
    elif type(precision).__name__ == "DotAlgorithm":
        count = _products_of_algorithm(precision)
    else:
        count = _PRODUCTS_OF.get(name)
    if count is None:
        raise CheckFailedError(
            f"A product asks for precision {precision}, which is not one of a TPU; known: Precision.DEFAULT, HIGH, HIGHEST, "
            f"and the algorithms {', '.join(_PRODUCTS_OF_PRESET)}.",
            hint="Give the operation one of these, or leave precision= out.",
        )
    return count


def _products_of_algorithm(algorithm: Any) -> int | None:
    operands = {str(algorithm.lhs_precision_type), str(algorithm.rhs_precision_type)}
    if str(algorithm.accumulation_type) != "float32":
        return None
    if operands == {"bfloat16"} and algorithm.num_primitive_operations in _LARGEST_SUM:
        return int(algorithm.num_primitive_operations)
    return EXACT if operands == {"float32"} else None


def multiply(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], products: int, dtype: Any) -> Any:
    """One product (a dot or a convolution).

    Operands narrower than float32 are widened first, so that sums are in float32 on every backend. Integers, and 64-bit
    numbers (which no matrix unit takes), are multiplied as they are.

    Args:
        primitive: ``dot_general``, ``conv_general_dilated`` or ``ragged_dot_general``.
        params: Of the operation.
        operands: Left and right operand, and what else the primitive takes.
        products: From :func:`bf16_products`.
        dtype: Of the result.
    """
    import jax
    import jax.numpy as jnp

    lhs, rhs, *rest = operands
    kind = jnp.result_type(lhs.dtype, rhs.dtype)
    if not jnp.issubdtype(kind, jnp.inexact) or kind in (jnp.float64, jnp.complex128):
        return primitive.bind(*operands, **params)
    wide = jnp.complex64 if jnp.issubdtype(kind, jnp.complexfloating) else jnp.float32
    highest = (jax.lax.Precision.HIGHEST,) * 2
    exact = {**params, "precision": highest, "preferred_element_type": jnp.dtype(wide)}
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    if products == EXACT:
        return primitive.bind(lhs, rhs, *rest, **exact).astype(dtype)
    most = _LARGEST_SUM[products]
    left, right = _parts(lhs, min(most, 2) + 1), _parts(rhs, min(most, 2) + 1)
    pairs = [(i, j) for i, j in itertools.product(range(len(left)), range(len(right))) if i + j <= most]
    total: Any = 0.0
    for i, j in sorted(pairs, key=sum, reverse=True):  # the small ones first, as XLA adds them
        if i == j == 0 and len(pairs) > 1:
            total = jnp.where(jnp.isnan(total), 0.0, total)  # infinity times a rest of zero
        total = primitive.bind(left[i], right[j], *rest, **exact) + total
    return total.astype(dtype)


def _parts(x: Any, count: int) -> list[Any]:
    """``x`` as a sum of ``count`` arrays of bfloat16 values: its rounding, the rounding of what is left, and so on."""
    import jax.numpy as jnp

    parts = [rounded(x)]
    while len(parts) < count:
        x = jnp.where(jnp.isfinite(parts[-1]), x - parts[-1], jnp.zeros_like(x))  # infinity has no rest
        parts.append(rounded(x))
    return parts


def rounded(x: Any) -> Any:
    """The nearest bfloat16 values (ties to even) of a float32 or complex64 array, in its own dtype."""
    import jax
    import jax.numpy as jnp

    if jnp.iscomplexobj(x):
        return jax.lax.complex(rounded(x.real), rounded(x.imag))
    # Not a cast to bfloat16 and back: the compiler may drop a pair of casts.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
