"""What a compiled TPU program does, read from its text (HLO): operations, HBM traffic, collectives.

The compiler's own ``cost_analysis()`` counts the body of a loop once, however often it runs: a model whose layers are
scanned would seem to have one layer. Here a loop's body counts as often as the loop's condition says. Pure: text in,
numbers out, all per device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4}
_BITS_IN_NAME = re.compile(r"[a-z]+(\d+)")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_PAREN = re.compile(r"[()]")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.\-]+)")

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# These move no data of their own.
_FREE = frozenset((
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "iota", "async-start", "call-start",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One array: element type, dimensions, memory space (0 is HBM, 1 the core's own VMEM)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size_bytes(self) -> int:
        """Without the padding of tiles."""
        found = _BITS_IN_NAME.match(self.dtype)
        bits = _BITS.get(self.dtype, int(found[1]) if found else 0)
        return math.ceil(math.prod(self.dims) * bits / 8)

    @property
    def hbm_bytes(self) -> int:
        """0 for what is not in HBM."""
        return self.size_bytes if self.space == 0 else 0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str = ""


@dataclass(frozen=True)
class Module:
    """Computations by name, in the text's order, and the entry's name."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str


@dataclass(frozen=True)
class Collective:
    """How often a kind of collective runs, and the bytes that each device brings to or gets from all of them."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class HloCost:
    """What one execution does on one device.

    Args:
        flops: Of matrix products and convolutions: 2 for each multiply-add; a product in three or six bfloat16
            passes (precision ``high``, ``highest``) counts as often.
        hbm_bytes: Read from and written to HBM by the instructions as scheduled, tile padding left out.
        collectives: By kind.
        unknown_loops: Loops whose number of iterations the text does not show: counted once.
        opaque_calls: Custom kernels, whose work the text does not show: only their operands' bytes are counted.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    unknown_loops: int = 0
    opaque_calls: int = 0

    def times(self, count: int) -> HloCost:
        """Executed ``count`` times."""
        found = {k: Collective(c.count * count, c.size_bytes * count) for k, c in self.collectives.items()}
        return HloCost(self.flops * count, self.hbm_bytes * count, found, self.unknown_loops, self.opaque_calls)

    def plus(self, other: HloCost) -> HloCost:
        """One after the other."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for kind, each in itertools.chain(self.collectives.items(), other.collectives.items()):
            counts[kind] += each.count
            sizes[kind] += each.size_bytes
        return HloCost(
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            {kind: Collective(counts[kind], sizes[kind]) for kind in counts},
            self.unknown_loops + other.unknown_loops,
            self.opaque_calls + other.opaque_calls,
        )


# -- reading --------------------------------------------------------------------------------


def read_module(text: str) -> Module:
    """Reads the text of a compiled module (``compiled.as_text()``).

    Raises:
        ValueError: It has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3], root=bool(found[1]))
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("The compiler's text has no ENTRY computation.")
    return Module(computations, entry)


def _instruction(name: str, rest: str, *, root: bool) -> Instruction:
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes, tail = read_shapes(rest[:shape_end]), rest[shape_end:].lstrip()
    opened = tail.index("(")
    closed = _closing(tail, opened)
    inside, attributes = tail[opened + 1 : closed], tail[closed + 1 :]
    if "known_trip_count" not in attributes:  # the scheduler's notes are most of the text
        attributes = attributes.partition(", backend_config=")[0]
    return Instruction(name, tail[:opened], shapes, tuple(_OPERAND.findall(inside)), attributes, root, inside.strip())


def _closing(text: str, opened: int) -> int:
    depth = 0
    for found in _PAREN.finditer(text, opened):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type, in order.

    >>> read_shapes("(f32[8,128]{1,0:T(8,128)S(1)}, bf16[4]{0})")
    (Shape(dtype='f32', dims=(8, 128), space=1), Shape(dtype='bf16', dims=(4,), space=0))
    """
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        sides = tuple(int(side.lstrip("<=")) for side in dims.split(",") if side)
        found.append(Shape(dtype, sides, int(space[1]) if space else 0))
    return tuple(found)


# -- counting -------------------------------------------------------------------------------


def read_cost(text: str, *, loops: bool = True) -> HloCost:
    """What one execution of a compiled module does on one device.

    Args:
        text: ``compiled.as_text()``.
        loops: Count a loop's body as often as it runs; otherwise once, as the compiler's own analysis does.

    Raises:
        ValueError: It is not the text of a module.
    """
    module = read_module(text)
    return _Counter(module, loops=loops).of(module.entry)


class _Counter:
    def __init__(self, module: Module, *, loops: bool) -> None:
        self._module = module
        self._loops = loops
        self._known: dict[tuple[str, bool], HloCost] = {}

    def of(self, name: str, *, fused: bool = False) -> HloCost:
        """Of a computation; inside a fusion nothing goes through HBM."""
        if (name, fused) not in self._known:
            total = HloCost()
            for instruction in self._module.computations.get(name, {}).values():
                total = total.plus(self._one(name, instruction, fused=fused))
            self._known[name, fused] = total
        return self._known[name, fused]

    def _one(self, computation: str, it: Instruction, *, fused: bool) -> HloCost:  # noqa: PLR0911 - one per kind
        here = self._module.computations[computation]
        if it.opcode == "while":
            trips = trip_count(self._module, computation, it) if self._loops else 1
            called = [self.of(name, fused=fused) for name in _CALLED.findall(it.attributes)]
            total = HloCost(unknown_loops=int(trips is None))
            for each in called:
                total = total.plus(each.times(1 if trips is None else trips))
            return total
        if it.opcode == "conditional":
            branches = [
                name
                for listed, single in _BRANCHES.findall(it.attributes)
                for name in (_OPERAND.findall(listed) if listed else [single])
            ]
            costs = [self.of(name, fused=fused) for name in branches]
            return max(costs, key=lambda cost: (cost.flops, cost.hbm_bytes), default=HloCost())
        moved = HloCost() if fused else HloCost(hbm_bytes=_moved(self._module, here, it))
        if it.opcode in ("convolution", "dot"):
            return moved.plus(HloCost(flops=_product_flops(here, it)))
        if it.opcode == "fusion":
            return moved.plus(self._called(it, fused=True))
        if it.opcode in ("call", "async-start", "call-start"):
            return self._called(it, fused=fused)
        kind = it.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            payload = _payload(here, it)
            return moved.plus(HloCost(collectives={kind: Collective(1, payload)}))
        if it.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in it.attributes:
            return moved.plus(HloCost(opaque_calls=1))
        return moved

    def _called(self, it: Instruction, *, fused: bool) -> HloCost:
        total = HloCost()
        for name in _CALLED.findall(it.attributes):
            total = total.plus(self.of(name, fused=fused))
        return total


def _payload(here: Mapping[str, Instruction], it: Instruction) -> int:
    brought = sum(s.size_bytes for name in it.operands if name in here for s in here[name].shapes)
    given = sum(s.size_bytes for s in it.shapes if s.space < 2)
    return max(brought, given - brought if it.opcode.endswith("-start") else given)


def _moved(module: Module, here: Mapping[str, Instruction], it: Instruction) -> int:
    """HBM bytes that a scheduled instruction reads and writes."""
    if it.opcode in _FREE or it.opcode.endswith(("-done", "-update")):
        return 0
    out = sum(s.hbm_bytes for s in it.shapes)
    operands = [here[name] for name in it.operands if name in here]

    def read(which: Sequence[Instruction]) -> int:
        return sum(s.hbm_bytes for operand in which for s in operand.shapes)

    if it.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):  # (to, from, flag): one copy of the smaller
        to = it.shapes[0]
        source = operands[0].shapes[0] if operands and operands[0].shapes else to
        return to.hbm_bytes + (to.size_bytes if source.space == 0 else 0)
    if it.opcode in ("dynamic-slice", "slice", "gather"):
        return out + (sum(s.size_bytes for s in it.shapes) if operands and read(operands[:1]) else 0)
    if it.opcode == "dynamic-update-slice":  # in place: only the update moves
        update = operands[1].shapes[0] if len(operands) > 1 else it.shapes[0]
        return (update.size_bytes if out else 0) + update.hbm_bytes
    if it.opcode == "fusion":
        return _fusion_moved(module, it, operands, out)
    return out + read(operands)


def _fusion_moved(module: Module, it: Instruction, operands: Sequence[Instruction], out: int) -> int:
    """A fusion reads of an operand only what it slices, and writes of an operand that it updates only the update."""
    names = _CALLED.findall(it.attributes)
    inside = module.computations.get(names[0], {}) if names else {}
    users: dict[str, list[Instruction]] = {}
    for each in inside.values():
        for operand in each.operands:
            users.setdefault(operand, []).append(each)
    total = out
    parameters = [each for each in inside.values() if each.opcode == "parameter"]
    for parameter in parameters:
        index = int(parameter.literal) if parameter.literal.isdigit() else -1
        if not 0 <= index < len(operands):
            continue
        size = sum(s.hbm_bytes for s in operands[index].shapes)
        if not size:
            continue
        used = users.get(parameter.name, [])
        if used and all(
            u.opcode in ("dynamic-slice", "slice", "gather") and u.operands[0] == parameter.name for u in used
        ):
            size = min(size, sum(s.size_bytes for u in used for s in u.shapes))
        elif used and all(
            u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name and len(u.operands) > 1 for u in used
        ):
            updates = sum(s.size_bytes for u in used for s in inside[u.operands[1]].shapes if u.operands[1] in inside)
            total -= max(size - updates, 0)
            size = 0
        total += size
    return max(total, 0)


# -- products -------------------------------------------------------------------------------

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_PASSES = {"high": 3, "highest": 6}
_LIST = re.compile(r"(\w+)=\{([0-9,]*)\}")


def _product_flops(here: Mapping[str, Instruction], it: Instruction) -> float:
    precision = re.search(r"operand_precision=\{(\w+)", it.attributes)
    passes = _PASSES.get(precision[1], 1) if precision else 1
    left, right = (here[name].shapes[0].dims if name in here else () for name in it.operands[:2])
    if it.opcode == "dot":
        lists = {name: [int(d) for d in dims.split(",") if d] for name, dims in _LIST.findall(it.attributes)}
        contracted = math.prod(left[d] for d in lists.get("lhs_contracting_dims", []))
        return 2.0 * passes * math.prod(it.shapes[0].dims) * contracted
    return 2.0 * passes * convolution_multiplies(left, right, it.shapes[0].dims, it.attributes)


def convolution_multiplies(left: Sequence[int], right: Sequence[int], out: Sequence[int], attributes: str) -> int:
    """Multiply-adds of a convolution with values that are neither padding nor holes of a dilation.

    TPUs run batched products as convolutions whose batch is a dilated spatial dimension, so that most positions of
    the window are holes. Counted as XLA's ``HloCostAnalysis::HandleConvolution`` does.

    Args:
        left: Dimensions of the input.
        right: Of the kernel.
        out: Of the output.
        attributes: ``window={...}, dim_labels=..., feature_group_count=...``.
    """
    labels = _LABELS.search(attributes)
    if labels is None:
        return 0
    window = dict(item.split("=", 1) for item in (_found(_WINDOW, attributes) or "").split() if "=" in item)
    spatial = sorted(c for c in labels[3] if c.isdigit())
    positions = 1
    for number, dim in enumerate(spatial):
        positions *= _valid_positions(
            size_in=left[labels[1].index(dim)],
            size_kernel=right[labels[2].index(dim)],
            size_out=out[labels[3].index(dim)],
            stride=_per_dim(window, "stride", number, 1),
            pad_low=_padding(window, number),
            left_dilation=_per_dim(window, "lhs_dilate", number, 1),
            kernel_dilation=_per_dim(window, "rhs_dilate", number, 1),
        )
    features_in = left[labels[1].index("f")] // int(_found(re.compile(r"feature_group_count=(\d+)"), attributes) or 1)
    batch = left[labels[1].index("b")] // int(_found(re.compile(r"batch_group_count=(\d+)"), attributes) or 1)
    return features_in * out[labels[3].index("f")] * batch * positions


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None


def _per_dim(window: Mapping[str, str], name: str, number: int, default: int) -> int:
    values = window.get(name, "").split("x")
    return int(values[number]) if len(values) > number and values[number] else default


def _padding(window: Mapping[str, str], number: int) -> int:
    values = window.get("pad", "").split("x")
    return int(values[number].split("_")[0]) if len(values) > number and values[number] else 0


def _valid_positions(
    *,
    size_in: int,
    size_kernel: int,
    size_out: int,
    stride: int,
    pad_low: int,
    left_dilation: int,
    kernel_dilation: int,
) -> int:
    """Pairs of an output and a kernel position that meet an input value."""
    if (size_kernel, stride, pad_low, left_dilation) == (1, 1, 0, 1):
        return min(size_out, size_in)
    last = (size_in - 1) * left_dilation
    period = left_dilation // math.gcd(stride, left_dilation)
    valid = 0
    for kernel in range(size_kernel):
        offset = kernel * kernel_dilation - pad_low
        # Outputs o with 0 <= o * stride + offset <= last, at a multiple of the dilation.
        low = max(0, -(offset // stride) if offset < 0 else 0)
        high = min(size_out - 1, (last - offset) // stride)
        first = next((o for o in range(low, low + period) if (o * stride + offset) % left_dilation == 0), None)
        if first is not None and first <= high:
            valid += (high - first) // period + 1
    return valid


# -- loops ----------------------------------------------------------------------------------


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """How often a loop's body runs: from its start, its step and the constant it is compared with; ``None`` if unknown."""
    found = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes)
    if found:
        return int(found[1])
    names = dict(re.findall(r"(condition|body)=%([\w.\-]+)", loop.attributes))
    condition = module.computations.get(names.get("condition", ""), {})
    compared = next((each for each in condition.values() if each.root), None)
    if compared is None or compared.opcode != "compare" or len(compared.operands) != 2:
        return None
    left, right = (condition.get(name) for name in compared.operands)
    if left is None or right is None or left.opcode != "get-tuple-element" or right.opcode != "constant":
        return None
    index, bound = _tuple_index(left), _integer(right)
    here = module.computations[computation]
    start = _integer(_element(here, loop.operands[0], index)) if loop.operands else None
    step = _step(module.computations.get(names.get("body", ""), {}), index)
    direction = _found(re.compile(r"direction=(\w+)"), compared.attributes)
    if bound is None or start is None or step is None:
        return None
    return _iterations(direction or "", start, bound, step)


def _iterations(direction: str, start: int, bound: int, step: int) -> int | None:
    """How often ``i += step`` happens while ``i direction bound``; ``None`` for a loop that does not end so."""
    if direction in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
    if step <= 0 or direction not in ("LT", "LE", "GT", "GE"):
        return None
    last = bound if direction in ("LE", "GE") else bound - 1
    return max((last - start) // step + 1, 0)


def _step(body: Mapping[str, Instruction], index: int) -> int | None:
    root = next((each for each in body.values() if each.root), None)
    if root is None or root.opcode != "tuple" or len(root.operands) <= index:
        return None
    update = _through_copies(body, body.get(root.operands[index]))
    if update is None or update.opcode not in ("add", "subtract") or len(update.operands) != 2:
        return None
    sides = [_through_copies(body, body.get(name)) for name in update.operands]
    constants = [value for side in sides if (value := _integer(side)) is not None]
    if len(constants) != 1:
        return None
    return -constants[0] if update.opcode == "subtract" else constants[0]


def _element(here: Mapping[str, Instruction], name: str, index: int) -> Instruction | None:
    made = here.get(name)
    if made is None or made.opcode != "tuple" or len(made.operands) <= index:
        return None
    return _through_copies(here, here.get(made.operands[index]))


def _through_copies(here: Mapping[str, Instruction], it: Instruction | None) -> Instruction | None:
    while it is not None and it.opcode in ("copy", "bitcast", "copy-done", "copy-start") and it.operands:
        it = here.get(it.operands[0])
    return it


def _tuple_index(it: Instruction) -> int:
    return int(_found(re.compile(r"index=(\d+)"), it.attributes) or 0)


def _integer(it: Instruction | None) -> int | None:
    if it is None or it.opcode != "constant":
        return None
    return int(it.literal) if re.fullmatch(r"-?\d+", it.literal) else None
