"""Saves to a store that refuses, blocks and limits: the real saver, the real server, and the proxy between them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tpupipe.checkpoint.verify import list_checkpoints, newest_intact
from tpupipe.checkpoint.writing import SLOWEST_BYTES_PER_S, UNSEEN_BYTES, Patience
from tpupipe.errors import StoreTimeoutError
from tpupipe.faults.store_proxy import StoreProxy, store_proxy
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store

PATHS = RunPaths("job", "run")

# Saves some steps behind the proxy and prints what came of it as JSON. `faults` come into force after step 1.
_SAVES = """
import json, logging, os, time
from tpupipe.errors import CheckpointSaveError
from tpupipe.faults.store_proxy import StoreProxy
logged = []
logging.getLogger("tpupipe.store").addHandler(type("Kept", (logging.Handler,), {{"emit": lambda _, r: logged.append(r.getMessage())}})())
proxy = StoreProxy({endpoint!r})
store = open_store({uri!r}, endpoint=proxy.endpoint, timeout_s={timeout_s})
told = []
target = SaveTarget(store, paths, "lm", Fence(store, paths, 1), 0, 10, timeout_s={timeout_s} * 10, silence_s={timeout_s} * 1.75)
s = Saver(target, primary=True, combine=lambda step: step, on_commit=lambda commit, _: told.append([commit.step, s.retries]))
s.save(1, tree(), {{}})
s.finish()
proxy.set({faults!r})
error, began = None, time.monotonic()
try:
    for step in {steps}:
        s.save(step, tree(), {{}})
    s.finish()
except CheckpointSaveError as caught:
    error = [caught.data["step"], str(caught)]
failed_s = time.monotonic() - began
try:
    s.close()
except CheckpointSaveError:
    pass
closed_s = time.monotonic() - began
proxy.set()
print(json.dumps({{"told": told, "error": error, "failed_s": failed_s, "closed_s": closed_s, "logged": logged}}))
sys.stdout.flush()
os._exit(0)  # what was given up on still waits for an answer
"""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    """The proxy in front of a real embedded server."""
    from tpupipe.local.server import embedded_store

    folder: Path = tmp_path_factory.mktemp("faults")
    with embedded_store(folder) as endpoint, store_proxy(endpoint, root=folder) as running:
        yield running


@pytest.fixture
def store(proxy: StoreProxy) -> Store:
    store = open_store(f"gs://saves-{uuid.uuid4().hex[:12]}/runs", endpoint=proxy.endpoint)
    store.create(PATHS.identity, b"{}")  # every run has this first, and with it the bucket
    return store


@pytest.fixture
def save(proxy: StoreProxy, store: Store, run_python: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Saves ``steps`` after step 1 while the store has ``faults``; gives what came of it."""

    def run(*faults: str, steps: tuple[int, ...] = (2,), timeout_s: float = 3) -> dict[str, Any]:
        code = _SAVES.format(
            endpoint=proxy.endpoint, uri=str(store.root), faults=faults, steps=steps, timeout_s=timeout_s
        )
        result: dict[str, Any] = json.loads(run_python(code, 1, proxy.endpoint).splitlines()[-1])
        return result

    return run


def committed(store: Store) -> list[int]:
    return sorted(f.step for f in list_checkpoints(store, PATHS, "lm") if f.committed)


@pytest.mark.parametrize("name", ["COMMIT.json", "/d/"])
def test_a_store_that_says_503_twice_has_the_save_and_the_repeats_are_recorded(save, store, name):
    """The record, and the arrays: refused twice, accepted then; what was repeated is told with the commit."""
    result = save(f"503@create,times=2,name={name}", timeout_s=20)
    assert result["error"] is None
    (first, none), (second, repeated) = result["told"]
    assert (first, none, second) == (1, 0, 2)
    assert committed(store) == [1, 2]
    if name == "/d/":
        assert 1 <= repeated <= 2, "TensorStore counts its own retries, and may see one refusal for two of its writes"
    else:
        assert repeated == 2
        assert len([line for line in result["logged"] if name in line and "503" in line]) == 2


@pytest.mark.parametrize("name", ["COMMIT.json", "/_sharding"])
def test_a_store_that_says_403_is_asked_once(save, store, proxy, name):
    """One attempt, and an error that names the object and the refusal; the checkpoint before it is intact."""
    fault = f"403@create,name={name}"
    before = proxy.counts().fired.get(fault, 0)
    result = save(fault, steps=(2, 3))
    step, message = result["error"]
    assert step == 2
    assert name.strip("/") in message
    assert "403" in message
    assert proxy.counts().fired[fault] - before == 1
    assert newest_intact(store, PATHS, "lm").commit.step == 1


@pytest.mark.parametrize("name", ["/arrays/", "COMMIT.json"])
def test_a_store_that_blocks_on_writes_ends_the_save(save, store, proxy, name):
    """Time-out 3 s: the error names what was written, and ending neither waits nor asks again.

    That it is told in under two time-outs is said with a clock of the test's own, of an operation (``tests/store``) and
    of the arrays (below). Here the clock is a busy machine's: what repeats by itself, as TensorStore and gcsfs do, goes
    on for minutes.
    """
    fault = f"block@create,name={name}"
    before = proxy.counts().fired.get(fault, 0)
    result = save(fault)
    step, message = result["error"]
    assert step == 2
    assert 3 < result["failed_s"] < 60
    assert result["closed_s"] - result["failed_s"] < 15, "Orbax waits for 30 s, and we do not wait for it again"
    if name == "COMMIT.json":
        assert proxy.counts().fired[fault] - before <= 2, "a second attempt has what is left of two time-outs"
    assert f"{PATHS.checkpoint('lm', step=2, epoch=1)}/{name.strip('/')}" in message
    assert committed(store) == [1]


def test_a_slow_save_that_moves_is_not_given_up(save, store):
    """Every write takes 1.5 s of a time-out of 6 s: as a whole longer than one may take, and committed."""
    result = save("latency@create,seconds=1.5", timeout_s=6)
    assert result["error"] is None
    assert result["failed_s"] > 6 * 1.75
    assert committed(store) == [1, 2]


def test_quick_saves_survive_the_limit_of_one_write_a_second_for_a_name(save, store):
    """429 for every second write of a name within a second: five saves as fast as they go are all committed."""
    result = save("429@create,per_name_interval_s=1", steps=(2, 3, 4, 5, 6), timeout_s=20)
    assert result["error"] is None
    assert committed(store) == [1, 2, 3, 4, 5, 6]


# -- patience, with a clock of the test's own --------------------------------------------------------


@pytest.fixture
def watch(tmp_path: Path):
    """``(store, at)``: a store in a folder, and ``at(second)``: one look at that second of a save of no bytes."""
    store = open_store(f"file://{tmp_path}")
    now = [0.0]
    patience = Patience(store, "c/arrays/", 16.0, 0, clock=lambda: now[0])

    def at(second: float) -> None:
        now[0] = second
        patience.look()

    return store, at


def test_patience_lasts_as_long_as_objects_come_or_grow(watch):
    """Something new every 12 s of 16 s allowed: no end, although the whole takes longer."""
    store, at = watch
    for number in range(4):
        store.create(f"c/arrays/{number}", b"x")
        at(12.0 * number + 1)
    store.put("c/arrays/3", b"longer")
    at(50)
    at(52)


def test_patience_ends_when_nothing_new_comes(watch):
    """16 s after the look before the last news, the error says where and how long."""
    store, at = watch
    at(10)
    store.create("c/arrays/0", b"x")
    at(11)
    at(25.9)
    with pytest.raises(StoreTimeoutError, match=r"c/arrays makes no progress.* 16\.1 s, 1 are there") as caught:
        at(26.1)
    assert caught.value.data["uri"] == store.uri("c/arrays")


def test_bytes_on_their_way_are_waited_for(tmp_path):
    """A large object is not there before its last byte: a save of 1 GiB has 128 s more, any larger at most 512 s."""
    store = open_store(f"file://{tmp_path}")
    assert Patience(store, "c/", 105, 1 << 30).allowed_s == 105 + 128
    assert Patience(store, "c/", 105, 1 << 45).allowed_s == 105 + UNSEEN_BYTES / SLOWEST_BYTES_PER_S == 105 + 512


def test_a_listing_that_fails_is_no_news(tmp_path):
    """The place cannot be listed: that is neither progress nor an error before the time is over."""
    (tmp_path / "c").write_text("a file where a folder is looked for")
    now = [0.0]
    patience = Patience(open_store(f"file://{tmp_path}"), "c/arrays/", 16.0, 0, clock=lambda: now[0])
    patience.look()
    now[0] = 17.0
    with pytest.raises(StoreTimeoutError):
        patience.look()
