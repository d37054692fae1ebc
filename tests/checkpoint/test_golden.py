"""Checkpoints written by earlier versions stay readable: one is stored beside this file.

It was made once, by a ``Saver`` of format 1 with ``STATE`` below at step 3 on one device, and is never made again: a new
format gets a second one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tpupipe.checkpoint.verify import newest_intact
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

GOLDEN = Path(__file__).parent / "golden"
PATHS = RunPaths("golden", "format-1")

STATE = {
    "params": {
        "embed": ("float32", [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]]),
        "layers": [("bfloat16", [1.0, -2.0, 0.125]), ("int8", [-128, 0, 127])],
    },
    "key": ("uint32", [1, 4294967295]),
    "step": ("int32", 3),
}


def is_array(node: object) -> bool:
    return isinstance(node, tuple)


@pytest.fixture
def store(tmp_path: Path):
    """A copy: reading must not need more, and a test must not change it."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return open_store(str(tmp_path / "golden"))


def test_the_golden_checkpoint_is_intact(store):
    """Its record is read, and every file has the recorded size and checksum."""
    found = newest_intact(store, PATHS, "lm")
    commit = found.commit
    assert (commit.step, commit.lease_epoch, commit.arrays) == (3, 1, "arrays")
    assert (commit.sample_digest, commit.metrics, commit.devices) == (2**64 - 3, {"loss": 0.75}, 1)
    assert commit.tree_digest == "7bc41128c7a048fb12dd8a54258688860c213813edddb7a27af73d60411ea3cb"
    assert commit.fingerprint == "e30c7f71816c5f9b53f047d4d319b46b"
    assert found.damaged == found.uncommitted == ()


def test_the_golden_checkpoint_restores_to_the_recorded_values(store):
    """Whole and parameters only: the values, shapes and dtypes of ``STATE``."""
    import jax
    import numpy as np

    from tpupipe.checkpoint.restore import restore, restore_params

    found = newest_intact(store, PATHS, "lm")
    wanted = jax.tree.map(lambda a: np.asarray(a[1], jax.numpy.dtype(a[0])), STATE, is_leaf=is_array)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), wanted)
    got = restore(store, found.folder, found.commit, abstract)
    params = restore_params(store, found.folder, found.commit, abstract, lambda state: state["params"])
    for read, expected in ((got, wanted), (params, wanted["params"])):
        assert jax.tree.structure(read) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), b)
