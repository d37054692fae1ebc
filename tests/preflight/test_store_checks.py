"""The store's checks against the real embedded server, a folder, and both of them broken."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from tpupipe.preflight.checks import iter_checks, run_checks
from tpupipe.preflight.findings import Status
from tpupipe.preflight.store import judge_space
from tpupipe.store.files import FileStore
from tpupipe.store.objects import Store, open_store

OPERATIONS = ["create", "read", "list", "overwrite", "rewrite", "throughput", "delete"]
GIB = 2**30


def found(context, store, **options):
    """Check (without its group) to its finding, of a store's operations."""
    findings = run_checks(context(store=store, probe_bytes=100_000, **options), ["store"])
    return {name: f for f in findings if (name := f.check.partition(".")[2]) in OPERATIONS}


def test_a_store_that_works_passes_and_is_left_as_it_was(context, store: Store):
    """On both backends: every operation is tried, what was there stays, nothing of ours does."""
    store.create("mine", b"x")
    judged = found(context, store)
    assert {name: f.status for name, f in judged.items() if f.status is not Status.WARNING} == {
        name: Status.OK for name, f in judged.items() if f.status is not Status.WARNING
    }
    assert list(judged) == OPERATIONS
    assert judged["throughput"].facts["size_bytes"] == 100_000
    assert judged["throughput"].facts["write_mb_per_s"] > 0
    assert [info.name for info in store.list()] == ["mine"]


def test_a_bucket_that_does_not_exist_is_not_a_forbidden_one(context, endpoint, caplog):
    """The real server's 404: absence, with the command that makes it, and no talk of permissions."""
    store = open_store(f"gs://absent-{uuid.uuid4().hex[:8]}/x", endpoint=endpoint, make_root=False)
    judged = found(context, store)
    assert judged["create"].status is Status.FAILURE
    assert "does not exist" in judged["create"].message
    assert "gcloud storage buckets create" in judged["create"].hint
    assert judged["list"].facts["error_kind"] == "ObjectNotFoundError"
    assert judged["read"].status is Status.SKIPPED
    assert "left in" not in caplog.text  # nothing was made, so nothing is looked for


def test_no_credentials_is_not_a_missing_permission(context, monkeypatch, tmp_path):
    """The real Cloud Storage without an account: the hint is how to get one, not what to grant it."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    judged = found(context, open_store("gs://no-account/x"))
    assert "no usable credentials" in judged["create"].message
    assert "gcloud auth application-default login" in judged["create"].hint
    assert "Grant" not in judged["create"].hint


def test_a_folder_that_may_not_be_written(context, tmp_path):
    """PermissionError of the file system is a refusal without the words of Cloud Storage."""
    (tmp_path / "file").write_text("a file where the folder should be")
    judged = found(context, open_store(f"file://{tmp_path}/file/store"))
    assert judged["create"].status is Status.FAILURE
    assert "storage.objects" not in judged["create"].hint


def test_a_reader_may_still_list(context, proxy, endpoint):
    """403 on writing: the listing is tried all the same, so that a viewer's rights are seen."""
    open_store("gs://viewers/x", endpoint=endpoint).create("a", b"a")
    proxy.set("403@create")
    judged = found(context, open_store("gs://viewers/x", endpoint=proxy.endpoint))
    assert judged["create"].status is Status.FAILURE
    assert judged["list"].status is Status.OK
    assert [judged[name].status for name in ("read", "overwrite", "rewrite", "delete")] == [Status.SKIPPED] * 4


def test_a_second_attempt_is_a_warning(context, proxy):
    """503 once: it works, and it says that it took two."""
    proxy.set("503@create,times=1")
    judged = found(context, open_store("gs://flaky/x", endpoint=proxy.endpoint))
    assert (judged["create"].status, judged["create"].facts["attempts"]) == (Status.WARNING, 2)
    assert judged["delete"].status is Status.OK


def test_one_write_a_second_of_a_name_is_no_finding(context, proxy):
    """Cloud Storage's limit: creating and replacing one object at once is waited out."""
    proxy.set("429@create,per_name_interval_s=1")
    judged = found(context, open_store("gs://limited/x", endpoint=proxy.endpoint))
    assert judged["overwrite"].status is judged["rewrite"].status is Status.OK


def test_a_listing_without_what_was_just_created(context, proxy):
    """An eventually consistent store is refused: resuming decides by listings."""
    proxy.set("stale-list@list,seconds=60")
    judged = found(context, open_store("gs://stale/x", endpoint=proxy.endpoint))
    assert judged["list"].status is Status.FAILURE
    assert "created before" in judged["list"].message


def test_a_store_that_does_not_answer_ends_in_time(context, proxy):
    """No answer to a write: a failure after the configured time-out, not a hanging check."""
    proxy.set("block@create")
    store = open_store("gs://blocking/x", endpoint=proxy.endpoint, timeout_s=1)
    judged = found(context, store, config=context(store={"timeout_s": 1.0}).config)
    assert judged["create"].status is Status.FAILURE
    assert judged["create"].facts["error_kind"] == "StoreTimeoutError"


class Forgetful(FileStore):
    """A store whose creation replaces what is there."""

    def create(self, name, data):
        return self.put(name, data)

    def _at(self, root, policy):
        return Forgetful(root, policy, base=self._base, make_root=True)


def test_a_store_that_does_not_refuse_to_overwrite(context, tmp_path):
    """What commits rest on is missing: a failure that says what could happen."""
    plain = open_store(f"file://{tmp_path}/store")
    judged = found(context, Forgetful(plain.root, plain.policy, base=str(tmp_path), make_root=True))
    assert judged["overwrite"].status is Status.FAILURE
    assert "Two drivers could both commit" in judged["overwrite"].hint


def test_what_is_left_when_the_check_is_broken_off_is_removed(context, file_place):
    """The checks end early: the probe goes all the same."""
    store = file_place.open()
    checks = iter_checks(context(store=store, probe_bytes=1), ["store"])
    next(f for f in checks if f.check == "store.create")
    assert len(list(store.list())) == 1
    checks.close()
    assert list(store.list()) == []


def test_what_cannot_be_removed_is_told(context, endpoint, proxy, caplog):
    """Deleting is forbidden: the finding has the place, and so does the log at the end."""
    caplog.set_level(logging.WARNING, logger="tpupipe.preflight")
    uri = f"gs://kept-{uuid.uuid4().hex[:8]}/x"
    proxy.set("403@delete")
    judged = found(context, open_store(uri, endpoint=proxy.endpoint))
    assert f"The probe is left in {uri}/.preflight/" in judged["delete"].hint
    assert "may be left in" in caplog.text
    assert len(list(open_store(uri, endpoint=endpoint).list())) == 2


def test_no_store_says_why(context):
    """The embedded server does not come up: one failure with its reason, the rest is skipped."""
    from tpupipe.errors import ClusterError

    judged = found(context, None, store_problem=ClusterError("no server", hint="pip install it"))
    assert (judged["create"].status, judged["create"].hint) == (Status.FAILURE, "pip install it")
    assert "no server" in judged["create"].message
    assert {judged[name].status for name in OPERATIONS[1:]} == {Status.SKIPPED}


@pytest.mark.parametrize(
    ("free", "total", "needed", "status"),
    [
        (50, 100, 1.0, Status.OK),
        (50, 100, 51.0, Status.FAILURE),
        (4, 100, 1.0, Status.WARNING),
        (0.5, 100, 1.0, Status.FAILURE),
        (0, 100, 0.0, Status.WARNING),
    ],
)
def test_free_space(free, total, needed, status):
    """Below what is needed: a failure; nearly full: a warning."""
    judged = judge_space(Path("/x"), int(free * GIB), total * GIB, needed)
    assert judged.status is status
    assert f"{free:.1f} GiB free of {total:.1f}" in judged.message


def test_space_is_that_of_the_disk_with_the_folder(context, tmp_path):
    """A folder that does not exist yet is on the disk of the next one above it."""
    [space] = [f for f in run_checks(context(local_folder=tmp_path / "a/b"), ["store"]) if f.check == "store.space"]
    assert space.facts["total_bytes"] > 0
    assert not (tmp_path / "a").exists()
