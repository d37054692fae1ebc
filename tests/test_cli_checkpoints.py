"""``tpupipe checkpoints``: what is printed, what is deleted, and the exit statuses; on a folder and the embedded server."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.checkpoint.conftest import STAGE, Shelf
from tpupipe.checkpoint.inspect import Depth, plan_prune, view_stage
from tpupipe.checkpoint.verify import list_checkpoints
from tpupipe.cli import app
from tpupipe.cli_checkpoints import _delete, _Place, run_place
from tpupipe.errors import FencedError, StoreUnavailableError, UsageError
from tpupipe.local.server import embedded_store
from tpupipe.store.lease import acquire, read_standing
from tpupipe.store.objects import open_store
from tpupipe.store.owner import Owner


@dataclass(frozen=True)
class Shop:
    """A run in a store, with the configuration that leads to it.

    Args:
        shelf: Its checkpoints.
        config: The file.
        files: The folder in which its objects lie as files.
        damages_silently: Whether a changed file still has the checksum that the store lists.
    """

    shelf: Shelf
    config: Path
    files: Path
    damages_silently: bool

    @property
    def uri(self) -> str:
        return self.shelf.store.uri(self.shelf.paths.root)

    def flip(self, name: str) -> None:
        """Changes one byte of an object behind the store's back."""
        path = self.files / name
        with path.open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(bytes([first[0] ^ 1]))


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The embedded server, as a run with ``store.root`` there starts it."""
    root = tmp_path_factory.mktemp("shop")
    with embedded_store(root) as endpoint:
        yield root, endpoint


@pytest.fixture(params=["file", "gs"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    """A run with nothing but its ``run.json``, in each kind of store."""
    if request.param == "file":
        uri, endpoint, files = f"file://{tmp_path}/store", None, tmp_path / "store"
        store = {"uri": uri}
    else:
        root, endpoint = request.getfixturevalue("embedded")
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        uri, files = f"gs://{bucket}/runs", root / "gcs" / bucket / "runs"
        store = {"uri": uri, "embedded": True, "root": str(root)}
    config = tmp_path / "world.yaml"
    world = {"store": store, "cluster": {"kind": "fake", "generation": "v6e", "topology": "2x4"}}
    config.write_text(json.dumps(world))
    shelf = Shelf(open_store(uri, endpoint=endpoint, timeout_s=30))
    shelf.store.create(shelf.paths.identity, b"{}")
    return Shop(shelf, config, files, damages_silently=request.param == "gs")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs the command line in an empty folder; gives exit status, stdout and stderr."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)

    def run(*arguments: object):
        done = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run


def said(done) -> dict:
    """The one object on stdout."""
    assert len(done.stdout.splitlines()) == 1, done.stdout
    return json.loads(done.stdout)


def steps(checkpoints: list[dict]) -> list[int]:
    return [checkpoint["step"] for checkpoint in checkpoints]


# -- help and usage -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "ls", "verify", "prune"])
def test_help_has_an_example_that_parses(call, command):
    """It begins with the command itself."""
    text = " ".join(call(*filter(None, [command]), "--help").stdout.split())
    words = text.partition("Example: tpupipe ")[2].partition(" Exit status")[0].split()
    parsed = typer.main.get_command(app)
    assert " ".join(words).startswith(f"checkpoints {command}".strip())
    for word in words[:2]:
        parsed = parsed.commands[word]
    parsed.make_context("x", words[2:])


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["verify"],
        ["prune", "job/run", "-c", "CONFIG"],
        ["prune", "job/run", "-c", "CONFIG", "--keep", "0"],
        ["prune", "job/run", "-c", "CONFIG", "--keep", "some"],
        ["ls", "job/run", "-c", "none.yaml"],
        ["ls", "job/run", "-c", "CONFIG", "--set", "stor.uri=x"],
        ["ls", "job/run"],
        ["ls", "run", "-c", "CONFIG"],
        ["ls", "JOB/run", "-c", "CONFIG"],
        ["ls", "gs://bucket/run"],
        ["ls", "s3://bucket/job/run"],
        ["ls", "job/no-such-run", "-c", "CONFIG"],
        ["ls", "job/run", "-c", "CONFIG", "--stage", "no-such-stage"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_exit_2(call, shop, arguments):
    """Nothing on stdout, what is wrong on stderr."""
    done = call(*[shop.config if a == "CONFIG" else a for a in arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr


def test_a_run_that_is_not_there_is_named_with_those_that_are(call, shop):
    """Not an empty list: a misspelt run must not look like one without checkpoints."""
    done = call("verify", "job/rum", "-c", shop.config, "--json")
    assert done.exit_code == 2
    assert said(done)["error_kind"] == "UsageError"
    assert "job/rum" in done.stderr
    assert "Runs of job there: run." in done.stderr


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(call, shop, tmp_path):
    """Exit 1: looking must not make a bucket or a folder."""
    place = "gs://no-such-bucket/x" if shop.damages_silently else f"{tmp_path}/no-such-store"
    done = call("ls", "job/run", "-c", shop.config, "--set", f"store.uri={place}")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("ObjectNotFoundError: ")
    assert not (tmp_path / "no-such-store").exists()
    again = call("ls", "job/run", "-c", shop.config, "--set", f"store.uri={place}")
    assert again.exit_code == 1


# -- which run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "store", "place", "root"),
    [
        ("gs://b-1/runs/lm/a", None, "gs://b-1/runs", "lm/a"),
        ("gs://b-1/lm/a/", "file:///x", "gs://b-1", "lm/a"),
        ("file:///x/y/lm/a", None, "file:///x/y", "lm/a"),
        ("/x/y/lm/a/", "gs://b-1", "file:///x/y", "lm/a"),
        ("/lm/a", None, "file:///", "lm/a"),
        ("lm/a", "gs://b-1/runs", "gs://b-1/runs", "lm/a"),
        ("lm/a/", "gs://b-1/runs", "gs://b-1/runs", "lm/a"),
    ],
)
def test_what_run_stands_for(run, store, place, root):
    """A URI and a folder say the store themselves, JOB/RUN is in the configuration's."""
    found, paths = run_place(run, store)
    assert (str(found), paths.root) == (place, root)


def test_a_relative_folder(monkeypatch, tmp_path):
    """With a dot, or more than two parts: below the working directory, whatever the configuration's store."""
    monkeypatch.chdir(tmp_path)
    for run in ("./store/lm/a", "store/lm/a"):
        found, paths = run_place(run, "gs://b-1")
        assert (str(found), paths.root) == (f"file://{tmp_path}/store", "lm/a")
    assert str(run_place("./lm/a", "gs://b-1")[0]) == f"file://{tmp_path}"


@pytest.mark.parametrize("run", ["lm/a", "a", "gs://b-1/a", "gs://b-1", "/a", "/", "gs://b-1/Lm/a", "x/y/Lm/a"])
def test_what_is_no_run(run):
    """JOB/RUN without a store, too few parts, names that no run can have."""
    with pytest.raises(UsageError):
        run_place(run, None)


def test_a_run_by_uri_or_name_is_the_same(call, shop):
    """The configuration tells how to reach the URI's store; a folder needs none."""
    shop.shelf.put(10)
    by_name = said(call("ls", "job/run", "-c", shop.config, "--json"))
    by_uri = said(call("ls", shop.uri, "-c", shop.config, "--json"))
    assert by_uri["run_uri"] == by_name["run_uri"] == shop.uri
    assert steps(by_uri["checkpoints"]) == steps(by_name["checkpoints"]) == [10]
    if not shop.damages_silently:
        assert steps(said(call("ls", shop.uri, "--json"))["checkpoints"]) == [10]


def test_an_emulator_of_the_environment_is_used_without_a_configuration(call, embedded, monkeypatch):
    """As a run with such a configuration would."""
    _, endpoint = embedded
    uri = f"gs://bucket-{uuid.uuid4().hex[:12]}/runs"
    shelf = Shelf(open_store(uri, endpoint=endpoint))
    shelf.put(10)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    assert steps(said(call("ls", f"{uri}/job/run", "--json"))["checkpoints"]) == [10]


# -- ls -----------------------------------------------------------------------------------------


def test_ls_lists_everything(call, shop):
    """Committed, damaged and without a record, what lies beside them, and exit 0; nothing changes."""
    shop.shelf.put(10)
    damaged = shop.shelf.put(20)
    shop.shelf.damage(damaged, "truncated")
    shop.shelf.arrays(30, 2, 1)
    beside = f"{shop.shelf.paths.checkpoints(STAGE)}/0000000010-000001.bak/x"
    shop.shelf.store.create(beside, b"x")
    before = shop.shelf.names()
    listed = call("ls", "job/run", "-c", shop.config, "--json")
    assert (listed.exit_code, listed.stderr) == (0, "")
    found = said(listed)
    keys = ("stage", "step", "lease_epoch", "restart", "committed", "intact", "objects")
    assert [[c[k] for k in keys] for c in found["checkpoints"]] == [
        [STAGE, 30, 2, 1, False, None, 2],
        [STAGE, 20, 1, 0, True, False, 3],
        [STAGE, 10, 1, 0, True, True, 3],
    ]
    assert all(c["size_bytes"] > 100 and 0 <= c["age_s"] < 600 for c in found["checkpoints"])
    assert (found["status"], found["committed"], found["damaged"], found["uncommitted"]) == ("damaged", 2, 1, 1)
    assert found["newest_intact"] == {STAGE: found["checkpoints"][2]["uri"]}
    assert found["other"] == [shop.shelf.store.uri(beside.rpartition("/")[0])]
    table = call("ls", "job/run", "-c", shop.config)
    assert table.exit_code == 0
    for words in (
        "no record",
        "yes, newest",
        f"damaged: {shop.shelf.store.uri(damaged)}/arrays/d/a: has ",
        "left alone",
    ):
        assert words in table.stdout
    assert shop.shelf.names() == before


def test_ls_of_a_run_without_checkpoints(call, shop):
    """Says so; an empty list for scripts, with exit 0."""
    done = call("ls", "job/run", "-c", shop.config)
    assert (done.exit_code, done.stdout) == (0, f"no checkpoints in {shop.uri}\n")
    assert said(call("ls", "job/run", "-c", shop.config, "--json"))["checkpoints"] == []


def test_stage_chooses(call, shop):
    """Without it all stages with checkpoints, with it that one; one that has none is an empty list."""
    shop.shelf.put(10)
    other = shop.shelf.put(20).replace(f"/{STAGE}/", "/lm-2/")
    shop.shelf.store.create(f"{other}/arrays/x", b"x")
    shop.shelf.store.create(shop.shelf.paths.manifest("tokens"), b"{}")

    def stages(*arguments: str) -> set[str]:
        return {c["stage"] for c in said(call("ls", "job/run", "-c", shop.config, "--json", *arguments))["checkpoints"]}

    assert stages() == {STAGE, "lm-2"}
    assert stages("--stage", "lm-2") == {"lm-2"}
    assert stages("--stage", "tokens") == set()


# -- verify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [[], ["--deep"]], ids=["shallow", "deep"])
def test_verify_of_intact_ones_is_exit_0(call, shop, deep):
    """A folder without a record is listed and is no damage."""
    shop.shelf.put(10)
    shop.shelf.put(20)
    shop.shelf.arrays(30)
    done = call("verify", "job/run", "-c", shop.config, "--json", *deep)
    assert done.exit_code == 0
    found = said(done)
    assert (found["status"], found["committed"], found["uncommitted"]) == ("intact", 2, 1)
    assert {c["compared"] for c in found["checkpoints"] if c["committed"]} == {
        "contents" if deep or not shop.damages_silently else "checksums"
    }
    assert call("verify", "job/run", "-c", shop.config, *deep).exit_code == 0


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped", "record cut", "record of another"])
def test_verify_of_a_damaged_one_is_exit_3_and_names_the_object(call, shop, how):
    """On stdout for people and for scripts, which get one object; nothing is changed."""
    shop.shelf.put(10)
    folder = shop.shelf.put(20)
    shop.shelf.damage(folder, how)
    before = shop.shelf.names()
    name = shop.shelf.store.uri(f"{folder}/{'COMMIT.json' if 'record' in how else 'arrays/d/a'}")
    done = call("verify", "job/run", "-c", shop.config)
    assert done.exit_code == 3
    assert f"damaged: {name}: " in done.stdout
    assert "CheckFailedError: 1 object(s) of 1 committed checkpoint(s)" in done.stderr
    script = call("verify", "job/run", "-c", shop.config, "--json")
    assert script.exit_code == 3
    found = said(script)
    assert (found["status"], found["damaged"], found["exit_status"]) == ("damaged", 1, 3)
    assert [p["object"] for c in found["checkpoints"] for p in c["problems"]] == [name]
    assert shop.shelf.names() == before


def test_a_flipped_bit_behind_the_stores_back_is_found_by_deep(call, shop):
    """Where the store keeps checksums only --deep can see it; where it keeps none, verify reads anyway."""
    folder = shop.shelf.put(10)
    shop.flip(f"{folder}/arrays/d/b")
    assert call("verify", "job/run", "-c", shop.config).exit_code == (0 if shop.damages_silently else 3)
    deep = call("verify", "job/run", "-c", shop.config, "--deep", "--json")
    assert deep.exit_code == 3
    assert [p["object"] for p in said(deep)["checkpoints"][0]["problems"]] == [
        shop.shelf.store.uri(f"{folder}/arrays/d/b")
    ]
    assert "reading step 10: " in deep.stderr


def test_a_flipped_bit_in_a_record_does_not_hide_the_others(call, shop):
    """The record is named as damaged, although the store refuses to give it; the rest is verified."""
    shop.shelf.put(10)
    folder = shop.shelf.put(20)
    shop.flip(f"{folder}/COMMIT.json")
    done = call("verify", "job/run", "-c", shop.config, "--json", "--set", "store.attempts=1")
    assert done.exit_code == 3
    newest, oldest = said(done)["checkpoints"]
    assert [p["object"] for p in newest["problems"]] == [shop.shelf.store.uri(f"{folder}/COMMIT.json")]
    assert oldest["intact"] is True


def test_a_stored_checkpoint_of_an_earlier_version_is_intact(call, tmp_path):
    """Written by Orbax, given by its folder alone."""
    shutil.copytree(Path(__file__).parent / "checkpoint/golden", tmp_path / "golden")
    done = call("verify", tmp_path / "golden/golden/format-1", "--deep", "--json")
    assert done.exit_code == 0
    (checkpoint,) = said(done)["checkpoints"]
    assert (checkpoint["step"], checkpoint["intact"], checkpoint["compared"]) == (3, True, "contents")


def test_verify_without_a_committed_one_is_exit_0(call, shop):
    """There is nothing that could be damaged; the numbers say how little was looked at."""
    shop.shelf.arrays(10)
    done = call("verify", "job/run", "-c", shop.config, "--json")
    assert done.exit_code == 0
    assert (said(done)["committed"], said(done)["uncommitted"]) == (0, 1)


# -- prune --------------------------------------------------------------------------------------


@pytest.fixture
def full(shop) -> Shop:
    """Steps 10 to 50; 50 damaged, 25 and 60 without a record, a copy under another name."""
    for step in (10, 20, 30, 40):
        shop.shelf.put(step)
    shop.shelf.damage(shop.shelf.put(50), "truncated")
    shop.shelf.arrays(25)
    shop.shelf.arrays(60)
    shop.shelf.store.create(f"{shop.shelf.paths.checkpoints(STAGE)}/0000000010-000001.bak/x", b"x")
    return shop


def test_prune_without_yes_only_shows(call, full):
    """What would go and what stays; nothing is written or deleted, no lease is taken."""
    before = full.shelf.names()
    done = call("prune", "job/run", "-c", full.config, "--keep", 1)
    assert done.exit_code == 0
    assert "would be deleted: 3 checkpoint folders" in done.stdout
    assert f"stays: {STAGE} step 40, intact, " in done.stdout
    assert "Nothing was deleted; --yes deletes these." in done.stderr
    script = said(call("prune", "job/run", "-c", full.config, "--keep", 1, "--json"))
    assert (script["status"], script["keep"]) == ("planned", 1)
    assert (steps(script["delete"]), steps(script["stay"])) == ([30, 20, 10], [60, 50, 40, 25])
    assert script["size_bytes"] == sum(c["size_bytes"] for c in script["delete"]) > 0
    assert full.shelf.names() == before


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--keep", 1], [30, 20, 10]),
        (["--keep", 2], [20, 10]),
        (["--keep", 3, "--uncommitted"], [25, 10]),
        (["--keep", 9], []),
        (["--keep", 9, "--uncommitted"], [25]),
    ],
    ids=str,
)
def test_prune_with_yes_deletes_what_was_shown(call, full, options, gone):
    """Those folders whole, and no other object; the run's lease is given back."""
    shown = said(call("prune", "job/run", "-c", full.config, *options, "--json"))
    assert steps(shown["delete"]) == gone
    folders = [full.shelf.paths.checkpoint(STAGE, step=step, epoch=1) + "/" for step in gone]
    stays = [name for name in full.shelf.names() if not name.startswith(tuple(folders))]
    done = call("prune", "job/run", "-c", full.config, *options, "--yes", "--json")
    assert done.exit_code == 0
    assert (said(done)["status"], steps(said(done)["delete"])) == ("deleted", gone)
    assert [name for name in full.shelf.names() if "/lease/" not in name] == stays
    standing = read_standing(full.shelf.store, full.shelf.paths)
    assert standing.released if gone else standing is None
    again = call("prune", "job/run", "-c", full.config, *options, "--yes", "--json")
    assert (again.exit_code, said(again)["delete"]) == (0, [])


def test_prune_with_yes_shows_first(call, full):
    """The table on stdout, each deletion on stderr."""
    done = call("prune", "job/run", "-c", full.config, "--keep", 2, "--yes")
    assert done.exit_code == 0
    assert "to delete: 2 checkpoint folders" in done.stdout
    assert [line.split()[0] for line in done.stderr.splitlines() if "/checkpoints/" in line] == ["deleted"] * 2


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped", "record cut", "record of another"])
def test_prune_never_takes_the_newest_intact_one(call, shop, how):
    """keep=1, the two newest are damaged in any way, also behind the store's back: the one before them stays."""
    shop.shelf.put(10)
    oldest_kept = shop.shelf.put(20)
    shop.shelf.damage(shop.shelf.put(30), how)
    shop.flip(f"{shop.shelf.put(40)}/arrays/d/a")
    done = call("prune", "job/run", "-c", shop.config, "--keep", 1, "--uncommitted", "--yes", "--json")
    assert done.exit_code == 0
    assert (steps(said(done)["delete"]), steps(said(done)["stay"])) == ([10], [40, 30, 20])
    assert shop.shelf.store.exists(f"{oldest_kept}/COMMIT.json")


def test_without_an_intact_one_nothing_goes(call, shop):
    """All damaged: everything stays, also what has no record."""
    for step in (10, 20):
        shop.shelf.damage(shop.shelf.put(step), "deleted")
    shop.shelf.arrays(5)
    before = shop.shelf.names()
    done = call("prune", "job/run", "-c", shop.config, "--keep", 1, "--uncommitted", "--yes")
    assert (done.exit_code, shop.shelf.names()) == (0, before)
    assert "nothing to delete" in done.stdout


def test_prune_of_a_run_that_a_driver_holds_is_exit_4(call, full):
    """With --yes nothing is deleted, and the advice is not to take the run over; showing is always possible."""
    with acquire(full.shelf.store, full.shelf.paths, Owner.here()):
        before = [name for name in full.shelf.names() if "/lease/" not in name]
        held = call("prune", "job/run", "-c", full.config, "--keep", 1, "--yes", "--json")
        assert held.exit_code == 4
        assert said(held)["error_kind"] == "RunHeldError"
        assert "--take-over" not in held.stderr
        assert call("prune", "job/run", "-c", full.config, "--keep", 1).exit_code == 0
        assert [name for name in full.shelf.names() if "/lease/" not in name] == before


def test_a_deletion_that_breaks_off_leaves_no_damaged_checkpoint(full):
    """The record goes first: what is left is a folder without one, and the next prune offers it."""
    store, paths = full.shelf.store, full.shelf.paths
    plan = plan_prune(view_stage(store, paths, STAGE, Depth.LISTING), 1)

    class Away:
        def __getattr__(self, name):
            return getattr(store, name)

        def delete_prefix(self, _):
            raise StoreUnavailableError("503", operation="delete")

    with acquire(store, paths, Owner.here()) as lease, pytest.raises(StoreUnavailableError):
        _delete(_Place(Away(), paths), [plan], lease)
    left = {f.step: f.committed for f in list_checkpoints(store, paths, STAGE)}
    assert left == {60: False, 50: True, 40: True, 30: False, 25: False, 20: True, 10: True}
    again = plan_prune(view_stage(store, paths, STAGE, Depth.LISTING), 1, uncommitted=True)
    assert [v.found.step for v in again.go] == [30, 25, 20, 10]


def test_nothing_goes_once_the_run_is_taken_over(full):
    """A driver that insists gets the run: FencedError before the next deletion."""
    store, paths = full.shelf.store, full.shelf.paths
    plan = plan_prune(view_stage(store, paths, STAGE, Depth.LISTING), 1)
    with acquire(store, paths, Owner.here()) as lease, acquire(store, paths, Owner.here(), take_over=True):
        before = list_checkpoints(store, paths, STAGE)
        with pytest.raises(FencedError):
            _delete(_Place(store, paths), [plan], lease)
        assert list_checkpoints(store, paths, STAGE) == before
