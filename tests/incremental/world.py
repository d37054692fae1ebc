"""A dataset of ticks without a cluster: the real store, leases, claims, units and manifests; this process is the worker.

``tick_in_child`` is for processes of their own, so that tests can kill them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tpupipe.config import Config
from tpupipe.data.read import read_unit
from tpupipe.data.sources import JsonLines, Source, Unit
from tpupipe.errors import TpupipeError
from tpupipe.faults.driver import armed_driver
from tpupipe.faults.plan import parse_faults
from tpupipe.identity import Identity, settle_identity
from tpupipe.incremental import run_tick
from tpupipe.job import Infer, Job
from tpupipe.run import RunOptions, RunResult
from tpupipe.stages.committed import resume_units
from tpupipe.stages.finished import finished, units_done
from tpupipe.stages.units import UnitTarget, commit_unit, write_manifest
from tpupipe.store.layout import GenerationPaths, TickPaths
from tpupipe.store.lease import Lease, acquire
from tpupipe.store.objects import Store, open_store
from tpupipe.store.owner import Owner
from tpupipe.ticks import parse_tick

STAGE = "scores"


class Quiet:
    def emit(self, *_: object, **__: object) -> None:
        return


@dataclass
class Attempt:
    """As ``tpupipe.run.Attempt``, with the stages' work done here: each unit is committed as it was read."""

    job: Job
    store: Store
    paths: TickPaths
    lease: Lease
    params: str
    before_work: Callable[[], None]
    allow_change: bool
    log: Quiet = field(default_factory=Quiet)
    inputs: Mapping[Source, Sequence[Unit]] = field(default_factory=dict)
    settle_params: Callable[[str, str], None] = lambda _stage, _fingerprint: None

    def execute(self, identity: Identity) -> RunResult:
        settle_identity(self.store, self.paths, identity, allow_change=self.allow_change)
        self.before_work()
        results = {}
        for stage in self.job.stages:
            result = finished(stage, self.store, self.paths)
            results[stage.name] = asdict(result or self._work(stage))
        return self._result(results)

    def complete(self) -> RunResult:
        return self._result({s.name: asdict(finished(s, self.store, self.paths)) for s in self.job.stages})

    def _work(self, stage: Infer) -> Any:
        self.settle_params(stage.name, self.params)
        run = SimpleNamespace(store=self.store, paths=self.paths, lease=self.lease)
        units = self.inputs[stage.data]
        pending, reused = resume_units(run, stage.name, units, self.params)
        target = UnitTarget(self.store, self.paths, stage.name, self.lease.fence, 8, self.params, "code", "1")
        positions = {unit.id: index for index, unit in enumerate(units)}
        fresh = []
        for unit in pending:
            table = read_unit(stage.data, unit)
            fresh.append(commit_unit(target, unit, positions[unit.id], table, rows_in=table.num_rows))
        manifest = write_manifest(run, stage.name, units, [*reused, *fresh], {})
        uri = self.store.uri(self.paths.outputs(stage.name))
        return units_done(manifest, uri, len(reused), SimpleNamespace(rounded=dict))

    def _result(self, stages: Mapping[str, Any]) -> RunResult:
        uri = self.store.uri(self.paths.root)
        return RunResult("job", self.paths.run, uri, "done", self.lease.epoch, stages, tick=self.paths.date)


def apply(_: Any, batch: Any) -> Any:
    return batch


@dataclass
class World:
    """A folder of inputs that grows, and a dataset of what was read from it.

    Args:
        inputs: The folder.
        uri: The store.
        endpoint: Its emulator.
        params: Fingerprint of the parameters.
        width: A parameter of the job.
        model: Where the parameters are said to be.
    """

    inputs: Path
    uri: str
    endpoint: str | None
    params: str = "p1"
    width: int = 1
    model: str = "gs://models/m/a/stages/fit"

    @property
    def store(self) -> Store:
        return open_store(self.uri, endpoint=self.endpoint)

    @property
    def job(self) -> Job:
        source = JsonLines(f"{self.inputs}/*.jsonl", unit_bytes=60)
        return Job("job", [Infer(STAGE, source, params=self.model, init=print, apply=apply)])

    @property
    def config(self) -> Config:
        return Config.model_validate(
            {
                "store": {"uri": self.uri},
                "cluster": {"kind": "gpu", "gpus": 1},
                "mode": "incremental",
                "job": {"width": self.width},
            }
        )

    def generation(self, number: int = 1) -> GenerationPaths:
        return GenerationPaths("job", "nightly", number)

    def tick_paths(self, tick: str, number: int = 1) -> TickPaths:
        return self.generation(number).tick(tick, (STAGE,))

    def tick(
        self, tick: str, *, before_work: Callable[[], None] = lambda: None, faults: Sequence[str] = (), **options: Any
    ) -> RunResult:
        store = self.store

        @contextlib.contextmanager
        def owned(paths: TickPaths, take_over: bool) -> Iterator[Attempt]:
            with acquire(store, paths, Owner.here(), take_over=take_over) as lease:
                yield Attempt(self.job, store, paths, lease, self.params, before_work, asked.allow_change)

        asked = RunOptions("nightly", parse_faults(faults), as_of=parse_tick(tick), **options)
        with armed_driver(asked.faults, None, store, None):
            return run_tick(
                self.job, self.config, asked, store, input_options={}, owned=owned, params_now=lambda _: self.params
            )

    def write(self, name: str, *ids: int) -> Path:
        self.inputs.mkdir(parents=True, exist_ok=True)
        file = self.inputs / name
        file.write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))
        return file

    def rows(self, number: int = 1) -> dict[str, list[int]]:
        """Ids by partition, as anybody would read the table."""
        import pyarrow.dataset as ds

        folder = self.store.uri(self.generation(number).table(STAGE))
        assert folder.startswith("/"), "a folder, to read it without this project"
        found: dict[str, list[int]] = {}
        if not Path(folder).exists():
            return found
        for row in ds.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist():
            found.setdefault(row["date"], []).append(row["id"])
        return {date: sorted(ids) for date, ids in sorted(found.items())}


def tick_in_child(world: World, tick: str, faults: Sequence[str], answer: Path, options: Mapping[str, Any]) -> None:
    """What a process of its own does: one tick; its result, or the error's name, goes to a file."""
    try:
        found = asdict(world.tick(tick, faults=faults, **options))
    except TpupipeError as error:
        found = {"error": type(error).__name__, "exit_status": error.exit_status}
    answer.write_text(json.dumps(found))
