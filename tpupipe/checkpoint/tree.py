"""The little of Orbax and JAX trees that saving and restoring share. Import inside workers only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from tpupipe.checkpoint.commit import Leaf


def checkpointer(timeout_s: float) -> Any:
    """An Orbax asynchronous checkpointer for one tree of arrays."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
        async_options=ocp.options.AsyncOptions(timeout_secs=int(timeout_s)),
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
