"""A deterministic sample of the input: about a fraction of the bytes, spread over the files.

The choice depends on the listed inputs and the fraction only, so every driver, host and
resumed run sees the same sample.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from tpupipe.data.sources import Part, Unit, make_units
from tpupipe.errors import ConfigError

_PIECE_BYTES = 16_384  # below this, one more range read costs more than the variety is worth
_PIECES = 256  # how many pieces a sample is at most made of because of its size
_UNIT_PARTS = 4096


def parse_sample(value: object) -> Fraction:
    """The exact fraction a sample setting means.

    Args:
        value: ``"1%"``, ``0.01``, ``"0.01"``, ``"1/100"``, ``"100%"`` or ``1`` (everything).

    Raises:
        ConfigError: Not one of those, or not in (0, 1].

    >>> parse_sample("2.5%"), parse_sample(0.01), parse_sample("1/50")
    (Fraction(1, 40), Fraction(1, 100), Fraction(1, 50))
    """
    fraction: Fraction | None = None
    if isinstance(value, (str, int, float, Fraction)) and not isinstance(value, bool):
        text = str(value).strip()
        try:
            fraction = Fraction(text[:-1].strip()) / 100 if text.endswith("%") else Fraction(text)
        except (ValueError, ZeroDivisionError):
            fraction = None
    if fraction is None or not 0 < fraction <= 1:
        raise ConfigError(
            f"sample={value!r} is not a fraction of the input.",
            hint='More than 0 and at most everything: "1%", 0.01, "1/100", "100%".',
            value=value,
        )
    return fraction


def sample_units(units: Sequence[Unit], fraction: str | float | Fraction) -> Sequence[Unit]:
    """A sample of the units' input.

    Parts that may be cut (text, JSON lines, Parquet rows) are cut to a piece of themselves
    unless they are small; parts that may not (binary or compressed files) are kept or left
    out whole, so with few of those the sample is only as near the fraction as they allow.
    Pieces are packed into units no larger than the largest given one.

    Args:
        units: All units, as a source lists them.
        fraction: See :func:`parse_sample`.

    Returns:
        Units in input order, with ids of their own. At least one, and with at least one row
        if the input has any. ``fraction`` 1 gives the units unchanged.

    Raises:
        ConfigError: ``fraction`` is not valid.
    """
    share = parse_sample(fraction)
    if share == 1 or not units:
        return units
    parts = [(part, len(unit.parts) == 1) for unit in units for part in unit.parts]
    target = max(1, round(share * sum(part.size_bytes for part, _ in parts)))
    piece_bytes = min(target, max(_PIECE_BYTES, target // _PIECES))

    # One candidate per part, in an order that only the inputs decide.
    candidates = [i for i, (part, _) in enumerate(parts) if part.size_bytes > 0 and part.stop > part.start]
    if not candidates:
        return make_units([units[0].parts])
    keys = {i: _key(parts[i][0]) for i in candidates}
    candidates.sort(key=lambda i: (keys[i], i))
    seen: Counter[str] = Counter()
    turns = {}
    for i in candidates:
        turns[i] = seen[parts[i][0].path]
        seen[parts[i][0].path] += 1
    candidates.sort(key=turns.__getitem__)  # every file once before any file twice
    # A piece of lines may hold no line start at all; one at the start of a file always does.
    first = next((i for i in candidates if parts[i][0].kind == "bytes" and parts[i][0].start == 0), None)
    if first is not None:
        candidates.remove(first)
        candidates.insert(0, first)

    chosen: dict[int, Part] = {}
    remaining, nearest = target, None
    for i in candidates:
        if chosen and remaining * 8 < piece_bytes:
            break
        part, alone = parts[i]
        whole = part.kind == "file" or (not alone and part.size_bytes * 8 <= target)
        size = part.size_bytes if whole else min(part.size_bytes, max(piece_bytes, math.ceil(share * part.size_bytes)))
        if size > remaining and part.kind == "file":
            if nearest is None or size < parts[nearest][0].size_bytes:
                nearest = i
            continue
        chosen[i] = _cut(part, min(size, remaining), 0 if i == first else keys[i])
        remaining -= chosen[i].size_bytes
        if remaining <= 0:
            break
    # Too little rather than too much, unless one more whole file comes nearer (or nothing fits).
    if nearest is not None and (not chosen or parts[nearest][0].size_bytes < 2 * remaining):
        chosen[nearest] = parts[nearest][0]
    return make_units(_repack([chosen[i] for i in sorted(chosen)], max(unit.size_bytes for unit in units)))


def _key(part: Part) -> int:
    text = f"{part.path}\t{part.start}\t{part.stop}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _cut(part: Part, size: int, key: int) -> Part:
    if size >= part.size_bytes:
        return part
    if part.kind == "rows":
        # The head of the row range: pages of a row group can only be read in order.
        rows = part.stop - part.start
        taken = max(1, round(Fraction(rows * size, part.size_bytes)))
        return part._replace(stop=part.start + taken, size_bytes=max(1, round(Fraction(part.size_bytes * taken, rows))))
    start = part.start + key % (part.size_bytes - size + 1)
    return part._replace(start=start, stop=start + size, size_bytes=size)


def _repack(parts: Sequence[Part], unit_bytes: int) -> list[list[Part]]:
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        if not groups or size + part.size_bytes > unit_bytes or len(groups[-1]) >= _UNIT_PARTS:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size_bytes
    return groups
