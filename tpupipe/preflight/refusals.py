"""Why the TPU compiler refused a program, read from what it said. Pure: text in, facts out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

_SIZE = re.compile(r"([0-9.]+)\s*([KMGT]?)i?B?")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE_TEXT = r"([0-9.]+[KMGT]?)"
_EARLY = re.compile(rf"required for HLO temporaries \({_SIZE_TEXT}\) exceeds available HBM \({_SIZE_TEXT}\)")
_MEMORY = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {_SIZE_TEXT} of {_SIZE_TEXT} \w+")
_TOTAL = re.compile(rf"Total hbm usage >= {_SIZE_TEXT}")
_ALLOCATION = re.compile(r"^\s*\d+\. Size: ([0-9.]+[KMGT]?)$(.*?)(?=^\s*=+\s*$|\Z)", re.MULTILINE | re.DOTALL)
_OP_NAME = re.compile(r'op_name="([^"]+)"')
_SOURCE = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')
_SHAPE = re.compile(r"Shape: (\S+)")
_LABEL = re.compile(r"XLA label: (\S+)")
_KIND = re.compile(r"Allocation type: (.+)")
_FATAL = re.compile(r"^F\d{4} [\d:.]+\s+\d+ ([\w./-]+:\d+)\] (.*)$", re.MULTILINE)
_HANDLER = re.compile(r"::(\w+)_handler::|\bHandle(?!CustomCall)([A-Z]\w+)\(")
_PRIMITIVE = re.compile(r"primitive '([\w\-]+)'|Unsupported (?:primitive|op(?:eration)?)[: ]+'?([\w.\-]+)'?")
_TARGET = re.compile(r"custom[- ]call(?: target)?[: ]+'?\"?([\w.$]+)", re.IGNORECASE)


class Reason(StrEnum):
    """The kind of a refusal."""

    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    CRASH = "crash"
    TIMEOUT = "timeout"
    JOB = "job"
    TARGET = "target"
    OTHER = "other"


@dataclass(frozen=True)
class Allocation:
    """One of the large buffers that the compiler listed.

    Args:
        size_bytes: Its size.
        what: Operation, source line and shape, as far as they were given.
    """

    size_bytes: int
    what: str


@dataclass(frozen=True)
class Refusal:
    """What the compiler (or the job's code under it) said no to.

    Args:
        reason: The kind.
        message: The first lines of what was said.
        needed_bytes: HBM per device that the program needs, where that is the reason.
        available_bytes: HBM per device that there is.
        space: The memory that ran out: ``hbm``, ``vmem``, ``smem``.
        allocations: The largest buffers, largest first; empty where the compiler listed none.
        operation: Name of the operation that is to blame, if it was named: a JAX primitive or an ``op_name``.
        source: Its source line, if that was named.
    """

    reason: Reason
    message: str
    needed_bytes: int | None = None
    available_bytes: int | None = None
    space: str = "hbm"
    allocations: tuple[Allocation, ...] = field(default=())
    operation: str = ""
    source: str = ""


def parse_size(text: str) -> int:
    """A size as XLA prints it, in bytes: ``K`` is 1024.

    Raises:
        ValueError: It is not one.

    >>> parse_size("15.75G"), parse_size("530.00M"), parse_size("0B")
    (16911433728, 555745280, 0)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; allowed: a number with K, M, G or T.")
    return round(float(found[1]) * _UNITS[found[2]])


def read_refusal(kind: str, text: str) -> Refusal:
    """Reads what was raised when a program was lowered or compiled.

    Args:
        kind: Class of the exception.
        text: Its message.
    """
    message = "\n".join(line.rstrip() for line in text.strip().splitlines()[:4])
    source, operation = _source(text), _operation(text)
    if "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text:
        needed = available = None
        space = "hbm"
        if early := _EARLY.search(text):
            needed, available = parse_size(early[1]), parse_size(early[2])
        elif memory := _MEMORY.search(text):
            space, needed, available = memory[1], parse_size(memory[2]), parse_size(memory[3])
        return Refusal(Reason.OUT_OF_MEMORY, message, needed, available, space, allocations(text), operation, source)
    if "INVALID_ARGUMENT" in text and "opology" in text:
        return Refusal(Reason.TARGET, message)
    unsupported = kind == "NotImplementedError" or "UNIMPLEMENTED" in text or "not found for platform" in text
    return Refusal(Reason.UNSUPPORTED if unsupported else Reason.OTHER, message, operation=operation, source=source)


def allocations(text: str) -> tuple[Allocation, ...]:
    """The "Largest program allocations in hbm" of an out-of-memory message, largest first."""
    found = []
    for size, rest in _ALLOCATION.findall(text):
        parts = [_operation(rest), _source(rest), _first(_SHAPE, rest), _first(_KIND, rest)]
        what = ", ".join(part for part in parts if part) or _first(_LABEL, rest) or "not named"
        found.append(Allocation(parse_size(size), what))
    return tuple(sorted(found, key=lambda each: -each.size_bytes))


def read_crash(signal_name: str, stderr: str) -> Refusal:
    """Reads what a compiler process that was ended by a signal left behind.

    Args:
        signal_name: ``SIGABRT``.
        stderr: The end of its standard error.
    """
    fatal, handler = _FATAL.search(stderr), _HANDLER.search(stderr)
    said = f"{fatal[2].strip()} ({fatal[1]})" if fatal else "it said nothing"
    operation = next(group for group in handler.groups() if group) if handler else _operation(stderr)
    return Refusal(Reason.CRASH, f"The compiler's process ended with {signal_name}: {said}", operation=operation)


def _operation(text: str) -> str:
    for pattern in (_OP_NAME, _PRIMITIVE, _TARGET):
        if found := pattern.search(text):
            return next(group for group in found.groups() if group)
    return ""


def _source(text: str) -> str:
    found = _SOURCE.search(text)
    return f"{found[1]}:{found[2]}" if found and found[2] else (found[1] if found else "")


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1].strip() if found else ""
