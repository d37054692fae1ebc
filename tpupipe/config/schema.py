"""The configuration's sections, typed and frozen. Every bound on a value stands here.

Checks over several keys sit on the last of them, so that they run, and are reported, beside every other problem.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from tpupipe.errors import SliceError
from tpupipe.hardware.slices import SliceSpec, generation_name

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
"""A time-out: always bounded, a week at most."""

Count = Annotated[int, Field(ge=1, le=2**40)]
Failures = Annotated[int, Field(ge=0, le=1_000_000)]

_SAMPLE = re.compile(r"\d{1,12}/\d{1,12}|\d{0,12}\.?\d{0,12}(?:e-?\d{1,2})?\s*%?", re.IGNORECASE)  # bounded, so exact
_STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?\Z")
_LABEL_KEY = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z"
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StoreConfig(_Section):
    """Where checkpoints, units and results go. ``store: URI`` is short for ``store: {uri: URI}``.

    Args:
        uri: ``gs://bucket/prefix``, ``file:///folder`` or a path.
        embedded: Serve the ``gs://`` URI from this machine, out of ``root``.
        root: Folder for local state (the embedded store's data, the warm faked cluster).
        timeout_s: Time-out of one attempt of one storage operation.
        attempts: Attempts of one storage operation before it is an error.
        allow_cross_region: Whether the bucket may be in another region than ``cluster.zone``.
        min_free_gib: Free space that a store on this machine's disk must have, GiB.
    """

    uri: str
    embedded: bool = False
    root: str = Field(default=".tpupipe", min_length=1)
    timeout_s: Seconds = 60.0
    attempts: int = Field(default=8, ge=1, le=20)
    allow_cross_region: bool = False
    min_free_gib: float = Field(default=1.0, ge=0, le=1_048_576)

    @field_validator("uri")
    @classmethod
    def _has_a_known_scheme(cls, uri: str) -> str:
        scheme, found, rest = uri.partition("://")
        if not uri.strip() or (found and (scheme not in ("gs", "file") or not rest.strip("/"))):
            raise ValueError("is not a store; allowed: gs://bucket/prefix, file:///folder or a path")
        return uri

    @field_validator("embedded")
    @classmethod
    def _embedded_serves_gs(cls, embedded: bool, info: ValidationInfo) -> bool:
        if embedded and not info.data.get("uri", "gs://").startswith("gs://"):
            raise ValueError(f"the embedded server serves gs:// only, and store.uri is {info.data['uri']!r}")
        return embedded


class ClusterConfig(_Section):
    """Where a run executes.

    Args:
        kind: ``fake`` (a faked slice on this machine), ``tpu`` (a real Ray cluster with slices) or ``gpu``.
        generation: TPU generation, ``v6e``; for ``fake`` and ``tpu``.
        chips_per_vm: Chips of one TPU VM, where it is not the default of the topology.
        slices: Number of slices, taken all or none.
        topology: Sides of one slice in chips, ``4x4`` or ``2x2x1``; for ``fake`` and ``tpu``.
        address: Ray cluster to connect to; else ``RAY_ADDRESS``, else (``fake``) one is started.
        timeout_s: Time-out of the whole reservation, whatever the number of slices.
        cpus_per_host: Logical CPUs of a faked host. Fewer than 4 starve Ray Data's own tasks.
        gpus: Number of workers with one GPU each; for ``gpu``.
        zone: Cloud zone of the nodes, ``us-central2-b``. Nothing is placed by it: it is what the bucket's region and
            the offers of zones are compared with.
    """

    kind: Literal["fake", "tpu", "gpu"]
    generation: str | None = Field(default=None, validate_default=True)
    chips_per_vm: int | None = Field(default=None, ge=1, le=64)
    slices: int = Field(default=1, ge=1, le=1024)
    topology: str | None = Field(default=None, validate_default=True)
    address: str | None = Field(default=None, min_length=1)
    timeout_s: Seconds = 600.0
    cpus_per_host: int = Field(default=8, ge=1, le=1024)
    gpus: int | None = Field(default=None, ge=1, le=65_536, validate_default=True)
    zone: str | None = Field(default=None, pattern=r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$")

    @field_validator("generation")
    @classmethod
    def _generation_is_known(cls, generation: str | None, info: ValidationInfo) -> str | None:
        _needed_for_tpu("generation", generation, info)
        try:
            return None if generation is None else generation_name(generation)
        except SliceError as error:
            raise ValueError(error.message) from error

    @field_validator("topology")
    @classmethod
    def _slice_can_exist(cls, topology: str | None, info: ValidationInfo) -> str | None:
        _needed_for_tpu("topology", topology, info)
        if topology is None or info.data.get("generation") is None or not {"chips_per_vm", "slices"} <= set(info.data):
            return topology  # what is missing has its own problem
        try:
            return SliceSpec(info.data["generation"], topology, info.data["chips_per_vm"], info.data["slices"]).topology
        except SliceError as error:
            raise ValueError(error.message) from error

    @field_validator("gpus")
    @classmethod
    def _gpus_for_gpu(cls, gpus: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("kind")
        if kind == "gpu" and gpus is None:
            raise ValueError("is needed for cluster.kind gpu: the number of workers, one GPU each")
        if kind in ("fake", "tpu") and gpus is not None:
            raise ValueError(f"is only for cluster.kind gpu, and it is {kind}")
        return gpus

    def slice_spec(self) -> SliceSpec | None:
        """The slices asked for; ``None`` for ``kind: gpu``."""
        if self.generation is None or self.topology is None:
            return None
        return SliceSpec(self.generation, self.topology, self.chips_per_vm, self.slices)


def _needed_for_tpu(name: str, value: str | None, info: ValidationInfo) -> None:
    kind = info.data.get("kind")
    if kind in ("fake", "tpu") and value is None:
        raise ValueError(f"is needed for cluster.kind {kind}")
    if kind == "gpu" and value is not None:
        raise ValueError(f"{name} is only for cluster.kind fake and tpu, and it is gpu")


class CheckpointConfig(_Section):
    """How often a training stage saves. Given keys replace the declaration's; saving cannot be switched off.

    Args:
        steps: Save every so many steps.
        minutes: Save every so many minutes.
        keep: Committed checkpoints to keep; the newest intact one is always kept.
    """

    steps: Count | None = None
    minutes: float | None = Field(default=None, gt=0, le=1440)
    keep: int | None = Field(default=None, ge=1, le=10_000)


class StageConfig(_Section):
    """What a configuration changes of one stage's declaration; a key left out keeps the job's value.

    Args:
        checkpoint: Training: when to save.
        epochs: Training: passes over the data.
        steps: Training: optimiser steps; instead of ``epochs``.
        batch_size: Training: rows of one global batch.
        seed: Training: seed of parameters and sample order.
        log_every_s: Training: interval of metrics, seconds.
        mesh: Training and inference: axis name -> devices; one axis may be ``-1``, the rest.
        sharding: Training and inference: how parameters are laid out over the mesh.
        parallel: Inference: a model per host, or one over all hosts of a slice.
        spare: Training: keep a second set of processes ready on the held slice, to begin when one is lost; on by
            default, in stages that have more than 20 s to go.
        chunk_rows: Preprocessing: rows of one chunk.
        batch_rows: Inference: rows of one padded batch.
        bad_rows: Inference: what becomes of rows that cannot be used; ``quarantine`` keeps the job's ``max``.
        recompile: Training and inference: whether arguments of another shape may cost a compilation after the first.
        concurrency: Preprocessing: units at work at a time. Inference: units in flight on each worker.
        stall_timeout_s: A step or unit that takes longer is a failure.
        compile_timeout_s: Training and inference: the same for ``init`` and for compiling.
        restore_timeout_s: Training and inference: the same for reading the parameters.
    """

    checkpoint: CheckpointConfig | None = None
    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Count | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    log_every_s: Seconds | None = None
    mesh: dict[str, int] | None = None
    sharding: Literal["replicated", "fsdp"] | None = None
    parallel: Literal["replica", "sharded"] | None = None
    spare: bool | None = None
    chunk_rows: Count | None = None
    batch_rows: Count | None = None
    bad_rows: Literal["fail", "quarantine"] | None = None
    recompile: Literal["forbid", "warn"] | None = None
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    stall_timeout_s: Seconds | None = None
    compile_timeout_s: Seconds | None = None
    restore_timeout_s: Seconds | None = None

    @field_validator("steps")
    @classmethod
    def _steps_or_epochs(cls, steps: int | None, info: ValidationInfo) -> int | None:
        if steps is not None and info.data.get("epochs") is not None:
            raise ValueError(f"give steps or epochs, not both; epochs is {info.data['epochs']}")
        return steps

    @field_validator("mesh")
    @classmethod
    def _mesh_has_sizes(cls, mesh: dict[str, int] | None) -> dict[str, int] | None:
        if mesh is None:
            return None
        rest = [name for name, size in mesh.items() if size == -1]
        if not mesh or len(rest) > 1 or any(size < 1 and size != -1 for size in mesh.values()):
            raise ValueError("is not a mesh; allowed: axis name -> devices (1 or more), at most one of them -1")
        return mesh


class BudgetsConfig(_Section):
    """How many failures of each kind a run may survive.

    Args:
        worker_failures: Worker processes that died on a host that lives.
        host_failures: Hosts lost without notice.
        slice_failures: Slices of several hosts of which all were lost at once.
        preemptions: Hosts lost with notice.
        app_errors: Exceptions of the job's own code; they rarely go away by trying again.
        store_failures: Times the store could not be reached, with all retries of the operation.
        stalls: Workers that made no progress for the time-out of what they did.
        unit_failures: Failures of one and the same unit (exceptions, and deaths of a process that worked on nothing
            else) after which it is set aside.
    """

    worker_failures: Failures = 3
    host_failures: Failures = 3
    slice_failures: Failures = 3
    preemptions: Failures = 16
    app_errors: Failures = 0
    store_failures: Failures = 8
    stalls: Failures = 3
    unit_failures: Annotated[int, Field(ge=1, le=1_000_000)] = 3


class CostConfig(_Section):
    """What the hardware costs.

    Args:
        usd_per_chip_hour: Price of one chip (``kind: gpu``: one GPU) for one hour; else the packaged price list.
        region: Region of the price list, ``us-central1``.
        spot: Whether the node pool is Spot.
    """

    usd_per_chip_hour: float | None = Field(default=None, ge=0, le=10_000)
    region: str | None = Field(default=None, min_length=1)
    spot: bool = False


class ParityConfig(_Section):
    """The check of a job's precision on a TPU: how much is computed, and how much may differ from float32.

    Args:
        batches: Batches that are compared operation by operation.
        rows: Rows of a batch; fewer where the job's batches are smaller.
        steps: Training: steps over which the difference is followed.
        product: Largest error of a product by itself, relative to its result in norm; well-conditioned ones have 0.002.
        operation: Relative difference of an operation's result from which on it is named.
        metric: Largest difference of a metric of training, relative to its largest value.
        output: Largest relative difference of an output of inference, in norm.
        mismatch: Largest share of an output's whole numbers that differ.
        cosine: Least cosine between the updates of the parameters.
        growth: Largest growth of the difference over ``steps``, as a factor.
    """

    batches: int = Field(default=2, ge=1, le=64)
    rows: int = Field(default=16, ge=1, le=65_536)
    steps: int = Field(default=20, ge=3, le=10_000)
    product: float = Field(default=0.05, gt=0, le=1e6)
    operation: float = Field(default=0.25, gt=0, le=1e6)
    metric: float = Field(default=0.05, gt=0, le=1e6)
    output: float = Field(default=0.05, gt=0, le=1e6)
    mismatch: float = Field(default=0.05, gt=0, le=1)
    cosine: float = Field(default=0.95, gt=-1, le=1)
    growth: float = Field(default=10.0, gt=1, le=1e9)


class LogsConfig(_Section):
    """Logs, on stderr.

    Args:
        level: The least severe level shown.
        format: ``text`` to read, ``json`` for Cloud Logging (one object a line).
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class ScheduleConfig(_Section):
    """The ticks of an incremental job.

    Args:
        every: Interval, ``15m``, ``1h``, ``1d``: what now is truncated to where no tick is named.
    """

    every: str = Field(default="1h", pattern=r"^[1-9]\d{0,5}[mhd]$")


class Config(_Section):
    """One world a job can run in, and what it changes of the job.

    Args:
        store: Where everything goes; the only section besides ``cluster`` that has no default.
        cluster: Where the run executes.
        mode: ``full`` (all inputs) or ``incremental`` (those that no earlier tick took).
        schedule: The ticks of an incremental job.
        sample: Fraction of the input: ``"1%"``, ``0.01`` or ``"1/100"``, kept in one spelling.
        stages: Stage name -> what changes.
        budgets: Failures a run may survive.
        labels: For cost allocation and schedulers; Kubernetes label syntax.
        cost: Prices.
        logs: Log level and format.
        parity: The check of the job's precision on a TPU.
        dry_run: Keys of this same schema, laid over it by ``tpupipe dry-run``.
        faults: Failures to inject, as ``--fault`` takes them; after those of the command line.
        store_faults: Failures of the store to inject, as ``--store-fault`` takes them.
        job: The job's own parameters; the job's model types them (:func:`tpupipe.config.job_parameters`).
    """

    store: StoreConfig
    cluster: ClusterConfig
    mode: Literal["full", "incremental"] = "full"
    schedule: ScheduleConfig = ScheduleConfig()
    sample: str = "100%"
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    budgets: BudgetsConfig = BudgetsConfig()
    labels: dict[str, str] = Field(default_factory=dict)
    cost: CostConfig = CostConfig()
    logs: LogsConfig = LogsConfig()
    parity: ParityConfig = ParityConfig()
    dry_run: dict[str, Any] = Field(default_factory=dict)
    faults: list[str] = Field(default_factory=list)
    store_faults: list[str] = Field(default_factory=list)
    job: dict[str, Any] = Field(default_factory=dict)

    @field_validator("sample", mode="before")
    @classmethod
    def _one_spelling(cls, sample: object) -> str:
        return sample_text(sample)

    @field_validator("stages", mode="before")
    @classmethod
    def _stage_names(cls, stages: object) -> object:
        if not isinstance(stages, dict):
            return stages
        wrong = sorted(str(name) for name in stages if not _STAGE_NAME.match(str(name)))
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))} cannot name a stage; allowed: 1 to 63 of a-z 0-9 . _ -")
        return {name: {} if stage is None else stage for name, stage in stages.items()}

    @field_validator("labels")
    @classmethod
    def _label_syntax(cls, labels: dict[str, str]) -> dict[str, str]:
        wrong = [f"{k}={v}" for k, v in labels.items() if not (_LABEL_KEY.match(k) and _LABEL_VALUE.match(v))]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: not a Kubernetes label (63 of A-Z a-z 0-9 . _ -; key may have prefix/)"
            )
        return labels


def sample_text(sample: object) -> str:
    """Give the one spelling of a sample fraction: a percentage, or ``a/b`` where that has no end.

    Args:
        sample: ``"1%"``, ``0.01``, ``"0.01"``, ``"1/100"`` or ``1`` (everything).

    Raises:
        ValueError: Not above 0 % and at most 100 %.

    >>> sample_text(0.01), sample_text("1/50"), sample_text("2/3")
    ('1%', '2%', '2/3')
    """
    refused = f"{sample!r} is not a sample; allowed: above 0% up to 100%, as '1%', 0.01 or '1/100'"
    text = str(sample).strip() if isinstance(sample, str | int | float) and not isinstance(sample, bool) else ""
    if not _SAMPLE.fullmatch(text):
        raise ValueError(refused)
    try:
        fraction = Fraction(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(refused) from error
    if not 0 < fraction <= 1:
        raise ValueError(refused)
    percent = fraction * 100
    decimals = next((n for n in range(13) if (percent * 10**n).denominator == 1), None)
    return str(fraction) if decimals is None else f"{float(percent):.{decimals}f}%"
