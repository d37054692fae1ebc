"""The command line: help, usage errors, what is printed where, and exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import tpupipe
from tpupipe.cli import app

ROOT = Path(__file__).parents[1]
WORLD = "store: {uri: 'file:///nowhere/at/all'}\ncluster: {kind: fake, generation: v6e, topology: 2x4}\n"
JOB = """
from tpupipe import Files, Job, Preprocess
def build():
    return Job("job", [Preprocess("p", Files({pattern!r}), map=dict)])
"""


def commands(group: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group, as typed."""
    inner = getattr(group, "commands", {})
    return [path, *(found for name, command in inner.items() for found in commands(command, (*path, name)))]


COMMANDS = [c for c in commands(typer.main.get_command(app)) if c]


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs the command line in an empty folder; gives exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def run(*arguments: str):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return run


@pytest.fixture
def world(tmp_path) -> Path:
    path = tmp_path / "world.yaml"
    path.write_text(WORLD)
    return path


@pytest.fixture
def job(tmp_path) -> str:
    """A job whose input does not exist: it ends before anything starts."""
    name = f"job_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(JOB.format(pattern=f"{tmp_path}/*.nothing"))
    return name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(call, command):
    """Exit 0, and more than the name."""
    done = call(*command, "--help")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != ("cluster",)], ids=" ".join)
def test_the_help_of_every_command_has_an_example(call, command):
    """An example that begins with the command itself, and that the command line can parse."""
    text = " ".join(call(*command, "--help").stdout.split())
    example = f"Example: tpupipe {' '.join(command)}"
    assert example in text
    words = text.partition("Example: tpupipe ")[2].partition(" Exit status")[0].split()
    parsed = typer.main.get_command(app)
    for word in command:
        assert words.pop(0) == word
        parsed = parsed.commands[word]
    parsed.make_context(" ".join(command), words)


def test_version(call):
    """One line on stdout."""
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"{tpupipe.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "some.job"],
        ["run", "some.job", "-c"],
        ["run", "some.job", "-c", "x.yaml", "--no-such-option"],
        ["no-such-command"],
        ["cluster", "no-such-command"],
        ["cluster", "up"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_parsed_is_exit_2(call, arguments):
    """Nothing on stdout, the usage on stderr."""
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr


def test_errors_of_jobs_and_files_are_exit_2(call, world, job, tmp_path):
    """A missing module, a missing file, an unknown key, a missing store, an unknown fault: each with its own message."""
    storeless = tmp_path / "storeless.yaml"
    storeless.write_text("cluster: {kind: gpu, gpus: 1}\n")
    for arguments, says in (
        (["no_such_job", "-c", world], "no_such_job"),
        ([job, "-c", tmp_path / "none.yaml"], "none.yaml"),
        ([job, "-c", world, "--set", "clustr.kind=gpu"], "cluster"),
        ([job, "-c", storeless], "store"),
        ([job, "-c", world, "--set", "cluster.topology=3x5"], "3x5"),
        ([job, "-c", world, "--set", "stages.p.checkpoint=off"], "cannot be switched off"),
        ([job, "-c", world, "--set", "stages.q.seed=1"], "no such stage"),
        ([job, "-c", world, "--fault", "kill-worker@train.stp=1"], "train.step"),
        ([job, "-c", world, "--fault", "kill-host@run.reserved"], "Points of workers"),
        ([job, "-c", world, "--store-fault", "503@craete"], "did you mean create?"),
        ([job, "-c", world, "--store-fault", "503@create"], "only an emulated store can be made to fail"),
        ([job, "-c", world, "--set", "store_faults=['503@create']"], "only an emulated store can be made to fail"),
        ([job, "-c", world, "--set", "faults=['kill-worker@train.stp=1']"], "Did you mean train.step?"),
        ([job, "-c", world, "--set", "dry_run.faults=['explode@train.step']"], "dry_run.faults.0"),
        ([job, "-c", world, "--set", "faults=slow@train.step"], "faults"),
    ):
        done = call("run", *arguments)
        assert (done.exit_code, done.stdout) == (2, ""), (arguments, done.stdout, done.stderr)
        assert re.match(r"(Config|Usage)Error: ", done.stderr)
        assert says in done.stderr


@pytest.mark.parametrize(("extra", "status"), [(["--fault", "nothing"], 2), (["--set", "a.b=c"], 2), ([], 1)])
def test_json_on_an_error_is_one_object_on_stdout(call, world, job, tmp_path, extra, status):
    """For scripts: status, message and exit status; the message for people is on stderr."""
    done = call("run", job, "-c", world, "--set", f"store.uri={tmp_path}/store", "--json", *extra)
    assert done.exit_code == status
    said = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    assert said["status"] == "failed"
    assert said["exit_status"] == status
    assert f"{said['error_kind']}: {said['error']}" in done.stderr


def test_a_wrong_run_name_is_a_usage_error(call, world, job, tmp_path):
    """Exit 2 and the allowed characters, and nothing was made in the store."""
    (tmp_path / "input.nothing").write_text("x")
    done = call("run", job, "-c", world, "--set", f"store.uri={tmp_path}/store", "--run", "NOT A NAME")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'NOT A NAME' is not a run name" in done.stderr
    assert not (tmp_path / "store").exists()


def test_no_input_is_an_error_that_names_the_pattern(call, world, job, tmp_path):
    """Exit 1, and nothing was made in the store."""
    done = call("run", job, "-c", world, "--set", f"store.uri={tmp_path}/store")
    assert done.exit_code == 1
    assert "*.nothing" in done.stderr
    assert not (tmp_path / "store").exists()


def test_cluster_commands_without_a_cluster(call, tmp_path, world):
    """The status is exit 1 with a hint, down says there was none and succeeds, up of something real is a usage error."""
    status = call("cluster", "status", "--root", tmp_path / "none")
    assert (status.exit_code, status.stdout) == (1, "")
    assert "tpupipe cluster up" in status.stderr
    down = call("cluster", "down", "--root", tmp_path / "none")
    assert (down.exit_code, down.stdout) == (0, "")
    up = call("cluster", "up", "-c", world, "--set", "cluster.kind=tpu")
    assert (up.exit_code, up.stdout) == (2, "")
    assert "only a faked slice" in up.stderr


def test_a_job_run_as_a_script_has_the_same_options(tmp_path):
    """With --help the options of tpupipe run are shown, and a usage error is exit 2."""
    script = tmp_path / "myjob.py"
    script.write_text(JOB.format(pattern="/nowhere/*") + "import tpupipe\ntpupipe.main(build)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=True, env=environment
    ).stdout
    for option in ("--config", "--set", "--run", "--json", "--fault", "--store-fault", "--allow-change", "--take-over"):
        assert option in shown
    wrong = subprocess.run(
        [sys.executable, script, "-c", "none.yaml", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert wrong.returncode == 2
    assert json.loads(wrong.stdout)["exit_status"] == 2
    assert wrong.stderr.startswith("ConfigError: ")


def test_an_early_jax_in_a_script_is_refused(tmp_path):
    """The module is over when main is called: devices that were counted before are an error that explains the order."""
    script = tmp_path / "early.py"
    script.write_text(
        "import jax\nN = jax.device_count()\n"
        + JOB.format(pattern="/nowhere/*")
        + "import tpupipe\ntpupipe.main(build)\n"
    )
    (tmp_path / "world.yaml").write_text(WORLD)
    done = subprocess.run(
        [sys.executable, script, "-c", "world.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "made JAX look for devices" in done.stderr
