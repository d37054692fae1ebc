"""A job of one Preprocess stage: by unit, or with ``whole`` as a dataset."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

import tpupipe
from tests.e2e import small
from tpupipe import JsonLines, Preprocess


class Params(BaseModel):
    inputs: str
    whole: bool = False


def as_it_is(rows: Any) -> Any:
    return rows


def build(cfg: Params) -> tpupipe.Job:
    source = JsonLines(cfg.inputs, unit_bytes=300)
    how = {"dataset": as_it_is} if cfg.whole else {"map": small.keep_ids}
    return tpupipe.Job("shards", [Preprocess("ids", source=source, chunk_rows=8, **how)])
