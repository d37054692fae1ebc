"""Products as a TPU computes them: against numpy on random operands, and what each kind of operation asks for."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from tpupipe.errors import CheckFailedError
from tpupipe.preflight.parity_precision import EXACT, Level, bf16_products
from tpupipe.preflight.parity_program import REFERENCE, Evaluator

BF16 = ml_dtypes.bfloat16


def emulated(function, level, *arguments):
    """``function`` with a TPU's products."""
    import jax

    closed = jax.make_jaxpr(function)(*arguments)
    evaluator = Evaluator((level,))
    results, _ = jax.jit(lambda values: evaluator.evaluate(closed, [(v,) for v in values]))(jax.tree.leaves(arguments))
    return np.asarray(results[0][0])


def rounded(x):
    return x.astype(BF16).astype(np.float32)


def split(x):
    return rounded(x), rounded(x - rounded(x))


def in_numpy(a, b, level):
    """The same product with numpy: bfloat16 parts, sums in float64 (of float32 the last digits may differ)."""
    if level is Level.HIGHEST:
        return a.astype(np.float64) @ b
    if level is Level.DEFAULT:
        return rounded(a).astype(np.float64) @ rounded(b)
    (a1, a2), (b1, b2) = split(a), split(b)
    return a1.astype(np.float64) @ b1 + a1.astype(np.float64) @ b2 + a2.astype(np.float64) @ b1


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 256)).astype(np.float32), rng.normal(size=(256, 32)).astype(np.float32)


@pytest.mark.parametrize("level", list(Level))
def test_a_product_is_numpys_with_rounded_parts(level):
    """Of 64x256 by 256x32 random numbers, to four roundings of a float32 sum of their size: its order is the processor's."""
    a, b = operands()
    got = emulated(lambda a, b: a @ b, level, a, b)
    allowed = 4 * 2.0**-24 * (np.abs(a) @ np.abs(b))  # 3e-5 to 5e-5
    np.testing.assert_array_less(np.abs(got - in_numpy(a, b, level)), allowed)


@pytest.mark.parametrize(("level", "low", "high"), [(Level.DEFAULT, 1.5e-3, 4e-3), (Level.HIGH, 1e-6, 1e-5), (Level.HIGHEST, 0, 1e-6)])  # fmt: skip
def test_the_three_levels_have_their_errors(level, low, high):
    """Relative in norm: about 2^-9 with 8 significant bits, 2^-17 and less with 16, float32's own at the highest."""
    a, b = operands()
    exact = a.astype(np.float64) @ b
    error = np.linalg.norm(emulated(lambda a, b: a @ b, level, a, b) - exact) / np.linalg.norm(exact)
    assert low <= error < high


def test_rounding_is_to_nearest_even():
    """Every bit pattern of a sample, ties and infinities among them, is rounded as ml_dtypes does."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    ties = (rng.integers(0, 2**15, 500, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], ties, np.array([np.inf, -np.inf, 0, -0.0, 1e-45], np.float32)])
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]  # a TPU has no smaller numbers
    import jax

    from tpupipe.preflight import parity_precision

    got = np.asarray(jax.jit(parity_precision.rounded)(x))
    np.testing.assert_array_equal(got.view(np.uint32), rounded(x).view(np.uint32))


def test_a_convolution():
    """One dimension, against numpy's with rounded operands."""
    import jax

    rng = np.random.default_rng(2)
    x, k = rng.normal(size=(1, 1, 40)).astype(np.float32), rng.normal(size=(1, 1, 7)).astype(np.float32)
    got = emulated(lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "VALID"), Level.DEFAULT, x, k)
    wanted = np.correlate(rounded(x)[0, 0].astype(np.float64), rounded(k)[0, 0].astype(np.float64))
    np.testing.assert_allclose(got[0, 0], wanted, atol=1e-5)


def test_complex_and_narrow_and_whole_numbers():
    """Complex numbers by their parts; bfloat16 is summed in float32; integers stay exact."""
    rng = np.random.default_rng(3)
    a = (rng.normal(size=(8, 8)) + 1j * rng.normal(size=(8, 8))).astype(np.complex64)
    b = a.T.copy()
    parts = [rounded(x.real.astype(np.float32)) + 1j * rounded(x.imag.astype(np.float32)) for x in (a, b)]
    np.testing.assert_allclose(emulated(lambda a, b: a @ b, Level.DEFAULT, a, b), parts[0] @ parts[1], atol=1e-4)
    ones = np.ones((1, 1000), BF16)
    assert emulated(lambda a, b: a @ b, Level.DEFAULT, ones, ones.T.copy()).item() == 1000  # bfloat16 sums stop at 256
    whole = np.full((2, 2), 2**20 + 1, np.int32)
    np.testing.assert_array_equal(emulated(lambda a: a @ np.eye(2, dtype=np.int32), Level.DEFAULT, whole), whole)


def test_infinity_has_no_rest():
    """At the high level, infinity times one is infinity, as in float32, not the NaN of infinity minus infinity."""
    a, b = np.array([[np.inf, 1.0]], np.float32), np.array([[1.0], [1.0]], np.float32)
    assert emulated(lambda a, b: a @ b, Level.HIGH, a, b).item() == np.inf


@pytest.mark.parametrize(
    ("asked", "level", "products"),
    [
        (None, Level.DEFAULT, 1), (None, Level.HIGH, 3), (None, Level.HIGHEST, EXACT),
        ("default", Level.HIGHEST, 1), ("high", Level.DEFAULT, 3), ("highest", Level.DEFAULT, EXACT),
        (("default", "highest"), Level.DEFAULT, EXACT), ("BF16_BF16_F32_X6", Level.DEFAULT, 6), ("F32_F32_F32", Level.DEFAULT, EXACT),
    ],
)  # fmt: skip
def test_what_an_operation_asks_for_comes_first(asked, level, products):
    """The level is only for operations without a precision; of a pair the higher counts."""
    import jax

    x = np.ones((2, 2), np.float32)
    closed = jax.make_jaxpr(lambda x: jax.lax.dot(x, x, precision=asked))(x)
    assert bf16_products(closed.eqns[0].params["precision"], level) == products


def test_the_context_manager_counts():
    """jax.default_matmul_precision("highest") around a product leaves no error at the default level."""
    import jax

    def exact(a, b):
        with jax.default_matmul_precision("highest"):
            return a @ b

    a, b = operands()
    np.testing.assert_array_equal(emulated(exact, Level.DEFAULT, a, b), emulated(exact, REFERENCE, a, b))


def test_an_algorithm_that_no_tpu_has_is_refused():
    """By name."""
    import jax

    with pytest.raises(CheckFailedError, match="TF32_TF32_F32"):
        bf16_products(jax.lax.DotAlgorithmPreset.TF32_TF32_F32, Level.DEFAULT)
