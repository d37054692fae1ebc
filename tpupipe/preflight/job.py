"""Whether the job's module, inputs, maps and functions work, tried on the first rows of the real input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpupipe.data.buckets import AutoBuckets, Buckets, row_lengths
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.schemas import merge_schemas
from tpupipe.errors import DataError, TpupipeError
from tpupipe.job import Infer, Quarantine, Stage, Train
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.job_data import EarlierProblemError, JobData, describe, shown

LARGE_PICKLE_BYTES = 10_000_000


def import_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.import``: the module can be imported, and neither that nor ``build`` makes JAX look for devices."""
    name, report = "job.import", context.imported
    if report is None:
        yield Finding(name, Status.SKIPPED, "The module was not imported alone.")
        return
    facts = {"seconds": report.seconds, "jax_awake": report.jax_awake, "jax_imported": report.jax_imported}
    if report.error:
        yield Finding(name, Status.FAILURE, report.error, report.hint, facts)
        return
    if context.build_woke_jax:
        yield Finding(
            name,
            Status.FAILURE,
            f"build of {report.module} made JAX look for devices in the driver, before the slice's processes exist.",
            "Move jax.devices(), jax.random and every computation into init, step, apply or map.",
            facts,
        )
        return
    yield Finding(
        name, Status.OK, f"Importing {report.module} takes {report.seconds:.1f} s and does not wake JAX.", facts=facts
    )


def source_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.sources``: every input exists and can be listed; files of pretrained parameters exist."""
    name, data = "job.sources", context.data
    for stage, source in _sources(context):
        try:
            units = data.listed(source)
        except EarlierProblemError:
            yield Finding(name, Status.SKIPPED, f"{stage.name}: reads the same input, see above.")
            continue
        except TpupipeError as error:
            yield _failure(name, stage.name, error)
            continue
        size = sum(unit.size_bytes for unit in units)
        yield Finding(
            name,
            Status.OK,
            f"{stage.name}: {len(units)} unit(s), {_bytes(size)}, from {shown(source.pattern)}.",
            facts={"stage": stage.name, "units": len(units), "size_bytes": size},
        )
    for stage in data.job.stages:
        if isinstance(stage, Infer) and isinstance(stage.params, Pretrained):
            yield _pretrained(name, stage, stage.params, context.input_options)


def _pretrained(name: str, stage: Infer, params: Pretrained, options: Mapping[str, Any]) -> Finding:
    from tpupipe.data.listing import list_files

    try:
        files = list_files(params.files, storage_options=options)
    except TpupipeError as error:
        return _failure(name, stage.name, error)
    size = sum(file.size_bytes for file in files)
    return Finding(name, Status.OK, f"{stage.name}: parameters in {len(files)} file(s), {_bytes(size)}.")


def sample_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.sample``: the sample has units, and a row."""
    name, data = "job.sample", context.data
    for stage, source in _sources(context):
        try:
            units = data.sampled(source)
            unit, table = data.first(source)
        except EarlierProblemError:
            yield _earlier(name, stage.name)
            continue
        except TpupipeError as error:
            yield _failure(name, stage.name, error)
            continue
        size = sum(u.size_bytes for u in units)
        yield Finding(
            name,
            Status.OK,
            f"{stage.name}: {context.config.sample} of the input is {len(units)} unit(s), {_bytes(size)}; unit {unit.id} has "
            f"{table.num_rows} row(s).",
            facts={"stage": stage.name, "units": len(units), "size_bytes": size, "rows_of_first": table.num_rows},
        )


def map_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.map``: the first unit maps; what came out of it."""
    name, data = "job.map", context.data
    for stage in _mapping_stages(context):
        if unknown := data.unknown_rows(stage):
            yield Finding(name, Status.SKIPPED, f"{stage.name}: {unknown}", "Try it with --set sample=1%.")
            continue
        try:
            made = data.mapped(stage)
        except EarlierProblemError:
            yield _earlier(name, stage.name)
            continue
        except TpupipeError as error:
            yield _map_failure(name, stage, error)
            continue
        columns = describe(made)
        text = ", ".join(f"{column}: {kind}" for column, kind in columns.items())
        facts = {"stage": stage.name, "rows": made.num_rows, "columns": columns}
        if not made.num_rows:
            message = f"{stage.name}: the first unit maps to no row at all ({text})."
            yield Finding(name, Status.WARNING, message, "Later units may have some; look at the map.", facts)
            continue
        yield Finding(
            name, Status.OK, f"{stage.name}: the first unit gives {made.num_rows} row(s) of {text}.", facts=facts
        )


def _map_failure(name: str, stage: Stage, error: TpupipeError) -> Finding:
    found = _failure(name, stage.name, error)
    if isinstance(stage, Infer) and isinstance(stage.bad_rows, Quarantine):
        hint = f"bad_rows sets up to {stage.bad_rows.max} such rows aside; the rest of the unit was not tried. {error.hint}"
        return Finding(name, Status.WARNING, found.message, hint.strip(), found.facts)
    return found


def schema_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.schema``: first and last unit give the same columns, and those are what the stages behind them need."""
    name, data = "job.schema", context.data
    for stage in data.job.stages:
        if unknown := data.unknown_rows(stage):
            yield Finding(name, Status.SKIPPED, f"{stage.name}: {unknown}", "Try it with --set sample=1%.")
            continue
        try:
            if isinstance(stage, Train):
                told = check_trainable(stage, data.mapped(data.job.stage(stage.data)))
            else:
                told = _same_columns(stage, data)
                if isinstance(stage, Infer):
                    told = f"{told}; {check_feedable(stage, data.mapped(stage))}"
        except EarlierProblemError:
            yield _earlier(name, stage.name)
        except TpupipeError as error:
            yield _failure(name, stage.name, error)
        else:
            yield Finding(name, Status.OK, f"{stage.name}: {told}.", facts={"stage": stage.name})


def _same_columns(stage: Stage, data: JobData) -> str:
    first, last = data.mapped(stage), data.mapped(stage, "last")
    merged = merge_schemas([first.schema, last.schema] if last.num_columns else [first.schema])
    return f"first and last unit of the sample have the same {len(merged)} column(s)"


def check_trainable(stage: Train, table: Any) -> str:
    """Whether a training stage can be fed a table's columns: numbers, and of one shape.

    Raises:
        DataError: A column is ragged, text, or named ``mask``.
    """
    from tpupipe.data.columns import is_numeric, to_numpy

    columns = to_numpy(table)
    for column, values in columns.items():
        if column == "mask":
            raise DataError(f"{stage.data} gives a column 'mask', which every batch gets anyway.", hint="Rename it.")
        if values.dtype == object or not is_numeric(values):
            raise DataError(
                f"{stage.data} gives column {column!r} as {describe(table)[column]}; training needs numbers of one shape.",
                hint="Let the stage's map pad or pack it, or drop it.",
                column=column,
            )
    return f"is fed {', '.join(columns)} of {stage.data}"


def check_feedable(stage: Infer, table: Any) -> str:
    """Whether an inference stage can be fed a table's columns.

    Raises:
        DataError: A column to keep is missing, none has numbers, the bucketed one has no length, or a row is too long.
    """
    from tpupipe.data.columns import is_numeric, to_numpy

    columns = to_numpy(table)
    missing = [column for column in stage.keep if column not in columns]
    if missing:
        raise DataError(f"It keeps {', '.join(missing)}, but its rows have {', '.join(columns)}.", hint="Change keep=.")
    fed = {column: values for column, values in columns.items() if is_numeric(values)}
    if not fed:
        raise DataError(
            f"No column has numbers to feed: {', '.join(columns)}.",
            hint="Give it a map that turns the rows into arrays.",
        )
    told = f"the model is fed {', '.join(fed)}"
    if stage.buckets is None:
        ragged = [column for column, values in fed.items() if values.dtype == object]
        if ragged:
            raise DataError(
                f"Column {ragged[0]!r} is ragged, and there are no buckets.",
                hint="buckets=Buckets(lengths=(128, 256, 512)), or Buckets.auto().",
            )
        return told
    if not table.num_rows:
        return told
    declared = stage.buckets if isinstance(stage.buckets, Buckets) else Buckets(column=stage.buckets.column)
    longest = int(row_lengths(fed, declared).max())
    limit = _longest(stage.buckets)
    if limit is not None and longest > limit:
        if stage.buckets.too_long == "error":
            raise DataError(
                f"A row of the first unit has length {longest}; the longest bucket is {limit}.",
                hint='Add a longer bucket, or too_long="truncate" or "quarantine".',
            )
        return f"{told}; the longest row has {longest}, over the longest bucket {limit}: {stage.buckets.too_long}"
    return f"{told}; the longest row has {longest}"


def _longest(buckets: Buckets | AutoBuckets) -> int | None:
    return buckets.lengths[-1] if isinstance(buckets, Buckets) else buckets.longest


def pickle_findings(context: CheckContext) -> Iterator[Finding]:
    """``job.pickle``: every function can be sent to workers, and carries no data along."""
    name = "job.pickle"
    if context.pickled is None or context.job is None:
        yield Finding(name, Status.SKIPPED, "Ray was not asked to pickle anything.")
        return
    sizes: dict[str, int] = {}
    for stage in context.job.stages:
        for label, function in _functions(stage):
            try:
                sizes[label] = len(context.pickled(function))
            except Exception as error:  # noqa: BLE001 - pickling runs the user's own code, which may raise anything
                yield Finding(
                    name,
                    Status.FAILURE,
                    f"{label} cannot be sent to workers: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                    "It refers to something that lives in this process only (a lock, a file, a connection, a device): make that inside "
                    "the function.",
                    {"function": label},
                )
    large = {label: size for label, size in sizes.items() if size > LARGE_PICKLE_BYTES}
    for label, size in large.items():
        hint = "Read it inside the function, from a file that every host has."
        yield Finding(name, Status.WARNING, f"{label} carries {_bytes(size)} of data to every worker.", hint)
    fine = {label: size for label, size in sizes.items() if label not in large}
    if fine:
        message = f"{len(fine)} function(s) pickle: {', '.join(fine)}; {_bytes(sum(fine.values()))} in all."
        yield Finding(name, Status.OK, message, facts={"size_bytes": sizes})


def _functions(stage: Stage) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute in ("map", "dataset", "init", "step", "params", "apply", "sharding"):
        value = getattr(stage, attribute, None)
        if callable(value):
            yield f"{attribute} of {stage.name}", value
    if isinstance(stage, Infer) and isinstance(stage.params, Pretrained):
        yield f"load of {stage.name}", stage.params.load


# -- small parts ----------------------------------------------------------------------------


def _sources(context: CheckContext) -> Iterator[tuple[Stage, Any]]:
    data = context.data
    for stage in data.job.stages:
        source = data.source_of(stage)
        if source is not None:
            yield stage, source


def _mapping_stages(context: CheckContext) -> list[Stage]:
    return [stage for stage in context.data.job.stages if not isinstance(stage, Train)]


def _earlier(name: str, stage: str) -> Finding:
    return Finding(name, Status.SKIPPED, f"{stage}: there are no rows to look at.", "Mend the failures above first.")


def _failure(name: str, stage: str, error: TpupipeError) -> Finding:
    facts = {"stage": stage, "error_kind": type(error).__name__}
    return Finding(name, Status.FAILURE, f"{stage}: {error.message}", error.hint, facts)


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
