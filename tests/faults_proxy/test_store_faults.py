"""What is asked for, what a request is about, and which fault hits it: all without sockets."""

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpupipe.errors import UsageError
from tpupipe.faults.store_faults import KINDS, OPERATIONS, StoreFault, StoreFaults, decide, fresh_marks, withdrawn
from tpupipe.faults.store_requests import Operation, StoreRequest, identify, wants_body

READ = StoreRequest("GET", Operation.READ, "b", "run/a")
DOWNLOAD = StoreRequest("GET", Operation.DOWNLOAD, "b", "run/a")
WRITE = StoreRequest("POST", Operation.CREATE, "b", "run/a", begins=True)
PART = replace(WRITE, method="PUT", begins=False)
LIST = StoreRequest("GET", Operation.LIST, "b", "run/")
DELETE = StoreRequest("DELETE", Operation.DELETE, "b", "run/a")


def hits(texts, sequence, now_s=None):
    """Kind that hits each request of the sequence ('' for none); one second between two unless told."""
    faults = StoreFaults.parse(*texts)
    marks = fresh_marks(faults)
    found = []
    for number, request in enumerate(sequence):
        decision, marks = decide(faults, marks, request, number if now_s is None else now_s[number])
        found.append(decision.fault.kind if decision.fault else "")
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("503@create,rate=0.2,seed=7", StoreFault("503", "create", rate=0.2, seed=7)),
        ("outage@any,seconds=5,after=20", StoreFault("outage", "any", seconds=5.0, after=20, times=1)),
        ("truncate@read,name=ocdbt,times=1", StoreFault("truncate", "read", name="ocdbt", times=1)),
        ("reset@create,times=2", StoreFault("reset", "create", times=2)),
        ("429@create,per_name_interval_s=1", StoreFault("429", "create", per_name_interval_s=1.0)),
        ("stale-list@list,seconds=3", StoreFault("stale-list", "list", seconds=3.0)),
        ("403@list", StoreFault("403", "list")),
        ("503@any,burst=3", StoreFault("503", "any", burst=3, times=1)),
        ("503@any,burst=3,rate=0.1", StoreFault("503", "any", burst=3, rate=0.1)),
        ("latency@any", StoreFault("latency", "any", seconds=1.0)),
        ("429@create, retry_after_s=2, method=PUT", StoreFault("429", "create", retry_after_s=2, method="PUT")),
    ],
)
def test_what_is_written_is_what_is_meant(text, expected):
    """Each text has one reading, keeps its wording, and survives pickling."""
    assert StoreFault.parse(text) == expected
    faults = StoreFaults.parse(text)
    assert pickle.loads(pickle.dumps(faults)) == faults
    assert faults.texts == (text,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("530@create", "no kind '530'"),
        ("outtage@any", "did you mean outage"),
        ("503@crate", "did you mean create"),
        ("503", "no '@'"),
        ("503@read,rat=1", "'rat=1' is not known"),
        ("503@read,rate=0", "rate='0'"),
        ("503@read,rate=1.1", "rate='1.1'"),
        ("503@read,rate=nan", "rate='nan'"),
        ("503@read,times=0", "times='0'"),
        ("503@read,times=x", "times='x'"),
        ("503@read,seconds=1", "'seconds=1' is not known"),
        ("outage@any,seconds=0", "seconds='0'"),
        ("outage@any,seconds=inf", "seconds='inf'"),
        ("outage@any,burst=2", "not for a burst"),
        ("stale-list@any", "stale-list@list"),
        ("429@any,per_name_interval_s=1", "@create"),
        ("503@read,name=", "name=''"),
        ("503@read,method=get", "method='get'"),
    ],
)
def test_a_typo_is_refused_with_what_there_is(text, says):
    """The value and what is allowed; for kinds and operations all of them."""
    with pytest.raises(UsageError) as caught:
        StoreFaults.parse("403@list", text)
    assert says in str(caught.value)
    if "no kind" in str(caught.value) or "no operation" in str(caught.value):
        assert all(known in caught.value.message for known in (*KINDS, *OPERATIONS))


@pytest.mark.parametrize(
    ("texts", "sequence", "expected"),
    [
        ([], [READ, WRITE], ["", ""]),
        (["503@any,times=2"], [READ, WRITE, LIST], ["503", "503", ""]),
        (["503@create,after=1,times=1"], [WRITE, READ, WRITE, WRITE], ["", "", "503", ""]),
        (["403@list"], [LIST, READ, LIST], ["403", "", "403"]),
        (["503@read,times=1"], [DOWNLOAD, READ], ["503", ""]),
        (["503@download"], [READ, DOWNLOAD], ["", "503"]),
        (["503@delete,name=run/a"], [DELETE, replace(DELETE, name="run/b")], ["503", ""]),
        (["503@create,method=PUT"], [WRITE, PART], ["", "503"]),
        (["503@any,burst=2,after=1"], [READ] * 4, ["", "503", "503", ""]),
        (["503@read,times=1", "429@any,times=2"], [READ, READ, WRITE, READ], ["503", "429", "429", ""]),
        (["outage@any,seconds=2.5"], [READ] * 5, ["outage", "outage", "outage", "", ""]),
        (["outage@create,seconds=1.5,times=2"], [WRITE, READ, WRITE, WRITE], ["outage", "", "outage", "outage"]),
    ],
)
def test_which_requests_are_hit(texts, sequence, expected):
    """One request a second; a fault only sees what it is limited to, and the first that may hits."""
    assert hits(texts, sequence) == expected


def test_one_write_a_second_per_name():
    """Writes of one name within the interval are refused; later parts of an upload and other names are not."""
    other = replace(WRITE, name="run/b")
    sequence = [WRITE, PART, WRITE, other, WRITE, WRITE, READ]
    now_s = [0.0, 0.1, 0.9, 0.95, 1.0, 1.5, 1.6]
    assert hits(["429@create,per_name_interval_s=1"], sequence, now_s) == ["", "", "429", "", "", "429", ""]


def test_a_write_that_never_reached_the_store_does_not_count():
    """Refused by another fault: the next write of the name is the first one."""
    texts = ["503@create,times=1", "429@create,per_name_interval_s=1"]
    assert hits(texts, [WRITE] * 3, [0.0, 0.1, 0.2]) == ["503", "", "429"]
    assert hits(["lost@create,times=1", texts[1]], [WRITE] * 2, [0.0, 0.1]) == ["lost", "429"]


def test_delays_add_up_and_do_not_replace():
    """Two delays and a refusal hit one request."""
    faults = StoreFaults.parse("503@any", "latency@any,seconds=1", "latency@read,seconds=2")
    decision, _ = decide(faults, fresh_marks(faults), READ, 0.0)
    assert [fault.kind for fault in decision.hits] == ["latency", "latency", "503"]
    assert sum(delay.seconds for delay in decision.delays) == 3


def test_what_had_nothing_to_spoil_is_taken_back():
    """The hit is as if it had not been, alone and in a burst; other faults keep theirs."""
    faults = StoreFaults.parse("latency@any,times=5", "truncate@any,burst=2")
    fresh = fresh_marks(faults)
    _, once = decide(faults, fresh, READ, 0.0)
    back = withdrawn(faults, once, faults.faults[1])
    assert back == (once[0], replace(fresh[1], matched=1))
    _, twice = decide(faults, once, READ, 0.0)
    assert withdrawn(faults, twice, faults.faults[1])[1] == replace(once[1], matched=2)


REQUESTS = st.lists(st.sampled_from([READ, DOWNLOAD, WRITE, PART, LIST, DELETE]), max_size=60)


@settings(deadline=None)  # the machine may be busy
@given(REQUESTS, st.integers(0, 5), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_same_seed_and_sequence_meet_the_same_faults(sequence, seed, rate):
    """Twice the same; and a fault that hits nothing here does not shift where another one hits."""
    text = f"503@any,rate={rate},seed={seed}"
    assert hits([text], sequence) == hits([text], sequence)
    assert hits(["403@any,name=nowhere", text], sequence) == hits([text], sequence)


@settings(deadline=None)  # the machine may be busy
@given(REQUESTS, st.integers(1, 5), st.integers(0, 5))
def test_times_and_after_bound_it(sequence, times, after):
    """Never before ``after`` requests and never more than ``times``, and exactly that if enough come."""
    found = hits([f"503@any,times={times},after={after}"], sequence)
    assert found[:after] == [""] * min(after, len(sequence))
    assert found.count("503") == max(0, min(times, len(sequence) - after))


def test_a_rate_is_kept():
    """One in five of 5,000 requests, within four standard deviations; bursts multiply it."""
    assert 887 < hits(["503@any,rate=0.2,seed=1"], [READ] * 5000).count("503") < 1113
    found = "".join(kind[:1] or "." for kind in hits(["503@any,rate=0.02,burst=3,seed=1"], [READ] * 1000))
    assert {len(run) % 3 for run in found.strip(".").replace(".", " ").split()} == {0}


_MULTIPART = (
    b'--x\r\ncontent-type: application/json\r\n\r\n{"name": "run/a", "metadata": {"k": "v"}}\r\n'
    b"--x\r\ncontent-type: application/octet-stream\r\n\r\n" + bytes(100) + b"\r\n--x--"
)
_BATCH = (
    b"--x\r\nContent-Type: application/http\r\n\r\nDELETE /storage/v1/b/b/o/run%2Fa HTTP/1.1\r\n\r\n"
    b"--x\r\nContent-Type: application/http\r\n\r\nDELETE /storage/v1/b/b/o/run%2Fb HTTP/1.1\r\n\r\n--x--"
)


@pytest.mark.parametrize(
    ("method", "target", "head", "expected"),
    [
        ("GET", "/storage/v1/b/b/o/run%2Fa", b"", READ),
        ("GET", "/storage/v1/b/b/o/run%2Fa?alt=media", b"", DOWNLOAD),
        ("GET", "/download/storage/v1/b/b/o/run%2Fa?alt=media", b"", DOWNLOAD),
        ("GET", "/b/run/a", b"", DOWNLOAD),
        ("HEAD", "/b/run/a", b"", replace(READ, method="HEAD")),
        ("PUT", "/b/run/a", b"", replace(WRITE, method="PUT")),
        ("GET", "/storage/v1/b/b/o?prefix=run%2F&delimiter=%2F", b"", LIST),
        ("GET", "/storage/v1/b/b/o/?prefix=run/", b"", LIST),
        ("POST", "/upload/storage/v1/b/b/o?uploadType=media&name=run%2Fa", b"", WRITE),
        ("POST", "/upload/storage/v1/b/b/o?uploadType=multipart", _MULTIPART, WRITE),
        ("POST", "/upload/storage/v1/b/b/o?uploadType=resumable", json.dumps({"name": "run/a"}).encode(), WRITE),
        ("PUT", "/upload/resumable/17", b"", PART),
        ("POST", "/storage/v1/b/x/o/y/rewriteTo/b/b/o/run%2Fa", b"", WRITE),
        ("POST", "/storage/v1/b/b/o/run%2Fa/compose", b"", WRITE),
        ("PATCH", "/storage/v1/b/b/o/run%2Fa", b"", replace(PART, method="PATCH")),
        ("DELETE", "/storage/v1/b/b/o/run%2Fa", b"", DELETE),
        ("POST", "/batch/storage/v1", _BATCH, replace(DELETE, method="POST", name="run/a\nrun/b")),
        ("GET", "/storage/v1/b/b", b"", StoreRequest("GET", Operation.OTHER)),
        ("POST", "/storage/v1/b?project=p", b"", StoreRequest("POST", Operation.OTHER)),
        ("POST", "/upload/storage/v1/b/b/o?uploadType=multipart", b"\xff no json", replace(WRITE, name="")),
    ],
)
def test_what_a_request_is_about(method, target, head, expected):
    """Operation, bucket and object, of each way in which a client says it."""
    assert identify(method, target, head, {"/upload/resumable/17": ("b", "run/a")}) == expected


def test_only_uploads_and_batches_are_looked_into():
    """A body is peeked at where the name may be in it, nowhere else."""
    assert wants_body("POST", "/upload/storage/v1/b/b/o?uploadType=multipart")
    assert wants_body("POST", "/batch/storage/v1")
    assert not wants_body("POST", "/upload/storage/v1/b/b/o?uploadType=media&name=x")
    assert not wants_body("PUT", "/upload/storage/v1/b/b/o?upload_id=1")
    assert not wants_body("GET", "/storage/v1/b/b/o/x")
