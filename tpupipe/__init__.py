"""Checkpointed TPU batch pipelines on Ray.

A job is a module with ``build(config) -> Job``; where it runs is configuration. ``tpupipe run MODULE -c FILE`` and
``python -m MODULE -c FILE`` (through ``main``) are the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpupipe.checkpoint.policy import Every, OnPreemption
from tpupipe.data.buckets import Buckets
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.sources import Files, JsonLines, Parquet
from tpupipe.errors import TpupipeError
from tpupipe.job import Infer, Job, Preprocess, Quarantine, Train

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "Every",
    "Files",
    "Infer",
    "Job",
    "JsonLines",
    "OnPreemption",
    "Parquet",
    "Preprocess",
    "Pretrained",
    "Quarantine",
    "TpupipeError",
    "Train",
    "main",
]


def main(build: Callable[..., Job]) -> None:
    """Command line of a job module: ``if __name__ == "__main__": tpupipe.main(build)``.

    Takes the options of ``tpupipe run`` and ends the process with its exit status.

    Args:
        build: ``build(config) -> Job``; ``config`` is the ``job:`` section, typed by the pydantic model that the
            parameter is annotated with. A job without parameters takes none.
    """
    from tpupipe.cli import job_main  # typer and pydantic are not needed to declare a job

    job_main(build)


def __dir__() -> list[Any]:
    return sorted(__all__)
