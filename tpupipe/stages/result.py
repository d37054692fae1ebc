"""What a stage gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageResult:
    """What a stage did. Units are work units, or steps for training.

    Args:
        status: ``done``; the run's result also knows ``failed``, ``interrupted`` and ``pending``.
        done: Units committed, over all attempts.
        total: Units in all.
        resumed_from: Units that were committed before this attempt; ``None`` where none were.
        rows_in: Input rows (training: rows fed, real ones).
        rows_out: Output rows.
        rows_dropped: Rows left out on purpose (a training tail).
        rows_quarantined: Rows set aside with an error record each.
        rows_truncated: Rows of which only the beginning was fed to the model.
        seconds: By kind, this attempt's.
        metrics: Last metrics of training; shapes and padding of inference.
        params_digest: sha256 over the parameters' bytes, training only.
        sample_digest: Hash over what was fed in which place, training only.
        uri: Where the outputs are.
    """

    status: str
    done: int
    total: int
    resumed_from: int | None
    rows_in: int
    rows_out: int
    uri: str
    seconds: Mapping[str, float]
    rows_dropped: int = 0
    rows_quarantined: int = 0
    rows_truncated: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    params_digest: str | None = None
    sample_digest: str | None = None
    checkpoint: str | None = None
