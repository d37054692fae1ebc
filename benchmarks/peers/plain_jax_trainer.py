"""Plain Ray: the same model, rows, batch size, steps and save interval, as Ray's guides to ``JaxTrainer`` have it.

The guides (docs.ray.io, "Get Started with Distributed Training using JAX" and the GPT-2 example of ``JaxTrainer``):
``ScalingConfig(use_tpu=True, topology=...)``, a Ray Data shard per worker read with ``iter_batches`` two batches ahead,
``jax.make_array_from_process_local_data``, Orbax's ``PyTreeCheckpointer`` into a folder that all hosts share, and
``ray.train.report`` with the checkpoint from rank 0.

    python -m benchmarks.peers.plain_jax_trainer WORK_JSON ROWS.parquet FOLDER RAY_ADDRESS
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from benchmarks.common import SLICE, Work

MEASURED = "measured.json"


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What the guides' loop does, with the time taken at the first step and after saves."""
    # ruff: noqa: PLC0415 - JAX must not be touched before Ray has joined the workers
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jobs.stdlib_lm import TinyLM

    work = Work.from_json(config["work"])
    rank = ray.train.get_context().get_world_rank()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    model = TinyLM(work.width, work.layers, work.heads, work.steps)
    state = jax.jit(model.init, out_shardings=replicated)(jax.random.key(work.seed))
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(replicated, replicated))
    checkpointer = ocp.PyTreeCheckpointer()

    shard = ray.train.get_dataset_shard("train")
    mine = work.batch_size // jax.process_count()
    mask = jax.make_array_from_process_local_data(rows, np.ones(mine, bool))
    batches = shard.iter_batches(batch_size=mine, batch_format="numpy", prefetch_batches=2, drop_last=True)
    first_s = loss = 0.0
    begins: list[float] = []
    ends: list[float] = []
    for done, batch in enumerate(batches, 1):
        local = np.stack(list(batch["tokens"])).astype(np.uint8)
        tokens = jax.make_array_from_process_local_data(rows, local, (work.batch_size, local.shape[1]))
        state, metrics = step(state, {"tokens": tokens, "mask": mask})
        if done == 1:
            jax.block_until_ready(metrics)
            first_s = time.time()
        if done % work.save_every == 0:
            loss = float(metrics["loss"])
            begins.append(time.perf_counter())
            path = Path(config["folder"], "orbax", f"{done:06d}")
            checkpointer.save(path, state)
            checkpoint = ray.train.Checkpoint.from_directory(path) if rank == 0 else None
            ray.train.report({"step": done, "loss": loss}, checkpoint=checkpoint)
            ends.append(time.perf_counter())
        if done == work.steps:
            break
    # Not reported: Result.metrics are those of the last checkpoint, taken before its own save has ended.
    if rank == 0:
        measured = {
            "intervals_s": [after - before for before, after in itertools.pairwise(ends)],
            "blocked_s": sum(end - begin for begin, end in zip(begins[1:], ends[1:], strict=True)),
            "startup_s": first_s - config["began_s"],
            "loss": loss,
        }
        Path(config["folder"], MEASURED).write_text(json.dumps(measured))


def main(work: Work, rows: str, folder: Path, address: str) -> None:
    """Trains; prints what was measured as JSON."""
    ray.init(
        address=address,
        runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1"}},
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    folder.mkdir()
    dataset = ray.data.read_parquet(rows)  # before the clock starts: it looks into the file
    trainer = JaxTrainer(
        train_loop_per_worker,
        train_loop_config={"work": work.to_json(), "folder": str(folder), "began_s": time.time()},
        scaling_config=ScalingConfig(
            use_tpu=True,
            num_workers=SLICE.hosts,
            topology=SLICE.topology,
            accelerator_type="TPU-V6E",
            resources_per_worker={"TPU": SLICE.chips_per_host},
        ),
        run_config=RunConfig(name="plain", storage_path=str(folder / "ray")),
        datasets={"train": dataset},
    )
    trainer.fit()
    sys.stdout.write((folder / MEASURED).read_text() + "\n")


if __name__ == "__main__":
    main(Work.from_json(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
