"""Finds the first array in which two checkpoints differ. Run as a process of its own, with JAX on the CPU.

``python -m tpupipe.drill.leaves STORE ENDPOINT FOLDER FOLDER`` prints one JSON object; an empty endpoint is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tpupipe.config import process_variables
from tpupipe.store.objects import Store
from tpupipe.store.wiring import process_environment

TIMEOUT_S = 300.0


def where_params_differ(store: Store, endpoint: str | None, wanted: str, found: str) -> str:
    """The first leaf in which two checkpoints differ, or why that cannot be told.

    Args:
        store: Where both are.
        endpoint: Emulated Cloud Storage, or ``None``.
        wanted: URI of the reference's checkpoint.
        found: URI of the other one.
    """
    command = [sys.executable, "-m", "tpupipe.drill.leaves", store.uri(), endpoint or "", wanted, found]
    with process_variables({**process_environment(endpoint), "JAX_PLATFORMS": "cpu"}):
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and module
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"comparing the checkpoints did not end within {TIMEOUT_S:.0f} s"
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            return f"the checkpoints could not be compared: {last}"
    return str(json.loads(done.stdout.splitlines()[-1])["difference"])


def first_leaf_difference(wanted: Any, found: Any) -> str:
    """The first leaf in which two trees of arrays differ, in tree order.

    Args:
        wanted: Tree of ``ndarray``.
        found: Another.
    """
    import jax
    import numpy as np

    ours = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    theirs = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    for path in [*ours, *(p for p in theirs if p not in ours)]:
        if path not in ours or path not in theirs:
            return f"leaf {path} is in one checkpoint only"
    differing = [path for path in ours if not _same(ours[path], theirs[path])]
    if not differing:
        return "the last checkpoints hold the same arrays: the digest was taken of others"
    path = differing[0]
    return f"leaf {path}{_first_value(ours[path], theirs[path])} ({len(differing)} of {len(ours)} leaves differ)"


def _same(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())


def _first_value(one: Any, other: Any) -> str:
    import numpy as np

    if one.shape != other.shape or one.dtype != other.dtype:
        return f": {other.dtype}{list(other.shape)} instead of {one.dtype}{list(one.shape)}"
    size = one.dtype.itemsize
    bits, others = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, size) for a in (one, other))
    flat = int(np.flatnonzero((bits != others).any(axis=1))[0])
    index = [int(i) for i in np.unravel_index(flat, one.shape)]
    return f"{index or ''}: {other.reshape(-1)[flat]} instead of {one.reshape(-1)[flat]}"


def _arrays(store: Store, folder: str) -> Any:
    """A checkpoint's arrays whole in host memory, as a plain tree: the job's own types are not needed."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from tpupipe.store.layout import ARRAYS

    where = store.uri(f"{folder}/{ARRAYS}")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    reader = ocp.Checkpointer(handler)
    try:
        tree = reader.metadata(where).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(where, args=ocp.args.PyTreeRestore(restore_args=arguments))
    finally:
        reader.close()


def main() -> None:
    """Entry point of the process."""
    from tpupipe.store.objects import open_store

    root, endpoint, wanted, found = sys.argv[1:]
    store = open_store(root, endpoint=endpoint or None)
    folders = [uri.removeprefix(store.uri()).lstrip("/") for uri in (wanted, found)]
    difference = first_leaf_difference(*(_arrays(store, folder) for folder in folders))
    sys.stdout.write(json.dumps({"difference": difference}) + "\n")


if __name__ == "__main__":
    main()
