"""Prints ``order`` of the small job's newest checkpoint: ``python -m tests.e2e.read_order ENDPOINT RUN PARAMETERS``."""

from __future__ import annotations

import json
import sys

import jax

from tests.e2e import small
from tpupipe.checkpoint.restore import restore
from tpupipe.checkpoint.verify import newest_intact
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store


def main() -> None:
    endpoint, run, parameters = sys.argv[1:]
    store = open_store("gs://tests/runs", endpoint=endpoint)
    chosen = newest_intact(store, RunPaths("small", run), "fit")
    assert chosen.commit is not None
    shapes = jax.eval_shape(small.model(small.Params.model_validate_json(parameters)).init, jax.random.key(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    sys.stdout.write(json.dumps(restore(store, chosen.folder, chosen.commit, abstract)["order"].tolist()) + "\n")


if __name__ == "__main__":
    main()
