"""The job that is measured: ``jobs.stdlib_lm`` without its scoring stage."""

from __future__ import annotations

import tpupipe
from jobs import stdlib_lm
from jobs.stdlib_lm import Params

STAGE = "lm"
DATA = "tokens"
JOB = "bench-lm"


def build(params: Params) -> tpupipe.Job:
    """Declare the job: pack, train."""
    return tpupipe.Job(JOB, stdlib_lm.build(params).stages[:2])
