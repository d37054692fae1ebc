"""The small job's model as an incremental job: an ``Infer`` stage whose parameters come from a finished run."""

from __future__ import annotations

from pydantic import BaseModel

import tpupipe
from tests.e2e import small
from tpupipe import Infer, JsonLines


class Params(BaseModel):
    inputs: str
    params: str


def build(cfg: Params) -> tpupipe.Job:
    lm = small.model(small.Params(inputs=cfg.inputs))
    source = JsonLines(cfg.inputs, unit_bytes=300)
    return tpupipe.Job(
        "ticks",
        [Infer("scores", data=source, map=small.keep_ids, params=cfg.params, init=lm.init, apply=lm.apply)],
    )
