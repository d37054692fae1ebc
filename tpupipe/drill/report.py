"""The report of a drill: a table to read, JSON for scripts, JUnit XML for CI. Pure."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree as ET

from rich.table import Table

from tpupipe.drill.outcome import Verdict
from tpupipe.drill.plan import Skipped

# What XML 1.0 cannot hold, not even escaped.
_NOT_XML = {code: "?" for code in range(32) if code not in (9, 10, 13)}


@dataclass(frozen=True)
class Report:
    """How a drill ended.

    Args:
        job: The job's name.
        drill: The drill's name; the runs' names begin with it.
        reference: Name of the reference run, its seconds and its digests by stage.
        verdicts: Of the scenarios that were run.
        left_out: Scenarios that were not run, and why.
        seconds: The whole drill.
        budget_s: What was allowed, if anything was said.
        folder: Local folder of the logs and of this report as JSON.
        unfinished: Why it is not the whole drill's report; empty if it is.
    """

    job: str
    drill: str
    reference: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    left_out: tuple[Skipped, ...]
    seconds: float
    budget_s: float | None
    folder: str
    unfinished: str = ""

    @property
    def status(self) -> str:
        """``passed``, ``failed``, ``unfinished``, or ``nothing ran``."""
        if not all(v.passed for v in self.verdicts):
            return "failed"
        if self.unfinished:
            return "unfinished"
        return "passed" if self.verdicts else "nothing ran"

    def to_json(self) -> str:
        """One JSON object on one line."""
        verdicts = [{**asdict(v), "verdict": "passed" if v.passed else "failed"} for v in self.verdicts]
        return json.dumps({"status": self.status, **asdict(self), "verdicts": verdicts})

    def table(self) -> Table:
        """The verdicts."""
        title = f"drill {self.drill} of {self.job}: {self.status}, {self.seconds:.0f} s"
        table = Table(title=title, title_justify="left")
        for heading in ("scenario", "fired", "lost steps", "recovery s", "rows redone", "attempts", "s", "verdict"):
            table.add_column(heading, overflow="fold")
        for v in self.verdicts:
            of = "" if v.allowed_steps is None else f" (of {v.allowed_steps})"
            table.add_row(
                v.scenario,
                f"{v.fired} of {v.faults}",
                f"{', '.join(map(str, v.lost_steps))}{of}" if v.lost_steps else "",
                f"{', '.join(f'{s:.1f}' for s in v.recoveries_s)}{_of_s(v)}" if v.recoveries_s else "",
                str(v.rows_redone),
                str(v.attempts),
                f"{v.seconds:.0f}",
                "passed" if v.passed else f"FAILED: {v.failed[0]}",
            )
        return table

    def lines(self) -> list[str]:
        """What stands below the table: everything that failed, and what was not run."""
        lines = []
        for v in self.verdicts:
            lines += [f"{v.scenario}: {what}" for what in v.failed]
            lines += [f"{v.scenario}: log {v.log}"] if v.failed else []
        lines += [f"not run: {skipped.name} ({skipped.why})" for skipped in self.left_out]
        lines.append(self.totals())
        return [*lines, f"logs and report: {self.folder}"]

    def totals(self) -> str:
        """How much was tried, in one line."""
        kinds: Counter[str] = Counter()
        for v in self.verdicts:
            kinds.update(v.kinds)
        back = [seconds for v in self.verdicts for seconds in v.recoveries_s]
        by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        recoveries = f", median {statistics.median(back):.1f} s, longest {max(back):.1f} s" if back else ""
        return (
            f"{len(self.verdicts)} scenarios, {sum(not v.passed for v in self.verdicts)} with differences; "
            f"{kinds.total()} faults fired ({by_kind or 'none'}); {len(back)} recoveries{recoveries}"
        )

    def to_junit(self) -> str:
        """One test suite, one test case per scenario; what was not run is skipped, a drill that did not end is an error."""
        cut_off = self.status == "unfinished"  # else a failure says why, or there is nothing to say
        suite = ET.Element(
            "testsuite",
            name=f"tpupipe drill {self.job}",
            tests=str(len(self.verdicts) + len(self.left_out) + cut_off),
            failures=str(sum(not v.passed for v in self.verdicts)),
            errors=str(int(cut_off)),
            skipped=str(len(self.left_out)),
            time=f"{self.seconds:.1f}",
        )
        for v in self.verdicts:
            case = _case(suite, self.job, v.scenario, v.seconds)
            if not v.passed:
                failure = ET.SubElement(case, "failure", message=_xml_text(v.failed[0]))
                failure.text = _xml_text("\n".join([*v.failed, f"run: {v.run}", f"log: {v.log}"]))
            ET.SubElement(case, "system-out").text = _xml_text(_numbers(v))
        for skipped in self.left_out:
            ET.SubElement(_case(suite, self.job, skipped.name, 0.0), "skipped", message=_xml_text(skipped.why))
        if cut_off:
            message = _xml_text(f"the drill did not end: {self.unfinished}")
            ET.SubElement(_case(suite, self.job, "the whole drill", self.seconds), "error", message=message)
        suites = ET.Element("testsuites")
        suites.append(suite)
        return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, job: str, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=f"drill.{job}", name=name, time=f"{seconds:.1f}")


def _of_s(v: Verdict) -> str:
    return "" if v.allowed_recovery_s is None else f" (of {v.allowed_recovery_s:.0f})"


def _numbers(v: Verdict) -> str:
    return (
        f"{v.about}\nfired {v.fired} of {v.faults}, lost steps {_listed(v.lost_steps)}, "
        f"recovery {_listed(v.recoveries_s)} s, rows redone {v.rows_redone}, attempts {v.attempts}"
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(map(str, values)) or "none"


def _xml_text(text: str) -> str:
    return text.translate(_NOT_XML)
