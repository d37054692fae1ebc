"""The small job with three promises broken on purpose, each in the workers and each only after a failure.

Unpickling the model breaks tpupipe in the process that does it, so the product knows nothing of this:

1. a checkpoint's record is written before its arrays are;
2. the first batch after a restore is left out;
3. a unit of inference that is done again loses its first row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tpupipe
from tests.e2e import small
from tests.e2e.small import Params
from tpupipe.cluster.connect import ship_by_value

ship_by_value(small)


class Mutant(small.Model):
    def __reduce__(self) -> Any:
        return _unpickled, (self.steps, self.batch_size, self.width, self.break_at)


def _unpickled(*arguments: Any) -> Mutant:
    from tpupipe.checkpoint import saver

    if not hasattr(saver, "mutated"):
        saver.mutated = True  # type: ignore[attr-defined]
        _record_before_the_arrays()
        _leave_out_a_batch()
        _lose_a_row()
    return Mutant(*arguments)


def _record_before_the_arrays() -> None:
    from tpupipe.checkpoint import saver
    from tpupipe.checkpoint.tree import leaves_of
    from tpupipe.faults.points import point

    save = saver.Saver.save

    def early(self: Any, step: int, state: Any, metrics: Any) -> float:
        self.finish()
        if self._primary:
            commit = self._commit(step, self._target.folder(step), leaves_of(state), dict(metrics))
            self._on_commit(commit, 0.0)
            point("save.arrays_written", step=step)  # not one of them is
        return save(self, step, state, metrics)

    def complete(self: Any, *_: Any) -> None:
        try:
            self._checkpointer.wait_until_finished()
        except BaseException as error:  # noqa: BLE001 - as the original: a thread has nobody to raise to
            self._failure = error

    saver.Saver.save = early  # type: ignore[method-assign]
    saver.Saver._complete = complete  # type: ignore[method-assign]
    saver._saved_objects = lambda *_: ()  # type: ignore[assignment]


def _leave_out_a_batch() -> None:
    from tpupipe.stages.context import StageContext

    batches = StageContext.batches

    @contextlib.contextmanager
    def without_the_first(self: Any) -> Iterator[Iterator[Any]]:
        with batches(self) as found:
            yield (batch for position, batch in enumerate(found) if position or self._start is None)

    StageContext.batches = without_the_first  # type: ignore[method-assign]


def _lose_a_row() -> None:
    from tpupipe.stages import infer_worker

    windows, to_table = infer_worker.unit_windows, infer_worker.to_table
    begun: dict[str, int] = {}

    def counted(plan: Any, unit: Any) -> Any:
        begun[unit.id] = plan.coordinator.count(f"mutant/{unit.id}")
        return windows(plan, unit)

    def without_the_first(columns: Any) -> Any:
        table = to_table(columns)
        return table.slice(1) if begun[columns["unit"][0]] > 1 else table

    infer_worker.unit_windows = counted  # type: ignore[assignment]
    infer_worker.to_table = without_the_first  # type: ignore[attr-defined]


def build(cfg: Params) -> tpupipe.Job:
    return small.job(cfg, Mutant(cfg.steps, cfg.batch_size, cfg.width, cfg.break_at))
