"""What was found of a program, in sentences: its numbers, why it does not compile, what would help. Pure."""

from __future__ import annotations

from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.fit import TIGHT_SHARE, Layout, remedies, size_text, time_text
from tpupipe.preflight.program import Compilation, Program
from tpupipe.preflight.refusals import Reason

BOUND_NOT_PREDICTION = "a bound, not a prediction"

_REMEDIES = {
    Reason.CRASH: "The compiler itself gave up; it may do so for the same program on the slice. Leave the operation out, "
    "or do it on the host.",
    Reason.UNSUPPORTED: "Compute it on the host (in map), or write it with operations that the TPU has.",
    Reason.TIMEOUT: "Scan over equal layers instead of unrolling them: the program gets shorter.",
}


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
    if refusal.reason in _REMEDIES:
        return _REMEDIES[refusal.reason]
    if refusal.reason is Reason.OUT_OF_MEMORY and refusal.space != "hbm":
        return "That memory is on the chip and used by one kernel: make its block smaller."
    if refusal.reason is Reason.OUT_OF_MEMORY and refusal.needed_bytes and refusal.available_bytes:
        layout = Layout(program.state_bytes, program.ways, program.sharding, program.batch, program.kind == "train")
        return "What would help (estimates): " + "; or ".join(
            remedies(layout, refusal.needed_bytes, refusal.available_bytes)
        )
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
