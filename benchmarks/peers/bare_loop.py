"""The limit: the same compiled step on the same mesh, all batches in memory, nothing else.

One process per faked host: no checkpoints, no events, no Ray.

    python -m benchmarks.peers.bare_loop WORK_JSON BATCHES.npy COORDINATOR RANK HOSTS
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import deque
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.common import Work
from jobs.stdlib_lm import TinyLM

NICENESS = (
    15  # that of Ray's worker processes: with another, whatever else the machine does would slow only one of them
)
RUN_AHEAD_STEPS = 2  # as many batches are in flight as in the stage that is measured against this


def main(work: Work, batches: Path, coordinator: str, rank: int, hosts: int) -> None:
    """Takes the steps; rank 0 prints what was measured as JSON."""
    began = time.time()
    os.nice(NICENESS)
    jax.distributed.initialize(coordinator, hosts, rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    model = TinyLM(work.width, work.layers, work.heads, work.steps)
    state = jax.jit(model.init, out_shardings=replicated)(jax.random.key(work.seed))
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(replicated, replicated))

    mine = work.batch_size // hosts
    tokens = np.load(batches)[:, rank * mine : (rank + 1) * mine]
    mask = np.ones(mine, bool)
    fed = [
        {
            "tokens": jax.make_array_from_process_local_data(rows, batch),
            "mask": jax.make_array_from_process_local_data(rows, mask),
        }
        for batch in tokens
    ]

    first_s = 0.0
    ends: list[float] = []
    unfinished: deque[jax.Array] = deque()
    loss = jax.numpy.zeros(())
    for done, batch in enumerate(fed, 1):
        state, metrics = step(state, batch)
        loss = metrics["loss"]
        unfinished.append(loss)
        if len(unfinished) > RUN_AHEAD_STEPS:
            unfinished.popleft().block_until_ready()
        if done == 1:
            loss.block_until_ready()
            first_s = time.time()
        if done % work.save_every == 0:
            jax.block_until_ready(state)
            ends.append(time.perf_counter())
    if rank == 0:
        measured = {
            "intervals_s": [after - before for before, after in itertools.pairwise(ends)],
            "blocked_s": 0.0,
            "startup_s": first_s - began,
            "loss": float(loss),
        }
        sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(Work.from_json(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
