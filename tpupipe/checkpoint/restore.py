"""Restores a committed checkpoint: strictly, onto whatever devices there are, in whole or the parameters only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpupipe.checkpoint.commit import Commit, tree_differences
from tpupipe.checkpoint.tree import leaves_of
from tpupipe.errors import CheckpointMismatchError, CheckpointReadError
from tpupipe.faults.points import point
from tpupipe.store.objects import Store


def check_tree(commit: Commit, abstract: Any) -> None:
    """Compares the saved tree with the one to fill.

    Raises:
        CheckpointMismatchError: A leaf is missing, unexpected, or has another shape or dtype.
    """
    missing, unexpected, changed = tree_differences(commit.leaves, leaves_of(abstract))
    if missing or unexpected or changed:
        parts = [
            f"{what}: {', '.join(paths[:8])}{' …' if len(paths) > 8 else ''}"
            for what, paths in (("missing", missing), ("unexpected", unexpected), ("changed", changed))
            if paths
        ]
        raise CheckpointMismatchError(
            f"The checkpoint of step {commit.step} does not hold the state to restore. {'; '.join(parts)}.",
            hint="The model in the job is not the one that was saved. Use another --run, or put the old model back.",
            step=commit.step,
            missing=missing,
            unexpected=unexpected,
            changed=changed,
        )


def restore(store: Store, folder: str, commit: Commit, abstract: Any) -> Any:
    """Reads a whole state.

    Args:
        store: The run's store.
        folder: The checkpoint's folder in it.
        commit: Its record.
        abstract: Tree of ``jax.ShapeDtypeStruct`` with ``sharding``: structure and placement of the result.

    Raises:
        CheckpointMismatchError: The saved tree is another one.
        CheckpointReadError: The arrays cannot be read.
    """
    check_tree(commit, abstract)
    point("restore.start", step=commit.step)
    state = _read(store, folder, commit, abstract)
    point("restore.done", step=commit.step)
    return state


def restore_params(store: Store, folder: str, commit: Commit, abstract: Any, params: Callable[[Any], Any]) -> Any:
    """Reads the parameters only, where ``params`` picks them out of the state, else all of it.

    Args:
        store: The run's store.
        folder: The checkpoint's folder in it.
        commit: Its record.
        abstract: The whole state's tree of ``jax.ShapeDtypeStruct`` with ``sharding``.
        params: The training stage's ``params``.

    Raises:
        CheckpointMismatchError, CheckpointReadError: As ``restore``.
    """
    import jax
    import orbax.checkpoint as ocp

    check_tree(commit, abstract)
    point("restore.start", step=commit.step)
    known = {id(leaf) for leaf in jax.tree.leaves(abstract)}
    try:
        wanted = {id(leaf) for leaf in jax.tree.leaves(params(abstract))}
    except Exception:  # noqa: BLE001 - the job's own function, on leaves it was not made for: it computes
        wanted = set()
    picked = abstract
    if wanted and wanted <= known:  # otherwise params() computes rather than picks
        picked = jax.tree.map(lambda leaf: leaf if id(leaf) in wanted else ocp.PLACEHOLDER, abstract)
    state = _read(store, folder, commit, picked)
    point("restore.done", step=commit.step)
    return params(state)


def _read(store: Store, folder: str, commit: Commit, abstract: Any) -> Any:
    import jax
    import orbax.checkpoint as ocp

    def restore_args(leaf: Any) -> Any:
        if leaf is ocp.PLACEHOLDER:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    where = store.uri(f"{folder}/{commit.arrays}")
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    try:
        return reader.restore(
            where, args=ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(restore_args, abstract))
        )
    except jax.errors.JaxRuntimeError:
        raise  # no memory, or a process that is gone: nothing that another read mends
    except Exception as error:
        raise CheckpointReadError(
            f"Reading the arrays of step {commit.step} at {where} failed: {type(error).__name__}: {error}",
            step=commit.step,
            folder=folder,
        ) from error
    finally:
        reader.close()
