"""The parity check in a process of its own: JAX runs there on the CPU, and the caller's stays asleep.

``python -m tpupipe.preflight.parity_child`` is the child: the request as JSON on stdin, the findings on the last line of
stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from tpupipe.config import Config, child_variables
from tpupipe.preflight.findings import Finding, Status

PARITY_TIMEOUT_S = 1800.0
_TAIL = 8  # lines of stderr that are told of a child that died


def parity_alone(
    module: str, config: Config, input_options: Mapping[str, Any], *, timeout_s: float = PARITY_TIMEOUT_S
) -> list[Finding]:
    """As ``parity_findings``, of a job's module.

    Args:
        module: As for ``python -m``.
        config: The configuration.
        input_options: fsspec's options for opening inputs.
        timeout_s: Seconds after which the comparison is given up, which is a failure.
    """
    request = {
        "module": module,
        "path": sys.path,
        "config": config.model_dump_json(),
        "input_options": dict(input_options),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tpupipe.preflight.parity_child"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=child_variables({"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}),
        )
    except subprocess.TimeoutExpired:
        hint = "parity.batches and parity.rows make it smaller; a smaller model shows the same operations."
        return [Finding("parity.job", Status.FAILURE, f"The comparison did not end in {timeout_s:g} s.", hint)]
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.splitlines()[-_TAIL:])
        return [
            Finding("parity.job", Status.FAILURE, f"The comparing process ended with status {done.returncode}:\n{tail}")
        ]
    return [Finding(**{**each, "status": Status(each["status"])}) for each in json.loads(lines[-1])]


def _child() -> None:
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    from tpupipe.errors import TpupipeError
    from tpupipe.preflight.parity import parity_findings
    from tpupipe.resolve import load_build, rebuilt

    with redirect_stdout(sys.stderr):  # what the job prints is no finding
        try:
            config = Config.model_validate_json(request["config"])
            job = rebuilt(load_build(request["module"]), config)
            found = parity_findings(job, config, input_options=request["input_options"])
        except TpupipeError as error:
            found = [Finding("parity.job", Status.FAILURE, error.message, error.hint)]
    sys.stdout.write(f"\n{json.dumps([asdict(each) for each in found], default=str)}\n")


if __name__ == "__main__":
    _child()
