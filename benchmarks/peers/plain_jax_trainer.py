"""Plain Ray: the same model, rows, batch size, steps and save interval, as Ray's guides to ``JaxTrainer`` have it.

The guides (docs.ray.io, "Get Started with Distributed Training using JAX" and the GPT-2 example of ``JaxTrainer``):
``ScalingConfig(use_tpu=True, topology=...)``, a Ray Data shard per worker read with ``iter_batches`` two batches ahead,
``jax.make_array_from_process_local_data``, Orbax's ``PyTreeCheckpointer`` into a folder that all hosts share, and
``ray.train.report`` with the checkpoint from rank 0, ``ray.train.get_checkpoint`` and ``FailureConfig`` to go on after a
failure ("Handling Failures and Node Preemption").

    python -m benchmarks.peers.plain_jax_trainer WORK_JSON ROWS.parquet FOLDER RAY_ADDRESS [KILL_AT_STEP]

With KILL_AT_STEP rank 1 sends itself SIGKILL right before that step, once.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from benchmarks.common import SLICE, Work

MEASURED = "measured.json"
KILLED = "killed"
RECOVERY = "recovery.json"


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What the guides' loop does, with the time taken at the first step and after saves."""
    # ruff: noqa: PLC0415 - JAX must not be touched before Ray has joined the workers
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from jobs.stdlib_lm import TinyLM

    work = Work.from_json(config["work"])
    rank = ray.train.get_context().get_world_rank()
    rows, replicated = shardings()
    model = TinyLM(work.width, work.layers, work.heads, work.steps)
    state = jax.jit(model.init, out_shardings=replicated)(jax.random.key(work.seed))
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(replicated, replicated))
    checkpointer = ocp.PyTreeCheckpointer()
    folder = Path(config["folder"])
    recovery: dict[str, Any] = {"loop_s": time.time()}
    before = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        state, before = restored(checkpointer, checkpoint, state)
        recovery |= {"restored_step": before, "restored_s": time.time()}

    shard = ray.train.get_dataset_shard("train")
    mine = work.batch_size // jax.process_count()
    batches = shard.iter_batches(batch_size=mine, batch_format="numpy", prefetch_batches=2, drop_last=True)
    first_s = loss = 0.0
    saves: list[tuple[float, float]] = []
    for done, batch in enumerate(batches, before + 1):
        if rank == 1 and done - 1 == config["kill_at"] and not (folder / KILLED).exists():
            (folder / KILLED).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        local = np.stack(list(batch["tokens"])).astype(np.uint8)
        tokens = jax.make_array_from_process_local_data(rows, local, (work.batch_size, local.shape[1]))
        mask = jax.make_array_from_process_local_data(rows, np.ones(mine, bool))
        state, metrics = step(state, {"tokens": tokens, "mask": mask})
        if done == before + 1:
            jax.block_until_ready(metrics)
            first_s = time.time()
            if before and rank == 0:
                recovery |= {"killed_s": float((folder / KILLED).read_text()), "first_step_s": first_s}
                (folder / RECOVERY).write_text(json.dumps(recovery))
        if done % work.save_every == 0:
            loss = float(metrics["loss"])
            began = time.perf_counter()
            path = folder / "orbax" / f"{done:06d}"
            checkpointer.save(path, {"state": state, "step": done}, force=True)
            checkpoint = ray.train.Checkpoint.from_directory(path) if rank == 0 else None
            ray.train.report({"step": done, "loss": loss}, checkpoint=checkpoint)
            saves.append((began, time.perf_counter()))
        if done == work.steps or before:  # after a restart the first step is all there is to see
            break
    # Not reported: Result.metrics are those of the last checkpoint, taken before its own save has ended.
    if rank == 0:
        measured = {
            "intervals_s": [after - before for (_, before), (_, after) in itertools.pairwise(saves)],
            "blocked_s": sum(end - begin for begin, end in saves[1:]),
            "startup_s": first_s - config["began_s"],
            "loss": loss,
        }
        (folder / MEASURED).write_text(json.dumps(measured))


def shardings() -> tuple[Any, Any]:
    """Over all devices: rows split, and everything everywhere."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    return NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def restored(checkpointer: Any, checkpoint: ray.train.Checkpoint, state: Any) -> tuple[Any, int]:
    """The state of a checkpoint, placed as ``state`` is, and the steps done."""
    import orbax.checkpoint as ocp

    item = {"state": state, "step": 0}
    with checkpoint.as_directory() as path:
        args = ocp.checkpoint_utils.construct_restore_args(item)
        found = checkpointer.restore(path, item=item, restore_args=args)
    return found["state"], int(found["step"])


def main(work: Work, rows: str, folder: Path, address: str, kill_at: int | None) -> None:
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
        train_loop_config={"work": work.to_json(), "folder": str(folder), "kill_at": kill_at, "began_s": time.time()},
        scaling_config=ScalingConfig(
            use_tpu=True,
            num_workers=SLICE.hosts,
            topology=SLICE.topology,
            accelerator_type="TPU-V6E",
            resources_per_worker={"TPU": SLICE.chips_per_host},
        ),
        run_config=RunConfig(
            name="plain", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
        datasets={"train": dataset},
    )
    trainer.fit()
    measured = json.loads((folder / MEASURED).read_text())
    if kill_at is not None:
        measured["recovery"] = json.loads((folder / RECOVERY).read_text())
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(
        Work.from_json(sys.argv[1]),
        sys.argv[2],
        Path(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]) if sys.argv[5:] else None,
    )
