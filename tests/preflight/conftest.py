"""A job and a configuration in which nothing is wrong, to break one thing at a time."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tpupipe.cli import app
from tpupipe.config import Config
from tpupipe.job import Job
from tpupipe.preflight.context import CheckContext

JOB = """
import numpy as np
import threading
from tpupipe import Every, Files, Infer, Job, Preprocess, Train

LOCK = threading.Lock()

def tokenize(batch):
    return {"tokens": np.stack([np.frombuffer(t.encode()[:4], np.uint8).astype(np.int32) for t in batch["text"]])}

def words(batch):
    return {"word": np.array([t[:4] for t in batch["text"]], object)}

def broken(batch):
    return {"tokens": batch["no such column"]}

def by_file(batch):
    name = "first" if "a.txt" in batch["path"][0] else "other"
    return {name: np.ones((len(batch["path"]), 4), np.int32)}

def locked(batch):
    with LOCK:
        return tokenize(batch)

def init(key):
    return {"params": {"w": np.zeros(4)}}

def step(state, batch):
    return state, {"loss": 0.0}

def apply(params, batch):
    return {"sum": batch["tokens"].sum(1)}

def build():
    source = Files(PATTERN, unit_bytes=1024)
    return Job("job", [
        Preprocess("tokens", source, map=MAP),
        Train("lm", data="tokens", init=init, step=step, batch_size=32, steps=40, checkpoint=Every(steps=10)),
        Infer("out", data="tokens", params="lm", apply=apply, batch_rows=16),
    ])
"""

WORLD: dict[str, Any] = {
    "store": {"uri": "gs://bucket/runs"},
    "cluster": {"kind": "tpu", "generation": "v6e", "topology": "4x4", "zone": "us-central1-b"},
}


@dataclass(frozen=True)
class World:
    """A folder with a job, its input and its configuration.

    Args:
        folder: The current folder of the command.
        uri: The store.
    """

    folder: Path
    uri: str

    def job(self, mapping: str = "tokenize", *, before: str = "", files: dict[str, str] | None = None) -> str:
        """Writes a job module of its own and its input; gives the module's name."""
        name = f"job_{uuid.uuid4().hex[:8]}"
        inputs = self.folder / f"{name}-inputs"
        inputs.mkdir()
        for file, text in ({"a.txt": "abcdefgh\n", "b.txt": "ijklmnop\n"} if files is None else files).items():
            (inputs / file).write_text(text)
        text = JOB.replace("PATTERN", repr(f"{inputs}/*.txt")).replace("MAP", mapping)
        (self.folder / f"{name}.py").write_text(before + text)
        return name

    def check(self, job: str, *arguments: str, sets: tuple[str, ...] = ()) -> Result:
        """Runs ``tpupipe check`` in this process."""
        settings = [f"store.uri={self.uri}", *sets]
        return self.run("check", job, "-c", "world.yaml", *(p for s in settings for p in ("--set", s)), *arguments)

    def run(self, *arguments: str) -> Result:
        """Runs a command in this process."""
        return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str) -> World:
    """The embedded server as an emulator that the environment names: to the project, a bucket in us-central1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = ", ".join(f"{key}: {value}" for key, value in WORLD["cluster"].items())
    (tmp_path / "world.yaml").write_text(f"store: {{uri: 'gs://bucket/runs'}}\ncluster: {{{cluster}}}\n")
    return World(tmp_path, f"gs://bucket-{uuid.uuid4().hex[:12]}/runs")


@pytest.fixture
def context() -> Callable[..., CheckContext]:
    """Makes a context of a configuration with some sections changed, and a job."""

    def make(job: Job | None = None, **changes: Any) -> CheckContext:
        named = [
            name
            for name, value in changes.items()
            if name in Config.model_fields and (name != "store" or isinstance(value, dict))
        ]
        sections = {name: changes.pop(name) for name in named}
        raw = {
            name: {**WORLD.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in sections.items()
        }
        return replace(CheckContext(Config.model_validate({**WORLD, **raw}), job), **changes)

    return make
