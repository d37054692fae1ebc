"""By how much the values of two lanes differ: norms, the largest difference, and rows of measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LOCAL, CONDITION, RELATIVE, ABSOLUTE = range(4)
"""Columns of the measurements: see :class:`tpupipe.preflight.parity_operations.Operation`."""
COLUMNS = 4

_MASKED = 1e18  # larger numbers are masks, and their squares no float32

Lanes = tuple[Any, ...]
"""A value in each lane; the same object where it is computed once for all."""


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(function)


def sizes_of(reference: Any, other: Any) -> Any:
    """Sum of squares of the reference, of the difference, and the largest difference."""
    return _jitted(_sizes_now)(reference, other)


def squares_of(x: Any) -> Any:
    """Sum of squares."""
    return _jitted(_squares_now)(x)


def _sizes_now(reference: Any, other: Any) -> tuple[Any, Any, Any]:
    import jax.numpy as jnp

    wide = jnp.complex64 if jnp.iscomplexobj(reference) else jnp.float32
    a, b = reference.astype(wide), other.astype(wide)
    # Beyond _MASKED a number stands for minus infinity.
    same = (a == b) | ((a != a) & (b != b)) | ((jnp.abs(a) > _MASKED) & (jnp.abs(b) > _MASKED))  # noqa: PLR0124 - NaN
    apart = jnp.where(same, 0.0, jnp.abs(b - a))
    return _squares_now(a), jnp.sum(apart * apart), apart.max()


def _squares_now(x: Any) -> Any:
    import jax.numpy as jnp

    size = jnp.abs(x.astype(jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32))
    return jnp.sum(jnp.where(size < _MASKED, size * size, 0.0))


def ratio_of(of: Any, to: Any) -> Any:
    """Of norms, given their squares."""
    import jax.numpy as jnp

    return jnp.where(to > 0, jnp.sqrt(of / jnp.where(to > 0, to, 1.0)), jnp.where(of == 0, 0.0, jnp.inf))


def is_shared(lanes: Lanes) -> bool:
    """Whether a value was computed once for all lanes."""
    return all(value is lanes[0] for value in lanes)


def is_inexact(x: Any) -> bool:
    """Whether it is an array of floating or complex numbers."""
    import jax.numpy as jnp

    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def no_rows() -> Any:
    """``float32[0, COLUMNS]``."""
    return np.zeros((0, COLUMNS), np.float32)


def one_row(*columns: Any) -> Any:
    """``float32[1, COLUMNS]``."""
    import jax.numpy as jnp

    return jnp.stack([jnp.asarray(column, jnp.float32) for column in columns])[None]


def stacked(rows: Sequence[Any]) -> Any:
    """``float32[n, COLUMNS]`` of all rows."""
    import jax.numpy as jnp

    some = [each for each in rows if each.shape[0]]
    return jnp.concatenate(some) if some else no_rows()
