"""The watchdog inside a process of its own: it ends it, and says where it stood and in which phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpupipe.stages.stall import EXIT_STATUS
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

PATHS = RunPaths("job", "run")

# The coordinator is a file that records are put into: what the watchdog asks of it is one call.
_CODE = """
import json, sys, threading, time
from types import SimpleNamespace
from tpupipe.stages.stall import Phase, Watchdog
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

class Coordinator:
    def report_now(self, record):
        {told}
    def counted(self, name):
        return STALLED
    def count(self, name):
        return 1

STALLED = 0
place = SimpleNamespace(store=open_store({uri!r}), paths=RunPaths("job", "run"), stage="lm")
restoring, stepping = Phase(1.0, "while restoring", "restore_timeout_s"), Phase(0.7, "in a step")
watchdog = Watchdog(Phase(60.0, "while starting", key=""), "rank 1", place, Coordinator(), step=5, rank=1)

def the_culprit():
    threading.Event().wait()

with watchdog.watching():
    {body}
print("survived")
"""


@pytest.fixture
def ended(tmp_path: Path):
    """Runs code under a watchdog; gives exit status, what it printed, and the stacks."""

    def run(body: str, told: str = "print(json.dumps(record), flush=True)"):
        uri = f"file://{tmp_path}/store"
        done = subprocess.run(
            [sys.executable, "-c", _CODE.format(uri=uri, body=body, told=told)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        store = open_store(uri)
        stacks = [store.read(info.name).decode() for info in store.list(f"{PATHS.stage('lm')}/stalls/")]
        return done.returncode, done.stdout, stacks

    return run


def test_a_phase_without_progress_ends_the_process_and_names_the_phase_the_step_and_the_stacks(ended):
    """Hanging while restoring, whose bound is 1 s: exit status 70, and the stacks show the function that hangs."""
    status, output, stacks = ended("watchdog.enter(restoring); the_culprit()")
    assert status == EXIT_STATUS
    record = json.loads(output)
    assert record["phase"] == "no progress while restoring (restore_timeout_s 1)"
    assert (record["kind"], record["step"], record["rank"]) == ("stalled", 5, 1)
    assert len(stacks) == 1
    assert "the_culprit" in stacks[0]
    assert record["uri"] in record["what"]


def test_each_phase_has_its_own_bound(ended):
    """Five minutes in a phase of ten, then steps of 40 s of at most 60: no end; the step is told that was reached last.

    The minutes are moved, for the watchdog looks once a second.
    """
    body = "watchdog.enter(Phase(600.0, 'while restoring')); watchdog._last -= 300; time.sleep(1.5)\n"
    body += "    watchdog.enter(Phase(60.0, 'in a step'))\n"
    body += "    for step in range(6, 16):\n        watchdog._last -= 40; time.sleep(0.2); watchdog.beat(step)\n"
    status, output, stacks = ended(body)
    assert (status, output, stacks) == (0, "survived\n", [])
    status, output, _ = ended(body + "    watchdog._last -= 61; the_culprit()")
    assert status == EXIT_STATUS
    assert json.loads(output)["step"] == 15
    assert json.loads(output)["phase"] == "no progress in a step (stall_timeout_s 60)"


def test_a_process_that_waits_for_one_that_stalled_tells_of_its_stacks_too(ended):
    """It has been silent for half of its own bound of 10 minutes when another one ends: it ends too, long before those."""
    body = "watchdog._peers = ('group', 1); STALLED = 1\n"
    body += "    watchdog.enter(Phase(600.0, 'in a step')); watchdog._last -= 300; the_culprit()"
    status, _, stacks = ended(body)
    assert status == EXIT_STATUS
    assert "the_culprit" in stacks[0]
    body = "watchdog._peers = ('group', 1); STALLED = 1\n"
    body += "    watchdog.enter(Phase(600.0, 'in a step')); time.sleep(1.5)"
    assert ended(body)[1] == "survived\n", "it made progress a moment ago"


def test_nobody_to_tell_does_not_keep_a_stalled_process(ended):
    """The coordinator is gone: the stacks are kept, and the process ends all the same."""
    status, _, stacks = ended("watchdog.enter(stepping); the_culprit()", told="raise TimeoutError('gone')")
    assert status == EXIT_STATUS
    assert len(stacks) == 1
