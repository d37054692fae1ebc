"""The job's inputs, listed once, and the rows that its maps make of the first of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tpupipe.data.sample import parse_sample, sample_units
from tpupipe.data.sources import Source, Unit
from tpupipe.errors import DataError, TpupipeError, UserCodeError
from tpupipe.job import Infer, Job, Preprocess, Stage

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

_EMPTY_UNITS = 8  # units without a row that are looked at before the sample counts as empty


class EarlierProblemError(Exception):
    """What is asked for failed before, and was told then."""


class JobData:
    """Lists, reads and maps at the first question. What fails is raised then, and ``EarlierProblemError`` ever after.

    Args:
        job: The declaration.
        sample: ``sample`` of the configuration.
        input_options: fsspec's options for opening inputs.
    """

    def __init__(self, job: Job, sample: str, input_options: Mapping[str, Any]) -> None:
        self.job = job
        self.fraction = parse_sample(sample)
        self._options = input_options
        self._known: dict[tuple[Any, ...], Any] = {}

    def source_of(self, stage: Stage) -> Source | None:
        """The source that a stage reads itself."""
        if isinstance(stage, Preprocess):
            return stage.source
        return stage.data if isinstance(stage, Infer) and isinstance(stage.data, Source) else None

    def unknown_rows(self, stage: Stage) -> str:
        """Why the rows of a stage can only be known by running it; empty if they can be had here."""
        if isinstance(stage, Preprocess):
            return f"dataset= of {stage.name} works on all rows at once, with Ray." if stage.dataset is not None else ""
        return self.unknown_rows(self.job.stage(stage.data)) if isinstance(stage.data, str) else ""

    def listed(self, source: Source) -> Sequence[Unit]:
        """All units of a source.

        Raises:
            DataError: There is no input, or it is not what the source reads.
            StoreError: It cannot be listed.
        """

        def work() -> Sequence[Unit]:
            units = source.units(storage_options=self._options)
            if not units:
                raise DataError(f"{shown(source.pattern)} has no input.", hint="Look at the pattern.")
            return units

        return self._once(("listed", source), work)

    def sampled(self, source: Source) -> Sequence[Unit]:
        """The units of the sample. Raises as :meth:`listed`."""
        return self._once(("sampled", source), lambda: sample_units(self.listed(source), self.fraction))

    def first(self, source: Source) -> tuple[Unit, pa.Table]:
        """The first unit of the sample that has a row, and its rows.

        Raises:
            DataError: None of the first units has one, or one cannot be parsed. Else as :meth:`listed`.
        """

        def work() -> tuple[Unit, pa.Table]:
            units = self.sampled(source)
            for unit in units[:_EMPTY_UNITS]:
                table = self._read(source, unit)
                if table.num_rows:
                    return unit, table
            raise DataError(
                f"The sample of {shown(source.pattern)} has no row: none in its first {min(len(units), _EMPTY_UNITS)} of "
                f"{len(units)} unit(s).",
                hint="Look at the input files; they may be empty.",
            )

        return self._once(("first", source), work)

    def last(self, source: Source) -> tuple[Unit, pa.Table]:
        """The last unit of the sample, and its rows. Raises as :meth:`first`."""

        def work() -> tuple[Unit, pa.Table]:
            unit = self.sampled(source)[-1]
            return unit, self._read(source, unit)

        return self._once(("last", source), work)

    def mapped(self, stage: Stage, which: str = "first") -> pa.Table:
        """What a stage's map makes of a unit; the rows themselves where it has none.

        Args:
            stage: A ``Preprocess`` or ``Infer`` stage.
            which: ``first`` or ``last`` unit of the sample.

        Raises:
            UserCodeError: The map raises, or gives no columns.
            DataError: What it gives cannot be stored. Else as :meth:`first`.
        """

        def work() -> pa.Table:
            from tpupipe.data.columns import to_numpy, to_table

            source = self.source_of(stage)
            if source is not None:
                unit, table = self.first(source) if which == "first" else self.last(source)
                place = f"unit {unit.id}, first input {unit.parts[0].path}"
            else:
                before = self.job.stage(str(stage.data))  # type: ignore[union-attr] # Preprocess has a source
                table, place = self.mapped(before, which), f"the {which} unit of {before.name}"
            mapping = getattr(stage, "map", None)
            if mapping is None:
                return table
            made = _called(stage.name, mapping, to_numpy(table), place)
            return to_table(made)

        return self._once(("mapped", stage.name, which), work)

    def _read(self, source: Source, unit: Unit) -> pa.Table:
        from tpupipe.data.read import read_unit

        return read_unit(source, unit, storage_options=self._options)

    def _once(self, key: tuple[Any, ...], work: Callable[[], T]) -> T:
        if key not in self._known:
            try:
                self._known[key] = work()
            except (TpupipeError, EarlierProblemError):
                self._known[key] = EarlierProblemError()
                raise
        found: Any = self._known[key]
        if isinstance(found, EarlierProblemError):
            raise EarlierProblemError
        result: T = found
        return result


def _called(stage: str, mapping: Callable[..., Any], batch: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    try:
        made = mapping(batch)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this call of ours
        own = [frame for frame in frames if frame.filename == frames[0].filename]  # not those of libraries below it
        where = f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
        raise UserCodeError(
            f"map of stage {stage!r} raised {type(error).__name__}: {error}{where}, on {place}.",
            hint=f"It was given the columns {', '.join(batch) or '(none)'}.",
            stage=stage,
        ) from error
    if not isinstance(made, Mapping) or not made:
        raise UserCodeError(
            f"map of stage {stage!r} gave {type(made).__name__ if not isinstance(made, Mapping) else 'no columns'}, on {place}.",
            hint="It must return a mapping of column name to array, rows first.",
            stage=stage,
        )
    return made


def shown(patterns: Sequence[str]) -> str:
    """The first patterns of a source, and how many more there are.

    >>> shown(["a/*", "b/*", "c/*", "d/*"])
    'a/*, b/* and 2 more'
    """
    more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
    return ", ".join(patterns[:2]) + more


def describe(table: pa.Table) -> dict[str, str]:
    """Column name to dtype and shape of a row: ``int32[128]``, ``float32``, ``ragged int32``, ``text``."""
    from tpupipe.data.columns import to_numpy

    return {name: _dtype(values) for name, values in to_numpy(table).items()}


def _dtype(values: Any) -> str:
    import numpy as np

    if values.dtype != object:
        return f"{values.dtype}{list(values.shape[1:]) if values.ndim > 1 else ''}"
    example = next((row for row in values if row is not None), None)
    if isinstance(example, np.ndarray):
        return f"ragged {example.dtype}"
    names = {str: "text", bytes: "bytes", list: "ragged", type(None): "empty"}
    return names.get(type(example), type(example).__name__)
