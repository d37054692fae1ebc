"""One suite for every backend: what ``Store`` promises."""

import pickle
import threading
import time

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpupipe.errors import ObjectExistsError, ObjectNotFoundError, StoreError, UsageError
from tpupipe.store.objects import open_store

FOLDERS = ["a", "a-", "a.b", "b", "0"]
LEAVES = ["o", "o-1", "ö", "p q", "50%", "x+y"]
names = st.builds(
    lambda folders, leaf: "/".join([*folders, f"{leaf}.json"]),
    st.lists(st.sampled_from(FOLDERS), max_size=3),
    st.sampled_from(LEAVES),
)


def test_what_is_created_is_read_back(store):
    """Name, size, checksum, time and content of a created object are those of the data, and its info agrees."""
    before = time.time()
    info = store.create("a/b c+%ö/x.json", b"hello")
    assert (info.name, info.size, info.crc32c, info.attempts) == (
        "a/b c+%ö/x.json",
        5,
        google_crc32c.value(b"hello"),
        1,
    )
    assert before - 2 < info.updated_s < time.time() + 2
    assert store.read("a/b c+%ö/x.json") == b"hello"
    again = store.info("a/b c+%ö/x.json")
    assert (again.name, again.size, again.generation) == (info.name, 5, info.generation)
    assert again.updated_s == pytest.approx(info.updated_s, abs=0.01)


def test_an_object_is_created_once(store):
    """A second create is refused, names the object, and leaves the first content, even if it brings the same."""
    store.create("a", b"one")
    for data in (b"two", b"one"):
        with pytest.raises(ObjectExistsError, match="a") as caught:
            store.create("a", data)
        assert caught.value.data["uri"] == store.uri("a")
        assert caught.value.data["attempts"] == 1
        assert isinstance(caught.value, FileExistsError)
    assert store.read("a") == b"one"


def test_put_replaces(store):
    """A put over an object gives the new content and a new generation; a create after it is refused."""
    first = store.put("a/beat", b"one")
    second = store.put("a/beat", b"three")
    assert store.read("a/beat") == b"three"
    assert first.generation != second.generation == store.info("a/beat").generation
    with pytest.raises(ObjectExistsError):
        store.create("a/beat", b"four")


def test_readers_never_see_a_mixture(store):
    """While one object is rewritten with other lengths, every read is one of the written contents."""
    contents = [bytes([65 + number]) * (50_000 * (number + 1)) for number in range(4)]
    store.put("a", contents[0])
    stop = threading.Event()

    def rewrite():
        number = 0
        while not stop.is_set():
            number += 1
            store.put("a", contents[number % 4])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(40):
            assert store.read("a") in contents
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, None, b"0123456789"), (0, 3, b"012"), (2, 5, b"234"), (7, None, b"789"), (7, 99, b"789"), (-3, None, b"789"),
        (-99, None, b"0123456789"), (10, None, b""), (99, 100, b""), (5, 5, b""), (5, 2, b""), (0, 0, b""),
    ],
)  # fmt: skip
def test_ranges_are_those_of_a_slice(store, start, end, expected):
    """A range read gives what slicing the content gives, cut at the end of the object."""
    store.create("digits", b"0123456789")
    assert store.read("digits", start, end) == expected


@pytest.mark.parametrize(("start", "end"), [(-3, 5), (-3, -1), (0, -1)])
def test_ranges_without_one_meaning_are_refused(store, start, end):
    """A negative end, or an end with a negative start, is a usage error."""
    store.create("digits", b"0123456789")
    with pytest.raises(UsageError, match="digits"):
        store.read("digits", start, end)


def test_an_empty_object_is_an_object(store):
    """Zero bytes can be created, read, ranged over, listed and checksummed."""
    store.create("empty", b"")
    assert store.read("empty") == store.read("empty", 0, 4) == store.read("empty", -4) == b""
    assert store.exists("empty")
    assert store.checksum("empty") == 0
    assert [(info.name, info.size) for info in store.list()] == [("empty", 0)]


def test_pages_say_what_the_listing_says(store, monkeypatch):
    """In columns, page by page: every object once and in order, whatever a page holds; nothing of an empty folder."""
    for module in ("gcs", "objects"):
        monkeypatch.setattr(f"tpupipe.store.{module}._PAGE", 2)
    for number in range(5):
        store.create(f"p/{number}", b"x" * number)
    listed = [(info.name, info.size, info.crc32c, info.generation) for info in store.list("p/")]
    assert len(listed) == 5
    assert [row for page in store.pages("p/") for row in zip(*page, strict=True)] == listed
    assert [row for page in store.pages("q/") for row in zip(*page, strict=True)] == []


@pytest.mark.parametrize("listing", ["list", "pages"])
def test_a_listing_of_something_else_is_an_error(listing, monkeypatch):
    """An object without a generation: what was said is in the error; nothing is taken for an object."""
    store = open_store("gs://bucket/x", endpoint="http://127.0.0.1:9")
    monkeypatch.setattr("tpupipe.store.connection.Connection.json", lambda *_, **__: {"items": [{"name": "x/odd"}]})
    with pytest.raises(StoreError, match=r"described .*x/odd"):
        list(getattr(store, listing)())


@pytest.mark.parametrize("operation", ["read", "info", "checksum"])
def test_a_missing_object_is_not_found(store, operation):
    """Reading, describing or checksumming what is not there is an error naming it; exists says no."""
    store.create("there", b"1")
    with pytest.raises(ObjectNotFoundError, match="missing/one") as caught:
        getattr(store, operation)("missing/one")
    assert isinstance(caught.value, FileNotFoundError)
    assert not store.exists("missing/one")
    assert store.exists("there")


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "a/../b", ".", "a/.tmp-1", "a\nb", "x" * 256, "a/" * 512 + "b"]
)
def test_bad_names_are_refused(store, name):
    """Names that mean something else on some backend are a usage error, for every operation."""
    for operation in (store.read, store.info, store.exists, store.delete, lambda bad: store.create(bad, b"")):
        with pytest.raises(UsageError, match="is not an object name"):
            operation(name)


def test_delete(store):
    """A deleted object is gone; deleting what is not there is fine unless asked otherwise."""
    store.create("a/b", b"1")
    store.delete("a/b")
    assert not store.exists("a/b")
    store.delete("a/b")
    with pytest.raises(ObjectNotFoundError):
        store.delete("a/b", missing_ok=False)
    store.create("a/b", b"2")
    assert store.read("a/b") == b"2"


def test_delete_prefix_means_a_folder(store):
    """Only what is inside the folder goes, not a neighbour whose name starts the same; the count is right."""
    for name in ("c/1/x", "c/1/y/z", "c/10/x", "c/1.json"):
        store.create(name, b"1")
    assert store.delete_prefix("c/1") == 2
    assert [info.name for info in store.list()] == ["c/1.json", "c/10/x"]
    assert store.children("c") == ["1.json", "10"]
    assert store.delete_prefix("c/1/") == 0
    with pytest.raises(UsageError, match="refused"):
        store.delete_prefix("")
    assert store.exists("c/10/x")


def test_children_are_what_is_directly_inside(store):
    """Bare names of objects and of folders with objects; a folder whose objects were deleted is none."""
    for name in ("a/x", "a/b/y", "a/b/c/z", "a/d/gone", "ab/other"):
        store.create(name, b"1")
    store.delete("a/d/gone")
    assert store.children("a") == store.children("a/") == ["b", "x"]
    assert store.children("") == ["a", "ab"]
    assert store.children("a/nothing") == []


def test_an_empty_store_lists_nothing(store):
    """A prefix without objects is empty, not an error."""
    assert list(store.list()) == []
    assert list(store.list("a/b")) == []
    assert store.children("a") == []
    assert store.delete_prefix("a") == 0


def test_a_missing_bucket_is_not_an_empty_one(place, tmp_path):
    """Where the bucket or root folder is missing, listing and asking raise; nobody can take it for "no checkpoints"."""
    store = place.open(make_root=False)
    for ask in (lambda: list(store.list("a/")), lambda: store.children("a"), lambda: store.exists("a")):
        with pytest.raises(ObjectNotFoundError) as caught:
            ask()
        assert caught.value.data["operation"] in ("list", "read", "info")
    assert not (tmp_path / "store").exists()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    created=st.sets(names, max_size=8),
    prefix=st.sampled_from(["", "a", "a/", "a-", "a.b/o", "b/a/", "0/0/0"]),
    data=st.data(),
)
def test_listing_is_a_sorted_prefix_filter(store, created, prefix, data):
    """After any creates and deletes a listing is the sorted names that start with the prefix, sizes included."""
    here = store.sub(f"case-{time.monotonic_ns()}")
    for name in created:
        here.create(name, name.encode())
    deleted = data.draw(st.sets(st.sampled_from(sorted(created)))) if created else set()
    for name in deleted:
        here.delete(name)
    left = sorted(name for name in created - deleted if name.startswith(prefix))
    assert [(info.name, info.size) for info in here.list(prefix)] == [(name, len(name.encode())) for name in left]


def test_a_listing_goes_over_many_pages(store, monkeypatch):
    """Sixty objects in two folders come once each and in order although a page holds seven."""
    monkeypatch.setattr("tpupipe.store.gcs._PAGE", 7)
    wanted = [f"{folder}/{number:04d}" for folder in "ab" for number in range(30)]
    for name in reversed(wanted):
        store.create(name, b"")
    assert [info.name for info in store.list()] == wanted
    assert store.children("b") == [f"{number:04d}" for number in range(30)]


def test_a_store_travels_to_another_process(store):
    """A pickled store, also one that is connected, works on the other side; so do its sub-stores."""
    store.create("a/b", b"1")
    there = pickle.loads(pickle.dumps(store))
    assert there.read("a/b") == b"1"
    assert pickle.loads(pickle.dumps(there.sub("a"))).read("b") == b"1"


def test_sub_stores_share_names(store):
    """A sub-store sees what is below its prefix under shorter names, and its URIs are the same."""
    sub = store.sub("x/y")
    sub.create("z", b"1")
    assert store.read("x/y/z") == b"1"
    assert [info.name for info in sub.list()] == ["z"]
    assert sub.uri("z") == store.uri("x/y/z")
    assert store.sub("x").sub("y").root == sub.root


def test_checksum_is_of_the_content(store):
    """The checksum of a large object, read in slices, is the crc32c of its bytes."""
    data = bytes(range(256)) * 70_000
    store.create("big", data)
    assert store.checksum("big") == google_crc32c.value(data)


def test_a_store_error_travels(store):
    """An error from a worker arrives with its data and its hint."""
    with pytest.raises(StoreError) as caught:
        store.read("missing")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.data, str(copy)) == (ObjectNotFoundError, caught.value.data, str(caught.value))
