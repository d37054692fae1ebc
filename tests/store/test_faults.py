"""A store that refuses, blocks, breaks and lies, over real HTTP in front of the real server."""

import dataclasses
import pickle
import re
import time
import uuid

import pytest

from tpupipe.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreDeniedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tpupipe.store.objects import open_store

TRY_HARD = 5


@pytest.fixture
def good(endpoint):
    """The same place without the proxy."""
    store = open_store(f"gs://faults-{uuid.uuid4().hex[:12]}/run", endpoint=endpoint)
    store.create("there", b"0123456789" * 1000)
    return store


@pytest.fixture
def store(good, proxy):
    """The place behind the proxy, its bucket seen."""
    store = open_store(good.root, endpoint=proxy.endpoint, timeout_s=20, attempts=TRY_HARD)
    store.info("there")
    # How long the pauses are is test_retry's; here it is what comes after them.
    return store._at(store.root, dataclasses.replace(store.policy, first_pause_s=0.02))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_refusal_is_retried_and_counted(store, good, proxy, asked, status):
    """Refused twice, then accepted: saved, and three attempts are recorded."""
    proxy.set(f"{status}@any,times=2")
    asked()
    assert store.create("a", b"1").attempts == asked() == 3
    assert good.read("a") == b"1"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, StoreError),
        (401, StoreDeniedError),
        (403, StoreDeniedError),
        (404, ObjectNotFoundError),
        (412, ObjectExistsError),
    ],
)
def test_a_final_refusal_is_not_retried(store, proxy, asked, status, error):
    """One request, and an error that names the object, the status or what it means, and one attempt."""
    proxy.set(f"{status}@any,times=1")
    asked()
    with pytest.raises(error, match=re.escape(store.uri("a"))) as caught:
        store.create("a", b"1")
    assert type(caught.value) is error
    assert caught.value.data == {"operation": "create", "uri": store.uri("a"), "attempts": 1}
    assert asked() == 1
    assert status == 412 or f"{status}" in str(caught.value)


def test_a_denial_says_what_to_check(store, proxy):
    """The error for 403 carries the server's reason and a hint about credentials."""
    proxy.set("403@download")
    with pytest.raises(StoreDeniedError, match=r"403 Forbidden \(injected by store fault 403@download\)") as caught:
        store.read("there")
    assert "credentials" in caught.value.hint


def test_the_attempts_are_bounded(store, proxy, asked):
    """A server that always refuses is asked five times, then the error says so."""
    proxy.set("503@any")
    asked()
    with pytest.raises(StoreUnavailableError, match="after 5 attempts") as caught:
        store.put("a", b"1")
    assert caught.value.data["attempts"] == asked() == TRY_HARD
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ConnectionError)


OPERATIONS = {
    "create": lambda store: store.create("b", b"1"),
    "put": lambda store: store.put("there", b"1"),
    "read": lambda store: store.read("there"),
    "range": lambda store: store.read("there", 3, 9),
    "info": lambda store: store.info("there"),
    "exists": lambda store: store.exists("there"),
    "list": lambda store: list(store.list("the")),
    "pages": lambda store: list(store.pages("the")),
    "children": lambda store: store.children("a"),
    "delete": lambda store: store.delete("there"),
    "delete_prefix": lambda store: store.delete_prefix("there"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_blocks_ends_in_an_error(store, proxy, asked, operation):
    """No answer: every operation raises an error naming the object, after one attempt or two of the five it may have.

    That this is in under two time-outs is said with a clock of the test's own (``test_retry``).
    """
    timeout_s = 0.6
    store = store.with_limits(timeout_s=timeout_s)
    proxy.set("block@any")
    asked()
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=re.escape(str(store.root))) as caught:
        OPERATIONS[operation](store)
    assert timeout_s < time.monotonic() - started < 60
    assert asked() <= 2
    assert isinstance(caught.value, TimeoutError)


def test_a_trickle_is_not_an_answer(store, proxy):
    """A body that keeps dripping keeps the socket alive; the time-out counts for the whole answer all the same."""
    store = store.with_limits(timeout_s=1)
    proxy.set("trickle@download")
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="there"):
        store.read("there")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("fault", ["reset", "truncate", "damage", 503])
@pytest.mark.parametrize("operation", ["create", "read", "list"])
def test_a_broken_transfer_is_repeated(store, proxy, asked, operation, fault):
    """Reset, cut or damaged once: the operation succeeds with the right result."""
    proxy.set(f"{fault}@any,times=1")
    asked()
    if operation == "create":
        assert store.create("b", b"1").attempts == 2
        assert store.read("b") == b"1"
        return
    if operation == "read":
        assert store.read("there") == b"0123456789" * 1000
    else:
        assert [info.name for info in store.list()] == ["there"]
    assert asked() == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("truncate", "IncompleteRead|bytes arrived"), ("damage", "crc32c"), ("reset", "connection broke")],
)
def test_content_that_never_arrives_whole_is_an_error(store, proxy, asked, fault, reason):
    """A read that is cut or damaged every time is never passed on as content."""
    proxy.set(f"{fault}@any")
    asked()
    with pytest.raises(StoreUnavailableError, match=reason):
        store.read("there")
    assert asked() == TRY_HARD


def test_a_cut_range_is_repeated(store, proxy):
    """Ranges have no checksum, but their length is known."""
    proxy.set("truncate@any,times=1")
    assert store.read("there", 5, 500) == (b"0123456789" * 1000)[5:500]


def test_a_lost_answer_to_a_create_is_found_again(store, good, proxy):
    """The server made it, the answer was lost: the retry recognises its own content and succeeds."""
    proxy.set("lost@any,times=1")
    info = store.create("mine", b"content")
    assert info.attempts == 2
    assert info.generation == good.info("mine").generation


def test_a_lost_answer_does_not_hide_another_writer(store, good, proxy):
    """The first attempt never arrived and somebody else created the object meanwhile: that is an error."""
    good.create("theirs", b"other content")
    proxy.set("503@any,times=1")
    with pytest.raises(ObjectExistsError) as caught:
        store.create("theirs", b"my content")
    assert caught.value.data["attempts"] == 2
    assert good.read("theirs") == b"other content"


def test_a_lost_answer_to_a_delete_is_success(store, good, proxy):
    """Deleted, the answer lost, the retry finds nothing: done, also when the object had to exist."""
    proxy.set("lost@any,times=1")
    store.delete("there", missing_ok=False)
    assert not good.exists("there")


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: list(store.list("x/")),
        lambda store: list(store.pages("x/")),
        lambda store: store.children("x"),
    ],
)
@pytest.mark.parametrize(
    ("fault", "error"), [(500, StoreUnavailableError), (403, StoreDeniedError), ("reset", StoreUnavailableError)]
)
def test_a_listing_that_fails_is_never_empty(store, proxy, ask, fault, error):
    """A store that cannot be listed raises, on every way of listing."""
    proxy.set(f"{fault}@any")
    with pytest.raises(error):
        ask(store)


def test_a_later_page_that_fails_is_an_error(store, good, proxy, monkeypatch):
    """The first page arrived, the second never does: the listing raises instead of ending early."""
    monkeypatch.setattr("tpupipe.store.gcs._PAGE", 2)
    for number in range(5):
        good.create(f"p/{number}", b"")
    proxy.set("503@list,after=1")
    listing = store.list("p/")
    assert [next(listing).name, next(listing).name] == ["p/0", "p/1"]
    with pytest.raises(StoreUnavailableError):
        next(listing)
    proxy.set("503@list,after=1")
    pages = store.pages("p/")
    assert next(pages).names == ["p/0", "p/1"]
    with pytest.raises(StoreUnavailableError):
        next(pages)


@pytest.mark.parametrize("fault", [500, 403, "reset"])
def test_exists_is_never_no_on_an_error(store, proxy, fault):
    """A store that fails is not a store without the object."""
    proxy.set(f"{fault}@any")
    with pytest.raises(StoreError):
        store.exists("there")


def test_the_pause_a_server_asks_for_is_kept(store, proxy):
    """Retry-After: 1 is honoured."""
    proxy.set("429@create,times=1,retry_after_s=1")
    started = time.monotonic()
    assert store.put("a", b"1").attempts == 2
    assert time.monotonic() - started >= 1


def test_a_store_that_is_not_there(good):
    """Nobody listens: a clear error after bounded attempts, naming the object."""
    store = open_store(good.root, endpoint="http://127.0.0.1:9", timeout_s=30, attempts=2)
    with pytest.raises(StoreUnavailableError, match="refused") as caught:
        store.read("there")
    assert caught.value.data["attempts"] == 2


def test_making_the_bucket_is_retried_too(proxy):
    """The first use of a new bucket meets a 503: it is made all the same."""
    proxy.set("503@any,times=1")
    store = open_store(f"gs://new-{uuid.uuid4().hex[:12]}", endpoint=proxy.endpoint)
    assert store.create("a", b"1").attempts == 2


def test_retries_are_logged(store, proxy, caplog):
    """Every failed attempt leaves a line with the object and the reason."""
    proxy.set("503@any,times=1")
    store.put("a", b"1")
    assert any(store.uri("a") in line and "503" in line for line in caplog.messages)
