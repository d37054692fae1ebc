"""What a traced function says where the compiler does not: its largest values and the source lines of its operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, with those of the functions inside it (loops, branches, jitted functions)."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner_jaxpr = getattr(inner, "jaxpr", inner)
                if hasattr(inner_jaxpr, "eqns"):
                    yield from equations(inner_jaxpr)


def source_line(equation: Any) -> str:
    """``file:line`` of the user's call that an equation comes from; empty if that is not known."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for frame in frames:  # innermost first
        if "site-packages" not in frame.file_name and not frame.file_name.startswith("<"):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def find_operation(jaxpr: Any, operation: str) -> str:
    """The source line of the first operation of a name.

    Args:
        jaxpr: Where to look.
        operation: A primitive (``eig``), or an HLO ``op_name`` that ends with one (``jit(f)/eig``).
    """
    wanted = operation.rpartition("/")[2].partition("[")[0]
    for equation in equations(jaxpr):
        if equation.primitive.name == wanted:
            return source_line(equation)
    return ""


def largest_values(jaxpr: Any, count: int = 3) -> list[tuple[int, str]]:
    """The largest values that a function computes, over all devices, as they were written: the compiler may keep fewer.

    Args:
        jaxpr: The function.
        count: How many, one for each source line and shape.

    Returns:
        Bytes and what they are, largest first.
    """
    found: dict[str, int] = {}
    for equation in equations(jaxpr):
        for variable in equation.outvars:
            shape, dtype = getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None)
            size = getattr(dtype, "itemsize", None)
            if shape is None or size is None:
                continue
            sides = ",".join(map(str, shape))
            what = f"{dtype}[{sides}] of {equation.primitive.name}, {source_line(equation) or 'line not known'}"
            found[what] = math.prod(shape) * size
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    distinct: dict[tuple[int, str], str] = {}
    for what, size in ordered:  # a line makes many values of one size: one of them says it
        distinct.setdefault((size, what.rpartition(", ")[2]), what)
    return [(size, what) for (size, _), what in list(distinct.items())[:count]]
