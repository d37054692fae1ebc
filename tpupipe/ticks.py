"""The times of a schedule: reading, truncating and counting them. All in UTC, to the minute, and pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tpupipe.errors import UsageError

_EVERY = re.compile(r"([1-9]\d{0,5})(m|h|d)\Z")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOST_TICKS = 10_000


def parse_tick(text: str) -> datetime:
    """The logical time of a tick: a date, or a date and a time to the minute; UTC unless an offset is given.

    Raises:
        UsageError: It is no such time, or has seconds.

    >>> tick_text(parse_tick("2026-11-30T03:00+01:00")), tick_text(parse_tick("2026-11-30"))
    ('2026-11-30T02:00', '2026-11-30T00:00')
    """
    try:
        found = datetime.fromisoformat(text.strip())
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        if not found.second and not found.microsecond:
            return found
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"{text!r} is not the time of a tick; allowed: a date, or a date and a time to the minute, UTC unless an offset "
        "is given.",
        hint="2026-11-30, 2026-11-30T02:00, 2026-11-30T02:00+01:00.",
        tick=text,
    )


def tick_text(tick: datetime) -> str:
    """The one spelling of a tick, which sorts as time does: ``2026-11-30T02:00``."""
    return tick.strftime("%Y-%m-%dT%H:%M")


def parse_every(text: str) -> timedelta:
    """The interval of a schedule.

    Raises:
        UsageError: It is not a whole number of minutes, hours or days.

    >>> parse_every("90m"), parse_every("1d")
    (datetime.timedelta(seconds=5400), datetime.timedelta(days=1))
    """
    match = _EVERY.match(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an interval; allowed: 15m, 1h, 1d and the like.", every=text)
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def truncated(now: datetime, every: timedelta) -> datetime:
    """The tick that ``now`` belongs to: the last whole interval, counted from 1970-01-01 UTC.

    >>> tick_text(truncated(datetime(2026, 11, 30, 2, 17, tzinfo=UTC), timedelta(hours=1)))
    '2026-11-30T02:00'
    """
    return now - (now - _EPOCH) % every


def refuse_future(tick: datetime, now: datetime, asked: str) -> None:
    """Refuses a tick whose time is yet to come. A clock that is behind is no excuse: ticks are to the minute.

    Args:
        tick: The (last) tick that was asked for.
        now: Now.
        asked: What was typed, for the message.

    Raises:
        UsageError: It is after now.
    """
    if tick > now:
        raise UsageError(
            f"{asked} reaches into the future: it is {tick_text(now)} UTC. A tick that was run before its time would be "
            "complete without what comes until then.",
            tick=tick_text(tick),
        )


def parse_range(text: str, every: timedelta, now: datetime) -> list[datetime]:
    """The ticks of ``FROM..TO``, both included, in order.

    Raises:
        UsageError: It is no range, is empty, too long, or reaches into the future.

    >>> now = datetime(2026, 12, 24, tzinfo=UTC)
    >>> [tick_text(t) for t in parse_range("2026-11-29..2026-11-30", timedelta(days=1), now)]
    ['2026-11-29T00:00', '2026-11-30T00:00']
    """
    begin, dots, end = text.partition("..")
    if not dots:
        raise UsageError(f"{text!r} is not a range of ticks.", hint="FROM..TO: 2026-11-01..2026-11-30.", backfill=text)
    first, last = parse_tick(begin), parse_tick(end)
    count = (last - first) // every + 1
    if last < first or count > MOST_TICKS:
        raise UsageError(
            f"--backfill {text} has {max(count, 0)} ticks; allowed: 1 to {MOST_TICKS}.",
            hint="FROM comes first; --every sets the interval.",
            backfill=text,
        )
    refuse_future(last, now, f"--backfill {text}")
    return [first + number * every for number in range(count)]
