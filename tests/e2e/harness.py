"""What end-to-end tests run with: a world (cluster and store) and a runner of the small job in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from tests.e2e import small
from tests.processes import until
from tpupipe.cluster.connect import connected, ship_by_value, warm_cluster
from tpupipe.cluster.fake import FakeClusterState
from tpupipe.cluster.reservation import held_groups
from tpupipe.config import ClusterConfig, Config
from tpupipe.faults.plan import parse_faults
from tpupipe.hardware.slices import SliceSpec
from tpupipe.ledger.events import read_events
from tpupipe.resolve import configured
from tpupipe.run import RunOptions, RunResult, run
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store
from tpupipe.store.wiring import process_environment

ship_by_value(small)

REPOSITORY = Path(__file__).parents[2]

# A slice of two hosts, and two slices of one host each: what placement, resharding and several slices need.
SLICES = (SliceSpec("v6e", "2x4", chips_per_vm=4), SliceSpec("v6e", "2x2", slices=2))

# What the small job feeds by default: ids by step.
ALL_IDS = [list(range(start, start + 10)) for start in range(0, 100, 10)]


@dataclass(frozen=True)
class World:
    """A warm faked cluster and the folder of its local state.

    Args:
        base: The folder that the relative ``store.root`` is in.
        cluster: The cluster.
        endpoint: The embedded Cloud Storage.
    """

    base: Path
    cluster: FakeClusterState
    endpoint: str

    @property
    def root(self) -> Path:
        return self.base / ".tpupipe"

    def command(self, *arguments: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs ``tpupipe`` as a user would, in the repository, against this world."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("tpupipe")), *arguments],
            cwd=REPOSITORY,
            env={**self.environment(), **(more or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    def hosts(self, slice_name: str) -> list[int]:
        """Process ids of the raylets of a slice's hosts now."""
        state = warm_cluster(self.root)
        assert state is not None
        return [pid for host, pid in state.hosts.items() if host.startswith(slice_name + "/")]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TPUPIPE_ROOT": str(self.base)}


def write_ids(folder: Path, rows: int) -> str:
    """Ten files of JSON lines with the ids 0 to ``rows`` - 1, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, ids in enumerate(np.array_split(np.arange(rows), min(10, rows))):
        file = folder / f"part-{part:02d}.jsonl"
        if not file.exists():  # writing it again would make it another input
            file.write_text("".join(json.dumps({"id": int(i)}) + "\n" for i in ids))
    return str(folder / "*.jsonl")


class Runner:
    """Runs the small job; keeps what all runs of one test have in common."""

    def __init__(self, world: World, folder: Path, name: str) -> None:
        self.world = world
        self.folder = folder
        self.name = name

    def config(self, job: Mapping[str, Any], **sections: Any) -> Config:
        rows = job.get("rows", 100)
        parameters = small.Params(inputs=write_ids(self.folder / f"in-{rows}", rows), **job).model_dump()
        cluster = {"kind": "fake", "generation": "v6e", "topology": "2x4", "chips_per_vm": 4, "timeout_s": 120}
        one_process = {"ids": {"concurrency": 1}}  # starting more would take longer than their work
        return Config.model_validate(
            {
                "store": {"uri": "gs://tests/runs", "embedded": True, "root": str(self.world.root)},
                "cluster": {**cluster, **sections.pop("cluster", {})},
                "job": parameters,
                "stages": {**one_process, **sections.pop("stages", {})},
                **sections,
            }
        )

    def __call__(
        self,
        run_name: str,
        *,
        faults: tuple[str, ...] = (),
        job: Mapping[str, Any] | None = None,
        allow_change: bool = False,
        **sections: Any,
    ) -> RunResult:
        config = self.config(job or {}, **sections)
        declared = configured(small.build(small.Params(**config.job)), config)
        return run(declared, config, RunOptions(self.name + run_name, parse_faults(faults), allow_change))

    @property
    def store(self) -> Store:
        return open_store("gs://tests/runs", endpoint=self.world.endpoint)

    def paths(self, run_name: str) -> RunPaths:
        return RunPaths("small", self.name + run_name)

    def events(self, run_name: str, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.store, self.paths(run_name)) if e["kind"] == kind]

    def order(self, run_name: str, job: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Ids by step, as the state of the last checkpoint remembers them."""
        job_parameters = small.Params(inputs="", **(job or {})).model_dump_json()
        arguments = [self.world.endpoint, self.name + run_name, job_parameters]
        done = subprocess.run(  # a process of its own: JAX is not wanted in this one
            [sys.executable, "-m", "tests.e2e.read_order", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **process_environment(self.world.endpoint), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        order: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
        return order

    def outputs(self, run_name: str, stage: str) -> dict[str, list[Any]]:
        """The inference output, read as anybody would: one Parquet data set."""
        import pyarrow.dataset as ds
        from pyarrow.fs import LocalFileSystem

        folder = self.world.root / "gcs" / "tests" / "runs" / self.paths(run_name).units(stage)
        return ds.dataset(str(folder), format="parquet", filesystem=LocalFileSystem()).to_table().to_pydict()


def same_answer(one: RunResult, other: RunResult) -> None:
    for digest in ("params_digest", "sample_digest"):
        assert one.stages["fit"][digest] == other.stages["fit"][digest]
    assert one.status == other.status == "done"


@contextlib.contextmanager
def connection(world: World) -> Iterator[None]:
    """A connection to the warm cluster, as a driver has one."""
    config = ClusterConfig(kind="fake", generation="v6e", topology="2x4", chips_per_vm=4)
    with connected(config, root=world.root, worker_environment={}, say=print):
        yield


def nothing_is_held(world: World) -> None:
    with connection(world):
        # Ray clears a driver's groups after it has noticed its end, and its table follows.
        until(lambda: not held_groups(), told=held_groups)
        until(lambda: ray.available_resources().get("TPU") == 16, told=ray.available_resources)
        assert ray.cluster_resources()["TPU"] == 16
