"""Verdicts of dry runs, in the runs' folders, found again by the hash of the production configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpupipe.config import Config, config_hash, environment
from tpupipe.dry_run.rehearsal import Machine, rehearsal
from tpupipe.errors import UsageError
from tpupipe.identity import code_fingerprint
from tpupipe.job import Job
from tpupipe.run import endpoint_of
from tpupipe.store.layout import DRY_RUN_NAME, RunPaths
from tpupipe.store.objects import Store, open_store

PASSED, FAILED = "passed", "failed"
VERSION = 1


@dataclass(frozen=True)
class DryRunRecord:
    """``dry_run.json`` of a dry run's folder.

    Args:
        config_hash: Of the production configuration, its ``dry_run`` section included.
        code: Fingerprint of the job's code.
        verdict: ``passed`` or ``failed``.
        at: When, ISO 8601.
        run: Name of the run.
        report: Findings, account, projection, notes.
        version: Of this format.
    """

    config_hash: str
    code: str
    verdict: str
    at: str
    run: str
    report: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> bytes:
        """One JSON object."""
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, text: bytes) -> DryRunRecord:
        """Reads what ``to_json`` wrote; keys of later versions are left out."""
        raw = json.loads(text)
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})


def run_prefix(hashed: str) -> str:
    """How the names of a configuration's dry runs begin."""
    return f"dry-{hashed[:12]}-"


def find_dry_runs(store: Store, job: str, hashed: str) -> list[DryRunRecord]:
    """The dry runs of a configuration, the newest first.

    Raises:
        StoreError: Listing or reading failed.
    """
    names = [i.name for i in store.list(f"{job}/{run_prefix(hashed)}") if i.name.endswith("/" + DRY_RUN_NAME)]
    found = [DryRunRecord.from_json(store.read(name)) for name in names]
    return sorted((r for r in found if r.config_hash == hashed), key=lambda record: record.at, reverse=True)


def keep(store: Store, job: str, record: DryRunRecord) -> str:
    """Writes a verdict into its run's folder; its URI."""
    name = RunPaths(job, record.run).dry_run
    store.create(name, record.to_json())
    return store.uri(name)


def require_passed(job: Job, config: Config) -> DryRunRecord:
    """The newest dry run of this configuration and this code, if it passed.

    Raises:
        UsageError: There is none, the newest failed, or it was of other code.
        StoreError: The dry runs' store cannot be read.
    """
    hashed, code = config_hash(config), code_fingerprint(job)
    command = "tpupipe dry-run JOB -c CONFIG with the same --set"
    dry = rehearsal(config, job, Machine.here()).config
    with endpoint_of(dry, environment()) as endpoint:
        store = open_store(dry.store.uri, endpoint=endpoint, timeout_s=dry.store.timeout_s, attempts=dry.store.attempts)
        found = find_dry_runs(store, job.name, hashed)
    if not found:
        raise UsageError(
            f"There is no dry run of this configuration ({hashed[:12]}) in {dry.store.uri}.", hint=command, hash=hashed
        )
    newest = found[0]
    if newest.verdict != PASSED:
        raise UsageError(f"The last dry run of this configuration, {newest.run}, {newest.verdict}.", hint=command)
    if newest.code != code:
        raise UsageError(
            f"The last dry run of this configuration, {newest.run}, was of other code than the job's.", hint=command
        )
    return newest
