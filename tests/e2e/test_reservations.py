"""Promise 6 (no leaked slice) and 7 (no hang without an end)."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests.e2e.harness import REPOSITORY, SLICES, Runner, World, connection, nothing_is_held
from tests.processes import killed_at_the_end, until
from tpupipe.cluster.loss import drain_this_host
from tpupipe.cluster.reservation import Reservation, check_slice, held_groups, slice_states
from tpupipe.errors import ReservationError, ReservationTimeoutError, SliceError, UserCodeError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.store.lease import read_standing

PAIR = SliceSpec("v6e", "2x4", chips_per_vm=4)


def free_chips() -> int:
    return sum(int(s["chips_free"]) for s in slice_states())


@contextlib.contextmanager
def _settled(world: World) -> Iterator[None]:
    """A connection that ends when Ray's table has forgotten the host that was lost: it lags by seconds."""
    with connection(world):
        yield
        until(lambda: free_chips() == 16, told=slice_states)


def test_a_slice_is_held_whole_named_and_given_back(world: World) -> None:
    """All chips of both hosts are taken, the hosts are told in order, and after the block everything is free."""
    with connection(world):
        with Reservation(PAIR, timeout_s=60, name="t", say=print) as reservation:
            assert [(h.slice_name, h.worker_id) for h in reservation.hosts] == [
                ("fake-v6e-2x4-0", 0),
                ("fake-v6e-2x4-0", 1),
            ]
            assert free_chips() == 8
            assert held_groups() == ["t-0"], "the head group is gone, or the next job's head claim would fail"
        assert free_chips() == 16
        assert held_groups() == []


def test_a_host_that_is_announced_to_go_is_gone_at_that_time(world: World) -> None:
    """An actor is on it, so Ray would leave it there: the pool takes it down and puts another one in its place."""
    before = world.hosts("fake-v6e-2x4-0")
    with _settled(world), Reservation(PAIR, timeout_s=60, name="t", say=print) as reservation:
        host = reservation.hosts[1]
        place = PlacementGroupSchedulingStrategy(host.group, host.bundle)
        there = {"num_cpus": 0, "resources": {"TPU": 1}, "scheduling_strategy": place}
        actor = ray.remote(collections.Counter).options(**there).remote()
        assert ray.get(actor.total.remote(), timeout=60) == 0
        ray.get(ray.remote(drain_this_host).options(**there).remote(10.0, "a test"), timeout=60)
        assert [h.node_id for h in reservation.draining_hosts()] == [host.node_id]
        until(reservation.lost_hosts, told=lambda: "it is still there")
        assert [h.node_id for h in reservation.lost_hosts()] == [host.node_id]
        reservation.renew("a host is gone")
        assert reservation.draining_hosts() == reservation.lost_hosts() == []
    after = world.hosts("fake-v6e-2x4-0")
    assert len(set(before) & set(after)) == 1
    assert len(after) == 2


def test_two_slices_asked_and_one_present_holds_nothing(world: World) -> None:
    """All or nothing, on a cluster that might grow: the time-out is for the whole, nothing stays held."""
    with connection(world):
        began = time.monotonic()
        with pytest.raises(ReservationTimeoutError, match="slice 2 of 2"):
            Reservation(SliceSpec("v6e", "2x4", chips_per_vm=4, slices=2), timeout_s=20, name="t", say=print).acquire()
        assert time.monotonic() - began < 39, "not one time-out per slice"
        assert free_chips() == 16
        assert held_groups() == []


def test_an_absent_topology_ends_with_what_is_wanted_and_available(world: World) -> None:
    """The time-out of 3 s is kept, and both are named."""
    with connection(world):
        began = time.monotonic()
        with pytest.raises(ReservationTimeoutError) as error:
            Reservation(SliceSpec("v6e", "4x4"), timeout_s=3, name="t", say=print).acquire()
        assert 3 <= time.monotonic() - began < 30
        assert "v6e 4x4" in str(error.value)
        assert "fake-v6e-2x4-0" in str(error.value)
        assert error.value.data["available"]


def test_a_cluster_that_cannot_grow_says_so_at_once(world: World) -> None:
    """On a faked slice there is nothing to wait for."""
    with connection(world), pytest.raises(ReservationError, match="cannot grow"):
        Reservation(SliceSpec("v6e", "4x4"), timeout_s=60, name="t", say=print, declared=SLICES).acquire()


@pytest.mark.parametrize(("shape", "hosts"), [({}, 1), ({"topology": "2x4", "chips_per_vm": 4}, 2)])
def test_a_request_to_stop_is_heard_while_the_slice_is_waited_for(
    runner: Runner, tmp_path: Path, shape: dict[str, object], hosts: int
) -> None:
    """The slices are another job's. SIGTERM ends the wait: status 130, and the run is given back."""
    config = runner.config({}, cluster={"topology": "2x2", "chips_per_vm": None, "timeout_s": 600} | shape)
    (tmp_path / "world.yaml").write_text(config.model_dump_json(exclude_none=True))
    command = [sys.executable, "-m", "tests.e2e.small", "-c", str(tmp_path / "world.yaml"), "--run", f"{runner.name}a"]
    log = tmp_path / "log"
    held = PAIR if hosts == 2 else SliceSpec("v6e", "2x2", slices=2)
    with (
        connection(runner.world),
        Reservation(held, timeout_s=60, name="other-job", say=print),
        log.open("w") as stderr,
        killed_at_the_end() as started,
    ):
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=runner.world.environment(), stdout=stderr, stderr=stderr, text=True
        )
        started.append(process)
        until(lambda: "waiting for v6e" in log.read_text(), of=process, told=lambda: log.read_text()[-2000:])
        process.terminate()
        assert process.wait(90) == 130, log.read_text()[-2000:]
    standing = read_standing(runner.store, runner.paths("a"))
    assert standing is not None
    assert standing.released
    nothing_is_held(runner.world)


def test_a_busy_slice_names_its_holder(world: World) -> None:
    """The message says who holds the chips."""
    second = Reservation(PAIR, timeout_s=2, name="t", say=print)
    with (
        connection(world),
        Reservation(PAIR, timeout_s=60, name="other-job", say=print),
        pytest.raises(ReservationTimeoutError, match="held by other-job-0"),
    ):
        second.acquire()


def test_a_single_host_slice_does_not_break_a_larger_one(world: World) -> None:
    """A 2x2 is taken from the 2x2 slices, not out of the 2x4."""
    with connection(world), Reservation(SliceSpec("v6e", "2x2", slices=2), timeout_s=60, name="t", say=print) as held:
        assert {h.slice_name for h in held.hosts} == {"fake-v6e-2x2-0", "fake-v6e-2x2-1"}


def test_a_topology_that_ray_does_not_know_is_refused_without_a_cluster() -> None:
    """3x5 is no v6e slice."""
    with pytest.raises(SliceError, match="3x5"):
        check_slice(SliceSpec("v6e", "3x5", chips_per_vm=5))


@pytest.mark.parametrize("where", ["map", pytest.param("step", marks=pytest.mark.soak)])
def test_an_exception_of_the_job_gives_the_slice_back(runner: Runner, where: str) -> None:
    """The function's own error and stage are named, the slice is free, and the next run starts."""
    with pytest.raises(UserCodeError, match="the job's own mistake") as error:
        runner(where, job={"break_at": where})
    assert error.value.exit_status == 1
    assert error.value.data["result"].status == "failed"
    nothing_is_held(runner.world)


@pytest.mark.soak
def test_stale_slice_variables_do_not_reach_the_workers(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MEGASCALE_NUM_SLICES=3 preset, the workers of a 2-slice run see 2."""
    from tpupipe.cluster import connect

    monkeypatch.setitem(connect.WORKER_ENVIRONMENT, "MEGASCALE_NUM_SLICES", "3")
    runner("a", job={"steps": 2, "score": False}, cluster={"topology": "2x2", "chips_per_vm": None, "slices": 2})
    seen = {e["metrics"]["slices"] for e in runner.events("a", "metrics")}
    assert seen == {2.0}
    assert "MEGASCALE_NUM_SLICES" not in os.environ
