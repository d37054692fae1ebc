"""Compiled functions that outlive the process: a restart of the workers compiles nothing anew.

JAX's own compilation cache does this, in the run's folder. Only process 0 writes to it, and on a CPU the other processes
have keys of their own, so there (on a faked slice) they would compile at every start. What they compiled is kept here.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tpupipe.errors import ObjectExistsError, ObjectNotFoundError
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store

_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True)
class Compiled:
    """A compiled function.

    Args:
        call: What to call.
        from_cache: Whether it was compiled before, in another process.
    """

    call: Any
    from_cache: bool


def use_compile_cache(store: Store, paths: RunPaths) -> None:
    """Has JAX keep in the run's folder what it compiles in this process, and look there first."""
    import jax

    jax.config.update("jax_compilation_cache_dir", store.uri(paths.compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compiled(lowered: Any, store: Store, paths: RunPaths) -> Compiled:
    """Compiles a lowered function, or takes it from the run's folder.

    Args:
        lowered: ``jax.stages.Lowered``.
        store: The run's store.
        paths: The run.

    Raises:
        StoreError: The store could not be asked.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.process_index() > 0:
        return _own(lowered, store, paths)
    here, hits = threading.get_ident(), 0

    def count(event: str, **_: str | int) -> None:
        nonlocal hits
        hits += event == _HIT and threading.get_ident() == here

    jax.monitoring.register_event_listener(count)
    try:
        call = lowered.compile()
    finally:
        jax.monitoring.unregister_event_listener(count)
    return Compiled(call, from_cache=hits > 0)


def _own(lowered: Any, store: Store, paths: RunPaths) -> Compiled:
    from jax.experimental import serialize_executable

    name = paths.compiled(_key(lowered))
    try:
        kept = store.read(name)
    except ObjectNotFoundError:
        call = lowered.compile()
        payload, _, _ = serialize_executable.serialize(call)
        with contextlib.suppress(ObjectExistsError):  # another start was faster
            store.create(name, payload)
        return Compiled(call, from_cache=False)
    # As with JAX's cache, whoever may write to the run's folder may run code in its processes.
    call = serialize_executable.deserialize_and_load(kept, lowered.in_tree, lowered.out_tree)
    return Compiled(call, from_cache=True)


def _key(lowered: Any) -> str:
    import jax

    versions = f"{jax.__version__} {version('jaxlib')} {jax.process_index()} {jax.process_count()} {jax.devices()}"
    return hashlib.sha256(f"{versions}\n{lowered.as_text()}".encode()).hexdigest()
