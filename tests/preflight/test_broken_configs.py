"""One thing is wrong at a time, with the real command: each has its own message, its own check and its exit status."""

from __future__ import annotations

import json

import pytest

from tpupipe.config import environment
from tpupipe.store.objects import open_store


def failures(done) -> dict[str, str]:
    """Check to messages with hints, of the failures in a ``--json`` answer."""
    found: dict[str, str] = {}
    for finding in json.loads(done.stdout)["findings"]:
        if finding["status"] == "failure":
            check = finding["check"]
            found[check] = f"{found.get(check, '')} {finding['message']} {finding['hint']}"
    return found


def test_what_is_not_broken_passes(world):
    """Nothing fails, exit 0, every group says something, and nothing is left in the store."""
    done = world.check(world.job(), "--json")
    said = json.loads(done.stdout)
    assert (done.exit_code, said["exit_status"], failures(done)) == (0, 0, {}), done.stdout
    assert {f["check"].partition(".")[0] for f in said["findings"]} >= {"topology", "zone", "store", "cluster", "job"}
    assert list(open_store(world.uri, endpoint=environment().emulator).list()) == []


TOPOLOGY = {
    "a topology that GKE does not have": (
        ("cluster.topology=8x4",),
        "topology.gke",
        ["GKE has no v6e slice of topology 8x4", "4x8"],
    ),
    "a machine type that the topology does not come with": (
        ("cluster.chips_per_vm=8",),
        "topology.gke",
        ["GKE has no v6e 4x4 with 8 chips per VM; it has 4", "Set cluster.chips_per_vm to 4"],
    ),
    "a mesh that does not cover the devices": (
        ("stages.lm.mesh={data: 3}",),
        "topology.mesh",
        ["lm: mesh {'data': 3} does not cover 16 devices", "stages.lm.mesh"],
    ),
    "a mesh for one device a chip where there are two": (
        ("cluster.generation=v7x", "cluster.topology=2x2x1", "stages.lm.mesh={data: 4}"),
        "topology.mesh",
        ["does not cover 8 devices (2 a chip)"],
    ),
    "a batch that does not divide": (
        ("stages.lm.batch_size=20",),
        "topology.batch",
        ["batch_size=20 does not divide over 16 devices", "16 or 32"],
    ),
    "a model axis across slices": (
        ("cluster.slices=2", "stages.lm.mesh={model: 32, data: 1}"),
        "topology.axes",
        ["axis 'model' (32 devices) crosses slices", "data, model"],
    ),
}


@pytest.mark.parametrize(("sets", "check", "says"), TOPOLOGY.values(), ids=TOPOLOGY)
def test_the_slice_and_the_mesh(world, sets, check, says):
    """Exit 3 and the value, what is allowed, and how to change it."""
    done = world.check(world.job(), "--json", "--only", "topology", sets=sets)
    found = failures(done)
    assert done.exit_code == 3, done.stdout
    assert set(found) <= {check, "topology.ray"}  # Ray does not take what GKE does not have
    assert [text for text in says if text not in found[check]] == []


PLACES = {
    "a zone without the generation": (
        ("cluster.zone=us-central1-f",),
        "zone.offer",
        ["us-central1-f is not listed with v6e", "us-central1-b"],
    ),
    "a bucket in another region": (
        ("cluster.zone=us-central2-b",),
        "store.region",
        ["is in us-central1, the slice in us-central2-b", "store.allow_cross_region=true", "a bucket in us-central2"],
    ),
    "a full disk": (
        ("store.uri=./runs", "store.min_free_gib=1000000"),
        "store.space",
        ["GiB free", "store.min_free_gib is 1e+06"],
    ),
}


@pytest.mark.parametrize(("sets", "check", "says"), PLACES.values(), ids=PLACES)
def test_the_place(world, sets, check, says):
    """Exit 3, that check alone, its message."""
    done = world.check(world.job(), "--json", "--only", "zone", "--only", "store", sets=sets)
    assert (done.exit_code, list(failures(done))) == (3, [check]), done.stdout
    assert [text for text in says if text not in failures(done)[check]] == []


STORES = {
    "writing is forbidden": ("403@create", {"store.create"}, ["is not permitted", "Grant storage.objects.create"]),
    "there is no bucket": ("404@create", {"store.create"}, ["The bucket gs://", "does not exist", "buckets create"]),
    "reading is forbidden": ("403@download", {"store.read"}, ["is not permitted", "Grant storage.objects.get"]),
    "listing is forbidden": (
        "403@list",
        {"store.list", "store.delete"},
        ["Listing objects is not permitted", "Grant storage.objects.list"],
    ),
    "deleting is forbidden": (
        "403@delete",
        {"store.delete"},
        ["is not permitted", "Grant storage.objects.delete", "The probe is left in gs://"],
    ),
    "the store is down": ("503@create", {"store.create"}, ["Creating an object failed", "503"]),
}


@pytest.mark.parametrize(("fault", "checks", "says"), STORES.values(), ids=STORES)
def test_the_store(world, proxy, monkeypatch, fault, checks, says):
    """Exit 3; forbidden, absent and unavailable are told apart, each with the permission or the command it takes."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
    proxy.set(fault)
    done = world.check(world.job(), "--json", "--only", "store", sets=("store.timeout_s=10",))
    found = failures(done)
    assert done.exit_code == 3, done.stdout
    assert checks <= set(found) <= checks | {"store.overwrite", "store.throughput"}
    assert [text for text in says if text not in found[min(checks, key=list(found).index)]] == []


JOBS = {
    "no input": ({"files": {}}, "job.sources", ["matches no file"]),
    "a map that raises": (
        {"mapping": "broken"},
        "job.map",
        ["map of stage 'tokens' raised KeyError: 'no such column'", "in broken", "a.txt", "the columns path, text"],
    ),
    "units of different columns": ({"mapping": "by_file"}, "job.schema", ["different columns", "first", "other"]),
    "text to train on": ({"mapping": "words"}, "job.schema", ["'word' as text", "training needs numbers of one shape"]),
    "a lock to send": (
        {"mapping": "lambda batch, lock=LOCK: tokenize(batch)"},
        "job.pickle",
        ["map of tokens cannot be sent", "lock"],
    ),
    "a module that raises": ({"before": "raise OSError('no licence')\n"}, "job.import", ["raised OSError: no licence"]),
    "a module that ends the process": ({"before": "import os; os._exit(7)\n"}, "job.import", ["ended with status 7"]),
}


@pytest.mark.parametrize(("broken", "check", "says"), JOBS.values(), ids=JOBS)
def test_the_job(world, broken, check, says):
    """Exit 3, that check, its message."""
    done = world.check(world.job(**broken), "--json", "--only", "job")
    assert done.exit_code == 3, done.stdout + done.stderr
    found = failures(done)
    assert next(iter(found)) == check
    assert [text for text in says if text not in found[check]] == []


USAGE = {
    "an unknown key": (("--set", "cluster.topolgy=4x4"), "cluster.topolgy", "ConfigError"),
    "a slice that cannot exist": (("--set", "cluster.topology=3x5"), "3x5", "ConfigError"),
    "a zone that is none": (("--set", "cluster.zone=Iowa"), "cluster.zone", "ConfigError"),
    "an unknown group": (("--only", "stor"), "Did you mean store?", "UsageError"),
    "nothing left": (("--skip", "topology"), "leave no group", "UsageError"),
}


@pytest.mark.parametrize(("arguments", "says", "kind"), USAGE.values(), ids=USAGE)
def test_what_is_no_configuration(world, arguments, says, kind):
    """Exit 2 before anything is looked at; one JSON object, with the message on stderr."""
    done = world.check(world.job(), "--json", "--only", "topology", *arguments)
    said = json.loads(done.stdout)
    assert (done.exit_code, said["exit_status"], said["error_kind"]) == (2, 2, kind)
    assert says in done.stderr
    assert "findings" not in said


def test_no_such_module(world):
    """A typo in the job's name is a usage error, also where the import is done in another process."""
    done = world.check("jobs.no_such_job")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "There is no module 'jobs.no_such_job'" in done.stderr
