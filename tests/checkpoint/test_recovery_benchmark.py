"""What ``benchmarks/recovery.py`` makes of its numbers."""

from __future__ import annotations

import pytest

from benchmarks.recovery import met, table

RESULT = {
    "ours_s": 4.5,
    "peer_s": 36.0,
    "ratio": 0.125,
    "parts": {"ours": {"detect": 4.5}, "peer": {"detect_stop_start": 36.0}},
    "each": {"ours": [4.5], "peer": [36.0]},
    "compiled_anew": 0,
    "slice": "v6e 2x4, 2 hosts, faked",
}


@pytest.mark.parametrize(
    ("ratio", "anew", "ratio_met", "anew_met"),
    [
        (0.125, 0, True, True),
        (0.5, 0, True, True),
        (0.501, 0, False, True),
        (0.4, 1, True, False),
        (2.0, 2, False, False),
    ],
)
def test_what_is_not_met_is_told(ratio, anew, ratio_met, anew_met):
    """At most half of plain Ray's time, and no process that compiled again: a verdict each, by name and in the table."""
    result = {**RESULT, "ratio": ratio, "compiled_anew": anew}
    assert met(result) == {"ratio": ratio_met, "compiled_anew": anew_met}
    verdicts = {line.split()[0]: line.rpartition(": ")[2] for line in table(result).splitlines() if "wanted:" in line}
    said = {True: "met", False: "NOT met"}
    assert verdicts == {"ratio": said[ratio_met], "compiled_anew": said[anew_met]}
