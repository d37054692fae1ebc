"""When a stage of units says how far it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tpupipe.data.chunks import UnitFooter
from tpupipe.stages.progress import UnitProgress


def test_news_are_told_and_silence_is_once_a_minute() -> None:
    """Nothing is repeated every two seconds; what is done, the rate and the rest are told."""
    said: list[str] = []
    now = [0.0]
    log = SimpleNamespace(emit=lambda kind, text, **_: said.append(f"{kind} {text}"))
    run: Any = SimpleNamespace(log=log)
    progress = UnitProgress(run, "scores", 4, clock=lambda: now[0])
    done: Any = SimpleNamespace(footer=UnitFooter("u", rows=50))

    for second in range(1, 131):
        now[0] = second
        if second in (100, 101):
            progress.add(done)
        progress.tell()
    assert said == [
        "progress scores: 0 of 4 units",
        "progress scores: 1 of 4 units, 50 rows, 0 rows/s, about 5 min left",
        "progress scores: 2 of 4 units, 100 rows, 1 rows/s, about 2 min left",
    ]
