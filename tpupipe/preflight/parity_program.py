"""A traced program evaluated in several lanes at once, each with products of its own precision, and what they differ by.

The program's own structure is kept: scan, while, cond, jit, custom derivatives, rematerialisation and shard_map are entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpupipe.preflight.parity_operations import (
    CALLS,
    consts_of,
    inner_programs,
    is_measured,
    open_program,
    operations,
    where_of,
)
from tpupipe.preflight.parity_precision import EXACT, PRODUCTS, Level, bf16_products, multiply
from tpupipe.preflight.parity_sizes import (
    COLUMNS,
    Lanes,
    is_inexact,
    is_shared,
    no_rows,
    one_row,
    ratio_of,
    sizes_of,
    squares_of,
    stacked,
)

REFERENCE = None
"""Instead of a level: all products in float32."""


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

        measured = [no_rows()]
        for eqn in jaxpr.eqns:
            with eqn.ctx.manager:
                results, rows = self._equation(eqn, [read(v) for v in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            measured.append(rows)
        return [read(v) for v in jaxpr.outvars], stacked(measured)

    def _equation(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in PRODUCTS:
            return self._product(eqn, operands)
        if name in CALLS:
            inner = params[CALLS[name]]
            return self._run(open_program(inner), [self._shared(c) for c in consts_of(inner)], operands)
        control: dict[str, Callable[[Any, Sequence[Lanes]], tuple[list[Lanes], Any]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
            "custom_linear_solve": self._linear_solve,
        }
        if name in control:
            return control[name](eqn, operands)
        inner_programs(eqn, where_of(eqn))  # refuses what holds a program and is not known
        return self._plain(eqn, operands)

    def _plain(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        def bind(values: Sequence[Any]) -> list[Any]:
            got = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            return list(got) if eqn.primitive.multiple_results else [got]

        if all(is_shared(lanes) for lanes in operands):
            results = [self._shared(value) for value in bind([lanes[0] for lanes in operands])]
        else:
            per_lane = [bind([lanes[i] for lanes in operands]) for i in range(len(self.levels))]
            results = list(zip(*per_lane, strict=True))
        return results, self._row(results) if self.measures and is_measured(eqn) else no_rows()

    # -- products ------------------------------------------------------------------------------

    def _product(self, eqn: Any, operands: Sequence[Lanes]) -> tuple[list[Lanes], Any]:
        def compute(lane: int, products: int) -> Any:
            values = [lanes[lane] for lanes in operands]
            return multiply(eqn.primitive, eqn.params, values, products, eqn.outvars[0].aval.dtype)

        precision = eqn.params["precision"]
        counts = [EXACT if level is REFERENCE else bf16_products(precision, level) for level in self.levels]
        same = all(is_shared(lanes) for lanes in operands)
        first = compute(0, counts[0])
        if len(counts) == 1:
            return [(first,)], no_rows()
        if not self.measures:
            return [(first, first if same and counts[0] == counts[1] else compute(1, counts[1]))], no_rows()
        own = first if counts[1] == counts[0] else compute(0, counts[1])
        results = (first, own if same else compute(1, counts[1]))
        if not is_measured(eqn):
            return [results], no_rows()
        local, _ = self._difference(first, own)
        return [results], self._row([results], local, self._condition(eqn, operands, first))

    def _condition(self, eqn: Any, operands: Sequence[Lanes], exact: Any) -> Any:
        """The norm of |a||b| over that of ab."""
        import jax.numpy as jnp

        if any(not jnp.issubdtype(lanes[0].dtype, jnp.floating) for lanes in operands[:2]):
            return jnp.float32(1)
        values = [jnp.abs(lanes[0]) for lanes in operands[:2]] + [lanes[0] for lanes in operands[2:]]
        size = multiply(eqn.primitive, eqn.params, values, EXACT, exact.dtype)
        squares, of_size = (self._over_devices(x, largest=False) for x in (squares_of(exact), squares_of(size)))
        return ratio_of(of_size, squares)

    # -- measuring -----------------------------------------------------------------------------

    def _row(self, results: Sequence[Lanes], local: Any = 0.0, condition: Any = 0.0) -> Any:
        import jax.numpy as jnp

        apart = [lanes for lanes in results if not is_shared(lanes) and is_inexact(lanes[0]) and lanes[0].size]
        if not apart:
            return np.zeros((1, COLUMNS), np.float32)
        differences = [self._difference(*lanes) for lanes in apart]
        relative, absolute = (jnp.stack(column).max() for column in zip(*differences, strict=True))
        return one_row(local, condition, relative, absolute)

    def _difference(self, reference: Any, other: Any) -> tuple[Any, Any]:
        """Relative difference in the Euclidean norm, and the largest of a value; not finite where only one is."""
        if reference is other or not reference.size:
            return np.float32(0), np.float32(0)
        squares, of_difference, largest = sizes_of(reference, other)
        of_difference, squares = (self._over_devices(x, largest=False) for x in (of_difference, squares))
        return ratio_of(of_difference, squares), self._over_devices(largest, largest=True)

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
            rows = jnp.where(both, stacked([of_test, of_body]), 0.0)
            return kept, found, jnp.maximum(seen, rows), parted | self._parted(found)

        active, of_test = goes_on(list(operands[last:]))
        empty = len(operations(body.jaxpr, Level.HIGHEST)) if self.measures else 0
        seen = stacked([of_test, jnp.zeros((empty, COLUMNS), jnp.float32)])
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
                return results, stacked([*zeros[:number], rows, *zeros[number + 1 :]])

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
        if is_shared(index):
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
            return no_rows()
        size = jnp.where(parted, jnp.inf, 0.0)
        return stacked([rows, one_row(0.0, 0.0, size, size)])

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
        return self._run(open_program(solve), [self._shared(c) for c in consts_of(solve)], [*consts, *rest])


class _Packing:
    """Values of lanes as one list without repetitions, for what control flow passes on."""

    def __init__(self, values: Sequence[Lanes]) -> None:
        self._is_shared = [is_shared(lanes) for lanes in values]
        self._lanes = [len(lanes) for lanes in values]
        self.packed = [lanes[:1] if shared else lanes for lanes, shared in zip(values, self._is_shared, strict=True)]

    def unpacked(self, packed: Sequence[Lanes]) -> list[Lanes]:
        """The values, shared ones in every lane."""
        known = zip(packed, self._is_shared, self._lanes, strict=True)
        return [tuple(lanes) * count if shared else tuple(lanes) for lanes, shared, count in known]
