"""The pipeline: order, overlap, bounded memory, and errors that stay with their unit."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from tpupipe.stages.infer_pipeline import Pipeline

WAIT_S = 60


class Engine:
    """Doubles pieces, keeps up to two at work, and gives them back late. Fails at ``bad``."""

    def __init__(self, on_submit=lambda _: None):
        self.flying = deque()
        self.on_submit = on_submit

    def submit(self, piece, done):
        self.on_submit(piece)
        self.flying.append((piece, done))
        while len(self.flying) > 2:
            self.collect()

    def collect(self):
        if not self.flying:
            return False
        piece, done = self.flying.popleft()
        done(ValueError(f"computing {piece}") if piece == "bad" else piece * 2)
        return True


class Sink:
    def __init__(self, job, log):
        self.job, self.log, self.got = job, log, []

    def append(self, computed):
        if computed == -666 * 2:
            raise OSError("writing 666")
        self.got.append(computed)

    def finish(self):
        self.log.append(("finish", self.job[0]))
        return self.got

    def discard(self):
        self.log.append(("discard", self.job[0]))


def read(job):
    for piece in job[1]:
        if isinstance(piece, Exception):
            raise piece
        yield piece


@pytest.fixture
def make():
    made = []

    def pipeline(**options):
        log = []
        given = {"read": read, "engine": Engine(), "progress": lambda: None} | options
        one = Pipeline(given["read"], given["engine"], lambda job: Sink(job, log), given["progress"])
        made.append(one)
        return one, log

    yield pipeline
    for one in made:
        one.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("infer-")]


def test_each_unit_gets_its_own_pieces_in_order(make):
    """Twenty units of 0 to 6 pieces, all submitted at once: each result is its own pieces, computed, in order."""
    pipeline, log = make()
    jobs = [(n, list(range(n, n + n % 7))) for n in range(20)]
    futures = [pipeline.submit(job) for job in jobs]
    assert [f.result(WAIT_S) for f in futures] == [[2 * p for p in pieces] for _, pieces in jobs]
    assert log == [("finish", n) for n in range(20)]


def test_an_error_belongs_to_its_unit_and_the_next_ones_go_on(make):
    """Raised in reading, computing and writing: that future raises it, its sink is discarded, all others finish."""
    pipeline, log = make()
    jobs = [
        (0, [1]),
        (1, [1, KeyError("reading")]),
        (2, [1, 2]),
        (3, ["bad", 1, 2, 3]),
        (4, [4]),
        (5, [-666, 1]),
        (6, [6]),
    ]
    futures = [pipeline.submit(job) for job in jobs]
    for number, kind, said in ((1, KeyError, "reading"), (3, ValueError, "computing bad"), (5, OSError, "writing 666")):
        with pytest.raises(kind, match=said):
            futures[number].result(WAIT_S)
    assert [futures[n].result(WAIT_S) for n in (0, 2, 4, 6)] == [[2], [2, 4], [8], [12]]
    assert sorted(log) == [("discard", 1), ("discard", 3), ("discard", 5), *[("finish", n) for n in (0, 2, 4, 6)]]


def test_reading_computing_and_writing_overlap():
    """Unit 2 is read while unit 1 is computed and unit 0 is written: each of the three waits for the other two to begin."""
    meet = threading.Barrier(3, timeout=WAIT_S)

    def reading(job):
        if job[0] == 2:
            meet.wait()
        yield from job[1]

    class Waiting(Sink):
        def finish(self):
            if self.job[0] == 0:
                meet.wait()
            return super().finish()

    log = []
    pipeline = Pipeline(reading, Engine(lambda piece: piece == 1 and meet.wait()), lambda job: Waiting(job, log))
    futures = [pipeline.submit((n, [n])) for n in range(3)]
    assert [f.result(WAIT_S) for f in futures] == [[0], [2], [4]]
    pipeline.close()


def test_a_large_unit_is_not_read_ahead_of_the_writer():
    """Writing is held up: of 1,000 pieces only as many are read as the queues, the engine and the threads hold."""
    held = threading.Event()
    read_so_far = []

    def counted(job):
        for piece in job[1]:
            read_so_far.append(piece)
            yield piece

    class Held(Sink):
        def append(self, computed):
            held.wait(WAIT_S)
            super().append(computed)

    pipeline = Pipeline(counted, Engine(), lambda job: Held(job, []))
    future = pipeline.submit((0, list(range(1000))))
    ends = time.monotonic() + WAIT_S
    seen = -1
    while seen != len(read_so_far) or seen < 5:  # until it stands still
        seen = len(read_so_far)
        threading.Event().wait(0.2)
        assert time.monotonic() < ends
    assert seen <= 10
    held.set()
    assert future.result(WAIT_S) == [2 * n for n in range(1000)]
    pipeline.close()


def test_the_rest_of_a_failed_unit_is_not_read(make):
    """The first piece cannot be computed: of a million pieces only a few are read."""
    seen = []

    def counted(job):
        for piece in job[1]:
            seen.append(piece)
            yield piece

    pipeline, _ = make(read=counted)
    with pytest.raises(ValueError, match="computing bad"):
        pipeline.submit((0, ["bad", *range(1_000_000)])).result(WAIT_S)
    assert len(seen) < 1000
