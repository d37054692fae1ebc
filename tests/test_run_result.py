"""``result.json`` says how the run stands; a driver that lost the run leaves it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.places import Place
from tpupipe.config import Config
from tpupipe.data.chunks import Manifest
from tpupipe.data.sources import Files
from tpupipe.errors import FencedError, InterruptedRunError, ReservationError
from tpupipe.job import Job, Preprocess
from tpupipe.run import Attempt, RunOptions, run
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import acquire
from tpupipe.store.owner import Owner

PATHS = RunPaths("job", "a")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "input.txt").write_text("a line\n")
    return Job("job", [Preprocess("p", Files(f"{tmp_path}/input.txt"), map=dict)])


@pytest.fixture
def config(file_place: Place) -> Config:
    return Config.model_validate({"store": {"uri": file_place.uri}, "cluster": {"kind": "gpu", "gpus": 1}})


def result(place: Place) -> dict[str, object]:
    found: dict[str, object] = json.loads(place.open().read(PATHS.result))
    return found


def lose(attempt: Attempt, place: Place) -> None:
    """Another driver takes the run over and finishes it."""
    acquire(place.open(), PATHS, Owner.here("another"), take_over=True).release()
    place.open().put(PATHS.result, json.dumps({"attempt": attempt.lease.epoch + 1}).encode())


def test_a_run_that_is_taken_over_at_its_end_keeps_the_others_result(
    job: Job, config: Config, file_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is committed, so it is done for both; the result that is kept is that of the driver that has the run."""
    file_place.open().create(PATHS.manifest("p"), Manifest("p", (), pa.schema([])).to_json())
    assert run(job, config, RunOptions("a")).attempt == result(file_place)["attempt"] == 1
    monkeypatch.setattr(Attempt, "_work", lambda attempt, _: lose(attempt, file_place))
    done = run(job, config, RunOptions("a"))
    assert (done.status, done.attempt) == ("done", 2)
    assert result(file_place) == {"attempt": 3}


@pytest.mark.parametrize("kind", [ReservationError, InterruptedRunError, OSError, KeyboardInterrupt])
def test_whatever_ends_a_driver_that_lost_its_run_it_says_so(
    job: Job, config: Config, file_place: Place, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Exit status 4; what it ended with is the cause; the other's result stays."""

    def work(attempt: Attempt, _: object) -> None:
        lose(attempt, file_place)
        raise kind("over")

    monkeypatch.setattr(Attempt, "_work", work)
    with pytest.raises(FencedError, match="lease 1") as caught:
        run(job, config, RunOptions("a"))
    assert caught.value.exit_status == 4
    assert caught.value.__cause__ is not None
    assert (caught.value.data["result"].status, caught.value.data["result"].error_kind) == ("failed", "FencedError")
    assert result(file_place) == {"attempt": 2}
