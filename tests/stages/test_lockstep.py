"""Two processes hold one model together: same outputs as one, and a batch that is not the same is noticed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


def together(strayed: int = -1) -> list[dict[str, Any]]:
    """What the engines of two processes with two devices each gave back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stages.lockstep_process", address, str(process), str(strayed)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_each_process_gets_all_outputs_of_a_model_that_no_process_has_whole() -> None:
    """4 devices, fsdp: each holds a quarter of the 32 weights; batches of 6 are filled up to 8 rows."""
    one, other = together()
    assert one == other
    assert (one["devices"], one["local"]) == (4, 32 // 4)
    weights = np.arange(32, dtype=np.float32).reshape(4, 8)
    for (start, rows), got in zip(((0, 10), (7, 3), (20, 5)), one["got"], strict=True):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + start
        np.testing.assert_allclose(np.array(got["rows"]), x @ weights)
    assert one["got"][0]["seen"] == [8.0] * 8 + [2.0] * 2, "the tail's padding is masked"


def test_another_batch_on_one_host_is_an_error_on_both() -> None:
    """The third window begins with another number on process 1."""
    for said in together(strayed=1):
        first, second, third = said["got"]
        assert "rows" in first
        assert "rows" in second
        assert third["error"] == "OutOfStepError"
        assert "u20" in third["message"]
