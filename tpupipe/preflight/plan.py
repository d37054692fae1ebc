"""Which slice and batch size: fit, speed and price of a grid of compiled programs, and how often to save. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpupipe.config import CostConfig
from tpupipe.errors import UsageError
from tpupipe.hardware.facts import price_regions, tpu_price
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.program import Compilation, Program
from tpupipe.preflight.told import BOUND_NOT_PREDICTION, refused, remedy

ASSUMED_SAVE_S = 2.0
"""Seconds that a save holds the loop up, where nothing was measured."""
ASSUMED_MTBF_HOURS = 24.0
"""Mean time between failures of a whole slice, where nothing was said. Spot slices may fail several times a day."""
ASSUMED_EFFICIENCY = 0.2
"""Share of the roofline that a slow run reaches: the dear end of the cost range."""
_SECONDS_PER_HOUR = 3600


def parse_targets(text: str) -> list[SliceSpec]:
    """Reads ``v5e:4x4,v6e:2x4:4``: slices with commas between them, each once.

    Raises:
        SliceError: No such slice.
        UsageError: None is named.

    >>> [str(target) for target in parse_targets("v6e:4x4, v5p:2x2x2")]
    ['v6e 4x4 (16 chips, 4 hosts)', 'v5p 2x2x2 (8 chips, 2 hosts)']
    """
    found = dict.fromkeys(SliceSpec.parse(each.strip()) for each in text.split(",") if each.strip())
    if not found:
        raise UsageError(
            f"--targets {text!r} names no slice; allowed: generation:topology[:chips per VM], with commas."
        )
    return list(found)


def parse_batches(text: str) -> list[int]:
    """Reads ``64,128``: global batch sizes, each once.

    Raises:
        UsageError: One is not a whole number of at least 1.

    >>> parse_batches("64, 128,64")
    [64, 128]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part) > 0)]
    if wrong or not parts:
        raise UsageError(
            f"--batches {text!r}: {', '.join(map(repr, wrong)) or 'no size'}; allowed: whole numbers of at least 1, with "
            "commas.",
            hint="--batches 64,128,256",
        )
    return list(dict.fromkeys(int(part) for part in parts))


# -- prices -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChipPrice:
    """What a chip costs, and where that was read."""

    usd_per_chip_hour: float
    source: str


def chip_price(generation: str, cost: CostConfig, configured_generation: str | None) -> ChipPrice | None:
    """The price of a chip of one generation.

    Args:
        generation: Of the target.
        cost: The configuration's prices; its ``usd_per_chip_hour`` is that of the configured generation only.
        configured_generation: The generation in the configuration.

    Returns:
        ``None`` where neither the configuration nor the list has one.
    """
    if cost.usd_per_chip_hour is not None and generation == configured_generation:
        return ChipPrice(cost.usd_per_chip_hour, "cost.usd_per_chip_hour")
    kind = "spot" if cost.spot else "on demand"
    regions = price_regions(generation)
    for region in [cost.region, *regions] if cost.region in regions else regions:
        price = tpu_price(generation, region, spot=cost.spot) if region else None
        if price is not None:
            return ChipPrice(price.usd_per_chip_hour, f"{kind}, {price.region}, {price.source}")
    return None


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One program on one target.

    Args:
        program: What the compiler said.
        price: Of a chip; ``None`` where it is not known.
    """

    program: Program
    price: ChipPrice | None

    @property
    def fits(self) -> bool:
        """Whether it compiles, and so fits."""
        return self.program.memory is not None

    @property
    def usd_per_million(self) -> float | None:
        """The least US dollars for a million rows: the whole slice at its roofline."""
        rate = self.program.samples_per_s
        if rate is None or self.price is None:
            return None
        return self.usd_per_hour(self.price) / _SECONDS_PER_HOUR / rate * 1e6

    def usd_per_hour(self, price: ChipPrice) -> float:
        """Of the whole slice."""
        return self.program.spec.chips * price.usd_per_chip_hour

    @property
    def reason(self) -> str:
        """Why it does not compile, or was not tried."""
        if self.program.skipped:
            return self.program.skipped
        return refused(self.program) if self.program.refusal is not None else ""

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.program.to_json(),
            "chips": self.program.spec.chips,
            "fits": None if self.program.skipped else self.fits,
            "reason": self.reason,
            "hint": remedy(self.program),
            "usd_per_chip_hour": self.price.usd_per_chip_hour if self.price else None,
            "price_source": self.price.source if self.price else None,
            "usd_per_million_samples": self.usd_per_million,
        }


def rows_of(compilation: Compilation, cost: CostConfig, configured_generation: str | None) -> list[Row]:
    """The rows of the table."""
    return [
        Row(program, chip_price(program.spec.generation, cost, configured_generation))
        for program in compilation.programs
    ]


def cheapest(rows: Sequence[Row]) -> Row | None:
    """The row with the fewest US dollars per million samples."""
    priced = [(row.usd_per_million, row) for row in rows if row.usd_per_million is not None]
    return min(priced, key=lambda item: item[0] or 0.0)[1] if priced else None


def fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the most samples per second."""
    timed = [(row.program.samples_per_s, row) for row in rows if row.program.samples_per_s is not None]
    return max(timed, key=lambda item: item[0] or 0.0)[1] if timed else None


# -- checkpoints ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveCost:
    """What a save costs.

    Args:
        save_s: Seconds that it holds the loop up.
        source: ``measured`` (with where), ``given`` or ``assumed``.
    """

    save_s: float
    source: str


def measured_save(events: Sequence[Mapping[str, Any]], stage: str, run: str) -> SaveCost | None:
    """The mean of the seconds that an earlier run's saves held its loop up.

    Args:
        events: The run's events.
        stage: The training stage.
        run: Name of the run, for the source.

    Returns:
        ``None`` where the run saved nothing.
    """
    blocked = [float(e["blocked_s"]) for e in events if e["kind"] == "save" and e.get("stage", stage) == stage]
    if not blocked:
        return None
    return SaveCost(sum(blocked) / len(blocked), f"measured: mean of {len(blocked)} saves of {run}")


def young_daly_s(save_s: float, mtbf_s: float) -> float:
    """The time between two saves, from the end of one to the start of the next, that loses the least.

    Young's first order is ``sqrt(2 d M)`` for a save of ``d`` seconds and a mean time ``M`` between failures (J. W.
    Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, pp.
    530-531). This is Daly's higher order: ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d`` for ``d < 2M``,
    else ``M`` (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, pp. 303-312, equation 37). Both take failures to be independent, with a
    constant rate.

    Args:
        save_s: Seconds that a save holds the work up.
        mtbf_s: Mean seconds between failures of the whole slice.

    Raises:
        UsageError: One of them is not positive.

    >>> round(young_daly_s(2, 86_400))
    587
    """
    if not (save_s > 0 and mtbf_s > 0 and math.isfinite(save_s) and math.isfinite(mtbf_s)):
        raise UsageError(
            f"A save of {save_s} s and a failure every {mtbf_s} s give no checkpoint interval; allowed: above 0.",
            hint="--save-s 2 --mtbf-hours 24",
        )
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True)
class CheckpointPlan:
    """How often to save.

    Args:
        interval_s: Seconds between saves.
        save: What a save costs.
        mtbf_hours: Mean hours between failures of the slice.
        mtbf_source: ``given`` or ``assumed``.
    """

    interval_s: float
    save: SaveCost
    mtbf_hours: float
    mtbf_source: str

    @property
    def lost_share(self) -> float:
        """Share of the time that goes into saves and into work done again: first order, without the restart itself."""
        return self.save.save_s / self.interval_s + self.interval_s / 2 / (self.mtbf_hours * _SECONDS_PER_HOUR)

    def sentence(self) -> str:
        """What to set, and from what."""
        return (
            f"Checkpoints: every {self.interval_s / 60:.1f} minutes (checkpoint: {{minutes: {self.interval_s / 60:.1f}}}), "
            f"by Young and Daly from {self.save.save_s:.2f} s per save ({self.save.source}) and a failure every "
            f"{self.mtbf_hours:g} h ({self.mtbf_source}); about {self.lost_share:.2%} of the time is lost to saves and "
            "repeated work."
        )


def checkpoint_plan(save: SaveCost, mtbf_hours: float | None) -> CheckpointPlan:
    """The plan for a save cost and a failure rate; ``None`` is assumed.

    Raises:
        UsageError: A value is not positive.
    """
    hours = ASSUMED_MTBF_HOURS if mtbf_hours is None else mtbf_hours
    interval_s = young_daly_s(save.save_s, hours * _SECONDS_PER_HOUR)
    return CheckpointPlan(interval_s, save, hours, "assumed" if mtbf_hours is None else "given")


# -- the run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageEstimate:
    """What one stage of a run takes on one target.

    Args:
        stage: Its name.
        target: The slice.
        batch: Rows of a batch.
        steps: Steps; of inference, batches of one host.
        hours: Slice-hours at the roofline, and at a fifth of it.
        usd: The same in US dollars; ``None`` without a price.
    """

    stage: str
    target: str
    batch: int
    steps: int
    hours: tuple[float, float]
    usd: tuple[float, float] | None


def estimate(row: Row, work: Mapping[str, Any]) -> StageEstimate | None:
    """Slice-hours and cost of a stage; ``None`` where its rows are not known or it does not fit.

    Training takes as many rows as declared, whatever the batch. Inference takes every row for one of the longest bucket.

    Args:
        row: The program.
        work: The stage's entry of ``Compilation.work``.
    """
    rate = row.program.samples_per_s
    if rate is None:
        return None
    samples = work["steps"] * work["batch"] if work.get("steps") else work.get("rows")
    if not samples:
        return None
    per_step = row.program.batch * (row.program.spec.hosts if row.program.kind == "infer" else 1)
    least = samples / rate / _SECONDS_PER_HOUR
    hours = (least, least / ASSUMED_EFFICIENCY)
    usd = None
    if row.price is not None:
        usd = (hours[0] * row.usd_per_hour(row.price), hours[1] * row.usd_per_hour(row.price))
    return StageEstimate(
        row.program.stage,
        f"{row.program.spec.generation}:{row.program.spec.topology}",
        row.program.batch,
        math.ceil(samples / per_step),
        hours,
        usd,
    )


@dataclass(frozen=True)
class Plan:
    """Everything that ``tpupipe plan`` prints.

    Args:
        job: The job's name.
        rows: The table.
        work: What there is to do; or why that is not known.
        checkpoints: How often to save; ``None`` without a training stage.
        seconds: How long the plan took.
    """

    job: str
    rows: tuple[Row, ...]
    work: Sequence[Mapping[str, Any]] | str
    checkpoints: CheckpointPlan | None
    seconds: float

    @property
    def stages(self) -> list[str]:
        """Stages with programs, in order."""
        return list(dict.fromkeys(row.program.stage for row in self.rows))

    def of(self, stage: str) -> list[Row]:
        """A stage's rows. Of the buckets of an inference stage, the longest speaks for the stage in a comparison."""
        rows = [row for row in self.rows if row.program.stage == stage]
        longest = max((row.program.length for row in rows), default=0)
        return [row for row in rows if row.program.length == longest]

    def estimates(self) -> list[StageEstimate]:
        """For each stage, on its cheapest and on its fastest target."""
        if isinstance(self.work, str):
            return []
        found: list[StageEstimate] = []
        for stage in self.stages:
            work = next((each for each in self.work if each["stage"] == stage), {})
            for row in (cheapest(self.of(stage)), fastest(self.of(stage))):
                each = estimate(row, work) if row is not None else None
                if each is not None and each not in found:
                    found.append(each)
        return found

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        best: dict[str, Any] = {}
        for stage in self.stages:
            rows = self.of(stage)
            best[stage] = {
                name: None if row is None else {"target": _target(row), "batch": row.program.batch}
                for name, row in (("cheapest", cheapest(rows)), ("fastest", fastest(rows)))
            }
        checkpoints = self.checkpoints
        return {
            "job": self.job,
            "time_is": BOUND_NOT_PREDICTION,
            "rows": [row.to_json() for row in self.rows],
            "best": best,
            "checkpoints": None
            if checkpoints is None
            else {**asdict(checkpoints), "lost_share": checkpoints.lost_share},
            "work": self.work if isinstance(self.work, str) else [dict(each) for each in self.work],
            "estimates": [asdict(each) for each in self.estimates()],
            "seconds": self.seconds,
        }


def _target(row: Row) -> str:
    return f"{row.program.spec.generation}:{row.program.spec.topology}"
