"""What the command prints where, and which groups it looks at."""

from __future__ import annotations

import json

import pytest

from tpupipe.cli_check import ALL_GROUPS, wanted_groups
from tpupipe.errors import ClusterError, UsageError


def test_lines_for_people_are_on_stdout_and_progress_is_not(world):
    """A line a finding with its status and a hint where it is needed; a summary; progress on stderr."""
    done = world.check(world.job(), "--only", "topology", "--only", "zone", "--set", "cost.region=us-east5")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       topology.slice    one slice of v6e 4x4")
    [warning] = [i for i, line in enumerate(lines) if line.startswith("warning  zone.prices")]
    assert lines[warning + 1].split() == [
        "hint:",
        "Set",
        "cost.region",
        "to",
        "us-central1,",
        "or",
        "leave",
        "it",
        "out.",
    ]
    assert "nothing failed (" in lines[-1]
    assert "checking topology.mesh" in done.stderr
    assert "checking" not in done.stdout


def test_a_failure_is_named_at_the_end(world):
    """On stderr with exit 3; its line with a hint is on stdout."""
    done = world.check(world.job(), "--only", "topology", "--set", "stages.lm.batch_size=20")
    assert done.exit_code == 3
    assert "failure  topology.batch" in done.stdout
    assert "CheckFailedError: " in done.stderr
    assert "topology.batch failed (" in done.stderr


def test_json_is_alone_on_stdout_whatever_the_job_prints(world):
    """A map and a module that print: one object all the same."""
    job = world.job("lambda batch: print('mapping') or tokenize(batch)", before="print('importing')\n")
    done = world.check(job, "--json", "--only", "job")
    said = json.loads(done.stdout)
    assert (said["status"], said["exit_status"], len(done.stdout.splitlines())) == ("ok", 0, 1)
    assert {"check", "status", "message", "hint", "facts"} == set(said["findings"][0])
    assert "mapping" in done.stderr


def test_the_hash_is_that_of_the_configuration(world):
    """Equal for equal configurations, whatever is looked at; another one for another configuration."""
    job = world.job()

    def hash_of(*arguments):
        return json.loads(world.check(job, "--json", *arguments).stdout)["config_hash"]

    first = hash_of("--only", "topology")
    assert first == hash_of("--only", "zone")
    assert first != hash_of("--only", "topology", "--set", "sample=1%")


@pytest.mark.parametrize(
    ("only", "skip", "options", "expected"),
    [
        ((), (), {"aot": False}, set(ALL_GROUPS) - {"aot", "parity"}),
        ((), (), {"aot": True, "parity": True}, set(ALL_GROUPS)),
        ((), ("store", "job"), {"aot": False}, {"topology", "zone", "cluster"}),
        (("store",), (), {}, {"store"}),
        (("store", "aot"), (), {}, {"store", "aot"}),
        (("parity",), (), {}, {"parity"}),
        ((), ("aot",), {"aot": True}, set(ALL_GROUPS) - {"aot", "parity"}),
    ],
)
def test_which_groups_are_looked_at(only, skip, options, expected):
    """All but parity by default; --only alone; --skip last."""
    assert wanted_groups(only, skip, **options) == expected


def test_the_compiler_is_asked_by_default_where_it_is_installed(monkeypatch):
    """Libtpu can be imported: aot is in; it cannot: it is not."""
    for there in (object(), None):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, there=there: there)
        assert ("aot" in wanted_groups((), ())) is (there is not None)


def test_an_unknown_group_is_refused_with_what_there_is():
    """For both options."""
    for only, skip in ((("stroe",), ()), ((), ("stroe",))):
        with pytest.raises(UsageError) as caught:
            wanted_groups(only, skip)
        assert all(group in caught.value.message for group in ALL_GROUPS)
        assert "store" in caught.value.hint


def test_an_embedded_server_that_does_not_come_up_is_a_finding(world, monkeypatch):
    """Not installed: store.create fails with how to install it, and the rest is looked at all the same."""

    def missing():
        raise ClusterError("the embedded object server is not installed.", hint="pip install 'tpupipe[local]'")

    monkeypatch.setattr("tpupipe.local.server.server_binary", missing)
    embedded = ("--set", "store.embedded=true", "--set", "cluster.kind=fake")
    done = world.check(world.job(), "--json", "--only", "store", "--only", "topology", *embedded)
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 3
    assert (findings["store.create"]["status"], findings["store.create"]["hint"]) == (
        "failure",
        "pip install 'tpupipe[local]'",
    )
    assert findings["store.list"]["status"] == "skipped"
    assert findings["topology.mesh"]["status"] == "ok"


def test_one_embedded_store_and_its_disk(world):
    """The configuration of a laptop: the server is started for the check, its disk is looked at, no region is compared."""
    embedded = ("--set", "store.embedded=true", "--set", "cluster.kind=fake")
    done = world.check(world.job(), "--json", "--only", "store", *embedded)
    findings = {f["check"]: f["status"] for f in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0
    assert (findings["store.space"], findings["store.region"]) == ("ok", "skipped")
    assert findings["store.overwrite"] == "ok"
