"""A unit's object, written window by window: one Parquet file with row groups of one size, kept on disk when large."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tpupipe.data.schemas import merge_schemas
from tpupipe.errors import DataError, UsageError

FOOTER_KEY = b"tpupipe"
FORMAT = 1
_IN_MEMORY_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class UnitFooter:
    """What a unit's object says about itself.

    Attributes:
        unit: Unit id.
        rows: Rows in the object. Filled in when it is written.
        chunks: Rows of every chunk. Filled in when it is written.
        rows_in: Input rows the unit was made from (``map`` may change their number).
        rows_bad: Input rows set aside with an error record.
        rows_truncated: Rows of which only the beginning was fed, because they are longer than the longest bucket.
        values_fed: Values of the bucketed column that the model was fed, padding included.
        values_real: Those of them that are values of rows.
        input_fingerprint: Of the unit's input.
        params_fingerprint: Of the parameters used, ``""`` without any.
        code_fingerprint: Of the user's code.
        lease_epoch: Lease under which it was written.
        sample: Exact fraction of the input the run uses, such as ``"1/100"``.
    """

    unit: str
    rows: int = 0
    chunks: tuple[int, ...] = ()
    rows_in: int = 0
    rows_bad: int = 0
    rows_truncated: int = 0
    values_fed: int = 0
    values_real: int = 0
    input_fingerprint: str = ""
    params_fingerprint: str = ""
    code_fingerprint: str = ""
    lease_epoch: int = 0
    sample: str = "1"


class UnitWriter:
    """Collects the rows of one unit.

    Args:
        unit: Unit id, for messages.
        chunk_rows: Rows per chunk; the last may be shorter.

    Raises:
        UsageError: ``chunk_rows`` is not positive.
    """

    def __init__(self, unit: str, chunk_rows: int) -> None:
        if chunk_rows < 1:
            raise UsageError(f"chunk_rows={chunk_rows} must be at least 1.")
        self._unit = unit
        self._chunk_rows = chunk_rows
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._chunks: list[int] = []
        self._schema: pa.Schema | None = None
        self._file: Any = None
        self._parquet: pq.ParquetWriter | None = None

    def append(self, table: pa.Table) -> None:
        """Adds rows (there may be none: that keeps the schema).

        Raises:
            DataError: Parquet has no type for a column, or the columns are not those of the rows before.
        """
        if self._schema is None:
            self._open(table.schema)
        elif not table.schema.equals(self._schema, check_metadata=True):
            if not table.num_rows:
                return
            table = self._widen(table)
        self._pending.append(table)
        self._pending_rows += table.num_rows
        if self._pending_rows >= self._chunk_rows:
            self._flush(self._pending_rows - self._pending_rows % self._chunk_rows)

    def finish(self, footer: UnitFooter) -> bytes:
        """Ends the file and gives it.

        Args:
            footer: What to record; ``rows`` and ``chunks`` are filled in here.

        Raises:
            DataError: No table was appended, or see :meth:`append`.
        """
        if self._parquet is None:
            raise DataError(f"Unit {self._unit} has no columns.", unit=self._unit)
        if self._pending_rows:
            self._flush(self._pending_rows)
        footer = dataclasses.replace(footer, rows=sum(self._chunks), chunks=tuple(self._chunks))
        record = json.dumps(
            {"format": FORMAT, **dataclasses.asdict(footer)}, sort_keys=True, separators=(",", ":")
        ).encode()
        self._parquet.add_key_value_metadata({FOOTER_KEY: record})
        data = self._closed()
        self.discard()
        return data

    def discard(self) -> None:
        """Gives up what was collected."""
        if self._parquet is not None:
            self._parquet.close()
            self._parquet = None
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- parts ---------------------------------------------------------------------------------

    def _open(self, schema: pa.Schema) -> None:
        # Dictionaries pay for repeated text only; on numbers they cost time at both ends.
        text = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
        self._schema = schema
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - closed by discard
        try:
            self._parquet = pq.ParquetWriter(
                self._file, schema, compression="zstd", use_dictionary=text or False, write_page_checksum=True
            )
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise self._unwritable(error) from error

    def _flush(self, rows: int) -> None:
        """Writes that many of the pending rows, in chunks."""
        table = pa.concat_tables(self._pending)
        assert self._parquet is not None  # noqa: S101 - append opened it
        for at in range(0, rows, self._chunk_rows):
            chunk = table.slice(at, min(self._chunk_rows, rows - at))
            try:
                self._parquet.write_table(chunk, row_group_size=self._chunk_rows)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                raise self._unwritable(error) from error
            self._chunks.append(chunk.num_rows)
        self._pending = [table.slice(rows)]
        self._pending_rows -= rows

    def _unwritable(self, error: Exception) -> DataError:
        return DataError(f"Unit {self._unit} cannot be written as Parquet: {error}.", unit=self._unit)

    def _widen(self, table: pa.Table) -> pa.Table:
        """Makes the rows written so far and ``table`` one schema: a column that was empty until now has a type."""
        assert self._schema is not None  # noqa: S101 - there were rows before
        merged = merge_schemas([self._schema, table.schema])
        if not merged.equals(self._schema, check_metadata=True):
            written, pending, chunks = self._closed(), self._pending, self._chunks
            self.discard()
            self._open(merged)
            self._pending, self._pending_rows, self._chunks = [], 0, []
            file = pq.ParquetFile(pa.BufferReader(written))
            for group in range(file.num_row_groups):
                self.append(_cast(file.read_row_group(group, use_threads=False), merged))
            for rows in pending:
                self.append(_cast(rows, merged))
            assert self._chunks == chunks  # noqa: S101 - the same rows in the same chunks
        return _cast(table, merged)

    def _closed(self) -> bytes:
        assert self._parquet is not None  # noqa: S101 - the caller looked
        self._parquet.close()
        self._parquet = None
        self._file.seek(0)
        return bytes(self._file.read())


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema.equals(schema, check_metadata=True):
        return table
    return pa.Table.from_arrays(
        [table.column(name).cast(schema.field(name).type) for name in schema.names], schema=schema
    )
