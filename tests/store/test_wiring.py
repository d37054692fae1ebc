"""Every client library sees the same store."""

import json
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from tpupipe.errors import ConfigError
from tpupipe.store.objects import open_store
from tpupipe.store.wiring import Endpoint, fsspec_options, process_environment, pyarrow_filesystem

_CLIENTS = """
import json, sys
uri, endpoint = sys.argv[1:]
found = {}
import gcsfs
found["gcsfs"] = gcsfs.GCSFileSystem(token="anon").cat(uri).decode()
import tensorstore
store = tensorstore.KvStore.open(uri.rpartition("/")[0] + "/").result()
found["tensorstore"] = store.read(uri.rpartition("/")[2]).result().value.decode()
from google.cloud import storage
bucket, _, name = uri.removeprefix("gs://").partition("/")
found["google-cloud-storage"] = storage.Client().bucket(bucket).blob(name).download_as_bytes().decode()
import fsspec
from tpupipe.store.wiring import fsspec_options, pyarrow_filesystem
with fsspec.open(uri, **fsspec_options(uri, endpoint)) as file:
    found["fsspec"] = file.read().decode()
filesystem, path = pyarrow_filesystem(uri, endpoint)
with filesystem.open_input_stream(path) as stream:
    found["pyarrow"] = stream.read().decode()
print(json.dumps(found))
"""


def test_every_client_of_a_process_sees_the_same_store(endpoint, tmp_path):
    """With the process environment gcsfs, fsspec, TensorStore, google-cloud-storage and pyarrow read what we wrote."""
    store = open_store(f"gs://wiring-{uuid.uuid4().hex[:12]}/p", endpoint=endpoint)
    store.create("x", b"hello")
    variables = process_environment(endpoint, 10) | {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, "-c", _CLIENTS, store.uri("x"), endpoint]
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    clients = ["gcsfs", "tensorstore", "google-cloud-storage", "fsspec", "pyarrow"]
    assert json.loads(answer.stdout) == dict.fromkeys(clients, "hello")


def test_local_files_need_no_endpoint(endpoint, tmp_path):
    """Pyarrow and fsspec read a local store by its path, whatever the endpoint."""
    store = open_store(f"file://{tmp_path}")
    store.create("x", b"hello")
    filesystem, path = pyarrow_filesystem(store.uri("x"), endpoint)
    with filesystem.open_input_stream(path) as stream:
        assert stream.read() == b"hello"
    with fsspec.open(store.uri("x"), **fsspec_options(store.uri("x"), endpoint)) as file:
        assert file.read() == b"hello"


def test_the_real_cloud_gets_no_emulator_variables():
    """Without an endpoint nothing points anywhere, and no test token replaces real credentials."""
    variables = process_environment(None, 10)
    assert variables["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "false"
    assert not {"STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"} & variables.keys()
    assert fsspec_options("gs://bucket/x", None) == {}


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://host", "http://host/path", "http://"])
def test_what_is_not_an_endpoint(url):
    """Refused with the value."""
    with pytest.raises(ConfigError, match="is not a storage endpoint"):
        Endpoint(url)


def test_a_trailing_slash_is_no_other_endpoint():
    """Both spellings are one value."""
    assert Endpoint("http://127.0.0.1:80/") == Endpoint("http://127.0.0.1:80")
