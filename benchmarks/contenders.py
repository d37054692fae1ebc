"""The contenders of ``infer.py``: each encodes the same rows once, or is killed on its way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.common import LOCAL_ROOT, REPOSITORY, SLICE, BenchmarkError, World, last_json, run_python
from benchmarks.encoder import JOB, STAGE, make_weights, save_weights
from benchmarks.rows import Encoded, RowsWork, encoded, last_written_s, parquet_files, read_calls, write_rows
from tpupipe.ledger.events import read_events
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

STORE_URI = "gs://bench/runs"
POLL_S = 0.02


class Contenders:
    """Runs them in one world.

    Args:
        work: What they do.
        place: The slice and the store; rows and weights are written into its folder.
    """

    def __init__(self, work: RowsWork, place: World) -> None:
        self.work = work
        self.place = place
        self._rows = place.base / "rows"
        self._weights = place.base / "weights.npz"
        write_rows(work, self._rows)
        self._weights.write_bytes(save_weights(make_weights(work.seed)))

    # -- tpupipe --------------------------------------------------------------------------------

    def ours(self, name: str, timeout_s: float) -> tuple[Encoded, dict[str, Any]]:
        """Runs the job as a user does; gives its stage's result, too."""
        began = time.time()
        [output] = run_python([self._our_command(name)], timeout_s=timeout_s, variables=[self._our_variables()])
        total_s = time.time() - began
        stage = last_json(output)["stages"][STAGE]
        events = read_events(open_store(STORE_URI, endpoint=self.place.endpoint), RunPaths(JOB, name))
        compiled = [e for e in events if e["kind"] == "compiling" and e["time_s"] >= began]
        if not compiled:
            raise BenchmarkError(f"Run {name} compiled nothing.")
        ready = float(np.mean([e["time_s"] for e in compiled]))
        measured = Encoded(
            seconds=last_written_s(self.our_output(name)) - ready,
            startup_s=ready - began,
            compile_s=float(np.mean([e["seconds"] for e in compiled])),
            compilations=int(stage["metrics"]["compilations"]),
            padding=stage["metrics"]["padding_share"],
            total_s=total_s,
        )
        return measured, stage

    def our_output(self, name: str) -> Path:
        """The folder of a run's units, as the embedded Cloud Storage keeps it."""
        root = self.place.base / LOCAL_ROOT / "gcs" / STORE_URI.removeprefix("gs://")
        return root / RunPaths(JOB, name).units(STAGE)

    def kill_ours(self, name: str, share: float, timeout_s: float) -> int:
        """Kills the driver once ``share`` of the units are committed; how many are then."""
        wanted, folder = share * self.work.units, self.our_output(name)
        kill_at(
            self._our_command(name),
            lambda: folder.exists() and len(parquet_files(folder)) >= wanted,
            timeout_s=timeout_s,
            variables=self._our_variables(),
        )
        return len(parquet_files(folder))

    def _our_command(self, name: str) -> Sequence[str]:
        sets = {
            "store.uri": STORE_URI,
            "job.inputs": f"{self._rows}/*.parquet",
            "job.weights": str(self._weights),
            "job.batch_tokens": self.work.batch_tokens,
        }
        overrides = [argument for key, value in sets.items() for argument in ("--set", f"{key}={value}")]
        command = ["run", "benchmarks.encoder", "-c", "configs/local.yaml", "--run", name, "--json", *overrides]
        return ["-c", "from tpupipe.cli import app; app()", *command]

    def _our_variables(self) -> Mapping[str, str]:
        return {"TPUPIPE_ROOT": str(self.place.base)}

    # -- the others ------------------------------------------------------------------------------

    def padded(self, name: str, timeout_s: float) -> Encoded:
        """Ray Data's recipe, padded to the longest length."""
        return self._ray("ray_padded", name, timeout_s)

    def bucketed(self, name: str, timeout_s: float, checkpoint: Path | None = None) -> Encoded:
        """Ray Data with buckets by hand, with or without its checkpoint."""
        return self._ray("ray_bucketed", name, timeout_s, "by-hand", *([str(checkpoint)] if checkpoint else []))

    def packed(self, name: str, timeout_s: float) -> Encoded:
        """The same with tpupipe's packer inside its class."""
        return self._ray("ray_bucketed", name, timeout_s, "packed")

    def kill_bucketed(self, name: str, share: float, timeout_s: float, checkpoint: Path) -> int:
        """Kills the driver once ``share`` of the rows came out of the model; how many its checkpoint holds then."""
        folder, wanted = self.folder(name), share * self.work.rows
        kill_at(
            self._ray_command("ray_bucketed", name, "by-hand", str(checkpoint)),
            lambda: sum(call["rows"] for call in read_calls(folder / "calls")[1]) >= wanted,
            timeout_s=timeout_s,
        )
        kept = [f for f in parquet_files(checkpoint) if not f.name.endswith(".pending.parquet")]
        return sum(pq.read_metadata(file).num_rows for file in kept)

    def bare(self, name: str, timeout_s: float) -> Encoded:
        """The loop with nothing around it: one process per host, with the slice's variables."""
        folder = self.folder(name)
        given = [self.work.to_json(), str(self._rows), str(self._weights), str(folder)]
        commands = [
            ["-m", "benchmarks.peers.bare_encoder", *given, str(rank), str(SLICE.hosts)] for rank in range(SLICE.hosts)
        ]
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={SLICE.devices_per_host}",
            "OMP_NUM_THREADS": "1",  # as Ray gives its workers
        }
        began = time.time()
        run_python(commands, timeout_s=timeout_s, variables=[variables] * SLICE.hosts)
        return encoded(folder / "calls", began, time.time(), last_written_s(folder / "out"))

    def folder(self, name: str) -> Path:
        """Of a peer's run; its output is in ``out``."""
        return self.place.base / name

    def _ray(self, peer: str, name: str, timeout_s: float, *more: str) -> Encoded:
        folder = self.folder(name)
        began = time.time()
        run_python([self._ray_command(peer, name, *more)], timeout_s=timeout_s)
        return encoded(folder / "calls", began, time.time(), last_written_s(folder / "out"))

    def _ray_command(self, peer: str, name: str, *more: str) -> Sequence[str]:
        given = [self.work.to_json(), str(self._rows), str(self._weights), str(self.folder(name))]
        return ["-m", f"benchmarks.peers.{peer}", *given, self.place.address, *more]


def kill_at(
    command: Sequence[str], reached: Callable[[], bool], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Runs a Python process and kills it with SIGKILL, and its children, when ``reached``.

    Raises:
        BenchmarkError: It ended before that, or it was not reached in time (it is killed then, too).
    """
    ends = time.monotonic() + timeout_s
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and scripts
            [sys.executable, *command],
            cwd=REPOSITORY,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not reached():
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    what = f"ended with {process.returncode}" if process.returncode is not None else "took too long"
                    raise BenchmarkError(f"A process that was to be killed on its way {what}:\n{log.read()[-2000:]}")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
