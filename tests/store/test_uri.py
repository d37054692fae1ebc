import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.errors import ConfigError
from tpupipe.store.uri import StoreURI

parts = st.text("abcxyz019._- é%", min_size=1).filter(lambda part: part not in (".", "..") and part == part.strip())


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "path"),
    [
        ("gs://bucket", "gs", "bucket", ""),
        ("gs://bucket/", "gs", "bucket", ""),
        ("gs://my.bucket_1/a/b/", "gs", "my.bucket_1", "a/b"),
        ("file:///data/x", "file", "", "/data/x"),
        ("/data/x/", "file", "", "/data/x"),
    ],
)
def test_what_is_a_store(text, scheme, bucket, path):
    """Scheme, bucket and path of every allowed spelling."""
    uri = StoreURI.parse(text)
    assert (uri.scheme, uri.bucket, uri.path) == (scheme, bucket, path)


def test_a_relative_path_is_from_the_working_directory(monkeypatch, tmp_path):
    """Plain relative paths become absolute at once, so that a later chdir does not move the store."""
    monkeypatch.chdir(tmp_path)
    assert StoreURI.parse(".tpupipe/store").path == f"{tmp_path}/.tpupipe/store"
    assert StoreURI.parse(Path("x")).native == f"{tmp_path}/x"


@pytest.mark.parametrize(
    "text",
    ["", " ", "gs://", "gs:///x", "gs://UPPER/x", "gs://ab", "gs://bucket/a//b", "gs://bucket/../x", "s3://bucket/x",
     "file://relative", "https://host/x", " gs://bucket", "gs://bucket/a\nb", "gs://a..b"],
)  # fmt: skip
def test_what_is_not_a_store(text):
    """Refused as a configuration error that quotes the value."""
    with pytest.raises(ConfigError) as caught:
        StoreURI.parse(text)
    assert repr(text) in str(caught.value)


@given(st.lists(parts, max_size=3), st.lists(parts, min_size=1, max_size=3))
def test_text_and_parts_agree(prefix, name):
    """Joining, printing, parsing and pickling keep the place."""
    root = StoreURI.parse("/".join(["gs://bucket", *prefix]))
    joined = root / "/".join(name)
    assert str(joined) == "/".join(["gs://bucket", *prefix, *name]) == joined.native
    assert StoreURI.parse(str(joined)) == joined == pickle.loads(pickle.dumps(joined))


@pytest.mark.parametrize("name", ["/a", "../a", "a/./b"])
def test_joining_does_not_leave_the_place(name):
    """Absolute and upward names are refused."""
    with pytest.raises(ConfigError):
        StoreURI.parse("/data") / name
