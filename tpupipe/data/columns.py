"""Batches of numpy arrays to Arrow tables and back, with dtypes and shapes kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tpupipe.errors import DataError

_KEY = b"tpupipe"
_MAX_OFFSET = 2**31 - 1
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def to_table(batch: Mapping[str, Any]) -> pa.Table:
    """A batch as an Arrow table.

    Args:
        batch: Column name to array with rows first. ``ndarray[N, ...]`` of numbers, booleans
            or times becomes nested fixed-size lists, its shape in the field's metadata;
            dtypes Arrow lacks (bfloat16, float8) are carried as unsigned integers and
            named there. A list or object array of arrays or lists is ragged and becomes
            ``list<...>``, also when all rows happen to have one length. Strings and bytes stay.

    Raises:
        DataError: No columns, columns of different lengths, or a dtype with no Arrow type.
    """
    if not batch:
        raise DataError("A batch must have at least one column.")
    arrays = {name: as_array(name, values) for name, values in batch.items()}
    counts = {name: len(values) for name, values in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"The columns of a batch have different numbers of rows: {counts}.", rows=counts)
    fields, columns = [], []
    for name, values in arrays.items():
        try:
            column = _encode(values)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"Column {name!r} of {values.dtype}{list(values.shape)} cannot be stored: {error}."
            ) from error
        columns.append(column)
        fields.append(pa.field(name, column.type, metadata=_describe(values)))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def to_numpy(table: pa.Table) -> dict[str, NDArray[Any]]:
    """An Arrow table as a batch, without copying where the types allow it.

    Returns:
        Column name to ``ndarray[N, ...]``. Fixed-size lists become dimensions, ``list<...>``
        object arrays of arrays, text and bytes object arrays. Missing values are NaN or NaT in
        floating and time columns; integer and boolean columns that have some become object
        arrays with ``None``, so that no value changes. Arrays may be read-only.
    """
    batch = {}
    for column, values in zip(table.schema, table.columns, strict=True):
        dtype = json.loads((column.metadata or {}).get(_KEY, b"{}")).get("dtype")
        # combine_chunks() copies fixed-size lists even when there is nothing to combine.
        decoded = _decode(values.chunk(0) if values.num_chunks == 1 else values.combine_chunks())
        batch[column.name] = decoded.view(_named_dtype(dtype)) if dtype and decoded.dtype != object else decoded
    return batch


def is_numeric(values: NDArray[Any]) -> bool:
    """Whether a model can be fed a column: numbers, booleans, or arrays of them."""
    if values.dtype == object:
        return all(isinstance(row, (np.ndarray, list)) for row in values)
    return values.dtype.kind in "biufc" or "float" in values.dtype.name


# -- to Arrow -------------------------------------------------------------------------------


def as_array(name: str, values: Any) -> NDArray[Any]:
    """A column as an array; a list of lists or arrays becomes an object array of its rows.

    So does an object array of more dimensions, which numpy makes of rows that happen to have one length; the dtype that
    the rows had is lost then, and is inferred from the values.

    Raises:
        DataError: It is a single value.
    """
    if isinstance(values, (list, tuple)) and any(isinstance(row, (list, tuple, np.ndarray)) for row in values):
        rows = np.empty(len(values), object)
        for i, row in enumerate(values):
            rows[i] = row
        return rows
    array = np.array(values, object) if isinstance(values, (list, tuple)) and None in values else np.asarray(values)
    if array.ndim == 0:
        raise DataError(f"Column {name!r} is a single {array.dtype} value; columns are arrays with rows first.")
    return _rows_of_objects(array) if array.dtype == object and array.ndim > 1 else array


def _rows_of_objects(values: NDArray[Any]) -> NDArray[Any]:
    """``object[N, ...]`` as ``object[N]`` of arrays of numbers, or of objects where they are something else."""
    rows = np.empty(len(values), object)
    if not values.size:
        for i in range(len(rows)):
            rows[i] = values[i].tolist()  # lists: nothing tells a dtype
        return rows
    flat = values.reshape(-1).tolist()
    kinds = {type(value) for value in flat}
    others = (np.flexible, np.datetime64, np.timedelta64)
    numbers = all(
        issubclass(kind, (bool, int, float, complex, np.generic)) and not issubclass(kind, others) for kind in kinds
    )
    typed = np.array(flat).reshape(values.shape) if numbers else values
    for i in range(len(rows)):
        rows[i] = typed[i]
    return rows


def _encode(values: NDArray[Any]) -> pa.Array:
    if values.dtype == object and values.ndim == 1:
        if any(isinstance(row, (np.ndarray, list, tuple)) for row in values):
            return _encode_ragged(values)
        return pa.array(values.tolist())
    if 0 in values.shape[1:]:
        raise ValueError("a dimension has size 0, which Parquet cannot hold")
    column = _encode_flat(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, type=pa.list_(_element(column), size))
    return column


def _encode_flat(values: NDArray[Any]) -> pa.Array:
    if _is_carried(values.dtype):
        return pa.array(values.view(_CARRIERS[values.dtype.itemsize]))
    if values.dtype.kind in "OUS":
        return pa.array(values.tolist(), None if values.size or values.dtype == object else _text_type(values.dtype))
    if values.dtype.kind in {"V", "c"}:
        raise TypeError(f"Arrow has no type for {values.dtype}")
    if values.dtype.kind == "M" and np.datetime_data(values.dtype)[0] == "D":
        days = values[~np.isnat(values)].astype(np.int64)
        if (days != days.astype(np.int32)).any():  # Arrow wraps around without a word
            raise ValueError("days beyond 32 bits")
    return pa.array(values.astype(values.dtype.newbyteorder("="), copy=False))


def _text_type(dtype: np.dtype[Any]) -> pa.DataType:
    return pa.string() if dtype.kind == "U" else pa.binary()


def _encode_ragged(values: NDArray[Any]) -> pa.Array:
    missing = np.fromiter((row is None for row in values), np.bool_, len(values))
    rows = [np.asarray(row) for row in values[~missing]]
    if any(row.ndim == 0 for row in rows):
        raise TypeError("some rows are arrays and some are single values")
    lengths = np.zeros(len(values) + 1, np.int64)
    lengths[1:][~missing] = [len(row) for row in rows]
    offsets = np.cumsum(lengths)
    if offsets[-1] > _MAX_OFFSET:
        raise ValueError(f"{offsets[-1]} values in one column of a unit; allowed: {_MAX_OFFSET}. Make units smaller")
    # An empty Python list has no dtype of its own and must not turn integers into floats.
    filled = [row for row in rows if row.size] or [
        row for row, given in zip(rows, values[~missing], strict=True) if isinstance(given, np.ndarray)
    ]
    if any(_is_carried(row.dtype) for row in filled):
        raise TypeError(f"ragged rows of {filled[0].dtype}; store them as float32 or pad them to one length")
    column = _encode(np.concatenate(filled)) if filled else pa.nulls(0)
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), column, type=pa.list_(_element(column)), mask=mask
    )


def _element(values: pa.Array) -> pa.Field:
    # The name Parquet gives back, so that a schema is the same before and after it was stored.
    return pa.field("element", values.type)


def _is_carried(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes registers bfloat16, float8 and int4 with numpy as "void" kinds that have a name.
    return dtype.kind == "V" and dtype.fields is None and dtype.subdtype is None and not dtype.name.startswith("void")


def _describe(values: NDArray[Any]) -> dict[bytes, bytes] | None:
    facts: dict[str, Any] = {}
    if values.ndim > 1:
        facts["shape"] = list(values.shape[1:])
    if _is_carried(values.dtype):
        facts["dtype"] = values.dtype.name
    return {_KEY: json.dumps(facts, sort_keys=True).encode()} if facts else None


# -- to numpy -------------------------------------------------------------------------------


def _decode(column: pa.Array) -> NDArray[Any]:  # noqa: PLR0911 - one return per family of types
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        if isinstance(kind, pa.FixedShapeTensorType) and column.null_count == 0:
            return np.asarray(column.to_numpy_ndarray())
        return _decode(column.storage)
    if pa.types.is_dictionary(kind):
        return _decode(column.dictionary_decode())
    if pa.types.is_fixed_size_list(kind) and column.null_count == 0:
        values = _decode(column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _decode_ragged(column)
    has_missing = pa.types.is_floating(kind) or pa.types.is_temporal(kind)  # NaN, NaT
    exact = column.null_count == 0 or has_missing
    if pa.types.is_nested(kind) or pa.types.is_null(kind) or not exact:
        rows = np.empty(len(column), object)
        rows[:] = column.to_pylist()
        return rows
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _decode_ragged(column: pa.Array) -> NDArray[Any]:
    offsets = column.offsets.to_numpy()
    first = int(offsets[0]) if len(offsets) else 0
    values = _decode(column.values.slice(first, int(offsets[-1]) - first if len(offsets) else 0))
    bounds = (offsets - first).tolist()
    rows = np.empty(len(column), object)
    for i in range(len(column)):
        rows[i] = values[bounds[i] : bounds[i + 1]]
    if column.null_count:
        rows[np.asarray(column.is_null())] = None
    return rows


def _named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # registers its dtypes with numpy only when imported

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
