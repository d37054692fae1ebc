"""A job's own programs, compiled ahead of time by the compiler of the slice that is to run them. No TPU is needed.

The compiler (libtpu) may abort its process and does not get on with a CPU backend that is in use, so it is loaded in
a child process only. The child says what it found program by program; if it dies, another one does what is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tpupipe.config import Config, child_variables
from tpupipe.errors import CheckFailedError, TpupipeError, UsageError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.aot_child import Request
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.fit import (
    TIGHT_SHARE,
    Consumer,
    Layout,
    Memory,
    Roofline,
    hbm_bytes,
    largest,
    remedies,
    roofline,
    size_text,
    time_text,
)
from tpupipe.preflight.hlo import Collective, HloCost
from tpupipe.preflight.refusals import Allocation, Reason, Refusal, read_crash

START_TIMEOUT_S = 300.0
COMPILE_TIMEOUT_S = 900.0
_STDERR_TAIL_BYTES = 65_536
CHILD_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks the metadata server what machine this is, and waits
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # no chip is touched: a check beside a run, or beside a check, is fine
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}

BOUND_NOT_PREDICTION = "a bound, not a prediction"


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


def compiler_installed() -> bool:
    """Whether libtpu is there to be loaded; it is not loaded here."""
    return importlib.util.find_spec("libtpu") is not None


def compile_programs(
    job_name: str,
    config: Config,
    targets: Sequence[SliceSpec],
    *,
    batches: Sequence[int] | None = None,
    input_options: Mapping[str, Any] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    compile_timeout_s: float = COMPILE_TIMEOUT_S,
    say: Callable[[str], None] = lambda _: None,
) -> Compilation:
    """Compiles every training step and inference bucket of a job for some slices.

    Args:
        job_name: Module of the job, ``jobs.stdlib_lm``.
        config: The configuration; its ``cluster`` section is not looked at.
        targets: The slices.
        batches: Global batch sizes of training stages; by default the declared ones.
        input_options: fsspec's options for opening inputs.
        start_timeout_s: Bound of importing the job, listing its inputs and mapping their first unit.
        compile_timeout_s: Bound of one program.
        say: Told of each program when it is done.

    Returns:
        A program for each stage, target and batch. One that cannot be compiled has a ``refusal``.

    Raises:
        UsageError: libtpu is not installed.
        CheckFailedError: The job cannot be loaded, its inputs cannot be listed, or the compiler's process cannot start.
    """
    if not compiler_installed():
        raise UsageError("The TPU compiler is not installed here.", hint="pip install 'tpupipe[tpu]' brings libtpu.")
    targets_told = [[t.generation, t.topology, t.chips_per_vm, t.slices] for t in targets]
    found: dict[str, Mapping[str, Any]] = {}
    state = _Answers()
    while True:
        request = Request(
            job_name, config.model_dump_json(), targets_told, list(batches) if batches else None,
            dict(input_options or {}), list(found),
        )  # fmt: skip
        ended = _one_child(request, state, found, start_timeout_s, compile_timeout_s, say, targets)
        if state.failed is not None:
            raise CheckFailedError(f"{state.failed['kind']}: {state.failed['message']}", hint=state.failed["hint"])
        if state.programs is None or (ended is not None and not state.begun):
            raise CheckFailedError(
                f"The process that was to compile {job_name} ended before it had begun: "
                f"{ended.message if ended else 'it said nothing'}"
            )
        if ended is None:
            break
        facts = state.programs[state.begun]
        found[state.begun] = {**facts, "refusal": asdict(ended)}
        say(f"{facts['stage']}: {ended.message}")
        state.begun = ""
        if len(found) == len(state.programs):
            break
    programs = [_program(found[key], targets) for key in state.programs]
    return Compilation(state.job["name"], tuple(state.job["stages"]), tuple(programs), state.work)


@dataclass
class _Answers:
    """What the children have said so far."""

    job: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, Mapping[str, Any]] | None = None
    work: Any = ""
    failed: Mapping[str, str] | None = None
    begun: str = ""


def _one_child(  # noqa: PLR0917 - one caller
    request: Request,
    answers: _Answers,
    found: dict[str, Mapping[str, Any]],
    start_timeout_s: float,
    compile_timeout_s: float,
    say: Callable[[str], None],
    targets: Sequence[SliceSpec],
) -> Refusal | None:
    """Runs one child to its end; ``None`` if it did all it was asked, else how it ended."""
    answers.begun = ""
    with tempfile.TemporaryFile() as log:
        reading, writing = os.pipe()
        try:
            child = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
                [sys.executable, "-m", "tpupipe.preflight.aot_child", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                env=child_variables(CHILD_VARIABLES),
            )
        finally:
            os.close(writing)
        try:
            assert child.stdin is not None  # noqa: S101 - it was asked for
            with child.stdin as stdin:
                stdin.write(request.to_json().encode())
            for line in _lines(reading, lambda: compile_timeout_s if answers.begun else start_timeout_s):
                _absorb(json.loads(line), answers, found, say, targets)
        except TimeoutError as error:
            return Refusal(Reason.TIMEOUT, f"{error} The compiler's process was ended.")
        finally:
            os.close(reading)
            child.kill()  # a child that has said all has ended, or is about to
            status = child.wait()
        if answers.failed is not None or (answers.programs is not None and len(found) == len(answers.programs)):
            return None
        return _death(status, log)


def _lines(reading: int, timeout_s: Callable[[], float]) -> Iterator[str]:
    """Lines of a pipe to its end.

    Raises:
        TimeoutError: Nothing came for too long.
    """
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            bound = timeout_s()
            if not selector.select(bound):
                raise TimeoutError(f"Nothing was heard for {bound:.0f} s.")
            data = os.read(reading, 1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in lines)


def _absorb(
    record: Mapping[str, Any],
    answers: _Answers,
    found: dict[str, Mapping[str, Any]],
    say: Callable[[str], None],
    targets: Sequence[SliceSpec],
) -> None:
    answers.job = record.get("job", answers.job)
    answers.programs = record.get("programs", answers.programs)
    answers.work = record.get("work", answers.work)
    answers.failed = record.get("failed", answers.failed)
    answers.begun = record.get("begin", answers.begun)
    if "program" in record:
        found[record["program"]["key"]] = record["program"]
        answers.begun = ""
        say(told(_program(record["program"], targets)))


def _death(status: int, log: IO[bytes]) -> Refusal:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _STDERR_TAIL_BYTES))
    tail = log.read().decode("utf-8", "replace")
    if status < 0:
        return read_crash(signal.Signals(-status).name, tail)
    lines = [line for line in tail.splitlines() if line.strip()][-3:]
    return Refusal(Reason.CRASH, f"The compiler's process ended with status {status}: {' / '.join(lines)}")


def _program(record: Mapping[str, Any], targets: Sequence[SliceSpec]) -> Program:
    refusal, cost, memory = record.get("refusal"), record.get("cost"), record.get("memory")
    plain = ("stage", "kind", "batch", "length", "devices", "devices_per_chip", "processes", "ways", "sharding",
             "state_bytes", "lower_s", "compile_s", "compiler_flops", "compiler_bytes", "hint", "skipped")  # fmt: skip
    values = refusal.get("values", []) if refusal else []
    return Program(
        spec=targets[record["target"]],
        **{name: record[name] for name in plain if name in record},
        leaves=tuple(Consumer(what, size) for what, size in record.get("leaves", [])),
        memory=Memory(**memory) if memory else None,
        cost=_cost(cost) if cost else None,
        refusal=_refusal(refusal) if refusal else None,
        values=tuple(Consumer(what, size) for size, what in values),
        notes=tuple(record.get("notes", ())),
    )


def _cost(record: Mapping[str, Any]) -> HloCost:
    collectives = {kind: Collective(**each) for kind, each in record["collectives"].items()}
    return HloCost(**{**record, "collectives": collectives})


def _refusal(record: Mapping[str, Any]) -> Refusal:
    listed = tuple(Allocation(**each) for each in record["allocations"])
    known = {name: value for name, value in record.items() if name != "values"}
    return Refusal(**{**known, "reason": Reason(record["reason"]), "allocations": listed})


# -- saying it --------------------------------------------------------------------------------


def told(program: Program) -> str:
    """One program in one sentence."""
    if program.skipped:
        return f"{program.label}: not compiled: {program.skipped}"
    if program.refusal is not None:
        return f"{program.label} on {program.place}: {refused(program)}"
    memory, bound, cost = program.memory, program.roofline, program.cost
    assert memory is not None  # noqa: S101 - neither skipped nor refused
    assert bound is not None  # noqa: S101
    assert cost is not None  # noqa: S101
    moved = ", ".join(
        f"{c.count} {kind} ({size_text(c.size_bytes)} in all)" for kind, c in sorted(cost.collectives.items())
    )
    return (
        f"{program.label} compiles for {program.place}: {size_text(memory.total)} of {size_text(program.hbm_bytes)} HBM "
        f"per device ({memory.total / program.hbm_bytes:.1%}: arguments {size_text(memory.argument)}, temporaries "
        f"{size_text(memory.temporary)}); at least {time_text(bound.step_s)} per step, {bound.bound}-bound "
        f"({BOUND_NOT_PREDICTION}); collectives: {moved or 'none'}; compiled in {program.compile_s:.1f} s"
    )


def refused(program: Program) -> str:
    """Why a program does not compile, in one sentence."""
    refusal = program.refusal
    assert refusal is not None  # noqa: S101 - the caller looked
    where = f" at {refusal.source}" if refusal.source else ""
    what = f" (operation {refusal.operation}{where})" if refusal.operation else where
    if refusal.reason is Reason.OUT_OF_MEMORY and refusal.needed_bytes and refusal.available_bytes:
        consumers = "; ".join(f"{size_text(c.size_bytes)} {c.what}" for c in program.consumers())
        return (
            f"needs {size_text(refusal.needed_bytes)} of {refusal.space.upper()} per device, "
            f"{size_text(refusal.available_bytes)} is available{what}. Largest: {consumers or 'not known'}"
        )
    if refusal.reason is Reason.UNSUPPORTED:
        return f"an operation that a TPU does not have{what}: {refusal.message}"
    return f"{refusal.message}{what}"


def remedy(program: Program) -> str:
    """What would help, for a program that does not compile."""
    refusal = program.refusal
    if refusal is None:
        return ""
    if refusal.reason is Reason.OUT_OF_MEMORY and refusal.space != "hbm":
        return "That memory is on the chip and used by one kernel: make its block smaller."
    if refusal.reason is Reason.OUT_OF_MEMORY and refusal.needed_bytes and refusal.available_bytes:
        layout = Layout(program.state_bytes, program.ways, program.sharding, program.batch, program.kind == "train")
        return "What would help (estimates): " + "; or ".join(
            remedies(layout, refusal.needed_bytes, refusal.available_bytes)
        )
    if refusal.reason is Reason.UNSUPPORTED:
        return "Compute it on the host (in map), or write it with operations that the TPU has."
    if refusal.reason is Reason.CRASH:
        return "The compiler itself gave up; it may do so for the same program on the slice. Leave the operation out, or on the host."
    if refusal.reason is Reason.TIMEOUT:
        return "Scan over equal layers instead of unrolling them: the program gets shorter."
    return program.hint


def status_of(program: Program) -> Status:
    """How the check of one program ended."""
    if program.skipped:
        return Status.SKIPPED
    if program.refusal is not None:
        return Status.FAILURE
    share = program.hbm_share or 0.0
    unsure = program.cost is not None and (program.cost.unknown_loops or program.cost.opaque_calls)
    return Status.WARNING if share > TIGHT_SHARE or unsure else Status.OK


_WORST_FIRST = (Status.FAILURE, Status.WARNING, Status.SKIPPED, Status.OK)


def findings_of(compilation: Compilation) -> list[Finding]:
    """One finding for each stage with a program: of the program that came off worst."""
    found = []
    for stage in compilation.stages:
        programs = [program for program in compilation.programs if program.stage == stage]
        if not programs:
            continue
        worst = min(programs, key=lambda p: (_WORST_FIRST.index(status_of(p)), -(p.hbm_share or 0.0)))
        status = status_of(worst)
        others = (
            f" (the tightest of {len(programs)} buckets)" if len(programs) > 1 and status is not Status.FAILURE else ""
        )
        found.append(
            Finding(
                f"aot.{stage}",
                status,
                told(worst) + others,
                hint=remedy(worst) or _warning(worst) or "; ".join(worst.notes),
                facts={"programs": [program.to_json() for program in programs]},
            )
        )
    return found


def _warning(program: Program) -> str:
    if (program.hbm_share or 0.0) > TIGHT_SHARE:
        return (
            f"Above {TIGHT_SHARE:.0%} of HBM: batches that wait on the device and fragmentation may not find room. "
            "A smaller batch is safer."
        )
    if program.cost is not None and program.cost.unknown_loops:
        return f"{program.cost.unknown_loops} loop(s) of unknown length are counted once: time and flops are too low."
    if program.cost is not None and program.cost.opaque_calls:
        return f"{program.cost.opaque_calls} custom kernel(s) are not counted: time and flops are too low."
    return ""


def aot_findings(
    job_name: str,
    config: Config,
    *,
    input_options: Mapping[str, Any] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    compile_timeout_s: float = COMPILE_TIMEOUT_S,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Compiles a job's programs for the slice of its configuration.

    Args:
        job_name: Module of the job, ``jobs.stdlib_lm``.
        config: The configuration; a faked slice is compiled for as the real one of the same shape.
        input_options: fsspec's options for opening inputs.
        start_timeout_s: Bound of importing the job, listing its inputs and mapping their first unit.
        compile_timeout_s: Bound of one program.
        say: Told of each program when it is done.

    Returns:
        ``aot.<stage>`` for each training and inference stage; one ``aot.compiler``, ``aot.target`` or ``aot.job`` if
        there is no libtpu, no TPU in the configuration, or no job to compile. Nothing is raised for a job or program
        that is at fault.
    """
    spec = config.cluster.slice_spec()
    if spec is None:
        return [
            Finding(
                "aot.target", Status.SKIPPED, f"cluster.kind is {config.cluster.kind}: there is no TPU to compile for."
            )
        ]
    if not compiler_installed():
        hint = "pip install 'tpupipe[tpu]' brings libtpu; no TPU is needed."
        return [Finding("aot.compiler", Status.SKIPPED, "The TPU compiler is not installed here.", hint)]
    try:
        compilation = compile_programs(
            job_name,
            config,
            [spec],
            input_options=input_options,
            start_timeout_s=start_timeout_s,
            compile_timeout_s=compile_timeout_s,
            say=say,
        )
    except TpupipeError as error:
        return [Finding("aot.job", Status.FAILURE, error.message, error.hint)]
    return findings_of(compilation)
