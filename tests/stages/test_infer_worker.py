"""A whole inference worker in this process: points in order, quarantine across a death, large units, failed units."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tpupipe.data.buckets import Buckets
from tpupipe.data.chunks import decode_unit
from tpupipe.data.sources import JsonLines
from tpupipe.errors import BadRowError, UserCodeError
from tpupipe.faults.points import arm
from tpupipe.job import Infer, Quarantine
from tpupipe.stages import infer_worker
from tpupipe.stages.infer_worker import InferPlan, InferWorker, UnitDone, UnitFailed
from tpupipe.stages.stall import Bounds, Watchdog
from tpupipe.stages.units import UnitTarget

BOUNDS = Bounds(60.0)


class Params:
    step, fingerprint = 1, "p"

    def load(self, shardings):
        import jax

        return jax.device_put(np.int32(2), shardings(np.int32(2)))


def double(params, batch):
    return {"sum": batch["tokens"].sum(1) * params, "twice": batch["tokens"] * params}


def tokens(batch):
    """Row n has n % 7 tokens, all n; id 13 raises."""
    rows = np.empty(len(batch["id"]), object)
    for i, n in enumerate(np.asarray(batch["id"]).tolist()):
        if n == 13:
            raise ValueError("unlucky")
        rows[i] = np.full(n % 7, n, np.int32)
    return {"tokens": rows, "id": batch["id"]}


@pytest.fixture
def make(run, tmp_path):
    """A worker over ten-row files."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    def worker(files=3, rows=10, bounds=BOUNDS, **options):
        folder = tmp_path / "in"
        folder.mkdir()
        for n in range(files):
            lines = [json.dumps({"id": i}) for i in range(n * rows, (n + 1) * rows)]
            (folder / f"{n}.jsonl").write_text("\n".join(lines) + "\n")
        source = JsonLines(str(folder), unit_bytes=1100 if rows == 10 else 1_000_000)  # a file is a unit
        given = {
            "apply": double,
            "map": tokens,
            "buckets": Buckets((2, 6), batch_rows=4),
            "keep": ("id",),
            "ragged_outputs": ("twice",),
        }
        stage = Infer("s", source, "fit", **(given | options))
        said = []
        coordinator = SimpleNamespace(
            report=said.append, report_now=said.append, claim_fault=None, request_driver_kill=None
        )
        target = UnitTarget(run.store, run.paths, "s", run.lease.fence, 4, "p", "c", "1")
        plan = InferPlan(stage, target, source, "", {}, Params(), coordinator, (), bounds)
        made.append(InferWorker(plan, 0))
        return made[0], source.units(), said

    made = []
    yield worker
    arm(None)
    for each in made:
        each._pipeline.close()
    jax.config.update("jax_compilation_cache_dir", None)  # the worker's, in its own process otherwise
    compilation_cache.reset_cache()


def outputs(run):
    return ds.dataset(run.store.uri(run.paths.units("s")), format="parquet").to_table().to_pydict()


class Hung:
    """Watchdogs that tell of a stall, and end nothing."""

    def __init__(self, monkeypatch):
        self.phases, self.seen = [], threading.Event()
        monkeypatch.setattr(Watchdog, "_end", lambda _, phase: (self.phases.append(str(phase)), self.seen.set()))

    def wait(self):
        assert self.seen.wait(60)


def test_reading_the_parameters_has_a_bound_of_its_own(make, monkeypatch):
    """They do not come: that is a stall while restoring."""
    hung, load = Hung(monkeypatch), Params.load
    monkeypatch.setattr(Params, "load", lambda *given: (hung.wait(), load(*given))[1])
    make(bounds=Bounds(restore_timeout_s=0.2))
    assert hung.phases[0] == "no progress while restoring (restore_timeout_s 0.2)"


def test_compiling_has_a_bound_of_its_own(make, monkeypatch):
    """It takes longer than a unit may, which is no stall, and then longer than compiling may, which is one."""
    hung = Hung(monkeypatch)

    def passes(seconds):
        for watchdog in list(worker._watchdogs):
            watchdog._last -= seconds

    def apply(params, batch):
        if not hung.seen.is_set():
            passes(100)
            assert not hung.seen.wait(1.5), "the watchdog looks once a second"
            passes(600)
            hung.wait()
        return double(params, batch)

    worker, units, _ = make(apply=apply, bounds=Bounds(stall_timeout_s=60, compile_timeout_s=600))
    worker.run(units[0], 0)
    assert hung.phases[0] == "no progress in init or compilation (compile_timeout_s 600)"


def test_units_are_done_and_pass_their_points_in_order(make, run):
    """Thirty rows in three units: each row once, right values, each unit read, mapped, about to commit and committed."""
    worker, units, _ = make(map=lambda b: tokens({"id": b["id"][b["id"] != 13]}))
    passed = []
    arm(lambda name, facts: passed.append((facts["index"], name)))
    done = [worker.run(unit, index) for index, unit in enumerate(units)]
    assert all(isinstance(d, UnitDone) for d in done), done
    ids = [i for i in range(30) if i != 13]
    got = outputs(run)
    assert got["id"] == ids
    assert got["sum"] == [2 * i * (i % 7) for i in ids]
    assert got["twice"] == [[2 * i] * (i % 7) for i in ids]
    points = ["unit.read", "unit.mapped", "unit.before_commit", "unit.after_commit"]
    assert passed == [(index, name) for index in range(3) for name in points]
    assert {d.compilations for d in done} == {2}
    footer = done[0].committed.footer
    assert (footer.rows_in, footer.rows, footer.values_real) == (10, 10, sum(i % 7 for i in range(10)))
    assert footer.values_fed >= footer.values_real


def test_a_death_between_error_records_and_unit_loses_nothing(make, run):
    """It dies after the records and before the unit: the next try gives the same records, 9 rows and 1 record for 10."""
    worker, units, _ = make(bad_rows=Quarantine(max=3))

    class KilledError(Exception):
        pass

    def strike(name, _):
        if name == "unit.before_commit":
            raise KilledError

    arm(strike)
    failed = worker.run(units[1], 1)
    assert isinstance(failed, UnitFailed)
    assert "KilledError" in failed.error.message
    name = run.paths.unit_errors("s", units[1].id)
    before = run.store.info(name)
    assert not run.store.exists(run.paths.unit("s", units[1].id))
    arm(None)
    done = worker.run(units[1], 1)
    assert run.store.info(name).generation == before.generation
    assert (done.committed.footer.rows_in, done.committed.footer.rows, done.committed.footer.rows_bad) == (10, 9, 1)
    (record,) = decode_unit(run.store.read(name)).to_pylist()
    assert (record["input_row"], record["file_row"], record["reason"]) == (3, 3, "map")
    assert record["path"].endswith("1.jsonl")
    assert done.last_bad.input_row == 3


def test_a_bad_row_fails_its_unit_by_name_and_the_worker_goes_on(make, run):
    """Unit 1 holds id 13: BadRowError with its row; units before and after it are done; the error was reported."""
    worker, units, said = make()
    first, bad, last = [worker.run(unit, index) for index, unit in enumerate(units)]
    assert isinstance(first, UnitDone)
    assert isinstance(last, UnitDone)
    assert isinstance(bad.error, BadRowError)
    assert bad.error.data["row"] == 3
    assert [e["unit"] for e in said if e["kind"] == "worker_error"] == [units[1].id]
    assert outputs(run)["id"] == [*range(10), *range(20, 30)]


def test_a_large_unit_is_done_in_windows(make, run, monkeypatch):
    """500 rows with windows of 16: one object, rows numbered on through all windows, chunks of 4."""
    seen = []

    def windows(source, unit, **options):
        for window in real(source, unit, rows=16, **options):
            seen.append(window.table.num_rows)
            yield window

    real = infer_worker.read_windows
    monkeypatch.setattr(infer_worker, "read_windows", windows)
    worker, units, _ = make(files=1, rows=500, bad_rows=Quarantine())
    done = worker.run(units[0], 0)
    assert len(seen) == 32
    got = outputs(run)
    assert got["id"] == [i for i in range(500) if i != 13]
    assert got["row"] == list(range(499))
    assert done.committed.footer.chunks == (4,) * 124 + (3,)
    assert done.committed.footer.rows_in == 500
    name = run.store.uri(run.paths.unit("s", units[0].id))
    assert pq.ParquetFile(name).metadata.num_row_groups == 125


def test_an_apply_that_raises_fails_the_unit(make):
    """UserCodeError with the job's own words; the next unit gets the same, the worker lives."""

    def broken(_params, _batch):
        raise ZeroDivisionError("the job's own mistake")

    worker, units, _ = make(apply=broken, ragged_outputs=())
    for index in (0, 2):
        failed = worker.run(units[index], index)
        assert isinstance(failed.error, UserCodeError)
        assert "the job's own mistake" in failed.error.message
