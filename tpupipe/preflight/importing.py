"""Imports a job's module in a process of its own, and tells whether that woke JAX.

``python -m tpupipe.preflight.importing`` is the child: module and Python path as JSON on stdin, the report on the last
line of stdout. A process of its own, because JAX cannot be put back to sleep, and with ``JAX_PLATFORMS=cpu``, because a
module that does touch it must not take this machine's TPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass

IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What importing a module did.

    Args:
        module: Its name.
        seconds: How long it took.
        jax_awake: Whether JAX had looked for devices afterwards.
        jax_imported: Whether JAX itself was imported; that alone is harmless.
        error: Why it could not be imported; empty if it could.
        hint: What to do about that.
        usage: Whether the error is that there is no such module, or no ``build`` in it.
    """

    module: str
    seconds: float
    jax_awake: bool
    jax_imported: bool
    error: str = ""
    hint: str = ""
    usage: bool = False


def import_alone(module: str, *, timeout_s: float = IMPORT_TIMEOUT_S) -> ImportReport:
    """Imports a job's module in a process of its own, with this process's Python path and working directory.

    Args:
        module: As for ``python -m``.
        timeout_s: Seconds after which the import counts as hanging, which is a report too.
    """
    began = time.monotonic()
    request = json.dumps({"module": module, "path": sys.path})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tpupipe.preflight.importing"],
            input=request,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        hint = "Move what waits or computes into build, init, step, apply or map."
        return ImportReport(
            module, timeout_s, False, False, f"Importing {module} did not end in {timeout_s:g} s.", hint
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        tail = " ".join(done.stderr.splitlines()[-1:])
        return ImportReport(
            module,
            time.monotonic() - began,
            False,
            False,
            f"The process that imported {module} ended with status {done.returncode}: {tail}",
            "A module must not end the process or crash it when it is imported.",
        )
    return ImportReport(**json.loads(lines[-1]))


def _child() -> None:
    request = json.load(sys.stdin)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:] = request["path"]
    from tpupipe.errors import TpupipeError, UsageError
    from tpupipe.resolve import jax_is_awake, load_build

    error, hint, usage = "", "", False
    began = time.monotonic()
    with redirect_stdout(sys.stderr):  # what the module prints is not the report
        try:
            load_build(request["module"])
        except TpupipeError as raised:
            error, hint, usage = raised.message, raised.hint, type(raised) is UsageError
    report = ImportReport(
        request["module"], round(time.monotonic() - began, 3), jax_is_awake(), "jax" in sys.modules, error, hint, usage
    )
    sys.stdout.write(f"\n{json.dumps(asdict(report))}\n")


if __name__ == "__main__":
    _child()
