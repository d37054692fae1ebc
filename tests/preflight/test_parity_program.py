"""A traced program in lanes: every structure is entered, nothing is skipped silently, and what is measured is right."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from tpupipe.errors import CheckFailedError
from tpupipe.preflight.parity_operations import operations
from tpupipe.preflight.parity_precision import EXACT, Level
from tpupipe.preflight.parity_program import REFERENCE, Evaluator
from tpupipe.preflight.parity_sizes import CONDITION, LOCAL, RELATIVE


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def compare(function, *arguments, level=Level.DEFAULT, measures=True):
    """Results of the reference and of the level, with operations and their measurements."""
    import jax

    closed = jax.make_jaxpr(function)(*arguments)
    evaluator = Evaluator((REFERENCE, level), measures)
    run = jax.jit(lambda values: evaluator.evaluate(closed, [(v, v) for v in values]))
    [(ours, theirs)], rows = run(jax.tree.leaves(arguments))
    found = operations(closed.jaxpr, level)
    assert not measures or len(found) == len(rows)
    return np.asarray(ours), np.asarray(theirs), found, np.asarray(rows)


@functools.cache
def square():
    return np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3


def in_scan(x):
    import jax

    return jax.lax.scan(lambda c, w: (c @ w, None), x, np.stack([square()] * 3))[0]


def in_while(x):
    import jax

    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] @ square(), c[1] + 1), (x, 0))[0]


def in_cond(x):
    import jax

    def three(x):
        return x @ square() @ square() @ square()

    return jax.lax.cond(x[0, 0] < 1e9, three, lambda x: x, x)


def in_jit(x):
    import jax

    return jax.jit(lambda x: x @ square() @ square() @ square())(x)


def in_remat(x):
    import jax

    return jax.checkpoint(lambda x: x @ square() @ square() @ square())(x)


def in_custom_vjp(x):
    import jax

    @jax.custom_vjp
    def f(x):
        return x @ square() @ square() @ square()

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return f(x)


def in_custom_jvp(x):
    import jax

    @jax.custom_jvp
    def f(x):
        return x @ square() @ square() @ square()

    f.defjvp(lambda p, t: (f(*p), t[0]))
    return f(x)


def in_shard_map(x, *, check_vma=True):
    import jax
    from jax.sharding import Mesh, PartitionSpec

    def local(x):
        return jax.lax.scan(lambda c, w: (c @ w, None), x, np.stack([square()] * 3))[0]

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    return jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)(x)


def in_shard_map_unchecked(x):
    return in_shard_map(x, check_vma=False)


def in_all(x):
    import jax

    return jax.lax.cond(x[0, 0] < 1e9, jax.checkpoint(jax.jit(in_scan)), lambda x: x, x)


STRUCTURES = [
    in_scan, in_while, in_cond, in_jit, in_remat, in_custom_vjp, in_custom_jvp, in_shard_map, in_shard_map_unchecked, in_all,
]  # fmt: skip


@pytest.mark.parametrize("function", STRUCTURES, ids=lambda f: f.__name__)
def test_every_structure_is_entered(function):
    """Three products inside each: the reference is float32's result, the other numpy's with rounded operands."""
    x = square() * 2
    exact, wanted = x, x
    for _ in range(3):
        exact, wanted = exact @ square(), (rounded(wanted).astype(np.float64) @ rounded(square())).astype(np.float32)
    ours, theirs, found, rows = compare(function, x)
    np.testing.assert_allclose(ours, exact, atol=1e-6)
    np.testing.assert_allclose(theirs, wanted, atol=1e-5)
    assert not np.allclose(theirs, exact, atol=1e-4)
    products = [row for operation, row in zip(found, rows, strict=True) if operation.is_product]
    assert len(products) in (1, 3)
    for row in products:
        assert 5e-4 < row[LOCAL] < 5e-3
        assert row[CONDITION] > 1


@pytest.mark.parametrize("function", [in_scan, in_remat, in_custom_vjp], ids=lambda f: f.__name__)
def test_the_products_of_a_gradient_are_rounded_too(function):
    """What value_and_grad makes is part of the traced program: the gradient differs by rounding, and only by that."""
    import jax

    ours, theirs, found, _ = compare(jax.grad(lambda x: (function(x) ** 2).sum()), square())
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(ours)
    assert 1e-4 < error < 2e-2
    assert sum(operation.is_product for operation in found) >= 2


def test_lanes_that_part_go_on_alone():
    """A loop that one lane leaves earlier, and a branch that only one takes: both results are right, and it is said."""
    import jax

    one = np.float32(1 + 2**-10)  # 1 in bfloat16
    x = np.full((1, 1), one)

    def steps(x):  # grows by what bfloat16 cannot tell from nothing; the first lane gets beyond 1.01
        return jax.lax.while_loop(lambda c: (c[0][0, 0] < 1.01) & (c[1] < 50), lambda c: (c[0] @ x, c[1] + 1), (x, 0))[
            1
        ]

    ours, theirs, found, rows = compare(steps, x)
    assert (ours, theirs) == (10, 50)
    assert [op.name for op, row in zip(found, rows, strict=True) if row[RELATIVE] == np.inf] == ["while"]

    def branch(x):
        return jax.lax.cond((x @ x)[0, 0] > 1, lambda x: x @ x + 1, lambda x: x - 1, x)

    ours, theirs, found, rows = compare(branch, x)
    np.testing.assert_allclose(ours, x * x + 1)
    np.testing.assert_allclose(theirs, x - 1)
    assert [op.name for op, row in zip(found, rows, strict=True) if row[RELATIVE] == np.inf] == ["cond"]


def test_a_solve_is_entered():
    """jnp.linalg.solve holds programs; the solution of both lanes solves the system."""
    import jax.numpy as jnp

    a, b = square() + 3 * np.eye(8, dtype=np.float32), square()
    ours, theirs, _, _ = compare(lambda a, b: jnp.linalg.solve(a @ np.eye(8, dtype=np.float32), b), a, b)
    np.testing.assert_allclose(a @ ours, b, atol=1e-5)
    np.testing.assert_allclose(rounded(a) @ theirs, b, atol=1e-4)


def test_an_unknown_operation_with_a_program_is_named():
    """A Pallas kernel is refused with its name and line; it is not taken as it is."""
    import jax
    from jax.experimental import pallas

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    def call(x):
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), np.float32), interpret=True)(x)

    with pytest.raises(CheckFailedError, match=r"'pallas_call' at .*test_parity_program\.py:\d+"):
        compare(call, square())


def test_scatters_and_reductions_are_no_obstacle():
    """They hold a function of two scalars; without products in it they are computed as they are."""
    import jax
    import jax.numpy as jnp

    def several(x):
        counted = jnp.zeros(8).at[jnp.arange(8) % 3].add(x.sum(0))
        return jax.lax.reduce(x @ x, -np.inf, jax.lax.max, (0,)) + counted + jnp.cumsum(x[0])

    ours, theirs, _, _ = compare(several, square())
    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)
    assert (ours != theirs).any()


def test_cancellation_is_the_products_own_error():
    """1e4 w - 1e4 w + w by a product: the error by itself is as large as the result, and the condition says why."""
    rng = np.random.default_rng(4)
    x, w = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    left, right = np.concatenate([1e4 * x + 1, -1e4 * x, x], 1), np.concatenate([w, w, w])
    _, _, [product], [row] = compare(lambda a, b: a @ b, left, right)
    assert row[LOCAL] > 1
    assert row[CONDITION] > 1e4
    assert "test_parity_program.py" in product.where
    _, _, _, [row] = compare(lambda a, b: a @ b, left, right, level=Level.HIGHEST)
    assert row[LOCAL] == 0


def test_masks_do_not_hide_differences():
    """Minus infinity and -1e30 stand for nothing: the difference of the other values is told, and is finite."""
    import jax.numpy as jnp

    mask = np.tril(np.ones((8, 8), bool))
    for low in (-np.inf, -1e30):
        _, _, found, rows = compare(lambda x, low=low: jnp.where(mask, x @ x, low) + 1, square())
        added = rows[[op.name for op in found].index("add")]
        assert 1e-4 < added[RELATIVE] < 1e-2


def test_what_the_lanes_share_is_computed_once():
    """Without a product in its past a value is the same in both lanes: random numbers too, with a difference of exactly 0."""
    import jax

    def noise(key, x):
        return (jax.random.normal(key, (8, 8)) + x).sum()

    ours, theirs, _, rows = compare(noise, jax.random.key(0), square())
    assert ours == theirs
    assert not rows.any()


def test_operations_say_what_they_are_computed_with():
    """The number of bfloat16 products by level and by the operation's own precision."""
    import jax

    def two(x):
        return jax.lax.dot(x, x) + jax.lax.dot(x, x, precision="highest")

    closed = jax.make_jaxpr(two)(square())
    for level, products in [(Level.DEFAULT, [1, EXACT]), (Level.HIGH, [3, EXACT])]:
        assert [op.products for op in operations(closed.jaxpr, level) if op.is_product] == products
