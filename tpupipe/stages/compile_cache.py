"""JAX's persistent compilation cache, shared by all attempts and workers of a run. In workers only."""

from __future__ import annotations

from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store


def use_compile_cache(store: Store, paths: RunPaths) -> None:
    """Has this process keep every compiled program in the run's folder, and look there first."""
    import jax

    jax.config.update("jax_compilation_cache_dir", store.uri(paths.compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
