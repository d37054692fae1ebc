"""A traced program evaluated in several lanes at once, each with products of its own precision, and what they differ by.

The program's own structure is kept: scan, while, cond, jit, custom derivatives, rematerialisation and shard_map are entered;
an operation that holds a program of its own and is not known here is an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tpupipe.errors import CheckFailedError
from tpupipe.preflight.parity_precision import EXACT, PRODUCTS, Level, bf16_products, multiply

# Calls of a program with the operation's own operands. Derivatives have been taken by the time a step is traced, so that of a
# function with derivatives of its own only the value is left.
_CALLS = {
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
    "scan": lambda params: [_open(params["jaxpr"])],
    "shard_map": lambda params: [_open(params["jaxpr"])],
    "while": lambda params: [params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr],
    "cond": lambda params: [branch.jaxpr for branch in params["branches"]],
    "custom_linear_solve": lambda params: [_open(params["jaxprs"].solve)],
}
# What these hold combines two scalars; without products in it, it stays as it is.
_COMBINERS = (
    "scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max", "reduce",
    "reduce_window", "select_and_scatter",
)  # fmt: skip

LOCAL, CONDITION, RELATIVE, ABSOLUTE = range(4)
"""Columns of the measurements: see :class:`Operation`."""
COLUMNS = 4

REFERENCE = None
"""Instead of a level: all products in float32."""

_MASKED = 1e18  # larger numbers are masks, and their squares no float32
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


Lanes = tuple[Any, ...]
"""A value in each lane; the same object where it is computed once for all."""


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
    name, where = eqn.primitive.name, _where(eqn) or outer
    inner = _inner(eqn, where)
    for jaxpr in inner:
        yield from operations(jaxpr, level, where)
    if _is_measured(eqn):
        is_product = name in PRODUCTS
        products = bf16_products(eqn.params["precision"], level) if is_product else EXACT
        yield Operation(name, where or "unknown", _types(eqn), is_product, products)


def _is_measured(eqn: Any) -> bool:
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


def _inner(eqn: Any, where: str) -> list[Any]:
    """The programs that are entered for an operation, in the order of evaluation."""
    from jax.extend.core import jaxprs_in_params

    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return [_open(params[_CALLS[name]])]
    if name in _CONTROL:
        return _CONTROL[name](params)
    held = list(jaxprs_in_params(params))
    if held and name not in _COMBINERS:
        raise CheckFailedError(
            f"Operation {name!r} at {where or 'an unknown place'} holds a program of its own, and it is not known how to compute "
            f"its products as a TPU does; known: {', '.join(sorted({*_CALLS, *_CONTROL, *_COMBINERS}))}.",
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


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _consts(jaxpr: Any) -> list[Any]:
    return list(getattr(jaxpr, "consts", ()))


def _where(eqn: Any) -> str:
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


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a program in one or two lanes.

    Args:
        levels: Of each lane, the precision of operations that have none of their own; ``REFERENCE`` is float32 for all products,
            whatever they ask for. To measure, the first of two lanes must be the reference.
        measures: Whether two lanes are compared operation by operation.
        axes: Axes of the mesh that the values are local to, inside a shard_map that does not track them.
    """

    levels: tuple[Level | None, ...]
    measures: bool = False
    axes: frozenset[Any] = frozenset()

    def evaluate(self, closed: Any, arguments: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        """Evaluates a closed program. To be traced.

        Args:
            closed: ``jax.extend.core.ClosedJaxpr``.
            arguments: Its arguments.

        Returns:
            Results, and ``float32[n, COLUMNS]``: what was measured of each of :func:`operations`; without measuring ``n`` is 0.
        """
        return self._run(closed.jaxpr, [self._shared(c) for c in closed.consts], arguments)

    # -- programs ------------------------------------------------------------------------------

    def _shared(self, value: Any) -> Lanes:
        return (value,) * len(self.levels)

    def _run(self, jaxpr: Any, consts: Sequence[Lanes], arguments: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        from jax.extend.core import Literal

        values: dict[Any, Lanes] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Lanes:
            return self._shared(variable.val) if isinstance(variable, Literal) else values[variable]

        measured = [_no_rows()]
        for eqn in jaxpr.eqns:
            with eqn.ctx.manager:
                results, rows = self._equation(eqn, [read(v) for v in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            measured.append(rows)
        return [read(v) for v in jaxpr.outvars], _stacked(measured)

    def _equation(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in PRODUCTS:
            return self._product(eqn, operands)
        if name in _CALLS:
            inner = params[_CALLS[name]]
            return self._run(_open(inner), [self._shared(c) for c in _consts(inner)], operands)
        control: dict[str, Callable[[Any, Sequence[Lanes]], tuple[list[Lanes], Any]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
            "custom_linear_solve": self._linear_solve,
        }
        if name in control:
            return control[name](eqn, operands)
        _inner(eqn, _where(eqn))  # refuses what holds a program and is not known
        return self._plain(eqn, operands)

    def _plain(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        def bind(values: Sequence[Any]) -> list[Any]:
            got = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            return list(got) if eqn.primitive.multiple_results else [got]

        if all(_is_shared(lanes) for lanes in operands):
            results = [self._shared(value) for value in bind([lanes[0] for lanes in operands])]
        else:
            per_lane = [bind([lanes[i] for lanes in operands]) for i in range(len(self.levels))]
            results = list(zip(*per_lane, strict=True))
        return results, self._row(results) if self.measures and _is_measured(eqn) else _no_rows()

    # -- products ------------------------------------------------------------------------------

    def _product(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        def compute(lane: int, products: int) -> Any:
            values = [lanes[lane] for lanes in operands]
            return multiply(eqn.primitive, eqn.params, values, products, eqn.outvars[0].aval.dtype)

        precision = eqn.params["precision"]
        counts = [EXACT if level is REFERENCE else bf16_products(precision, level) for level in self.levels]
        same = all(_is_shared(lanes) for lanes in operands)
        first = compute(0, counts[0])
        if len(counts) == 1:
            return [(first,)], _no_rows()
        if not self.measures:
            return [(first, first if same and counts[0] == counts[1] else compute(1, counts[1]))], _no_rows()
        own = first if counts[1] == counts[0] else compute(0, counts[1])
        results = (first, own if same else compute(1, counts[1]))
        if not _is_measured(eqn):
            return [results], _no_rows()
        local, _ = self._difference(first, own)
        return [results], self._row([results], local, self._condition(eqn, operands, first))

    def _condition(self, eqn: Any, operands: Sequence[Lanes], exact: Any) -> Any:
        """The norm of |a||b| over that of ab."""
        import jax.numpy as jnp

        if any(not jnp.issubdtype(lanes[0].dtype, jnp.floating) for lanes in operands[:2]):
            return jnp.float32(1)
        values = [jnp.abs(lanes[0]) for lanes in operands[:2]] + [lanes[0] for lanes in operands[2:]]
        size = multiply(eqn.primitive, eqn.params, values, EXACT, exact.dtype)
        squares, of_size = (self._over_devices(x, largest=False) for x in (_squares(exact), _squares(size)))
        return _ratio(of_size, squares)

    # -- measuring -----------------------------------------------------------------------------

    def _row(self, results: Sequence[Lanes], local: Any = 0.0, condition: Any = 0.0) -> Any:
        import jax.numpy as jnp

        apart = [lanes for lanes in results if not _is_shared(lanes) and _is_inexact(lanes[0]) and lanes[0].size]
        if not apart:
            return np.zeros((1, COLUMNS), np.float32)
        differences = [self._difference(*lanes) for lanes in apart]
        relative, absolute = (jnp.stack(column).max() for column in zip(*differences, strict=True))
        return _one_row(local, condition, relative, absolute)

    def _difference(self, reference: Any, other: Any) -> tuple[Any, Any]:
        """Relative difference in the Euclidean norm, and the largest of a value; not finite where only one is."""
        if reference is other or not reference.size:
            return np.float32(0), np.float32(0)
        squares, of_difference, largest = _sizes(reference, other)
        of_difference, squares = (self._over_devices(x, largest=False) for x in (of_difference, squares))
        return _ratio(of_difference, squares), self._over_devices(largest, largest=True)

    def _over_devices(self, x: Any, *, largest: bool) -> Any:
        """A number of all devices of a shard_map together."""
        import jax

        axes = tuple(self.axes or jax.typeof(x).manual_axis_type.varying)
        if not axes:
            return x
        return jax.lax.pmax(x, axes) if largest else jax.lax.psum(x, axes)

    # -- control flow --------------------------------------------------------------------------

    def _scan(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        import jax

        params = eqn.params
        body, first = params["jaxpr"], params["num_consts"]
        last = first + params["num_carry"]
        fixed = operands[:first]
        pack = _Packing(operands[last:])

        def step(carry: Any, piece: Any) -> Any:
            inputs = [*fixed, *carry, *pack.unpacked(piece)]
            results, rows = self._run(body.jaxpr, [self._shared(c) for c in body.consts], inputs)
            return results[: params["num_carry"]], (results[params["num_carry"] :], rows)

        carry, (stacked, rows) = jax.lax.scan(
            step,
            list(operands[first:last]),
            pack.packed,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked], rows.max(0) if params["length"] else rows.sum(0)

    def _while(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        """Lanes run together; one whose condition is over keeps its values until the others' are, too."""
        import jax
        import jax.numpy as jnp

        params = eqn.params
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        tests, bodies = operands[:first], operands[first:last]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]

        def goes_on(carry: Sequence[Lanes]) -> tuple[Lanes, Any]:
            [found], rows = self._run(test.jaxpr, [self._shared(c) for c in test.consts], [*tests, *carry])
            return found, rows

        def step(state: Any) -> Any:
            carry, active, seen, parted = state
            results, of_body = self._run(body.jaxpr, [self._shared(c) for c in body.consts], [*bodies, *carry])
            kept = [
                tuple(jnp.where(on, new, old) for on, new, old in zip(active, now, before, strict=True))
                for now, before in zip(results, carry, strict=True)
            ]
            found, of_test = goes_on(kept)
            both = jnp.stack(active).all()
            found = tuple(on & more for on, more in zip(active, found, strict=True))
            rows = jnp.where(both, _stacked([of_test, of_body]), 0.0)
            return kept, found, jnp.maximum(seen, rows), parted | self._parted(found)

        active, of_test = goes_on(list(operands[last:]))
        empty = len(operations(body.jaxpr, Level.HIGHEST)) if self.measures else 0
        seen = _stacked([of_test, jnp.zeros((empty, COLUMNS), jnp.float32)])
        start = (list(operands[last:]), active, seen, self._parted(active))
        carry, _, rows, parted = jax.lax.while_loop(lambda state: jnp.stack(state[1]).any(), step, start)
        return list(carry), self._with_parting(rows, parted)

    def _cond(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        import jax
        import jax.numpy as jnp

        index, *given = operands
        pack, branches = _Packing(given), eqn.params["branches"]
        counts = [len(operations(b.jaxpr, Level.HIGHEST)) if self.measures else 0 for b in branches]

        def together(number: int) -> Callable[[Any], Any]:
            def run(packed: Any) -> Any:
                branch = branches[number]
                results, rows = self._run(branch.jaxpr, [self._shared(c) for c in branch.consts], pack.unpacked(packed))
                zeros = [jnp.zeros((count, COLUMNS), jnp.float32) for count in counts]
                return results, _stacked([*zeros[:number], rows, *zeros[number + 1 :]])

            return run

        def lane(at: int, packed: Any) -> Any:
            alone = Evaluator((self.levels[at],), axes=self.axes)

            def branch(number: int) -> Callable[[Any], Any]:
                def run(packed: Any) -> Any:
                    taken = branches[number]
                    inputs = [(lanes[at],) for lanes in pack.unpacked(packed)]
                    results, _ = alone._run(taken.jaxpr, [(c,) for c in taken.consts], inputs)
                    return [value for (value,) in results]

                return run

            return jax.lax.switch(index[at], [branch(n) for n in range(len(branches))], packed)

        def apart(packed: Any) -> Any:
            results = [lane(at, packed) for at in range(len(self.levels))]
            return list(zip(*results, strict=True)), jnp.zeros((sum(counts), COLUMNS), jnp.float32)

        every = [together(n) for n in range(len(branches))]
        if _is_shared(index):
            results, rows = jax.lax.switch(index[0], every, pack.packed)
            return list(results), self._with_parting(rows, jnp.bool_(False))
        parted = index[0] != index[1]
        results, rows = jax.lax.cond(parted, apart, lambda packed: jax.lax.switch(index[0], every, packed), pack.packed)
        return list(results), self._with_parting(rows, self._parted(index))

    def _parted(self, choices: Lanes) -> Any:
        """Whether the lanes chose differently, on any device."""
        import jax.numpy as jnp

        if len(choices) == 1:
            return jnp.bool_(False)
        return self._over_devices((choices[0] != choices[1]).astype(jnp.float32), largest=True) > 0

    def _with_parting(self, rows: Any, parted: Any) -> Any:
        import jax.numpy as jnp

        if not self.measures:
            return _no_rows()
        size = jnp.where(parted, jnp.inf, 0.0)
        return _stacked([rows, _one_row(0.0, 0.0, size, size)])

    def _shard_map(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        import jax
        from jax.sharding import PartitionSpec

        params = eqn.params
        lanes = len(self.levels)
        axes = frozenset(params["newly_manual_axes"])
        inside = self if params["check_vma"] else replace(self, axes=self.axes | axes)

        def local(*values: Any) -> Any:
            return inside._run(params["jaxpr"], [], list(values))  # noqa: SLF001 - its own kind

        mapped = jax.shard_map(
            local,
            mesh=params["mesh"],
            in_specs=tuple((spec,) * lanes for spec in params["in_specs"]),
            out_specs=([(spec,) * lanes for spec in params["out_specs"]], PartitionSpec()),
            axis_names=axes,
            check_vma=params["check_vma"],
        )
        results, rows = mapped(*operands)
        return list(results), rows

    def _linear_solve(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        """Only the solution is computed: its derivatives have been taken already."""
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first = lengths.matvec + lengths.vecmat
        consts, rest = operands[first : first + lengths.solve], operands[sum(lengths) :]
        return self._run(_open(solve), [self._shared(c) for c in _consts(solve)], [*consts, *rest])


class _Packing:
    """Values of lanes as one list without repetitions, for what control flow passes on."""

    def __init__(self, values: Sequence[Lanes]) -> None:
        self._is_shared = [_is_shared(lanes) for lanes in values]
        self._lanes = [len(lanes) for lanes in values]
        self.packed = [lanes[:1] if shared else lanes for lanes, shared in zip(values, self._is_shared, strict=True)]

    def unpacked(self, packed: Sequence[Lanes]) -> list[Lanes]:
        """The values, shared ones in every lane."""
        known = zip(packed, self._is_shared, self._lanes, strict=True)
        return [tuple(lanes) * count if shared else tuple(lanes) for lanes, shared, count in known]


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(function)


def _sizes(reference: Any, other: Any) -> Any:
    return _jitted(_sizes_now)(reference, other)


def _squares(x: Any) -> Any:
    return _jitted(_squares_now)(x)


def _sizes_now(reference: Any, other: Any) -> tuple[Any, Any, Any]:
    """Sum of squares of the reference, of the difference, and the largest difference."""
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


def _ratio(of: Any, to: Any) -> Any:
    """Of norms, given their squares."""
    import jax.numpy as jnp

    return jnp.where(to > 0, jnp.sqrt(of / jnp.where(to > 0, to, 1.0)), jnp.where(of == 0, 0.0, jnp.inf))


def _is_shared(lanes: Lanes) -> bool:
    return all(value is lanes[0] for value in lanes)


def _is_inexact(x: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _no_rows() -> Any:
    return np.zeros((0, COLUMNS), np.float32)


def _one_row(*columns: Any) -> Any:
    import jax.numpy as jnp

    return jnp.stack([jnp.asarray(column, jnp.float32) for column in columns])[None]


def _stacked(rows: Sequence[Any]) -> Any:
    import jax.numpy as jnp

    some = [each for each in rows if each.shape[0]]
    return jnp.concatenate(some) if some else _no_rows()
