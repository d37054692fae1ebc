"""Times of a schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tpupipe.errors import UsageError
from tpupipe.ticks import parse_every, parse_range, parse_tick, refuse_future, tick_text, truncated

NOW = datetime(2026, 11, 30, 9, 41, 12, 345, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "tick"),
    [
        ("2026-11-30", "2026-11-30T00:00"),
        ("2026-11-30T02:00", "2026-11-30T02:00"),
        ("2026-11-30 02:00:00Z", "2026-11-30T02:00"),
        ("2026-11-30T02:00+05:30", "2026-11-29T20:30"),
        ("20261130T0200", "2026-11-30T02:00"),
    ],
)
def test_a_tick_has_one_spelling(text, tick):
    """UTC to the minute, whatever was typed; it reads back as itself."""
    assert tick_text(parse_tick(text)) == tick
    assert tick_text(parse_tick(tick)) == tick


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "2026-11-30T02:00:30", "2026-11-30T25:00", "1"])
def test_what_is_no_tick_is_refused(text):
    """With the value and what is allowed; seconds are not cut off silently."""
    with pytest.raises(UsageError, match="not the time of a tick") as caught:
        parse_tick(text)
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("every", "tick"),
    [("1m", "2026-11-30T09:41"), ("15m", "2026-11-30T09:30"), ("1h", "2026-11-30T09:00"), ("1d", "2026-11-30T00:00")],
)
def test_now_belongs_to_the_last_whole_interval(every, tick):
    """All starts within one interval are the same tick."""
    assert tick_text(truncated(NOW, parse_every(every))) == tick
    assert truncated(truncated(NOW, parse_every(every)), parse_every(every)) == truncated(NOW, parse_every(every))


@pytest.mark.parametrize("text", ["", "0h", "1.5h", "-1d", "1w", "daily", "1", "h"])
def test_what_is_no_interval_is_refused(text):
    """Whole minutes, hours or days."""
    with pytest.raises(UsageError, match="15m, 1h, 1d"):
        parse_every(text)


def test_a_range_has_both_ends_in_order():
    """From the first on in steps; the end counts if a step falls on it."""
    day = timedelta(days=1)
    assert [tick_text(t) for t in parse_range("2026-11-28T02:00..2026-11-30T02:00", day, NOW)] == [
        "2026-11-28T02:00",
        "2026-11-29T02:00",
        "2026-11-30T02:00",
    ]
    assert [tick_text(t) for t in parse_range("2026-11-29T03:00..2026-11-30T02:00", day, NOW)] == ["2026-11-29T03:00"]
    assert len(parse_range("2026-11-30..2026-11-30", day, NOW)) == 1


def test_a_tick_may_be_now_but_not_later():
    """The message has what was typed and what time it is."""
    refuse_future(truncated(NOW, timedelta(minutes=1)), NOW, "--as-of")
    refuse_future(NOW, NOW, "--as-of")
    with pytest.raises(UsageError, match=r"^--as-of X reaches into the future: it is 2026-11-30T09:41 UTC"):
        refuse_future(NOW + timedelta(minutes=1), NOW, "--as-of X")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-11-30", "not a range"),
        ("2026-11-30..2026-11-29", "0 ticks"),
        ("1990-01-01..2026-11-30", "ticks"),
        ("2026-11-29..2026-12-01", "future"),
        ("..2026-11-30", "not the time of a tick"),
    ],
)
def test_what_is_no_range_is_refused(text, said):
    """Empty, endless, or reaching into the future, where a tick would be closed before its time."""
    with pytest.raises(UsageError, match=said):
        parse_range(text, timedelta(hours=1), NOW)
