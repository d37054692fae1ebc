"""The guard against compilations after the first step: what changed of which argument, before anything is compiled.

A call costs a comparison of the arguments' abstract values: some microseconds for a batch. What the function itself gave back, as the
state of a training step, is recognised as such and not looked at again, however many arrays it has. Import inside workers only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tpupipe.errors import RecompileError

Recompile = Literal["forbid", "warn"]
OnRecompile = Callable[[Sequence[str]], None]

SHOWN = 8

Signature = tuple[Any, ...]
"""Of one argument: its tree, and shape, dtype, weak type and sharding of each leaf."""


class Static:
    """A static value in a signature: compared by itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def signature_of(argument: Any, *, weak_types: bool = True) -> Signature:
    """What decides the program that an argument is compiled for.

    Args:
        argument: A pytree of arrays, ``jax.ShapeDtypeStruct`` or numbers.
        weak_types: Whether weak types count, as for ``jax.jit``; a program that was compiled ahead does not tell them apart.
    """
    import jax

    leaves, tree = jax.tree.flatten(argument)
    return (tree, *[_leaf(leaf, weak_types=weak_types) for leaf in leaves])


def _leaf(leaf: Any, *, weak_types: bool) -> tuple[Any, ...]:
    try:
        return (leaf.shape, leaf.dtype, weak_types and leaf.weak_type, leaf.sharding)
    except AttributeError:  # a numpy array or a number
        import jax

        kind = jax.typeof(leaf)
        return (kind.shape, kind.dtype, weak_types and kind.weak_type, None)


def changes(name: str, before: Signature | Static, after: Signature | Static) -> list[str]:
    """What is different about an argument, a line per leaf; empty if the same program serves both.

    Args:
        name: The argument's name.
        before: What the program was compiled for.
        after: What it would be called with.
    """
    if isinstance(before, Static) or isinstance(after, Static):
        if before == after:
            return []
        return [f"{name}: static value {_static(before)} became {_static(after)}"]
    then, now = (_named(name, signature) for signature in (before, after))
    found = [f"{leaf}: is not there any more" for leaf in then if leaf not in now]
    found += [f"{leaf}: is new, {_told(now[leaf])}" for leaf in now if leaf not in then]
    for leaf in then:
        if leaf in now:
            found += _leaf_changes(leaf, then[leaf], now[leaf])
    if not found and before[0] != after[0]:
        found.append(f"{name}: structure {before[0]} became {after[0]}")
    return found


def _static(value: Any) -> str:
    return repr(value.value) if isinstance(value, Static) else "(none)"


def _named(name: str, signature: Signature) -> dict[str, tuple[Any, ...]]:
    import jax

    tree, *leaves = signature
    numbered = jax.tree.unflatten(tree, range(len(leaves)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    return {name + jax.tree_util.keystr(path): leaves[at] for path, at in paths}


def _leaf_changes(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    found = []
    if before[0] != after[0]:
        found.append(f"{name}: shape {_shape(before[0])} became {_shape(after[0])}")
    if before[1] != after[1]:
        found.append(f"{name}: dtype {before[1]} became {after[1]}")
    elif before[2] != after[2]:
        kinds = {True: f"weak {before[1]} (a Python number's)", False: str(before[1])}
        found.append(f"{name}: dtype {kinds[bool(before[2])]} became {kinds[bool(after[2])]}")
    if not found and not _same_placement(before, after):
        found.append(f"{name}: sharding {_placement(before[3])} became {_placement(after[3])}")
    return found


def _same_placement(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    then, now = before[3], after[3]
    if then == now:
        return True
    return then is not None and now is not None and bool(then.is_equivalent_to(now, len(before[0])))


def _placement(sharding: Any) -> str:
    return "of the host" if sharding is None else str(sharding)


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _told(leaf: tuple[Any, ...]) -> str:
    return f"{leaf[1]}[{', '.join(map(str, leaf[0]))}]"


class Guarded:
    """A function with arguments of one kind: a call with others is an error, or is counted and compiled for.

    Args:
        function: For messages: ``step``.
        stage: Its stage.
        names: Names of the arguments.
        program: ``program(arguments) -> callable``: what to call for arguments of a new kind. It may compile now, or leave that to the
            first call.
        recompile: ``"forbid"``: only for the first kind; ``"warn"``: for any.
        on_recompile: Called with what changed, before a program other than the first is made.
        weak_types: See :func:`signature_of`.
        static: Names of arguments that are static.
    """

    def __init__(
        self,
        function: str,
        stage: str,
        names: Sequence[str],
        program: Callable[[Sequence[Any]], Callable[..., Any]],
        *,
        recompile: Recompile,
        on_recompile: OnRecompile,
        weak_types: bool = True,
        static: Sequence[str] = (),
    ) -> None:
        self._function = function
        self._stage = stage
        self._names = tuple(names)
        self._static = frozenset(static)
        self._make = program
        self._recompile = recompile
        self._on_recompile = on_recompile
        self._weak_types = weak_types
        self._programs: dict[tuple[Any, ...], tuple[Callable[..., Any], dict[int, Signature]]] = {}
        self._kinds: list[tuple[Any, ...]] = []  # one per program; others may be equivalent
        self._last_kind: tuple[Any, ...] | None = None
        self._last: tuple[Callable[..., Any], dict[int, Signature]]
        self._given: tuple[Any, ...] = ()
        self._given_signatures: dict[int, Signature] = {}

    @property
    def compilations(self) -> int:
        """Kinds of arguments that there is a program for."""
        return len(self._kinds)

    def expect(self, arguments: Sequence[Any], program: Callable[..., Any]) -> None:
        """Takes a program that was compiled ahead, for abstract arguments."""
        kind = self._kind(arguments)
        self._kinds.append(kind)
        self._programs[kind] = (program, {})

    def __call__(self, *arguments: Any) -> Any:
        """Calls the program for these arguments.

        Raises:
            RecompileError: They are of another kind, and that is forbidden.
        """
        kind = self._kind(arguments)
        if (
            kind != self._last_kind
        ):  # signatures that are the same objects are equal at once; hashing looks at every leaf
            found = self._programs.get(kind)
            if found is None:
                found = self._programs[kind] = (self._program(kind, arguments), {})
            self._last = found
        self._last_kind = kind
        program, signatures = self._last
        results = program(*arguments)
        # What a program gives back is of one kind for ever: it is looked at after its first call only.
        self._given = results if isinstance(results, tuple) else (results,)
        self._given_signatures = signatures
        return results

    def _kind(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        names = self._names_of(len(arguments))
        return tuple([self._signature(name, value) for name, value in zip(names, arguments, strict=True)])

    def _names_of(self, count: int) -> Sequence[str]:
        if len(self._names) == count:
            return self._names
        return [*self._names[:count], *(f"argument {at}" for at in range(len(self._names), count))]

    def _signature(self, name: str, value: Any) -> Signature | Static:
        if name in self._static:
            return Static(value)
        for at, given in enumerate(self._given):
            if given is value:
                known = self._given_signatures.get(at)
                if known is None:
                    known = self._given_signatures[at] = signature_of(value, weak_types=self._weak_types)
                return known
        return signature_of(value, weak_types=self._weak_types)

    def _program(self, kind: tuple[Any, ...], arguments: Sequence[Any]) -> Callable[..., Any]:
        for known in self._kinds:
            if not self._changes(known, kind):
                return self._programs[known][0]
        if self._kinds:
            found = self._changes(self._kinds[-1], kind)
            if self._recompile == "forbid":
                raise recompile_error(self._stage, self._function, found)
            self._on_recompile(found)
        self._kinds.append(kind)
        return self._make(arguments)

    def _changes(self, before: Sequence[Any], after: Sequence[Any]) -> list[str]:
        if len(before) != len(after):
            return [f"{self._function}: {len(before)} arguments became {len(after)}"]
        return [c for each in zip(self._names_of(len(after)), before, after, strict=True) for c in changes(*each)]


def recompile_error(stage: str, function: str, found: Sequence[str]) -> RecompileError:
    """The error that names the arguments that changed."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return RecompileError(
        f"{function} of stage {stage!r} would be compiled anew after its first step: {'; '.join(found[:SHOWN])}{more}.",
        hint='Keep shapes and types of the arguments: pad and mask the last batch, cast the state back. recompile="warn" allows it.',
        stage=stage,
        function=function,
        changes=list(found),
    )


def guarded_jit(
    function: Callable[..., Any],
    stage: str,
    *,
    recompile: Recompile,
    on_recompile: OnRecompile,
    static_argnames: Sequence[str] = (),
    **options: Any,
) -> Guarded:
    """``jax.jit`` of a function of positional arguments, guarded.

    Args:
        function: The function.
        stage: Its stage, for messages.
        recompile: See :class:`Guarded`.
        on_recompile: See :class:`Guarded`.
        static_argnames: Arguments that are static: a new value is a new program.
        **options: Of ``jax.jit``.
    """
    import jax

    jitted = jax.jit(function, static_argnames=tuple(static_argnames), **options)
    name = getattr(function, "__name__", type(function).__name__)
    return Guarded(
        name,
        stage,
        _positional(function),
        lambda _: jitted,
        recompile=recompile,
        on_recompile=on_recompile,
        static=static_argnames,
    )


def _positional(function: Callable[..., Any]) -> list[str]:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]
