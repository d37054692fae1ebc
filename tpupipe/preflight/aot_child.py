"""The process that loads the TPU compiler: ``python -m tpupipe.preflight.aot_child FD``, started by ``aot``.

libtpu may abort the whole process, so what was found is written to the pipe at once, one JSON object a line, and the
parent starts another process for what is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpupipe.config import Config
from tpupipe.errors import JobError, TpupipeError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.job import Infer, Job, Train
from tpupipe.preflight.aot_topology import CompilerTopology, one_host, one_slice, whole_slice
from tpupipe.preflight.hlo import read_cost
from tpupipe.preflight.refusals import Reason, Refusal, read_refusal
from tpupipe.preflight.shapes import InferShapes, JobShapes, NeedsClusterError
from tpupipe.preflight.trace import find_operation, largest_values
from tpupipe.programs.infer import abstract_feed, check_outputs, infer_mesh, lower_apply, row_multiple
from tpupipe.programs.infer_batches import shapes_of
from tpupipe.programs.sharding import named_sharding
from tpupipe.programs.train import abstract_batch, abstract_state, lower_step, train_mesh
from tpupipe.programs.turns import Turns
from tpupipe.resolve import load_build, rebuilt

_LEAVES_TOLD = 8


@dataclass(frozen=True)
class Request:
    """What the parent asks for.

    Args:
        job: Module of the job.
        config: The configuration, as JSON.
        targets: ``[generation, topology, chips per VM or null, slices]`` each.
        batches: Global batch sizes of training stages; ``null`` for the declared one.
        input_options: fsspec's options for opening inputs.
        skip: Keys of programs that were done by a process before this one.
    """

    job: str
    config: str
    targets: list[list[Any]]
    batches: list[int] | None
    input_options: dict[str, Any]
    skip: list[str]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Reads ``to_json``."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class _Program:
    """One program to compile: its identity for the parent, and how it is traced."""

    facts: Mapping[str, Any]
    trace: Callable[[], Traced]

    @property
    def key(self) -> str:
        return "|".join(str(self.facts[name]) for name in ("target", "stage", "batch", "length"))


@dataclass(frozen=True)
class Traced:
    """A program that is traced.

    Args:
        lowered: ``jax.stages.Lowered``, made when it is called.
        jaxpr: The function's jaxpr, made when it is called: only where the compiler does not say enough.
        facts: What is known before compiling.
    """

    lowered: Callable[[], Any]
    jaxpr: Callable[[], Any]
    facts: Mapping[str, Any]


def main() -> None:
    """Reads the request from standard input, compiles, writes what it found to the pipe."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe:

        def tell(record: Mapping[str, Any]) -> None:
            pipe.write(json.dumps(record) + "\n")
            pipe.flush()

        try:
            _serve(Request.from_json(sys.stdin.read()), tell)
        except TpupipeError as error:
            tell({"failed": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}})


def _serve(request: Request, tell: Callable[[Mapping[str, Any]], None]) -> None:
    build = load_build(request.job)
    config = Config.model_validate_json(request.config)
    job = rebuilt(build, config)
    shapes = JobShapes(job, config, request.input_options)
    tell({"job": {"name": job.name, "stages": list(job.stage_names)}})
    programs = list(_programs(job, shapes, request))
    tell({"programs": {program.key: dict(program.facts) for program in programs}})
    tell({"work": _work(job, shapes)})
    for program in programs:
        if program.key not in request.skip:
            tell({"begin": program.key})
            tell({"program": {**program.facts, "key": program.key, **_compile(program)}})


def _work(job: Job, shapes: JobShapes) -> Any:
    try:
        work = shapes.work()
        for found, stage in zip(work, job.stages, strict=True):
            if isinstance(stage, Infer) and "rows" not in found:
                found["rows"] = shapes.infer_rows(stage)
        return work
    except TpupipeError as error:  # every program tells the same of itself
        return error.message


# -- what to compile ----------------------------------------------------------------------------


def _programs(job: Job, shapes: JobShapes, request: Request) -> Iterator[_Program]:
    for number, (generation, topology, chips_per_vm, slices) in enumerate(request.targets):
        spec = SliceSpec(generation, topology, chips_per_vm, slices)
        for stage in job.stages:
            if isinstance(stage, Train):
                for batch in request.batches or [stage.batch_size]:
                    yield _train_program(number, spec, dataclasses.replace(stage, batch_size=batch), shapes)
            elif isinstance(stage, Infer):
                yield from _infer_programs(number, spec, stage, shapes)


def _train_program(number: int, spec: SliceSpec, stage: Train, shapes: JobShapes) -> _Program:
    facts = {"target": number, "stage": stage.name, "kind": "train", "batch": stage.batch_size, "length": 0}
    return _Program(facts, lambda: _trace_train(spec, stage, shapes))


def _trace_train(spec: SliceSpec, stage: Train, shapes: JobShapes) -> Traced:
    import jax

    columns = shapes.train_columns(stage)
    devices = _devices(whole_slice(spec))
    mesh, rows = train_mesh(stage, devices)
    state = abstract_state(stage, mesh)
    batch = abstract_batch(columns, stage.batch_size, rows)
    ways = 1
    for axis in stage.batch_axes:
        ways *= int(mesh.shape[axis])
    return Traced(
        lambda: lower_step(stage, state, batch, named_sharding(mesh)),
        lambda: jax.make_jaxpr(stage.step)(state, batch).jaxpr,
        {
            **_places(devices, spec.chips),
            "ways": ways,
            "sharding": stage.sharding if isinstance(stage.sharding, str) else "custom",
            **_leaves("state", state),
            "notes": _topology_notes(devices, spec, spec.chips),
        },
    )


def _infer_programs(number: int, spec: SliceSpec, stage: Infer, shapes: JobShapes) -> Iterator[_Program]:
    facts = {"target": number, "stage": stage.name, "kind": "infer"}
    try:
        topology = one_slice(spec) if stage.parallel == "sharded" else one_host(spec)
        devices = _devices(topology)
        mesh, rows = infer_mesh(stage, devices)
        found = shapes.infer(stage, row_multiple(stage, mesh))
        params = shapes.params(stage, mesh)
    except Exception as error:  # noqa: BLE001 - becomes that program's refusal
        yield _Program({**facts, "batch": 0, "length": 0}, _raises(error))
        return
    for shape in shapes_of(found.stage, row_multiple(stage, mesh)):
        length = shape[1] if found.stage.buckets is not None else 0
        yield _Program({**facts, "batch": shape[0], "length": length}, _Infers(spec, found, params, mesh, rows, shape))


def _raises(error: Exception) -> Callable[[], Traced]:
    def trace() -> Traced:
        raise error

    return trace


@dataclass(frozen=True)
class _Infers:
    spec: SliceSpec
    found: InferShapes
    params: Any
    mesh: Any
    rows: Any
    shape: tuple[int, int]

    def __call__(self) -> Traced:
        import jax

        rows, stage, spec = self.rows, self.found.stage, self.found.spec
        devices = list(self.mesh.devices.flat)
        sharded = stage.parallel == "sharded"
        chips = self.spec.chips_per_slice if sharded else self.spec.chips_per_host
        turns = Turns(self.mesh) if sharded else None
        check_outputs(stage, self.params, spec, self.shape, rows)
        return Traced(
            lambda: lower_apply(stage, self.params, spec, [self.shape], rows, turns=turns)[0],
            lambda: jax.make_jaxpr(stage.apply)(self.params, abstract_feed(stage, spec, self.shape, rows)).jaxpr,
            {
                **_places(devices, chips),
                "ways": row_multiple(stage, self.mesh),
                "sharding": stage.sharding if isinstance(stage.sharding, str) else "custom",
                **_leaves("params", self.params),
                "notes": [*self.found.notes, *_topology_notes(devices, self.spec, chips)],
            },
        )


def _devices(topology: CompilerTopology) -> Any:
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": topology.host_bounds}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return topologies.get_topology_desc(topology.name, "tpu", **options).devices


def _places(devices: Any, chips: int) -> dict[str, int]:
    return {
        "devices": len(devices),
        "devices_per_chip": max(len(devices) // chips, 1),
        "processes": len({device.process_index for device in devices}),
    }


def _topology_notes(devices: Any, spec: SliceSpec, chips: int) -> list[str]:
    listed = len(devices) // chips
    notes = []
    if listed != spec.devices_per_chip:
        notes.append(
            f"the compiler lists {listed} devices per {spec.generation} chip, a real host {spec.devices_per_chip}: "
            f"memory and time are those of a {'half' if listed == 2 else 'part of a'} chip, and the batch is split "
            f"{listed} times as often as in a run"
        )
    if spec.slices > 1 and chips == spec.chips:
        notes.append("time on the network between slices is not modelled")
    return notes


def _leaves(name: str, tree: Any) -> dict[str, Any]:
    """Bytes per device of a tree of shapes, in all and of its largest leaves."""
    import jax

    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        count = 1
        for side in leaf.sharding.shard_shape(leaf.shape):
            count *= side
        leaves.append((f"{name}{jax.tree_util.keystr(path)}", count * getattr(leaf.dtype, "itemsize", 4)))
    leaves.sort(key=lambda item: (-item[1], item[0]))
    return {"state_bytes": sum(size for _, size in leaves), "leaves": leaves[:_LEAVES_TOLD]}


# -- compiling ----------------------------------------------------------------------------------


def _compile(program: _Program) -> dict[str, Any]:
    known: dict[str, Any] = {}
    traced: Traced | None = None
    try:
        began = time.monotonic()
        traced = program.trace()
        known = dict(traced.facts)
        lowered = traced.lowered()
        lowered_at = time.monotonic()
        compiled = lowered.compile()
        ended = time.monotonic()
        return {**known, "lower_s": lowered_at - began, "compile_s": ended - lowered_at, **_measured(compiled)}
    except NeedsClusterError as error:
        return {**known, "skipped": error.message}
    except TpupipeError as error:
        return {**known, "refusal": _told(_of_the_job(error), traced), "hint": error.hint}
    except Exception as error:  # noqa: BLE001 - the compiler raises many kinds; each is told
        return {**known, "refusal": _told(read_refusal(type(error).__name__, str(error)), traced)}


def _of_the_job(error: TpupipeError) -> Refusal:
    """The job's own functions raised; or JAX did under them, for an operation that the TPU does not have."""
    cause = error.__cause__
    if cause is not None:
        found = read_refusal(type(cause).__name__, str(cause))
        if found.reason is not Reason.OTHER:
            return found
    return Refusal(Reason.TARGET if isinstance(error, JobError) else Reason.JOB, error.message)


def _told(refusal: Refusal, traced: Traced | None) -> dict[str, Any]:
    """With what the trace knows and the compiler did not say."""
    told = asdict(refusal)
    if traced is None:
        return told
    if refusal.reason is Reason.OUT_OF_MEMORY and not refusal.allocations:
        told["values"] = largest_values(traced.jaxpr())
    if refusal.operation and not refusal.source:
        told["source"] = find_operation(traced.jaxpr(), refusal.operation)
    return told


def _measured(compiled: Any) -> dict[str, Any]:
    memory, analysis = compiled.memory_analysis(), compiled.cost_analysis() or {}
    cost = read_cost(compiled.as_text())
    return {
        "memory": {
            "argument": memory.argument_size_in_bytes,
            "output": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "cost": asdict(cost),
        "compiler_flops": analysis.get("flops"),
        "compiler_bytes": analysis.get("bytes accessed"),
    }


if __name__ == "__main__":
    main()
