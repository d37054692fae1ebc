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
    Consumer,
    Memory,
)
from tpupipe.preflight.hlo import Collective, HloCost
from tpupipe.preflight.program import Compilation, Program
from tpupipe.preflight.refusals import Allocation, Reason, Refusal, read_crash
from tpupipe.preflight.told import findings_of, told

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


def aot_findings(
    job_name: str,
    config: Config,
    *,
    input_options: Mapping[str, Any] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    compile_timeout_s: float = COMPILE_TIMEOUT_S,
    say: Callable[[str], None] = lambda _: None,
    keep: Callable[[Compilation], None] = lambda _: None,
) -> list[Finding]:
    """Compiles a job's programs for the slice of its configuration.

    Args:
        job_name: Module of the job, ``jobs.stdlib_lm``.
        config: The configuration; a faked slice is compiled for as the real one of the same shape.
        input_options: fsspec's options for opening inputs.
        start_timeout_s: Bound of importing the job, listing its inputs and mapping their first unit.
        compile_timeout_s: Bound of one program.
        say: Told of each program when it is done.
        keep: Takes the compilation, if there is one.

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
    keep(compilation)
    return findings_of(compilation)
