"""One owner: races, zombies, dead and silent holders."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import until
from tpupipe.errors import FencedError, RunHeldError, StoreDeniedError, StoreError
from tpupipe.faults import points
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Fence, Standing, acquire, decide, lease_times, read_standing
from tpupipe.store.objects import open_store
from tpupipe.store.owner import Owner, is_running, same_machine

PATHS = RunPaths("lm", "a")
TTL_S = 30.0  # the default
ELSEWHERE = Owner("elsewhere", 7, "another-boot", 1, 0.0, "tpupipe run")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """A released lease leaves no thread behind."""
    yield
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tpupipe-lease"])


class Watch:
    """A clock that only pausing moves; ``then`` is done at each pause."""

    def __init__(self, then=lambda: None):
        self.now_s = 1000.0
        self.then = then
        self.paused = 0

    def tick(self):
        return self.now_s

    def pause(self, seconds):
        self.now_s += seconds
        self.paused += 1
        self.then()

    def passed(self, seconds):
        """More than so many seconds pass."""
        self.now_s += seconds + 1
        return True

    def options(self):
        return {"tick": self.tick, "pause": self.pause}


# -- the decision -----------------------------------------------------------------------------------

facts = st.fixed_dictionaries(
    {
        "now_s": st.floats(0, 1e6),
        "ttl_s": st.floats(1, 100),
        "here": st.booleans(),
        "running": st.booleans(),
        "beating": st.booleans(),
        "watched_s": st.floats(0, 200),
    }
)
standings = st.builds(
    Standing, st.just(3), st.just(ELSEWHERE), st.integers(0, 9), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()
)


@given(facts, st.none() | standings, st.booleans())
def test_free_released_and_insisted_leases_are_taken(facts, standing, take_over):
    """Nobody ever, given back, or the user insists: taken whatever else is true."""
    if standing is None or standing.released or take_over:
        assert decide(standing, **facts, take_over=take_over) == "take"


@given(facts, standings)
def test_a_beat_is_never_robbed(facts, standing):
    """A holder that beat while we watched keeps the run, unless its process is known to be gone."""
    standing = replace(standing, released=False)
    verdict = decide(standing, **{**facts, "beating": True}, take_over=False)
    assert verdict == ("take" if facts["here"] and not facts["running"] else "held")


@given(facts, standings)
def test_waiting_has_an_end(facts, standing):
    """Watched for the whole time to live without a beat: there is a decision other than waiting."""
    assert decide(standing, **{**facts, "watched_s": facts["ttl_s"]}, take_over=False) != "wait"


@pytest.mark.parametrize(
    ("silent_s", "here", "verdict"),
    [
        (1, True, "held"),
        (29, True, "held"),
        (31, True, "take"),
        (1, False, "wait"),
        (31, False, "wait"),
        (91, False, "take"),
    ],
)
def test_silence_on_this_and_on_other_machines(silent_s, here, verdict):
    """Time to live 30 s: exact on this machine's own clock; elsewhere up to a minute is put down to the clocks."""
    said_s, beaten_s = (1000 - silent_s, 0) if here else (0, 1000 - silent_s)
    standing = Standing(1, ELSEWHERE, 4, beaten_s, said_s, released=False)
    assert verdict == decide(
        standing, now_s=1000, ttl_s=30, here=here, running=True, beating=False, watched_s=0, take_over=False
    )


# -- alone --------------------------------------------------------------------------------------------


def test_a_lease_is_held_released_and_taken_again(store):
    """Epochs count up; the records name the owner; a released run is free at once; release twice is fine."""
    owner = Owner.here("tpupipe run x")
    with acquire(store, PATHS, owner) as lease:
        assert lease.epoch == 1
        lease.check()
        standing = read_standing(store, PATHS)
        assert (standing.owner, standing.epoch, standing.released) == (owner, 1, False)
    assert read_standing(store, PATHS).released
    lease.release()
    with acquire(store, PATHS, owner) as again:
        assert again.epoch == 2
        with pytest.raises(FencedError, match="taken the run over"):
            lease.check()
        assert lease.lost
    assert [info.name.rpartition("/")[2] for info in store.list(PATHS.leases)] == [
        "000001.beat.json", "000001.json", "000002.beat.json", "000002.json",
    ]  # fmt: skip


def test_when_each_lease_was_taken(store):
    """One listing: every epoch with the store's time of its object; beats, releases and other runs do not matter."""
    assert lease_times(store, PATHS) == {}
    for _ in range(2):
        with acquire(store, PATHS, Owner.here()):
            pass
    with acquire(store, RunPaths("lm", "a-2"), Owner.here()):
        assert lease_times(store, PATHS) == {epoch: store.info(PATHS.lease(epoch)).updated_s for epoch in (1, 2)}


def test_a_held_run_is_refused_with_who_holds_it(store):
    """A second driver is told holder, host, start and last beat, with exit status 4, and changes nothing."""
    with acquire(store, PATHS, Owner.here("tpupipe run x --run a")) as lease:
        with pytest.raises(RunHeldError, match=r"tpupipe run x --run a.*started .* UTC, last beat .* UTC") as caught:
            acquire(store, PATHS, Owner.here("another"))
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.data["host"], error.data["pid"], error.exit_status) == (lease.owner.host, os.getpid(), 4)
        assert abs(error.data["last_beat"] - time.time()) < 60
        assert "take the run over" in error.hint
        lease.check()


def test_it_beats(store):
    """The beat object changes while the lease is held."""
    with acquire(store, PATHS, Owner.here(), beat_s=0.05):
        until(lambda: read_standing(store, PATHS).beat >= 3)


def test_taking_over_fences_the_other(store):
    """Insisting takes a live run; the first holder's commits are refused from then on, here and in its workers."""
    with acquire(store, PATHS, Owner.here("first")) as first:
        worker = pickle.loads(pickle.dumps(first.fence))
        worker.check()
        with acquire(store, PATHS, Owner.here("second"), take_over=True) as second:
            second.check()
            for holder in (first, worker):
                with pytest.raises(FencedError, match="lease 1") as caught:
                    holder.check()
                assert caught.value.exit_status == 4


def test_a_fenced_holder_notices_by_itself(store):
    """The beating thread finds the higher epoch without a commit being tried."""
    told = []
    with (
        acquire(store, PATHS, Owner.here(), beat_s=0.05, on_lost=told.append) as first,
        acquire(store, PATHS, Owner.here(), take_over=True),
    ):
        until(lambda: told)
        assert first.lost
    assert told == ["another driver has taken the run over"]


# -- others -------------------------------------------------------------------------------------------


def test_a_live_holder_elsewhere_keeps_the_run(store):
    """While we watch, a beat comes: held, after one look, and the waiting was reported."""
    with acquire(store, PATHS, ELSEWHERE, beat_s=1000) as theirs:
        watch = Watch(then=lambda: theirs._beat(released=False))
        reports = []
        with pytest.raises(RunHeldError, match="elsewhere"):
            acquire(store, PATHS, Owner.here(), on_wait=lambda *report: reports.append(report), **watch.options())
        assert watch.paused == len(reports) == 1
        theirs.check()


def test_a_silent_holder_elsewhere_expires(store):
    """No beat for the time to live as we see it: taken, not earlier."""
    with acquire(store, PATHS, ELSEWHERE, beat_s=1000) as theirs:
        watch = Watch()
        with acquire(store, PATHS, Owner.here(), ttl_s=30, **watch.options()) as ours:
            assert ours.epoch == 2
            assert 30 <= watch.now_s - 1000 < 32
            with pytest.raises(FencedError):
                theirs.check()


def test_a_long_silent_holder_elsewhere_needs_no_watching(store):
    """A lease whose last beat is long ago by any clock is taken at once."""
    with acquire(store, PATHS, ELSEWHERE, beat_s=1000):
        watch = Watch()
        with acquire(store, PATHS, Owner.here(), clock=lambda: time.time() + 100, **watch.options()) as ours:
            assert (ours.epoch, watch.paused) == (2, 0)


def test_a_holder_that_was_killed_here_is_replaced_at_once(place, store, process):
    """SIGKILL of the driver, same command again on this machine: the next driver has the run without waiting."""
    driver = process(_driver(place))
    assert driver.stdout.readline() == "1\n"
    with pytest.raises(RunHeldError):
        acquire(store, PATHS, Owner.here())
    driver.kill()
    driver.wait()
    with acquire(store, PATHS, Owner.here(), on_wait=lambda *_: pytest.fail("waited for the dead")) as ours:
        assert ours.epoch == 2


def test_a_process_id_that_was_given_again_is_another_process(store):
    """The dead holder's number now belongs to somebody else: it does not keep the run."""
    dead = replace(Owner.here(), pid_start=1)
    with acquire(store, PATHS, dead, beat_s=1000), acquire(store, PATHS, Owner.here()) as ours:
        assert ours.epoch == 2


def test_a_zombie_is_refused(place, store, process):
    """A driver stopped for longer than the lease lives loses the run; woken, its check refuses the commit."""
    driver = process(_driver(place, "ttl_s=1.0, beat_s=0.2"))
    assert driver.stdout.readline() == "1\n"
    driver.send_signal(signal.SIGSTOP)
    taken = []

    def take():
        try:
            taken.append(acquire(store, PATHS, Owner.here(), ttl_s=1.0, beat_s=0.2))
        except RunHeldError:
            return False
        return True

    until(take)
    with taken[0] as ours:
        assert ours.epoch == 2
        driver.send_signal(signal.SIGCONT)
        driver.stdin.write("commit\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "FencedError\n"
        ours.fence.check()


def test_twenty_simultaneous_starts_have_one_winner(place, race):
    """Twenty drivers at the same moment: one holds the run, nineteen are told that it is held."""
    answers = race(_race(place), 20)
    assert sorted(map(str, answers)) == ["1"] + ["RunHeldError"] * 19


def test_twenty_simultaneous_starts_after_a_dead_holder(place, store, race):
    """The same over the lease of a killed driver: exactly one gets the next epoch."""
    with acquire(store, PATHS, replace(Owner.here(), pid_start=1), beat_s=1000):
        answers = race(_race(place), 20)
    assert sorted(map(str, answers)) == ["2"] + ["RunHeldError"] * 19


def _driver(place, options=""):
    return f"""
import sys
from tpupipe.errors import StoreTimeoutError
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import acquire
from tpupipe.store.objects import open_store
from tpupipe.store.owner import Owner
def checked(lease):
    while True:
        try:
            return lease.check()
        except StoreTimeoutError:  # the machine stood still for longer than a short lease lets a beat take
            continue
with acquire({place.code}, RunPaths("lm", "a"), Owner.here("driver"), {options}) as lease:
    print(lease.epoch)
    sys.stdin.readline()
    try:
        checked(lease)
        print("committed")
    except Exception as error:
        print(type(error).__name__)
"""


def _race(place):
    # The winner stays alive until all others have had their answer, as a driver does.
    return f"""
store = {place.code}
def attempt(me):
    lease = acquire(store, RunPaths("lm", "a"), Owner.here(str(me)))
    ends = time.monotonic() + 60
    while len(list(results.iterdir())) < 19 and time.monotonic() < ends:
        time.sleep(0.02)
    return lease.epoch
"""


# -- a store that fails -----------------------------------------------------------------------------------


def test_without_a_beat_nothing_is_committed_and_nothing_is_lost(proxy, caplog):
    """No beat gets through for the time to live: the check gives the store's error. When the store is back, it permits."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    watch = Watch()
    with acquire(store, RunPaths("lm", f"r{time.time_ns()}"), Owner.here(), beat_s=0.1, tick=watch.tick) as lease:
        lease.check()
        proxy.set("503@create")
        until(lambda: watch.passed(TTL_S) and "others may take the run" in caplog.text)
        with pytest.raises(StoreError, match="beat"):
            lease.check()
        assert not lease.lost
        proxy.set()
        lease.check()


def test_a_run_that_is_taken_from_a_silent_driver_is_lost(proxy, endpoint, caplog):
    """Its beats do not get through, those of the other one do: it hears of it although it cannot speak."""
    told: list[str] = []
    paths = RunPaths("lm", f"r{time.time_ns()}")
    behind = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    direct = open_store("gs://lease-beats/p", endpoint=endpoint, timeout_s=5)
    watch = Watch()
    with acquire(behind, paths, Owner.here(), beat_s=0.1, tick=watch.tick, on_lost=told.append) as lease:
        proxy.set("503@create")
        until(lambda: watch.passed(TTL_S) and "others may take the run" in caplog.text)
        with acquire(direct, paths, Owner.here(), clock=lambda: time.time() + 100) as other:
            assert other.epoch == lease.epoch + 1
            until(lambda: told)
            assert lease.lost
            assert len(told) == 1
            with pytest.raises(FencedError, match="another driver has taken the run over"):
                lease.check()
            other.check()


def test_a_lease_outlives_a_short_failure(proxy):
    """A few failed beats within the time to live change nothing."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    paths = RunPaths("lm", f"r{time.time_ns()}")
    with acquire(store, paths, Owner.here(), ttl_s=30, beat_s=0.05) as lease:
        proxy.set("503@create,times=4")
        until(lambda: read_standing(store, paths).beat >= 5)
        lease.check()


def test_a_first_beat_that_fails_is_tried_again(proxy):
    """The lease is made, then the store refuses for a while: the driver keeps its lease and beats when it can."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    paths = RunPaths("lm", f"r{time.time_ns()}")
    proxy.set("503@create,name=beat")
    with acquire(store, paths, Owner.here(), beat_s=0.5) as lease:
        assert read_standing(store, paths).beat == 0
        with pytest.raises(RunHeldError):
            acquire(store, paths, Owner.here())
        proxy.set()
        until(lambda: read_standing(store, paths).beat >= 2)
        lease.check()
        assert lease.epoch == 1
    assert read_standing(store, paths).released


def test_a_lease_that_may_not_be_kept_is_an_error_at_once(proxy):
    """Objects may be made but not rewritten: no lease that is lost half a minute later."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    proxy.set("403@create,name=beat")
    with pytest.raises(StoreDeniedError, match=r"beat\.json"):
        acquire(store, RunPaths("lm", f"r{time.time_ns()}"), Owner.here())


def test_a_store_that_cannot_be_asked_permits_nothing(proxy):
    """The check fails with the store's error; it does not say yes, and the lease is not lost by it."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5, attempts=2)
    paths = RunPaths("lm", f"r{time.time_ns()}")
    with acquire(store, paths, Owner.here(), beat_s=1000) as lease:
        proxy.set("500@any,times=2")
        with pytest.raises(StoreError, match="500"):
            lease.check()
        assert not lease.lost
        lease.check()


def test_leases_that_cannot_be_listed_are_not_absent(proxy):
    """A driver that cannot see whether the run is held does not start."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5, attempts=2)
    proxy.set("403@list")
    with pytest.raises(StoreError, match="403"):
        acquire(store, RunPaths("lm", f"r{time.time_ns()}"), Owner.here())


def test_a_lost_answer_does_not_lock_a_driver_out(proxy):
    """Creating the lease got through but its answer did not: the driver knows its own lease again."""
    store = open_store("gs://lease-beats/p", endpoint=proxy.endpoint, timeout_s=5)
    store.put("warm", b"")
    proxy.set("lost@create,times=1")
    with acquire(store, RunPaths("lm", f"r{time.time_ns()}"), Owner.here()) as lease:
        assert lease.epoch == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"{"])
def test_a_damaged_record_is_an_error(store, content):
    """A lease that cannot be understood is neither nobody's nor ours."""
    store.create(PATHS.lease(1), content)
    with pytest.raises(StoreError, match="is not a lease record"):
        acquire(store, PATHS, Owner.here())


# -- owners -----------------------------------------------------------------------------------------------


def test_this_process_is_running_and_a_dead_one_is_not():
    """Alive, ended but not yet waited for, and gone."""
    assert is_running(Owner.here())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = "from tpupipe.store.owner import _pid_start, Owner; import sys; print(_pid_start(int(sys.argv[1])))"
    start = int(subprocess.check_output([sys.executable, "-c", code, str(child.pid)], cwd=Path(__file__).parents[2]))
    owner = replace(Owner.here(), pid=child.pid, pid_start=start)
    assert is_running(owner)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(owner)
    child.wait()
    assert not is_running(owner)


def test_only_one_boot_of_one_machine_shares_process_ids():
    """Another host, another boot, or a system that does not tell: not the same machine."""
    me = Owner.here()
    assert same_machine(me, replace(me, pid=1))
    assert not same_machine(me, replace(me, host="other"))
    assert not same_machine(me, replace(me, boot_id="other"))
    assert not same_machine(replace(me, boot_id=""), replace(me, boot_id=""))


def test_an_owner_is_json():
    """The record of a lease holds the owner as it is."""
    assert Owner(**json.loads(json.dumps(asdict(Owner.here())))).pid == os.getpid()


def test_a_fence_alone_needs_no_lease(store):
    """Workers are given the epoch; with no higher one they may commit."""
    Fence(store, PATHS, 5).check()
    store.create(PATHS.lease(6), b"{}")
    with pytest.raises(FencedError):
        Fence(store, PATHS, 5).check()


# -- beats that fail, hang or come late ----------------------------------------------------------------


@pytest.fixture
def beats():
    """Arms ``lease.beat`` with what a test does there; inert afterwards."""
    yield lambda what: points.arm(lambda _, facts: what(facts["beat"]))
    points.arm(None)


def test_an_exception_is_a_missed_beat(store, beats):
    """Whatever it is: the thread goes on, and the next beat gets through."""

    def fail(beat):
        if len(failed) < 3:
            failed.append(beat)
            raise ZeroDivisionError("no beat")

    failed: list[int] = []
    beats(fail)
    with acquire(store, PATHS, Owner.here(), beat_s=0.05) as lease:
        until(lambda: read_standing(store, PATHS).beat >= 3)
        lease.check()
    assert failed == [2, 2, 2]


def test_exceptions_for_the_time_to_live_lose_nothing(store, beats, caplog):
    """No beat of the thread at all: the check beats itself, and permits."""

    def fail(_):
        raise ZeroDivisionError("no beat")

    beats(fail)
    watch = Watch()
    with acquire(store, PATHS, Owner.here(), beat_s=0.05, tick=watch.tick) as lease:
        until(lambda: watch.passed(TTL_S) and "others may take the run" in caplog.text)
        lease.check()
        assert not lease.lost
        assert read_standing(store, PATHS).beat == 2


def test_a_thread_that_hangs_is_stood_in_for_by_the_next_commit(store, beats):
    """The owner is alive and nobody took the run: its check beats, permits, and the release does not wait for ever.

    When the thread wakes up after that, it does not take the release back.
    """
    hangs, wake = threading.Event(), threading.Event()
    beats(lambda _: (hangs.set(), wake.wait(120)))
    watch = Watch()
    lease = acquire(store, PATHS, Owner.here(), beat_s=0.05, tick=watch.tick)
    try:
        assert hangs.wait(60)
        watch.passed(TTL_S)
        before = read_standing(store, PATHS).beat
        lease.check()
        assert read_standing(store, PATHS).beat == before + 1
    finally:
        releasing = threading.Thread(target=lease.release)
        releasing.start()
        until(lambda: read_standing(store, PATHS).released)
        wake.set()
        releasing.join(60)
    until(lambda: not lease._thread.is_alive())
    assert read_standing(store, PATHS).released


def test_a_hung_owner_whose_run_was_taken_is_refused(store, beats):
    """Standing in for the thread is no way around the fence."""
    hangs, wake = threading.Event(), threading.Event()
    beats(lambda _: (hangs.set(), wake.wait(120)))
    try:
        watch = Watch()
        with acquire(store, PATHS, Owner.here(), beat_s=0.05, tick=watch.tick) as lease:
            assert hangs.wait(60)
            points.arm(None)
            with acquire(store, PATHS, Owner.here(), take_over=True):
                watch.passed(TTL_S)
                with pytest.raises(FencedError, match="taken the run over"):
                    lease.check()
            wake.set()
    finally:
        wake.set()


def test_a_driver_killed_in_a_beat_is_replaced_at_once(place, store, process):
    """SIGKILL at the third beat: nobody waits for an expiry, and the next owner has the next epoch."""
    arm = (
        "from tpupipe.faults.inject import Injection\nfrom tpupipe.faults.plan import parse_faults\n"
        'Injection(parse_faults(["kill-worker@lease.beat=3"]), identity={}, claim=lambda *_: True, kill_driver=None).arm()\n'
    )
    driver = process(arm + _driver(place, "ttl_s=60, beat_s=0.05"))
    assert driver.wait(60) == -signal.SIGKILL
    standing = read_standing(store, PATHS)
    assert (standing.epoch, standing.beat, standing.released) == (1, 2, False)
    with acquire(store, PATHS, Owner.here()) as lease:
        assert lease.epoch == 2
