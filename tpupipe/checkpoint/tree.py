"""The little of Orbax and JAX trees that saving and restoring share. Import inside workers only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from tpupipe.checkpoint.commit import Leaf

SHARED_BYTES = 1 << 20
"""Replicas of an array share its writing if each has so much of it."""


def checkpointer(timeout_s: float) -> Any:
    """An Orbax asynchronous checkpointer for one tree of arrays."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=_handlers()),
        async_options=ocp.options.AsyncOptions(timeout_secs=int(timeout_s)),
    )


def _handlers() -> Any:
    """Orbax's own, but a small array is written by one process.

    Orbax has all replicas of an array write a part of it. Cutting the part out compiles a program for every shape, one
    after the other, inside the first save of each process: seconds for what is written in no time.
    """
    import jax
    from orbax.checkpoint import type_handlers
    from orbax.checkpoint._src.metadata import array_metadata_store

    arrays = type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=SHARED_BYTES, array_metadata_store=array_metadata_store.Store()
    )
    return type_handlers.create_type_handler_registry(
        *(
            (kind, arrays if kind is jax.Array else type_handlers.get_type_handler(kind))
            for kind in type_handlers.supported_types()
        )
    )


def save_args(state: Any) -> Any:
    """Orbax's arguments for saving ``state``."""
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave(state)


def leaves_of(tree: Any) -> tuple[Leaf, ...]:
    """Path, shape and dtype of every leaf, in tree order; works on abstract trees too."""
    import jax
    import numpy as np

    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape, dtype = (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else (np.shape(leaf), np.asarray(leaf).dtype)
        found.append(Leaf(jax.tree_util.keystr(path), tuple(shape), str(dtype)))
    return tuple(found)


def host_arrays(tree: Any) -> Iterator[Any]:
    """The leaves of ``tree`` whole in host memory, one at a time, in tree order. Every process must take them all."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            yield np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        else:
            yield np.asarray(leaf)


def params_digest(params: Any) -> str:
    """sha256 (hex) over the bytes of every parameter, in tree order. Every process must call this."""
    digest = hashlib.sha256()
    for array in host_arrays(params):
        digest.update(array.tobytes())
    return digest.hexdigest()
