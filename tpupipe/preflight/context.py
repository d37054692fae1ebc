"""What the checks look at: the job, the configuration, the store and how to ask the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tpupipe.config import Config
from tpupipe.errors import TpupipeError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.job import Infer, Job, Train
from tpupipe.preflight.cluster import ClusterFacts
from tpupipe.preflight.importing import ImportReport
from tpupipe.preflight.job_data import JobData
from tpupipe.preflight.probe import StoreProbe
from tpupipe.store.objects import Store

PROBE_BYTES = 8 << 20


@dataclass
class CheckContext:
    """What is looked at. Only what a check asks for is contacted, and once.

    Args:
        config: The configuration.
        job: The job with the configuration's changes; ``None`` if its module could not be loaded.
        module: The job's module, for messages.
        store: The opened store; ``None`` if it could not be opened, or where no check of it is wanted.
        store_problem: Why there is no store.
        input_options: fsspec's options for opening inputs.
        local_folder: Folder on this machine that the store fills: that of ``file://``, or of the embedded server.
        imported: What happened when the job's module was imported in a process of its own.
        build_woke_jax: Whether ``build(config)`` made JAX look for devices.
        ask_ray: Raises ``SliceError`` for a slice that Ray does not know; ``None`` leaves Ray unasked.
        pickled: Pickles a function as Ray would; ``None`` leaves that unchecked.
        ask_cluster: Gathers the cluster's facts; ``None`` where there is no cluster to ask.
        probe_bytes: Bytes written and read back to measure the store's throughput.
    """

    config: Config
    job: Job | None
    module: str = ""
    store: Store | None = None
    store_problem: TpupipeError | None = None
    input_options: Mapping[str, Any] = field(default_factory=dict)
    local_folder: Path | None = None
    imported: ImportReport | None = None
    build_woke_jax: bool = False
    ask_ray: Callable[[SliceSpec], None] | None = None
    pickled: Callable[[Any], bytes] | None = None
    ask_cluster: Callable[[], ClusterFacts] | None = None
    probe_bytes: int = PROBE_BYTES

    @cached_property
    def slices(self) -> SliceSpec | None:
        """The slices asked for; ``None`` for ``kind: gpu``."""
        return self.config.cluster.slice_spec()

    @cached_property
    def devices(self) -> int:
        """JAX devices of the whole run, as a real host's runtime lists them."""
        return self.slices.devices if self.slices else self.config.cluster.gpus or 0

    @cached_property
    def devices_per_host(self) -> int:
        """JAX devices of one process."""
        return self.slices.devices_per_host if self.slices else 1

    def model_devices(self, stage: Train | Infer) -> int:
        """JAX devices that hold the stage's model together, and that its mesh must cover."""
        if isinstance(stage, Train):
            return self.devices
        if stage.parallel == "replica":
            return self.devices_per_host
        return self.slices.devices_per_slice if self.slices else self.devices

    @cached_property
    def probe(self) -> StoreProbe | None:
        """The probe objects in the store."""
        return None if self.store is None else StoreProbe(self.store, self.config.store)

    @cached_property
    def data(self) -> JobData:
        """The job's inputs, and the first rows that its maps make of them."""
        if self.job is None:
            raise ValueError("there is no job")
        return JobData(self.job, self.config.sample, self.input_options)

    @cached_property
    def cluster(self) -> ClusterFacts | TpupipeError | None:
        """The cluster's facts, gathered at the first question; why there are none, if it does not answer."""
        if self.ask_cluster is None:
            return None
        try:
            return self.ask_cluster()
        except TpupipeError as error:
            return error

    def close(self) -> None:
        """Removes what the checks left behind; idempotent."""
        if "probe" in vars(self) and self.probe is not None:
            self.probe.remove()
