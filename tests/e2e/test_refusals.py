"""Bad input gets its own message and exit status, before anything is reserved or written."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import World, write_ids


@pytest.fixture
def call(world: World, tmp_path: Path) -> Any:
    """Runs the small job with a configuration text; gives exit status and stderr."""

    def run(config: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
        file = tmp_path / "config.yaml"
        file.write_text(config)
        inputs = f"job.inputs={write_ids(tmp_path / 'in', 20)}"
        command = ["run", "tests.e2e.small", "-c", str(file), "--set", inputs, *arguments]
        done = world.command(*command, more=environment)
        return done.returncode, done.stdout, done.stderr

    return run


FAKE = "cluster: {kind: fake, generation: v6e, topology: 2x4, chips_per_vm: 4, timeout_s: 3}\n"
STORE = "store: {uri: gs://tests/refused, embedded: true}\n"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FAKE, "store"),
        (STORE + FAKE + "stages: {fit: {checkpoint: off}}\n", "cannot be switched off"),
        (STORE + FAKE.replace("2x4", "3x5"), "3x5"),
        (STORE + FAKE.replace("2x4", "4x6"), "4x6"),
        (STORE + FAKE + "job: {steps: many}\n", "job"),
    ],
)
def test_usage_and_configuration_errors_end_with_2(call: Any, config: str, said: str) -> None:
    """What happened, the value, what is allowed; nothing was written."""
    status, _, stderr = call(config)
    assert status == 2, stderr
    assert said in stderr


def test_all_unknown_keys_are_one_error_with_the_nearest_valid_ones(call: Any) -> None:
    """Two typos in two sections: both are named, each with what was meant, and the exit status is 2."""
    status, _, stderr = call(STORE + FAKE + "clutser: {kind: fake}\nstages: {fit: {stepz: 3}}\n")
    assert status == 2, stderr
    assert "clutser" in stderr
    assert "cluster" in stderr
    assert "stepz" in stderr
    assert "steps" in stderr


def test_an_absent_slice_ends_with_1_and_names_what_is_there(call: Any) -> None:
    """A 4x4 where the warm cluster has 2x4 and 2x2."""
    status, stdout, stderr = call(STORE + FAKE.replace("2x4", "4x4"), "--json")
    assert status == 1
    assert "fake-v6e-2x4-0" in stderr
    assert json.loads(stdout)["status"] == "failed"
    assert json.loads(stdout)["error_kind"] == "ReservationError"


class _Refusing(http.server.BaseHTTPRequestHandler):
    def _refuse(self) -> None:
        body = b'{"error": {"code": 403, "message": "no permission on this bucket"}}'
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _refuse  # noqa: N815 - the names http.server looks for

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def refusing_store() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_unreadable_bucket_is_no_fresh_start(call: Any, refusing_store: str) -> None:
    """403 on everything: exit status 1, the bucket and the refusal are named, no step is run."""
    config = "store: {uri: gs://locked/runs}\n" + FAKE
    status, _, stderr = call(config, STORAGE_EMULATOR_HOST=refusing_store)
    assert status == 1
    assert "StoreDeniedError" in stderr
    assert "locked" in stderr
    assert "steps of" not in stderr
