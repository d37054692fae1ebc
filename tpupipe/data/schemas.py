"""One schema out of several."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tpupipe.errors import DataError


def merge_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """One schema for the units of a stage: all-empty columns take the type they have elsewhere, numbers widen.

    Raises:
        DataError: Units have different columns, or types (shapes, too) that do not go together.
    """
    distinct: list[pa.Schema] = []
    for schema in schemas:
        if not any(schema.equals(known, check_metadata=True) for known in distinct):
            distinct.append(schema)
    if not distinct:
        return pa.schema([])
    for schema in distinct[1:]:
        if set(schema.names) != set(distinct[0].names):
            raise DataError(f"Units have different columns: {distinct[0].names} and {schema.names}.")
    for name in distinct[0].names:
        columns = [s.field(name) for s in distinct if not pa.types.is_null(s.field(name).type)]
        fixed = [str(c.type) for c in columns if pa.types.is_fixed_size_list(c.type)]
        if len({(c.type, str(c.metadata)) for c in columns}) > 1 and (fixed or any(c.metadata for c in columns)):
            # Arrow would make ragged lists, or other numbers, of these.
            raise DataError(
                f"Column {name!r} has different shapes or dtypes in different units: "
                f"{' and '.join(sorted({str(c.type) for c in columns}))}.",
                column=name,
            )
    # A typed field first, so that its metadata (dtype, shape) is the one that is kept.
    distinct.sort(key=lambda schema: sum(pa.types.is_null(column.type) for column in schema))
    try:
        return pa.unify_schemas(distinct, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"The columns of the units do not go together: {error}.") from error
