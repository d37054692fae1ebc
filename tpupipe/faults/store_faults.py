"""Which fault hits which request to the store: ``KIND@OPERATION,key=value``. Pure, no sockets.

The proxy (``store_proxy``) carries out what is decided here.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tpupipe.errors import UsageError
from tpupipe.faults.store_requests import Operation, StoreRequest

STATUSES = (400, 401, 403, 404, 408, 412, 429, 500, 502, 503, 504)

KINDS: Mapping[str, str] = {
    **{str(status): f"the answer is {status}, the store is not asked" for status in STATUSES},
    "reset": "the connection is reset in the middle of the body: of the request's if it has one (the store is not asked)",
    "lost": "the store does what is asked, the answer is lost",
    "truncate": "half of a successful answer's body arrives, then the connection closes",
    "damage": "a bit of a successful answer's body is flipped",
    "trickle": "a successful answer's body drips in, a byte now and then, and is never complete",
    "block": "no answer comes, for `seconds` or until the client gives up",
    "latency": "the request waits `seconds` before anything else happens",
    "outage": "every connection is reset, for `seconds` from the first request that meets it",
    "stale-list": "what was created in the last `seconds` is missing in the listing",
}

OPERATIONS: Mapping[str, frozenset[Operation]] = {
    "create": frozenset({Operation.CREATE}),
    "read": frozenset({Operation.READ, Operation.DOWNLOAD}),
    "download": frozenset({Operation.DOWNLOAD}),
    "list": frozenset({Operation.LIST}),
    "delete": frozenset({Operation.DELETE}),
    "any": frozenset(Operation),
}

# Spoil an answer that is a success; whether it will be is known only when it comes.
SPOILS = frozenset({"truncate", "damage", "trickle"})
# The store is asked, and does it, although the client may not hear of it.
_REACHES_THE_STORE = SPOILS | {"lost", "stale-list"}
_ALWAYS = ("rate", "seed", "times", "burst", "after", "name", "method")
_EXTRA = {
    "block": ("seconds",),
    "latency": ("seconds",),
    "outage": ("seconds",),
    "stale-list": ("seconds",),
    **{str(status): ("per_name_interval_s", "retry_after_s") for status in STATUSES},
}


@dataclass(frozen=True)
class StoreFault:
    """One fault of the store.

    Attributes:
        kind: One of ``KINDS``.
        operation: One of ``OPERATIONS``.
        rate: Chance in (0, 1] that a request which could start it does.
        seed: Decides which requests those are.
        times: How often it may start; ``None`` is without limit.
        burst: Requests that it hits in a row each time.
        after: Matching requests that pass before the first one is hit.
        seconds: How long (``KINDS`` says what).
        name: Part of the object's name (of a listing's prefix); with a ``$`` at its end, the end of it.
        method: HTTP verb; empty is any.
        per_name_interval_s: Hits only a write that comes sooner than this after the last one of the same object.
        retry_after_s: Whole seconds in the answer's ``Retry-After``; 0 is no such header.
        text: As it was written.
    """

    kind: str
    operation: str
    rate: float = 1.0
    seed: int = 0
    times: int | None = None
    burst: int = 1
    after: int = 0
    seconds: float = 0.0
    name: str = ""
    method: str = ""
    per_name_interval_s: float = 0.0
    retry_after_s: int = 0
    text: str = field(default="", compare=False)

    @property
    def status(self) -> int | None:
        """The status that it answers with, if it does."""
        return int(self.kind) if self.kind.isdigit() else None

    def matches(self, request: StoreRequest) -> bool:
        """Whether the request is of the kind it is limited to."""
        return (
            request.operation in OPERATIONS[self.operation]
            and self._names(request.name)
            and self.method in ("", request.method)
        )

    def _names(self, name: str) -> bool:
        end = self.name.removesuffix("$")
        return name.endswith(end) if end != self.name else self.name in name

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one fault.

        A burst without a rate comes once, and so does an outage; everything else is without limit unless ``times``
        is given.

        Example:
            >>> fault = StoreFault.parse("503@create,rate=0.2,seed=7")
            >>> fault.status, fault.operation, fault.rate, fault.times
            (503, 'create', 0.2, None)

        Raises:
            UsageError: Unknown kind, operation or key, or a value out of range; the message lists what there is.
        """
        head, *rest = (part.strip() for part in text.split(","))
        kind, at, operation = head.partition("@")
        if kind not in KINDS or operation not in OPERATIONS:
            near = [
                difflib.get_close_matches(given, known, n=1)
                for given, known in ((kind, KINDS), (operation, OPERATIONS))
                if given not in known
            ]
            wrong = f"no kind {kind!r}" if kind not in KINDS else f"no operation {operation!r}" if at else "no '@'"
            meant = ", ".join(found[0] for found in near if found)
            raise UsageError(
                f"store fault {text!r}: {wrong}. Kinds: {', '.join(KINDS)}. Operations: {', '.join(OPERATIONS)}.",
                hint=f"did you mean {meant}?" if meant else "KIND@OPERATION,key=value, as 503@create,rate=0.2,seed=7",
            )
        values: dict[str, Any] = {}
        allowed = (*_ALWAYS, *_EXTRA.get(kind, ()))
        for part in rest:
            key, equals, value = part.partition("=")
            if not equals or key not in allowed:
                raise UsageError(
                    f"store fault {text!r}: {part!r} is not known; {kind} takes key=value with {', '.join(allowed)}."
                )
            values[key] = _value(text, key, value)
        if kind == "outage" or ("burst" in values and "rate" not in values):
            values.setdefault("times", 1)
        if kind in ("latency", "outage", "stale-list"):
            values.setdefault("seconds", 1.0)
        fault = cls(kind, operation, text=text, **values)
        fault._check()
        return fault

    def _check(self) -> None:
        problem = ""
        if self.kind == "stale-list" and self.operation != "list":
            problem = "stale-list is about listings: write stale-list@list"
        elif self.per_name_interval_s and (self.operation != "create" or self.burst > 1):
            problem = "per_name_interval_s is about writes, one at a time: write it with @create and without burst"
        elif self.kind == "outage" and self.burst > 1:
            problem = "an outage lasts for seconds, not for a burst"
        if problem:
            raise UsageError(f"store fault {self.text!r}: {problem}.")


_RANGES: Mapping[str, tuple[type, Callable[[Any], bool], str]] = {
    "rate": (float, lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    "seed": (int, lambda _: True, "a whole number"),
    "times": (int, lambda value: value >= 1, "a whole number from 1"),
    "burst": (int, lambda value: value >= 1, "a whole number from 1"),
    "after": (int, lambda value: value >= 0, "a whole number from 0"),
    "seconds": (float, lambda value: 0 < value < math.inf, "a number above 0"),
    "per_name_interval_s": (float, lambda value: 0 < value < math.inf, "a number above 0"),
    "retry_after_s": (int, lambda value: value >= 1, "a whole number from 1"),
    "name": (str, bool, "part of an object's name"),
    "method": (str, lambda value: value.isalpha() and value.isupper(), "an HTTP method, as GET"),
}


def _value(text: str, key: str, value: str) -> Any:
    kind, fits, allowed = _RANGES[key]
    try:
        parsed = kind(value)
    except ValueError:
        parsed = None
    if parsed is None or not fits(parsed):
        raise UsageError(f"store fault {text!r}: {key}={value!r}; allowed: {allowed}.")
    return parsed


@dataclass(frozen=True)
class StoreFaults:
    """The faults of a store, in the order in which they are tried. Picklable; no faults is a store that works.

    Example:
        >>> [fault.kind for fault in StoreFaults.parse("latency@any,seconds=0.1", "503@create,times=2").faults]
        ['latency', '503']
    """

    faults: tuple[StoreFault, ...] = ()

    @classmethod
    def parse(cls, *texts: str) -> Self:
        """Reads several faults.

        Raises:
            UsageError: See ``StoreFault.parse``.
        """
        return cls(tuple(StoreFault.parse(text) for text in texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """The faults as they were written."""
        return tuple(fault.text for fault in self.faults)


# -- the decision ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """How far one fault has come.

    Attributes:
        matched: Requests so far that it was about, hit or not.
        starts: How often it started.
        left: Requests that the burst under way still hits.
        until_s: When the outage under way ends.
        writes: Objects written within ``per_name_interval_s``, and when.
    """

    matched: int = 0
    starts: int = 0
    left: int = 0
    until_s: float = -math.inf
    writes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What happens to a request.

    Attributes:
        fault: What hits it, ``None`` if it gets through.
        delays: The ``latency`` faults that it waits for first.
    """

    fault: StoreFault | None = None
    delays: tuple[StoreFault, ...] = ()

    @property
    def hits(self) -> tuple[StoreFault, ...]:
        """Everything that hits it."""
        return (*self.delays, self.fault) if self.fault else self.delays


def fresh_marks(faults: StoreFaults) -> tuple[Mark, ...]:
    """The marks before the first request."""
    return (Mark(),) * len(faults.faults)


def decide(
    faults: StoreFaults, marks: Iterable[Mark], request: StoreRequest, now_s: float
) -> tuple[Decision, tuple[Mark, ...]]:
    """Which fault hits a request: the first that may; delays add up. Pure.

    Whether a fault with a rate hits depends on its seed and on how many requests matched it before, on nothing else:
    the same sequence of requests meets the same faults, whatever other faults there are.

    Args:
        faults: All faults.
        marks: How far each has come.
        request: The request.
        now_s: Monotonic seconds, for outages and intervals.

    Returns:
        The decision, and the marks for the next request.
    """
    after: list[Mark] = []
    delays: list[StoreFault] = []
    winner: StoreFault | None = None
    for fault, mark in zip(faults.faults, marks, strict=True):
        new = mark
        if fault.matches(request):
            new = replace(mark, matched=mark.matched + 1)
            hit = _hit(fault, mark, request, now_s) if winner is None or fault.kind == "latency" else None
            if hit is not None:
                new = replace(new, starts=hit.starts, left=hit.left, until_s=hit.until_s)
                if fault.kind == "latency":
                    delays.append(fault)
                else:
                    winner = fault
        after.append(new)
    if request.begins and (winner is None or winner.kind in _REACHES_THE_STORE):
        after = [_written(fault, mark, request, now_s) for fault, mark in zip(faults.faults, after, strict=True)]
    return Decision(winner, tuple(delays)), tuple(after)


def withdrawn(faults: StoreFaults, marks: Iterable[Mark], fault: StoreFault) -> tuple[Mark, ...]:
    """The marks as if the latest hit of ``fault`` had not been one: there was nothing to spoil."""
    return tuple(
        _unhit(known, mark) if known is fault else mark for known, mark in zip(faults.faults, marks, strict=True)
    )


def _unhit(fault: StoreFault, mark: Mark) -> Mark:
    if mark.left + 1 < fault.burst:
        return replace(mark, left=mark.left + 1)
    return replace(mark, starts=max(0, mark.starts - 1), left=0)


def _hit(fault: StoreFault, mark: Mark, request: StoreRequest, now_s: float) -> Mark | None:
    """The fault's mark if it hits this matching request, ``None`` if it does not."""
    if now_s < mark.until_s:
        return mark
    if mark.left:
        return replace(mark, left=mark.left - 1)
    if mark.matched < fault.after or (fault.times is not None and mark.starts >= fault.times):
        return None
    if fault.per_name_interval_s:
        last_s = mark.writes.get(_key(request), -math.inf)
        if not request.begins or now_s - last_s >= fault.per_name_interval_s:
            return None
    if fault.rate < 1 and _draw(fault, mark.matched) >= fault.rate:
        return None
    until_s = now_s + fault.seconds if fault.kind == "outage" else mark.until_s
    return replace(mark, starts=mark.starts + 1, left=fault.burst - 1, until_s=until_s)


def _written(fault: StoreFault, mark: Mark, request: StoreRequest, now_s: float) -> Mark:
    if not fault.per_name_interval_s or not fault.matches(request):
        return mark
    recent = {key: at_s for key, at_s in mark.writes.items() if now_s - at_s < fault.per_name_interval_s}
    return replace(mark, writes={**recent, _key(request): now_s})


def _key(request: StoreRequest) -> str:
    return f"{request.bucket}/{request.name}"


def _draw(fault: StoreFault, number: int) -> float:
    """A number in [0, 1] for the request of that number among those that match."""
    key = f"{fault.seed} {fault.kind}@{fault.operation} {fault.name} {fault.method} {number}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2.0**64
