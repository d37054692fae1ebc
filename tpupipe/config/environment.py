"""The environment variables tpupipe looks at. Nothing else in the package reads any."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

STORAGE_VARIABLES = (
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "GOOGLE_CLOUD_PROJECT",
    "STORAGE_EMULATOR_HOST",
    "TENSORSTORE_GCS_HTTP_URL",
)
"""Variables that decide how storage is reached; every worker needs the same as the driver."""

FAKED_SLICES_VARIABLE = "TPUPIPE_FAKED_SLICES"


@contextlib.contextmanager
def process_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for libraries of this process that read them, and puts back what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def child_variables(changes: Mapping[str, str]) -> dict[str, str]:
    """All variables for a child process: this process's own, with changes. A folder in ``PYTHONPATH`` goes in front."""
    path = [changes.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(each for each in path if each)}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process was started with. Empty variables count as not set.

    Args:
        ray_address: ``RAY_ADDRESS``: the cluster to connect to (set by ``ray job submit``).
        emulator: ``STORAGE_EMULATOR_HOST``: an emulated Cloud Storage, as a URL with its scheme.
        storage: Those of :data:`STORAGE_VARIABLES` that are set, to hand on to workers.
        path: ``PATH``, to put the interpreter's folder in front of for child processes.
        jax_platforms: ``JAX_PLATFORMS``: if the user pinned it.
        xla_flags: ``XLA_FLAGS``, to extend rather than replace.
        root: ``TPUPIPE_ROOT``: the folder that a relative ``store.root`` is in; by default the current one. Set by
            ``tpupipe cluster up`` for the jobs submitted to it, which run in folders of their own.
        faked_slices: ``TPUPIPE_FAKED_SLICES``: on a host of a faked slice, the state file of the server that started
            it. Set by that server.
    """

    ray_address: str | None
    emulator: str | None
    storage: Mapping[str, str]
    path: str
    jax_platforms: str | None
    xla_flags: str
    root: str | None = None
    faked_slices: str | None = None


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment once.

    Args:
        variables: Instead of the process's own.

    >>> environment({"STORAGE_EMULATOR_HOST": "127.0.0.1:4443"}).emulator
    'http://127.0.0.1:4443'
    """
    variables = os.environ if variables is None else variables

    def get(name: str) -> str | None:
        return variables.get(name, "").strip() or None

    emulator = get("STORAGE_EMULATOR_HOST")
    if emulator is not None:  # Google's clients accept it with and without a scheme
        emulator = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
    return Environment(
        ray_address=get("RAY_ADDRESS"),
        emulator=emulator,
        storage={name: value for name in STORAGE_VARIABLES if (value := get(name)) is not None},
        path=variables.get("PATH", os.defpath),
        jax_platforms=get("JAX_PLATFORMS"),
        xla_flags=get("XLA_FLAGS") or "",
        root=get("TPUPIPE_ROOT"),
        faked_slices=get(FAKED_SLICES_VARIABLE),
    )
