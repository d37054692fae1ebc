"""Checkpoints without JAX for what only looks at objects, and processes with a number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.places import Place
from tpupipe.checkpoint.commit import Commit, Leaf, SavedObject
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Fence
from tpupipe.store.objects import Store, crc32c_of
from tpupipe.store.wiring import process_environment

if TYPE_CHECKING:
    from tpupipe.checkpoint.saver import Saver

STAGE = "lm"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def file_store(file_place: Place) -> Store:
    """An empty store in a folder."""
    return file_place.open()


# -- checkpoints that look like real ones -------------------------------------------------------


@dataclass(frozen=True)
class Shelf:
    """Puts checkpoints into a store as a saver would, and damages them."""

    store: Store
    paths: RunPaths = RunPaths("job", "run")  # noqa: RUF009 - frozen

    def arrays(self, step: int, epoch: int = 1, restart: int = 0) -> dict[str, bytes]:
        """Writes the array files of a step; gives name in the checkpoint's folder -> content."""
        folder = self.paths.checkpoint(STAGE, step=step, epoch=epoch, restart=restart)
        contents = {f"arrays/d/{part}": f"{part} of {step}-{epoch}".encode() * 50 for part in ("a", "b")}
        for name, data in contents.items():
            self.store.create(f"{folder}/{name}", data)
        return contents

    def put(self, step: int, epoch: int = 1, restart: int = 0) -> str:
        """Writes a committed checkpoint; gives its folder."""
        return self.record(self.arrays(step, epoch, restart), step, epoch, restart)

    def record(self, contents: dict[str, bytes], step: int, epoch: int = 1, restart: int = 0) -> str:
        """Commits the arrays that were written; gives the folder."""
        objects = tuple(SavedObject(n, len(d), crc32c_of(d)) for n, d in contents.items())
        commit = Commit(step, epoch, "arrays", objects, (Leaf("['w']", (2, 3), "float32"),), step * 11)
        folder = self.paths.checkpoint(STAGE, step=step, epoch=epoch, restart=restart)
        self.store.create(f"{folder}/COMMIT.json", commit.to_json())
        return folder

    def lease(self, epoch: int) -> None:
        """Takes the run, after everything that was written before by the store's clock, and before all that follows."""
        self._moment()
        self.store.create(self.paths.lease(epoch), b"{}")
        self._moment()

    def put_late(self, step: int, epoch: int = 1) -> str:
        """A driver that is stopped between its last look at the lease and its record, while the next one takes over."""
        contents = self.arrays(step, epoch)
        self.lease(epoch + 1)
        return self.record(contents, step, epoch)

    def _moment(self) -> None:
        """Returns when the store's clock has moved on: that of a file system may stand for some milliseconds."""
        began_s = self.store.put("clock", b"").updated_s
        while self.store.put("clock", b"").updated_s <= began_s:
            time.sleep(0.001)
        self.store.delete("clock")

    def damage(self, folder: str, how: str) -> None:
        """Damages one object of a checkpoint."""
        name = f"{folder}/arrays/d/a"
        data = self.store.read(name)
        match how:
            case "deleted":
                self.store.delete(name)
            case "truncated":
                self.store.put(name, data[:-7])
            case "flipped":
                self.store.put(name, bytes([data[0] ^ 1]) + data[1:])
            case "record cut":
                record = self.store.read(f"{folder}/COMMIT.json")
                self.store.put(f"{folder}/COMMIT.json", record[: len(record) // 2])
            case "record of another":
                record = self.store.read(f"{folder}/COMMIT.json")
                self.store.put(f"{folder}/COMMIT.json", record.replace(b'"step": ', b'"step": 9'))

    def names(self) -> list[str]:
        """Every object of the store."""
        return [info.name for info in self.store.list()]


@pytest.fixture
def shelf(store: Store) -> Shelf:
    """Checkpoints on each backend."""
    return Shelf(store)


@pytest.fixture
def file_shelf(file_store: Store) -> Shelf:
    """Checkpoints in a folder."""
    return Shelf(file_store)


# -- savers ---------------------------------------------------------------------------------------


@pytest.fixture
def make_saver() -> Iterator[Callable[..., Saver]]:
    """Savers of one process; Orbax's threads are ended."""
    from tpupipe.checkpoint.saver import Saver, SaveTarget

    made = []

    def make(
        store: Store, *, restart: int = 0, epoch: int = 1, keep: int = 3, committed: list[int] | None = None
    ) -> Saver:
        paths = RunPaths("job", "run")
        target = SaveTarget(store, paths, STAGE, Fence(store, paths, epoch), restart, keep, timeout_s=30)
        told = committed if committed is not None else []
        saver = Saver(
            target, primary=True, combine=lambda step: step * 11, on_commit=lambda commit, _: told.append(commit.step)
        )
        made.append(saver)
        return saver

    yield make
    for saver in made:
        saver._checkpointer.close()


# -- processes with so many devices -------------------------------------------------------------

_PRELUDE = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.places import Place
from tpupipe.checkpoint.commit import Commit
from tpupipe.checkpoint.restore import restore, restore_params
from tpupipe.checkpoint.saver import Saver, SaveTarget
from tpupipe.checkpoint.verify import newest_intact, list_checkpoints
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import parse_faults
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Fence
from tpupipe.store.objects import open_store

paths = RunPaths("job", "run")
devices = len(jax.devices())

def saver(store, restart=0, epoch=1, keep=3):
    target = SaveTarget(store, paths, "lm", Fence(store, paths, epoch), restart, keep, 30)
    return Saver(target, primary=True, combine=lambda step: step * 11, on_commit=lambda commit, seconds: None)

def placed(tree):
    # Rows over all devices where they divide, whole elsewhere.
    mesh = Mesh(np.array(jax.devices()), ("data",))
    def place(leaf):
        spec = P("data") if leaf.ndim and leaf.shape[0] % devices == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))
    return jax.tree.map(place, tree)

def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

def tree(scale=1):
    w = jnp.arange(32, dtype=jnp.float32).reshape(8, 4) * scale
    return {"params": {"w": w, "b": jnp.full((3,), scale, jnp.bfloat16)}, "opt": {"m": w * 0.5}, "n": jnp.int32(scale)}
"""


def python(code: str, devices: int = 1, endpoint: str | None = None, *, check: bool = True) -> str:
    """Runs code in a process with so many CPU devices; gives what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            **process_environment(endpoint),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": str(ROOT),
        },
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs code in a process with so many CPU devices; gives what it prints."""
    return python
