"""The proxy in front of the real server, met by every client: the project's store, gcsfs, pyarrow and TensorStore."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import requests

from tpupipe.errors import (
    ClusterError,
    ObjectExistsError,
    RunHeldError,
    StoreDeniedError,
    StoreTimeoutError,
    StoreUnavailableError,
    UsageError,
)
from tpupipe.faults.store_proxy import store_proxy
from tpupipe.faults.store_requests import CONTROL_PATH
from tpupipe.store.layout import RunPaths
from tpupipe.store.lease import Owner, acquire, read_standing
from tpupipe.store.objects import open_store
from tpupipe.store.wiring import process_environment

CONTENT = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def running(endpoint, tmp_path_factory):
    """One proxy for all tests that only change its faults."""
    with store_proxy(endpoint, root=tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


@pytest.fixture
def proxy(running):
    """The proxy, without faults at first and afterwards."""
    running.set()
    yield running
    running.set()


@pytest.fixture
def good(endpoint):
    """An own bucket, reached without the proxy."""
    store = open_store(f"gs://faults-{uuid.uuid4().hex[:12]}/run", endpoint=endpoint)
    store.create("there", CONTENT)
    return store


@pytest.fixture
def store(good, proxy):
    """The same through the proxy; its bucket was seen."""
    store = open_store(good.root, endpoint=proxy.endpoint, timeout_s=20)
    store.info("there")
    return store


def fired(proxy, text):
    return proxy.counts().fired.get(text, 0)


# -- the project's own store: the reports of the public ---------------------------------------------


def test_a_save_survives_two_503(store, good, proxy):
    """The store says 503 twice: saved, and three attempts are recorded."""
    proxy.set("503@create,times=2")
    assert store.create("a", CONTENT).attempts == 3
    assert good.read("a") == CONTENT


def test_a_save_that_is_forbidden_is_tried_once(store, good, proxy):
    """403 on writing: one attempt, and an error that says so and names the object."""
    proxy.set("403@create")
    before = proxy.counts().requests["create"]
    with pytest.raises(StoreDeniedError, match=re.escape(store.uri("a"))) as caught:
        store.create("a", CONTENT)
    assert caught.value.data["attempts"] == proxy.counts().requests["create"] - before == 1
    assert not good.exists("a")


def test_a_store_that_blocks_ends_in_an_error(store, proxy):
    """No answer to a write, time-out 3 s: an error naming the object, after one attempt or two."""
    proxy.set("block@create")
    before = proxy.counts().requests["create"]
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=re.escape(store.uri("a"))):
        store.with_limits(timeout_s=3).create("a", CONTENT)
    assert 3 < time.monotonic() - started < 30
    assert proxy.counts().requests["create"] - before <= 2


@pytest.mark.parametrize(("fault", "error"), [("403@list", StoreDeniedError), ("503@list", StoreUnavailableError)])
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: list(store.list()),
        lambda store: store.children(""),
        lambda store: store.delete_prefix("x"),
        lambda store: read_standing(store, RunPaths("lm", "a")),
    ],
)
def test_a_failing_listing_is_never_an_empty_one(store, proxy, ask, fault, error):
    """A store that cannot be listed raises, whoever lists and why."""
    proxy.set(fault)
    with pytest.raises(error):
        ask(store.with_limits(attempts=2))


def test_five_quick_saves_of_one_name(store, good, proxy):
    """One write a second per object is taken, as Cloud Storage does: five quick writes all get through."""
    proxy.set("429@create,per_name_interval_s=1")
    for number in range(5):
        store.put("beat", str(number).encode())
        store.create(f"other/{number}", b"")  # other names are not held up
    assert good.read("beat") == b"4"
    refused = {entry.name for entry in proxy.counts().log if entry.fault == "429@create,per_name_interval_s=1"}
    assert refused == {"run/beat"}


def test_a_lease_given_back_right_after_a_beat_is_given_back(store, proxy):
    """The release rewrites the beat object within the second; the store refuses that for a while, not for good."""
    proxy.set("429@create,per_name_interval_s=1")
    paths = RunPaths("lm", "a")
    acquire(store, paths, Owner.here(), ttl_s=30).release()
    assert read_standing(store, paths).released


def test_a_stale_listing_does_not_hide_an_owner(store, proxy):
    """The lease of a driver that started a moment ago is not listed yet: the second driver is refused all the same."""
    proxy.set("stale-list@list,seconds=600")
    paths = RunPaths("lm", "a")
    with acquire(store, paths, Owner.here()) as lease:
        assert list(store.list()) == [store.info("there")]
        with pytest.raises(RunHeldError):
            acquire(store, paths, Owner.here())
        lease.check()
    with acquire(store, paths, Owner.here()) as lease:
        assert lease.epoch == 2


# -- outages, broken transfers, stale listings -------------------------------------------------------


def test_an_outage_shorter_than_the_retries_is_survived(store, good, proxy):
    """Gone for a second: reads, writes and listings go on where they were."""
    proxy.set("outage@any,seconds=1,after=3")
    for number in range(6):
        store.create(f"a/{number}", CONTENT)
        assert store.read(f"a/{number}") == CONTENT
    assert len(list(good.list("a/"))) == 6
    assert fired(proxy, "outage@any,seconds=1,after=3") >= 1


def test_an_outage_longer_than_the_retries_names_the_object(store, proxy):
    """Gone for good: after bounded attempts an error that names the object and how often it was tried."""
    proxy.set("outage@any,seconds=600")
    with pytest.raises(StoreUnavailableError, match=re.escape(store.uri("there"))) as caught:
        store.with_limits(attempts=3).read("there")
    assert caught.value.data["attempts"] == 3
    proxy.set()
    assert store.read("there") == CONTENT


@pytest.mark.parametrize("kind", ["truncate", "reset", "damage", "lost"])
def test_a_download_that_breaks_once_is_repeated(store, proxy, kind):
    """Half of the content, a flipped bit or no answer: the second attempt brings the content."""
    text = f"{kind}@download,name=there,times=1"
    proxy.set(text)
    assert store.read("there") == CONTENT
    assert fired(proxy, text) == 1


def test_a_download_that_always_breaks_is_an_error(store, proxy):
    """Never passed on as content, and the error says how much arrived."""
    proxy.set("truncate@download")
    with pytest.raises(StoreUnavailableError, match=r"there.*(IncompleteRead|bytes arrived)"):
        store.with_limits(attempts=2).read("there")


def test_a_create_cut_in_the_middle_leaves_nothing(store, good, proxy):
    """The connection breaks while the content is sent: nothing half made, and the retry creates it."""
    proxy.set("reset@create,times=2")
    with pytest.raises(StoreUnavailableError):
        store.with_limits(attempts=2).create("big", bytes(8 << 20))
    assert not good.exists("big")
    assert store.create("big", CONTENT).attempts == 1


def test_a_create_whose_answer_is_lost_is_not_done_twice(store, good, proxy):
    """The store has it, we do not know: the retry recognises its own content; another's is refused."""
    proxy.set("lost@create,times=1")
    assert store.create("mine", CONTENT).generation == good.info("mine").generation
    good.create("theirs", b"x")
    proxy.set("503@create,times=1")
    with pytest.raises(ObjectExistsError):
        store.create("theirs", CONTENT)


@pytest.mark.parametrize("send", [requests.put, requests.post])
def test_an_upload_whose_last_answer_is_lost_gives_it_when_asked_again(store, proxy, send):
    """As Cloud Storage does: a client that repeats the last request of an upload that is complete gets its answer."""
    url = f"{proxy.endpoint}/upload/storage/v1/b/{store.root.bucket}/o?uploadType=resumable"
    opened = requests.post(url, json={"name": "resumed"}, timeout=60)
    where = opened.headers["Location"] + "&quoted=as%2Fthe%2Fclient%2Flikes"
    parts = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
    proxy.set("lost@create,name=resumed,times=1")
    with pytest.raises(requests.ConnectionError):
        send(where, data=CONTENT, headers=parts, timeout=60)
    again = send(where, data=CONTENT, headers=parts, timeout=60)
    assert again.status_code == 200
    assert again.json()["name"] == "resumed"
    assert again.json()["size"] == str(len(CONTENT))
    assert send(where, data=CONTENT, headers=parts, timeout=60).json() == again.json()


def test_a_spoiled_answer_is_a_success_that_is_spoiled(store, proxy):
    """A 404 has no content to truncate: the one fault is kept for the next download."""
    proxy.set("truncate@read,times=1")
    assert not store.exists("absent")
    assert fired(proxy, "truncate@read,times=1") == 0
    assert store.read("there") == CONTENT
    assert fired(proxy, "truncate@read,times=1") == 1


def test_a_stale_listing_misses_what_is_new(store, good, proxy):
    """Listings lack objects created a moment ago, and folders of nothing else; reading them works."""
    good.create("old/x", b"")
    proxy.set("stale-list@list,seconds=600")
    store.create("old/y", b"y")
    store.create("new/z", b"z")
    assert [info.name for info in store.list()] == ["old/x", "there"]
    assert store.children("") == ["old", "there"]
    assert store.read("new/z") == b"z"
    proxy.set()
    assert store.children("") == ["new", "old", "there"]


def test_latency_delays_what_it_is_limited_to(store, proxy):
    """Reads of one name wait, others do not."""
    proxy.set("latency@read,seconds=0.5,name=there")
    before = fired(proxy, "latency@read,seconds=0.5,name=there")
    store.create("a", b"")
    assert store.read("a") == b""
    assert fired(proxy, "latency@read,seconds=0.5,name=there") == before
    started = time.monotonic()
    store.info("there")
    assert time.monotonic() - started >= 0.5


# -- gcsfs, pyarrow, google-cloud-storage and TensorStore --------------------------------------------

_CLIENTS = """
import io, json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from tpupipe.faults.store_proxy import StoreProxy
from tpupipe.store.wiring import fsspec_options, pyarrow_filesystem
endpoint, bucket, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
import fsspec, gcsfs, numpy as np, tensorstore as ts
from google.cloud import storage
content = os.urandom(2 << 20)
gcs = fsspec.filesystem("gs", **fsspec_options(f"gs://{bucket}", endpoint), skip_instance_cache=True)
arrow, _ = pyarrow_filesystem(f"gs://{bucket}", endpoint, 20)
google = storage.Client().bucket(bucket)

def use_gcsfs(name):
    with gcs.open(f"{bucket}/{name}", "wb", block_size=1 << 20) as file:  # a resumable upload in parts
        file.write(content)
    gcs.pipe_file(f"{bucket}/{name}-small", content[:99])
    return gcs.cat_file(f"{bucket}/{name}") == content and gcs.cat_file(f"{bucket}/{name}-small") == content[:99]

def use_pyarrow(name):
    with arrow.open_output_stream(f"{bucket}/{name}") as file:
        file.write(content)
    with arrow.open_input_stream(f"{bucket}/{name}") as file:
        return file.read() == content

def use_google(name):
    blob = google.blob(name, chunk_size=1 << 20)
    blob.upload_from_file(io.BytesIO(content))
    return google.blob(name).download_as_bytes() == content

def use_tensorstore(name):
    # As the environment says: two retries only where a failure is what is waited for.
    context = {"gcs_request_retries": {"max_retries": 2, "initial_delay": "10ms"}} if "gone" in name else {}
    kvstore = {"driver": "ocdbt", "base": f"gs://{bucket}/{name}/"} if "ocdbt" in name else f"gs://{bucket}/{name}/"
    spec = {"driver": "zarr3", "kvstore": kvstore, "context": context}
    chunks = ts.ChunkLayout(chunk_shape=[32, 64])
    array = ts.open(spec, create=True, dtype=ts.float32, shape=[64, 64], chunk_layout=chunks).result()
    values = np.random.default_rng(0).random((64, 64), np.float32)
    array.write(values).result()
    return bool((ts.open(spec).result().read().result() == values).all())

def attempt(case):
    try:
        return globals()["use_" + case.split("-")[0]](case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

with ThreadPoolExecutor(len(cases)) as pool:
    print(json.dumps(dict(zip(cases, pool.map(attempt, cases)))))
"""

# Each case has its own object names, and the faults are limited to them: all run at the same time.
_CLIENT_NAMES = ("gcsfs", "pyarrow", "google", "tensorstore-zarr", "tensorstore-ocdbt")
_SURVIVED = {
    "clean": "",
    "unavailable": "503@any,times=1",
    "toofast": "429@create,times=1",
    "cutupload": "reset@create,times=1",
    "lostupload": "lost@create,times=1",
    "cutdownload": "truncate@download,times=1",
    "resetdownload": "reset@download,times=1",
    "outage": "outage@any,seconds=1",
}
_FINAL = {"forbidden": "403@create"}


def _limited(text, case):
    return f"{text},name={case}"


@pytest.fixture(scope="module")
def clients(running, endpoint, tmp_path_factory):
    """What every client got in every case, and how often the case's fault fired."""
    cases = {f"{client}-{case}": text for client in _CLIENT_NAMES for case, text in {**_SURVIVED, **_FINAL}.items()}
    cases["tensorstore-gone"] = "outage@any,seconds=600"
    bucket = f"clients-{uuid.uuid4().hex[:12]}"
    open_store(f"gs://{bucket}", endpoint=endpoint).create("made", b"")
    running.set([_limited(text, case) for case, text in cases.items() if text])
    variables = process_environment(running.endpoint, 10) | {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path_factory.mktemp("home")), "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, "-c", _CLIENTS, running.endpoint, bucket, json.dumps(list(cases))]
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    counts = running.counts()
    running.set()
    return json.loads(answer.stdout), {case: counts.fired.get(_limited(text, case), 0) for case, text in cases.items()}


@pytest.mark.parametrize("case", _SURVIVED)
@pytest.mark.parametrize("client", _CLIENT_NAMES)
def test_every_client_survives_what_passes(clients, client, case):
    """Written and read back the same, through uploads in parts and in one piece, and the fault did happen."""
    results, hits = clients
    assert results[f"{client}-{case}"] is True
    assert hits[f"{client}-{case}"] >= (case != "clean")


@pytest.mark.parametrize("client", _CLIENT_NAMES)
def test_every_client_reports_a_refusal_at_once(clients, client):
    """403 is asked for once and is an error with the proxy's own words."""
    results, hits = clients
    assert f"injected by store fault 403@create,name={client}-forbidden" in results[f"{client}-forbidden"]
    assert hits[f"{client}-forbidden"] == 1


def test_tensorstore_names_the_object_that_it_gave_up_on(clients):
    """Gone for longer than its retries: an error with the object's name."""
    results, hits = clients
    assert "tensorstore-gone/zarr.json" in results["tensorstore-gone"]
    assert hits["tensorstore-gone"] >= 3  # curl repeats by itself what meets a connection that it had kept


def test_uploads_in_parts_come_through_the_proxy(store, good, proxy):
    """The address of a resumable upload, and links in answers, name the proxy and not the store behind it."""
    url = f"{proxy.endpoint}/upload/storage/v1/b/{store.root.bucket}/o?uploadType=resumable"
    with requests.Session() as session:
        session.trust_env = False
        begun = session.post(url, json={"name": "run/parts"}, timeout=60)
        location = begun.headers["location"]
        assert location.startswith(proxy.endpoint)
        proxy.set("503@create,times=1,name=run/parts")
        assert session.put(location, data=CONTENT, timeout=60).status_code == 503  # known by name, in every part
        done = session.put(location, data=CONTENT, timeout=60).json()
        assert done["selfLink"].startswith(proxy.endpoint)
        assert session.get(done["mediaLink"], timeout=60).content == CONTENT
        chunked = session.get(url.replace("/upload", ""), stream=True, timeout=60).json()
        assert {item["name"] for item in chunked["items"]} == {"run/parts", "run/there"}
    assert good.read("parts") == CONTENT


def test_content_is_never_rewritten(store, endpoint):
    """An object that happens to hold the store's address, as JSON, arrives as it was stored."""
    store.create("config.json", f'{{"url": "{endpoint}"}}'.encode())
    assert store.read("config.json") == f'{{"url": "{endpoint}"}}'.encode()


# -- the process -------------------------------------------------------------------------------------


def test_the_same_seed_meets_the_same_requests(store, proxy):
    """The same sequence of requests under the same seed is hit at the same places, under another seed elsewhere."""

    def hit(seed):
        proxy.set(f"503@read,rate=0.3,seed={seed}")
        with requests.Session() as session:
            session.trust_env = False
            url = f"{proxy.endpoint}/storage/v1/b/{store.root.bucket}/o/run%2Fthere"
            return [session.get(url, timeout=60).status_code for _ in range(40)]

    first = hit(7)
    assert hit(7) == first != hit(8)
    assert 4 <= first.count(503) <= 20


def test_the_counts_say_what_happened(store, proxy):
    """Requests by operation, hits by fault, and a line per hit with time, operation and object."""
    proxy.set("503@read,times=1")
    before = proxy.counts()
    started = time.time()
    store.info("there")
    after = proxy.counts()
    assert after.requests["read"] - before.requests["read"] == 2
    assert after.fired["503@read,times=1"] == 1
    last = after.log[-1]
    assert (last.fault, last.operation, last.bucket, last.name) == (
        "503@read,times=1",
        "read",
        store.root.bucket,
        "run/there",
    )
    assert started - 1 < last.at_s < time.time() + 1


def test_a_typo_changes_nothing(proxy, store):
    """Refused where it is written, and over the wire; the faults in force stay."""
    proxy.set("503@read")
    with pytest.raises(UsageError, match="no operation 'raed'"):
        proxy.set("503@raed")
    with requests.Session() as session:
        session.trust_env = False
        answer = session.put(proxy.endpoint + CONTROL_PATH, json=["504@raed"], timeout=60)
    assert answer.status_code == 400
    assert "no operation 'raed'" in answer.json()["error"]
    with pytest.raises(StoreUnavailableError):
        store.with_limits(attempts=1).info("there")


def test_the_proxy_is_picklable(proxy):
    """A worker that gets it can ask it."""
    assert pickle.loads(pickle.dumps(proxy)).counts() == proxy.counts()


def test_the_proxy_ends_with_its_user(endpoint, tmp_path):
    """It listens on this machine only, and is gone after the block; asking it then is a clear error."""
    with store_proxy(endpoint, ("503@create", "latency@any,seconds=0.01"), tmp_path) as proxy:
        facts = json.loads((tmp_path / "store-proxy" / "proxy.json").read_text())
        process = psutil.Process(facts["pid"])
        listening = [item.laddr.ip for item in process.net_connections() if item.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        with pytest.raises(UsageError, match="another store proxy runs in"), store_proxy(endpoint, (), tmp_path):
            pass
        assert proxy.counts().fired == {}
    process.wait(60)
    with pytest.raises(ClusterError, match="does not answer"):
        proxy.counts()
    with store_proxy(endpoint, (), tmp_path) as again:  # the folder can be used again
        assert again.counts().requests == {}


def test_the_proxy_ends_with_a_killed_user(endpoint, tmp_path):
    """SIGKILL to the user: the proxy goes too."""
    code = (
        "import sys\nfrom tpupipe.faults.store_proxy import store_proxy\n"
        "with store_proxy(sys.argv[1], (), sys.argv[2]):\n    print('up', flush=True)\n    sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code, endpoint, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as user:  # fmt: skip
        assert user.stdout.readline() == "up\n"
        process = psutil.Process(json.loads((tmp_path / "store-proxy" / "proxy.json").read_text())["pid"])
        user.send_signal(signal.SIGKILL)
        process.wait(60)
    assert not process.is_running()


def test_a_store_that_is_gone_is_told_apart(tmp_path):
    """Nobody behind the proxy: 502 with the reason, so that it is not taken for one of the faults."""
    with store_proxy("http://127.0.0.1:9", (), tmp_path) as proxy, requests.Session() as session:
        session.trust_env = False
        answer = session.get(f"{proxy.endpoint}/storage/v1/b", timeout=60)
        assert answer.status_code == 502
        assert "http://127.0.0.1:9 does not answer" in answer.text


def test_a_typo_on_the_command_line_ends_with_the_kinds():
    """Exit 2, and what there is."""
    command = [sys.executable, "-m", "tpupipe.faults.store_proxy", "--upstream", "http://127.0.0.1:9"]
    answer = subprocess.run(
        [*command, "--state", "x", "--fault", "50@any"], capture_output=True, text=True, check=False, timeout=90,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert answer.returncode == 2
    assert "no kind '50'" in answer.stderr
    assert "outage" in answer.stderr
