"""What the TPU compiler said of a job's programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.fit import Consumer, Memory, Roofline, hbm_bytes, largest, roofline
from tpupipe.preflight.hlo import HloCost
from tpupipe.preflight.refusals import Refusal


@dataclass(frozen=True)
class Program:
    """One program on one target: what the compiler said of it.

    Args:
        spec: The target.
        stage: Name of the stage.
        kind: ``train`` or ``infer``.
        batch: Rows of a global batch (``train``), or of one host's batch (``infer``).
        length: Bucket length; 0 without buckets.
        devices: Devices it is compiled for: all of the slice, or those of one host.
        devices_per_chip: As the compiler's topology has it.
        processes: Hosts among them.
        ways: Devices that a batch is split over.
        sharding: ``replicated``, ``fsdp`` or ``custom``.
        state_bytes: State (``train``) or parameters (``infer``) per device.
        leaves: The largest leaves of it, by path.
        lower_s: Seconds to trace and lower.
        compile_s: Seconds to compile.
        memory: HBM per device; ``None`` if it does not compile.
        cost: What one execution does on one device; ``None`` if it does not compile.
        compiler_flops: The compiler's own count, loops counted once.
        compiler_bytes: The same of bytes, on-chip memory included.
        refusal: Why it does not compile.
        values: For a program out of memory: the largest values of its trace, bytes over all devices.
        hint: What to do about it, where the job's own error said so.
        skipped: Why it was not tried.
        notes: What to know about the numbers.
    """

    spec: SliceSpec
    stage: str
    kind: str
    batch: int
    length: int
    devices: int = 0
    devices_per_chip: int = 1
    processes: int = 0
    ways: int = 1
    sharding: str = "replicated"
    state_bytes: int = 0
    leaves: tuple[Consumer, ...] = ()
    lower_s: float = 0.0
    compile_s: float = 0.0
    memory: Memory | None = None
    cost: HloCost | None = None
    compiler_flops: float | None = None
    compiler_bytes: float | None = None
    refusal: Refusal | None = None
    values: tuple[Consumer, ...] = ()
    hint: str = ""
    skipped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        """HBM of one device, from the hardware facts."""
        return hbm_bytes(self.spec.facts, self.devices_per_chip)

    @property
    def hbm_share(self) -> float | None:
        """Share of it that the program takes."""
        return None if self.memory is None else self.memory.total / self.hbm_bytes

    @property
    def roofline(self) -> Roofline | None:
        """The least time of one execution."""
        if self.cost is None:
            return None
        return roofline(self.cost.flops, self.cost.hbm_bytes, self.spec.facts, self.devices_per_chip)

    @property
    def samples_per_s(self) -> float | None:
        """The most rows per second of all hosts together."""
        bound = self.roofline
        if bound is None or bound.step_s <= 0:
            return None
        return self.batch * (self.spec.hosts if self.kind == "infer" else 1) / bound.step_s

    @property
    def label(self) -> str:
        """``lm, batch 64``; ``nll, 64 rows of 128``."""
        if self.kind == "train":
            return f"{self.stage}, batch {self.batch}"
        return f"{self.stage}, {self.batch} rows" + (f" of {self.length}" if self.length else "")

    @property
    def place(self) -> str:
        """``v6e 4x4 (16 devices)``."""
        where = f"{self.spec.generation} {self.spec.topology}"
        where = f"{self.spec.slices} x {where}" if self.spec.slices > 1 else where
        if self.kind == "infer" and self.spec.hosts > 1:
            where = f"one host of {where}"
        return f"{where} ({self.devices} devices)" if self.devices else where

    def consumers(self) -> list[Consumer]:
        """The three largest consumers of HBM per device, as far as they are known."""
        if self.refusal is not None and self.refusal.allocations:
            return largest([Consumer(each.what, each.size_bytes) for each in self.refusal.allocations])
        split = [
            Consumer(f"{v.what}, if split over {self.ways} devices", v.size_bytes // self.ways) for v in self.values
        ]
        return largest([*self.leaves, *split])

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        bound, memory = self.roofline, self.memory
        found: dict[str, Any] = {
            "target": f"{self.spec.generation}:{self.spec.topology}",
            "slices": self.spec.slices,
            "stage": self.stage,
            "kind": self.kind,
            "batch": self.batch,
            "length": self.length,
            "devices": self.devices,
            "devices_per_chip": self.devices_per_chip,
            "hosts": self.processes,
            "sharding": self.sharding,
            "hbm_capacity_bytes": self.hbm_bytes,
            "state_bytes": self.state_bytes,
            "largest": [asdict(each) for each in self.consumers()],
            "notes": list(self.notes),
        }
        if memory is not None and self.cost is not None and bound is not None:
            found |= {
                "memory_bytes": {**asdict(memory), "total": memory.total},
                "hbm_share": self.hbm_share,
                "flops": self.cost.flops,
                "bytes_accessed": self.cost.hbm_bytes,
                "collectives": {kind: asdict(each) for kind, each in self.cost.collectives.items()},
                "roofline_s": {"compute": bound.compute_s, "memory": bound.memory_s, "step": bound.step_s},
                "bound": bound.bound,
                "samples_per_s": self.samples_per_s,
                "lower_s": self.lower_s,
                "compile_s": self.compile_s,
                "compiler_flops": self.compiler_flops,
                "compiler_bytes_accessed": self.compiler_bytes,
            }
        if self.refusal is not None:
            found["refusal"] = asdict(self.refusal)
        if self.skipped:
            found["skipped"] = self.skipped
        return found


@dataclass(frozen=True)
class Compilation:
    """What a job's programs came to.

    Args:
        job: The job's name.
        stages: Its stages, in order.
        programs: By target, then in the order of the stages.
        work: Units, bytes, rows and steps by stage; or why they are not known.
    """

    job: str
    stages: tuple[str, ...]
    programs: tuple[Program, ...]
    work: Sequence[Mapping[str, Any]] | str
