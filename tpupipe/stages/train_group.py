"""A training group: the processes of one ``JaxTrainer``, which come up, import, and begin when they are given a plan.

So one can be kept ready on the held slice while another trains: when that one loses a process, the next begins at once.
It holds no chips, for JAX first looks for devices when the group begins.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

from ray.exceptions import RayError
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from tpupipe.job import Train
from tpupipe.stages.base import StageRun
from tpupipe.stages.train_backend import GroupConfig, KnownController, WatchWorkers
from tpupipe.stages.train_worker import TrainPlan, train_worker

logger = logging.getLogger("tpupipe")

DISMISS_S = 5.0  # what a group that was dismissed may take to end by itself
END_TIMEOUT_S = 30.0
POLL_S = 0.1
SPARE_FROM_S = 20.0  # work that ends sooner is not worth a second set of processes

# Read by Ray Train in the driver when a trainer is made and started. Its defaults notice a dead worker after 2 s.
RAY_TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1.0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
}


class _Trainer(JaxTrainer):
    """``JaxTrainer`` without Ray Data: rows come from chunks, so two processes fewer start with every group."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ != "DatasetsCallback"]


class TrainGroup:
    """Starts coming up when it is made. ``end`` it on every way out.

    Args:
        stage: The declaration, overrides applied.
        run: What every stage is given.
    """

    def __init__(self, stage: Train, run: StageRun) -> None:
        # A name of its own each time: Ray Train resumes a name it has seen, from its own idea of a checkpoint.
        self._id = f"{run.paths.run}-{uuid.uuid4().hex[:8]}"
        self._coordinator = run.coordinator
        self._scratch = tempfile.TemporaryDirectory(prefix="tpupipe-train-", ignore_cleanup_errors=True)
        self.error: BaseException | None = None
        self._begun = False
        self._dismissed_s: float | None = None
        on_tpu = run.reservation is not None
        trainer = _Trainer(
            lambda config: train_worker(config["coordinator"], config["group"]),
            train_loop_config={"coordinator": run.coordinator, "group": self._id},
            jax_config=GroupConfig(
                use_tpu=on_tpu, use_gpu=not on_tpu, coordinator=run.coordinator, group=self._id, step=stage.step
            ),
            scaling_config=_scaling(run),
            run_config=RunConfig(
                name=self._id,
                storage_path=self._scratch.name,
                callbacks=[
                    WatchWorkers(run.coordinator),
                    KnownController(run.coordinator, self._id),  # type: ignore[list-item] # Ray's own kinds are taken too
                ],
                # All retries are ours: Ray's would start again on a lost slice for ever.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            ),
        )
        # In a thread, so that the driver can watch, and Ray does not take the signal handlers over.
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name=f"fit-{self._id}", daemon=True)
        self._thread.start()

    def begin(self, plan: TrainPlan, doubted: Sequence[tuple[int, int]]) -> None:
        """Gives it its work, and the steps between which earlier groups failed."""
        self._begun = True
        first_step = plan.start.commit.step if plan.start else 0
        self._coordinator.begin_group(
            self._id, plan, restart=plan.target.restart, first_step=first_step, doubted=doubted
        )

    def running(self, timeout_s: float = 0.0) -> bool:
        """Waits a little; whether its trainer still runs, waiting for its turn or at work."""
        self._thread.join(timeout_s)
        return self._thread.is_alive()

    def dismiss(self) -> None:
        """Sends it home if it was not given work."""
        if not self._begun and self._dismissed_s is None:
            self._dismissed_s = time.monotonic()
            self._coordinator.dismiss_group(self._id)

    def end(self) -> None:
        """Has it end, and waits for that.

        One that waits for hosts that are lost does not hear that it was dismissed, and one at work is not asked: those
        are ended (Ray drops what they asked for with the driver's connection). None may be left: a thread that waits on
        Ray while that connection closes can crash the driver.
        """
        try:
            self.dismiss()
            self._ended()
        except RayError as error:  # who knows of it is gone, and so are its processes; what came before is what counts
            logger.warning("Training group %s could not be ended: %s", self._id, error)
        finally:
            self._scratch.cleanup()

    def _ended(self) -> None:
        ends_itself = time.monotonic() if self._dismissed_s is None else self._dismissed_s + DISMISS_S
        given_up = time.monotonic() + END_TIMEOUT_S
        while self.running(POLL_S):
            if time.monotonic() > ends_itself:
                self._coordinator.end_controller(self._id)
            if time.monotonic() > given_up:
                logger.warning("Training group %s did not end in %.0f s.", self._id, END_TIMEOUT_S)
                break
        self._coordinator.end_controller(self._id)  # its process has nothing left to do

    def _fit(self, trainer: JaxTrainer) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - the stage reads it
            self.error = error


class TrainGroups:
    """The group that works and the one that is kept ready behind it. Ends them on the way out.

    Args:
        stage: The declaration, overrides applied.
        run: What every stage is given.
    """

    def __init__(self, stage: Train, run: StageRun) -> None:
        self._stage = stage
        self._run = run
        # A GPU is taken by the group at work; on a held slice a spare needs none of what is held.
        self._spares = run.reservation is not None and run.settings(stage.name).spare is not False
        self._at_work: TrainGroup | None = None
        self._spare: TrainGroup | None = None
        self._dropped: list[TrainGroup] = []

    def take(self) -> TrainGroup:
        """The group to give work to: the one kept ready if it lives, else a new one."""
        if self._at_work is not None:
            self._at_work.end()
        if self._spare is not None and not self._spare.running():
            self.drop()  # it did not come up
        self._at_work, self._spare = self._spare or TrainGroup(self._stage, self._run), None
        return self._at_work

    def keep_ready(self, *, left_s: float) -> None:
        """Has a group ready behind the one at work, when that has far to go.

        Args:
            left_s: Seconds that the work will still take; 0 if unknown.
        """
        if self._spare is None and self._spares and left_s > SPARE_FROM_S:
            self._spare = TrainGroup(self._stage, self._run)

    def dismiss(self) -> None:
        """Sends the one kept ready home; does not wait for it."""
        if self._spare is not None:
            self._spare.dismiss()

    def drop(self) -> None:
        """Has the one kept ready end, and forgets it: it is no use, or stands on lost hosts. It is waited for on the way out."""
        if self._spare is not None:
            self._spare.dismiss()
            self._dropped.append(self._spare)
            self._spare = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends all."""
        with self._run.stop.handled():
            for group in (*self._dropped, self._spare, self._at_work):
                if group is not None:
                    group.end()


def _scaling(run: StageRun) -> ScalingConfig:
    if run.reservation is None:
        return ScalingConfig(num_workers=run.config.cluster.gpus or 1, use_gpu=True)
    # No TPU here: the reservation holds the chips, and use_tpu=True would reserve a second time and give the slice
    # back at every restart.
    return ScalingConfig(
        num_workers=len(run.reservation.hosts),
        resources_per_worker={"CPU": 1},
        placement_strategy="STRICT_SPREAD",
        label_selector=run.reservation.label_selectors,
    )
