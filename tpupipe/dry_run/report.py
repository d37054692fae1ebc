"""What a dry run says in the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tpupipe.dry_run.account import Account, Projection
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.fit import size_text


@dataclass(frozen=True)
class DryRunReport:
    """All of it.

    Args:
        job: The job's module.
        config_hash: Of the production configuration.
        run: Name of the small run.
        notes: What differed from production.
        findings: Of the checks, the compiler and the small run.
        account: What the small run measured; ``None`` if it failed.
        projection: Of the full run; ``None`` where nothing was compiled.
        seconds: How long the dry run took.
        record: URI of the kept verdict; empty before it is kept.
    """

    job: str
    config_hash: str
    run: str
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    account: Account | None
    projection: Projection | None
    seconds: float
    record: str = ""

    @property
    def to_fix(self) -> list[Finding]:
        """What failed."""
        return [finding for finding in self.findings if finding.status is Status.FAILURE]

    @property
    def passed(self) -> bool:
        """Whether nothing did."""
        return not self.to_fix

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and for the record."""
        return {**asdict(self), "verdict": "PASS" if self.passed else "FAIL", "to_fix": len(self.to_fix)}

    def lines(self) -> list[str]:
        """For people: the account, then PASS or the list of what to fix."""
        lines = [f"rehearsed with {', '.join(self.notes)}"]
        if self.account is not None:
            lines += _account_lines(self.account)
        if self.projection is not None:
            lines += _projection_lines(self.projection)
        lines.append(f"{self.seconds:.0f} s in all; configuration {self.config_hash[:12]}, kept in {self.record}")
        if self.passed:
            warned = sum(f.status is Status.WARNING for f in self.findings)
            return [*lines, f"PASS: {self.job} is ready" + (f" ({warned} warnings above)" if warned else "")]
        lines.append(f"FAIL: {len(self.to_fix)} to fix")
        for number, finding in enumerate(self.to_fix, 1):
            lines.append(
                f"  {number}. {finding.check}: {finding.message}" + (f" {finding.hint}" if finding.hint else "")
            )
        return lines


def _account_lines(account: Account) -> list[str]:
    lines = []
    if account.save_s is not None and account.save_blocked_s is not None:
        lines.append(
            f"saving: {account.saves} checkpoints of {size_text(account.save_bytes)}, durable after {account.save_s:.2f} s, "
            f"the loop held up {account.save_blocked_s:.2f} s"
        )
    if account.restore_s is not None:
        lines.append(f"restoring: {account.restore_s:.2f} s")
    if account.recovery_s:
        lines.append(f"recovery: {', '.join(f'{s:.1f}' for s in account.recovery_s)} s from failure to new work")
    lines += [
        f"{stage}: {share:.1%} padding, {account.compilations.get(stage, 0)} compilation(s)"
        for stage, share in account.padding.items()
    ]
    return lines


def _projection_lines(projection: Projection) -> list[str]:
    low, high = projection.hours
    text = f"full run: {low:.4g} to {high:.4g} slice-hours"
    if projection.usd is not None:
        text += f", {_usd(projection.usd[0])} to {_usd(projection.usd[1])} USD"
    return [text, *(f"  assumed: {each}" for each in projection.assumptions)]


def _usd(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}"
