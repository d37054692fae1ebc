"""``tpupipe run``, ``python -m`` and ``ray job submit`` are the same run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.e2e.harness import REPOSITORY, Runner
from tests.processes import until
from tpupipe.config import Config

FOLDER = REPOSITORY / "tests" / "e2e"


def submit(runner: Runner, name: str, config: Config) -> tuple[JobStatus, str]:
    """Submits the small job, as ``ray job submit --working-dir`` does; waits for its end."""
    file = runner.folder / f"{name}.yaml"
    file.write_text(config.model_dump_json(exclude_none=True))  # JSON is YAML
    client = JobSubmissionClient(runner.world.cluster.dashboard)
    job = client.submit_job(
        entrypoint=f"python -m small -c {file} --run {runner.name}{name}",
        runtime_env={"working_dir": str(FOLDER), "excludes": ["__pycache__"]},
    )
    until(
        lambda: client.get_job_status(job).is_terminal(), timeout_s=200, told=lambda: client.get_job_logs(job)[-3000:]
    )
    return client.get_job_status(job), client.get_job_logs(job)


@pytest.mark.soak
def test_a_submitted_job_and_python_m_are_the_same_run(runner: Runner) -> None:
    """Submitted, it makes the run in the store that the warm cluster belongs to; ``python -m`` finds it complete."""
    config = runner.config({"rows": 40, "steps": 4})
    status, log = submit(runner, "a", config)
    assert status is JobStatus.SUCCEEDED, log[-3000:]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.e2e.small",
            "-c",
            str(runner.folder / "a.yaml"),
            "--run",
            f"{runner.name}a",
            "--json",
        ],
        cwd=REPOSITORY,
        env=runner.world.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["attempt"] == 2
    assert result["stages"]["fit"]["resumed_from"] == 4
    assert result["stages"]["fit"]["params_digest"][:12] in log


@pytest.mark.soak
def test_a_failed_job_is_failed(runner: Runner) -> None:
    """The submitted job's status is FAILED, and its log names the job's own error."""
    status, log = submit(runner, "a", runner.config({"rows": 40, "steps": 4, "break_at": "map"}))
    assert status is JobStatus.FAILED
    assert "the job's own mistake" in log
