"""An attempt is a bounded process of its own, and what it printed last is its result."""

from __future__ import annotations

from tpupipe.drill.attempts import run_attempt


def test_a_usage_error_is_the_attempts_error(tmp_path):
    """Exit status 2; the error comes from the JSON object, and the log is kept."""
    ended = run_attempt(["run", "no.such.module", "-c", "none.yaml", "--json"], tmp_path / "a.log", 60)
    assert ended.exit_status == 2
    assert ended.error.startswith("UsageError: There is no module 'no.such.module'")
    assert "no.such.module" in ended.log.read_text()
    assert ended.seconds > 0


def test_an_attempt_without_json_tells_the_end_of_its_log(tmp_path):
    ended = run_attempt(["run"], tmp_path / "a.log", 60)
    assert (ended.exit_status, ended.result) == (2, {})
    assert "Missing argument" in ended.error


def test_an_attempt_that_does_not_end_is_stopped(tmp_path):
    """No exit status: it was asked to end after its bound."""
    ended = run_attempt(["--version"], tmp_path / "a.log", 0.01)
    assert ended.exit_status is None
