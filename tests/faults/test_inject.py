"""Faults fire where, when and as often as asked, and nothing happens without one."""

from __future__ import annotations

import ast
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tpupipe.errors import TpupipeError
from tpupipe.faults import points
from tpupipe.faults.inject import InjectedError, Injection
from tpupipe.faults.plan import Action, parse_faults
from tpupipe.faults.points import POINTS, arm, point

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _inert():
    yield
    arm(None)


def injection(*texts, claim=lambda *_: True, identity=None, kill_driver=None):
    faults = parse_faults(texts)
    made = Injection(faults, identity=identity or {}, claim=claim, kill_driver=kill_driver or (lambda: None))
    made.arm()
    return made


def test_points_are_inert_without_faults():
    """Nothing armed, or armed without faults: no call, no error, even for a name that does not exist."""
    point("train.step", step=1)
    Injection((), identity={}, claim=lambda *_: pytest.fail("asked"), kill_driver=lambda: None).arm()
    assert points._injector is None
    point("no.such.point")


def test_raise_fires_at_its_step_only():
    """Steps before pass, the step raises an error that names the fault."""
    injection("raise@train.step=2")
    point("train.step", step=0)
    point("train.updated", step=2)
    with pytest.raises(InjectedError, match=r"raise@train\.step=2"):
        point("train.step", step=2)


def test_the_process_s_own_facts_count():
    """rank=1 fires in the process of rank 1 only."""
    injection("raise@train.step=2,rank=1", identity={"rank": 0, "stage": "lm"})
    point("train.step", step=2)
    injection("raise@train.step=2,rank=1", identity={"rank": 1, "stage": "lm"})
    with pytest.raises(InjectedError):
        point("train.step", step=2)


def test_claims_are_asked_once_per_match_and_decide():
    """The counter sees position and facts of every match, and its no is a no."""
    asked = []

    def claim(position, facts):
        asked.append((position, facts["step"]))
        return len(asked) == 2

    injection("slow@train.updated", "raise@train.step,times=1", claim=claim)
    point("train.step", step=0)
    with pytest.raises(InjectedError):
        point("train.step", step=1)
    point("train.step", step=2)
    assert asked == [(1, 0), (1, 1), (1, 2)]


def test_several_faults_at_one_point_all_fire():
    """A pause, then the error."""
    calls = []
    injection(
        "kill-driver@unit.read=3", "raise@unit.read", claim=lambda position, _: calls.append(position) or position == 1
    )
    with pytest.raises(InjectedError):
        point("unit.read", index=3)
    assert calls == [0, 1]


def test_slow_pauses_for_so_long(monkeypatch):
    """The pause is the one asked for."""
    slept = []
    monkeypatch.setattr("tpupipe.faults.inject.time.sleep", slept.append)
    injection("slow@train.step=1,seconds=2.5")
    point("train.step", step=1)
    assert slept == [2.5]


def test_hang_does_not_return():
    """The thread that passes the point never gets past it."""
    injection("hang@train.step=1")
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (point("train.step", step=1), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.3)
    assert thread.is_alive()


def test_kill_driver_asks_and_stays():
    """The driver is asked to end, and this process does not go on past the point."""
    asked, passed = threading.Event(), threading.Event()
    injection("kill-driver@train.step=1", kill_driver=asked.set)
    threading.Thread(target=lambda: (point("train.step", step=1), passed.set()), daemon=True).start()
    assert asked.wait(60)
    assert not passed.wait(0.2)


def test_kill_worker_is_a_sigkill():
    """The process is gone at the point: no handler ran, nothing after it was printed."""
    code = """
import atexit
from tpupipe.faults.inject import Injection
from tpupipe.faults.plan import Action, parse_faults
from tpupipe.faults.points import point
atexit.register(print, "at exit")
Injection(parse_faults(["kill-worker@train.step=2"]), identity={}, claim=lambda *_: True, kill_driver=None).arm()
for step in range(4):
    point("train.step", step=step)
    print(step, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]


def test_an_injected_error_survives_pickling():
    """Ray ships it between processes; it is one of ours, and a RuntimeError."""
    error = pickle.loads(pickle.dumps(InjectedError("Injected.", hint="h", step=3)))
    assert isinstance(error, TpupipeError)
    assert isinstance(error, RuntimeError)
    assert (error.message, error.hint, error.data) == ("Injected.", "h", {"step": 3})


def marked_points() -> dict[str, set[str]]:
    """Every name that the package passes to ``point``, and the facts given with it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tpupipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "point"
                and isinstance(node.args[0], ast.Constant)
            ):
                found.setdefault(node.args[0].value, set()).update(k.arg for k in node.keywords)
    return found


def test_every_point_is_marked_somewhere_and_every_mark_is_a_point():
    """No fault can be asked for that nothing passes, none is passed that cannot be asked for; each gives its fact."""
    marked = marked_points()
    assert set(marked) == set(POINTS)
    assert [name for name, info in POINTS.items() if info.fact not in marked[name]] == []


def test_an_effect_gets_its_fault_and_place_and_the_process_goes_on():
    """A notice and a damage do not stop the process that passes the point."""
    done = []
    faults = parse_faults(["slow@unit.read", "drain-host@train.step=1", "corrupt-checkpoint@train.step=1,how=delete"])
    effects = {action: lambda fault, position: done.append((fault.action, position)) for action in Action}
    Injection(faults, identity={}, claim=lambda *_: True, kill_driver=lambda: None, effects=effects).arm()
    point("train.step", step=1)
    assert done == [("drain-host", 1), ("corrupt-checkpoint", 2)]


def test_a_lost_slice_takes_the_process_with_it():
    """The effect is carried out, and this process does not go on past the point: nothing after it may be done."""
    lost, passed = threading.Event(), threading.Event()
    effects = {Action.LOSE_SLICE: lambda *_: lost.set()}
    faults = parse_faults(["lose-slice@train.step=1"])
    Injection(faults, identity={}, claim=lambda *_: True, kill_driver=lambda: None, effects=effects).arm()
    threading.Thread(target=lambda: (point("train.step", step=1), passed.set()), daemon=True).start()
    assert lost.wait(60)
    assert not passed.wait(0.2)


@pytest.mark.parametrize("action", ["drain-host", "lose-slice", "corrupt-checkpoint"])
def test_an_effect_that_this_process_does_not_have_is_an_error(action):
    """Never silence: a fault that did nothing would look like one that was survived."""
    injection(f"{action}@train.step=1")
    with pytest.raises(InjectedError, match=f"cannot do {action}"):
        point("train.step", step=1)


def test_a_rate_fires_at_the_drawn_passes_only():
    """The claim is asked for them, with the facts of the process among those that decide."""
    faults, asked = parse_faults(["slow@train.step,rate=0.1,seed=7,seconds=0,times=99"]), []
    Injection(
        faults,
        identity={"rank": 0, "stage": "fit"},
        claim=lambda _, facts: asked.append(facts["step"]) or True,
        kill_driver=lambda: None,
    ).arm()
    for step in range(40):
        point("train.step", step=step)
    assert asked == [n for n in range(40) if faults[0].drawn(0, {"step": n, "rank": 0, "stage": "fit"})]
    assert asked
