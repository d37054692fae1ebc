"""The driver's side of faults: refusals before anything, events that are durable first, a store that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import WORLD, config_of
from tpupipe.cluster.fake import FakeClusterState
from tpupipe.cluster.loss import slice_of, this_slice
from tpupipe.errors import CheckpointError, ClusterError, StoreUnavailableError, UsageError
from tpupipe.faults.driver import armed_driver, check_faults, counted, failing_store
from tpupipe.faults.inject import InjectedError
from tpupipe.faults.plan import parse_faults
from tpupipe.faults.points import point
from tpupipe.faults.store_faults import StoreFaults
from tpupipe.ledger.events import EventLog, read_events
from tpupipe.local.server import embedded_store
from tpupipe.run import RunOptions, run
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

ROOT = Path(__file__).parents[2]
PATHS = RunPaths("job", "run")
OUTAGE = StoreFaults.parse("503@any,rate=0.1")
STAGES = {"tokens": "Preprocess", "lm": "Train", "nll": "Infer"}


def check(config, *texts):
    check_faults(parse_faults(texts), StoreFaults(), config, None, STAGES)


@pytest.mark.parametrize(
    ("store", "emulator", "refused"),
    [
        ({"uri": "gs://bucket/x", "embedded": True}, None, False),
        ({"uri": "gs://bucket/x"}, "http://127.0.0.1:4443", False),
        ({"uri": "gs://bucket/x"}, None, True),
        ({"uri": "file:///folder"}, None, True),
        ({"uri": "file:///folder"}, "http://127.0.0.1:4443", True),
    ],
)
def test_only_an_emulated_store_can_be_made_to_fail(store, emulator, refused):
    """The real Cloud Storage and a file system are refused with the URI and with what would do; without faults nothing is."""
    config = config_of(store=store)
    check_faults((), StoreFaults(), config, emulator, STAGES)
    if not refused:
        check_faults((), OUTAGE, config, emulator, STAGES)
        return
    with pytest.raises(UsageError) as caught:
        check_faults((), OUTAGE, config, emulator, STAGES)
    assert store["uri"] in caught.value.message
    assert "store.embedded" in caught.value.hint


def test_a_slice_that_is_not_faked_is_not_lost():
    """lose-slice with kind: tpu is refused before anything is reserved; the other host faults are not."""
    tpu = config_of(cluster={"kind": "tpu", "generation": "v6e", "topology": "4x4"})
    with pytest.raises(UsageError, match=r"lose-slice@train\.step=3'.* faked slice, and cluster\.kind is tpu"):
        check(tpu, "lose-slice@train.step=3")
    check(tpu, "drain-host@train.step=3", "kill-host@train.step")
    check(config_of(), "lose-slice@train.step=3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill-worker@train.step=3,stage=lmm", "no stage 'lmm'; it has tokens, lm, nll.\n  hint: Did you mean lm?"),
        ("kill-driver@stage.manifest=token", "no stage 'token'"),
        ("kill-worker@train.step=3,rank=2", "no rank 2; allowed: 0 to 1"),
        ("slow@params.loaded,rank=9", "no rank 9"),
    ],
)
def test_what_the_job_does_not_have_is_refused(text, said):
    """It would never fire, and a run that nothing was done to would look like one that survived it."""
    with pytest.raises(UsageError) as caught:
        check(config_of(), text)
    assert said in str(caught.value)
    assert caught.value.exit_status == 2


def test_what_the_job_has_is_not_refused():
    check(
        config_of(), "kill-worker@train.step=3,stage=lm,rank=1", "kill-driver@stage.manifest=nll", "slow@unit.read=999"
    )
    check(config_of(cluster={"kind": "gpu", "gpus": 4}), "kill-worker@train.step=3,rank=3")
    with pytest.raises(UsageError, match="0 to 3"):
        check(config_of(cluster={"kind": "gpu", "gpus": 4}), "kill-worker@train.step=3,rank=4")


@pytest.mark.parametrize("action", ["kill-host", "drain-host", "lose-slice"])
def test_the_drivers_own_host_is_not_taken_on_a_faked_cluster(action):
    """Units are prepared there; without a stage, the first unit that is passed is one of them."""
    for where in ("unit.read=3,stage=tokens", "unit.before_commit"):
        with pytest.raises(UsageError, match=f"{action}@unit.*prepared on the driver's host") as caught:
            check(config_of(), f"{action}@{where}")
        assert "stage=nll" in caught.value.hint
    check(config_of(), f"{action}@unit.read=3,stage=nll", f"{action}@train.step=3")
    check_faults(parse_faults([f"{action}@unit.read=3"]), StoreFaults(), config_of(), None, {"nll": "Infer"})


def test_a_real_cluster_prepares_units_anywhere():
    tpu = config_of(cluster={"kind": "tpu", "generation": "v6e", "topology": "4x4"})
    check(tpu, "kill-host@unit.read=3,stage=tokens")


def test_faults_of_the_configuration_come_after_those_of_the_command_line():
    """Both kinds; their places are what counting and drawing go by."""
    options = RunOptions("a", parse_faults(["raise@unit.read"]), store_faults=StoreFaults.parse("503@create"))
    config = config_of(faults=["slow@train.step", "hang@unit.read"], store_faults=["lost@create"])
    both = options.with_configured_faults(config)
    assert [fault.text for fault in both.faults] == ["raise@unit.read", "slow@train.step", "hang@unit.read"]
    assert both.store_faults.texts == ("503@create", "lost@create")
    assert both.name == "a"


def test_run_reads_the_configurations_faults_before_anything(tmp_path):
    """A Config that was made by hand, with a typo: exit status 2 from `run`, and the store's folder was not made."""
    from tests.e2e import small

    job = small.build(small.Params(inputs=str(tmp_path / "*.jsonl")))
    for wrong in ({"faults": ["kill-worker@train.stp"]}, {"store_faults": ["503@raed"]}, {"store_faults": ["503@any"]}):
        with pytest.raises(UsageError) as caught:
            run(job, config_of(store={"uri": str(tmp_path / "store")}, **wrong))
        assert caught.value.exit_status == 2
    assert not (tmp_path / "store").exists()


# -- the driver's own points -------------------------------------------------------------------------

_DIES = """
import sys
from tpupipe.faults.driver import armed_driver
from tpupipe.faults.plan import parse_faults
from tpupipe.faults.points import point
from tpupipe.ledger.events import EventLog
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store
store, paths = open_store(sys.argv[1]), RunPaths("job", "run")
with EventLog(store, paths, 4) as log, armed_driver(parse_faults(sys.argv[2:]), log, store, paths):
    log.emit("before")
    point("run.reserved", hosts=2)
    print("passed")
"""


@pytest.mark.parametrize("action", ["kill-driver", "kill-worker"])
def test_what_kills_the_driver_is_in_its_events(tmp_path, action):
    """SIGKILL right after: the fault, where it fired and what came before it are in the store."""
    store = open_store(str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path), f"{action}@run.reserved=3", f"{action}@run.reserved=2"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert "passed" not in done.stdout
    events = list(read_events(store, PATHS))
    assert [e["kind"] for e in events] == ["before", "fault", "fault_fired"]
    fault = events[1]
    assert (fault["text"], fault["action"], fault["point"]) == (f"{action}@run.reserved=2", action, "run.reserved")
    assert (fault["position"], fault["hosts"]) == (1, "2")
    assert int(fault["pid"]) > 0


@pytest.fixture
def log(tmp_path):
    with EventLog(open_store(str(tmp_path)), PATHS, 1) as log:
        yield log


def test_times_counts_and_the_points_are_inert_afterwards(log, tmp_path):
    """Twice of three passes; after the block none."""
    store = open_store(str(tmp_path))
    with armed_driver(parse_faults(["raise@stage.manifest=fit,times=2"]), log, store, PATHS):
        point("stage.manifest", stage="ids")
        for _ in range(2):
            with pytest.raises(InjectedError):
                point("stage.manifest", stage="fit")
        point("stage.manifest", stage="fit")
    point("stage.manifest", stage="fit")
    assert [e["kind"] for e in read_events(store, PATHS)] == ["fault", "fault_fired"] * 2


def test_what_did_not_fire_is_told_at_the_end(log, tmp_path, caplog):
    """Here and in workers, whose events the driver keeps; what an earlier attempt did does not count."""
    store = open_store(str(tmp_path))
    texts = ["kill-worker@train.step=3", "slow@run.reserved,seconds=0", "raise@unit.read=7", "slow@train.step=99"]
    store.create(PATHS.event_segment(0, 1), json.dumps({"kind": "fault", "text": texts[2]}).encode())
    with armed_driver(parse_faults(texts), log, store, PATHS):
        point("run.reserved", hosts=2)
        log.add({"kind": "fault", "text": texts[0]})
    (told,) = _unfired(log, store)
    assert told["texts"] == [texts[2], texts[3]]
    assert "did not fire in this attempt: 'raise@unit.read=7', 'slow@train.step=99'" in caplog.text


def _unfired(log, store):
    log.flush()
    return [e for e in read_events(store, PATHS) if e["kind"] == "faults_unfired"]


def test_nothing_is_told_of_faults_that_fired_or_of_a_run_that_failed(log, tmp_path):
    """A failed run has something else to say."""
    store = open_store(str(tmp_path))
    with armed_driver(parse_faults(["slow@run.reserved,seconds=0"]), log, store, PATHS):
        point("run.reserved", hosts=2)
    with pytest.raises(ZeroDivisionError), armed_driver(parse_faults(["slow@train.step"]), log, store, PATHS):
        raise ZeroDivisionError
    with armed_driver((), log, store, PATHS):
        pass
    assert _unfired(log, store) == []


def test_a_damage_that_cannot_be_done_is_an_error(log, tmp_path):
    """No checkpoint yet: the point raises rather than doing nothing."""
    with (
        armed_driver(parse_faults(["corrupt-checkpoint@run.reserved"]), log, open_store(str(tmp_path)), PATHS),
        pytest.raises(CheckpointError, match="no intact checkpoint to damage"),
    ):
        point("run.reserved", hosts=2)


# -- the store ---------------------------------------------------------------------------------------


def test_a_failing_store_is_used_counted_and_told(tmp_path, caplog):
    """Requests through the endpoint are hit; the event says how often, and so does a line of the log."""
    text = "503@create,times=2,name=thing"
    with (
        embedded_store(tmp_path) as upstream,
        failing_store(upstream, StoreFaults.parse(text), tmp_path) as proxy,
    ):
        store = open_store("gs://bucket/x", endpoint=proxy.endpoint)
        with EventLog(store, PATHS, 1) as log, counted(proxy, log):
            with pytest.raises(StoreUnavailableError):
                store.with_limits(attempts=1).create("thing", b"1")
            store.create("thing", b"1")
        (told,) = [e for e in read_events(store, PATHS) if e["kind"] == "store_faults"]
    assert told["fired"] == {text: 2}
    assert told["requests"]["create"] >= 3
    assert f"{text} 2 time(s)" in caplog.text


def test_counts_are_told_of_an_attempt_that_failed(tmp_path):
    """The block raises: what the proxy did is kept all the same."""
    with embedded_store(tmp_path) as upstream, failing_store(upstream, OUTAGE, tmp_path) as proxy:
        store = open_store("gs://bucket/x", endpoint=upstream)
        with EventLog(store, PATHS, 1) as log, pytest.raises(ZeroDivisionError), counted(proxy, log):
            raise ZeroDivisionError
        assert [e["kind"] for e in read_events(store, PATHS)] == ["store_faults"]


def test_without_faults_there_is_no_proxy(tmp_path):
    """Nothing is started, no folder made, and nothing told."""
    with failing_store("http://127.0.0.1:9", StoreFaults(), tmp_path) as proxy:
        assert proxy is None
    assert list(tmp_path.iterdir()) == []


# -- whose slice -------------------------------------------------------------------------------------

STATE = FakeClusterState("", "", 1, {"a/0": 10, "a/1": 11, "b/0": 20, "aa/0": 30}, {"slices": WORLD})


def test_a_slice_is_all_hosts_of_its_name_the_own_last():
    """By the server's own table; another slice whose name begins alike is not touched."""
    assert slice_of(STATE, 10).raylets == (11, 10)
    assert slice_of(STATE, 11).raylets == (10, 11)
    assert (slice_of(STATE, 30).name, slice_of(STATE, 30).raylets) == ("aa", (30,))


def test_a_host_that_is_on_no_faked_slice_cannot_lose_it(tmp_path):
    """A stranger's raylet, a host without the variable, a server that is gone: each says so."""
    with pytest.raises(ClusterError, match="Raylet 12 is none of"):
        slice_of(STATE, 12)
    with pytest.raises(ClusterError, match="not on one"):
        this_slice(None, 10)
    with pytest.raises(ClusterError, match="server is gone"):
        this_slice(str(tmp_path / "state.json"), 10)
