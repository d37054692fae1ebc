"""What all runs of one drill share: job, store, cluster, folder. Starts runs and looks at what they left. Effects only."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpupipe.checkpoint.verify import list_checkpoints, read_commit
from tpupipe.cluster.connect import Cluster
from tpupipe.config import Config
from tpupipe.data.chunks import Manifest, decode_unit
from tpupipe.drill.attempts import Ended, run_attempt
from tpupipe.drill.facts import JobFacts, StageFacts
from tpupipe.drill.history import AttemptHistory, Event
from tpupipe.drill.leaves import where_params_differ
from tpupipe.drill.outcome import AttemptSeen, Seen, differing_digests, ended_well, parting
from tpupipe.drill.rows import first_difference, first_difference_joined
from tpupipe.drill.scenario import Scenario
from tpupipe.errors import DataError, StageError, TpupipeError
from tpupipe.stages.finished import read_manifest
from tpupipe.store.layout import RunPaths, parse_event_segment, parse_unit
from tpupipe.store.objects import Store

GIVEN_BACK_S = 45.0
_POLL_S = 0.25
_SIGKILL = -9
_BUDGETS = (
    "worker_failures",
    "host_failures",
    "slice_failures",
    "store_failures",
    "stalls",
    "preemptions",
    "unit_failures",
)
_FAILURES = 4  # what a scenario may need of a budget, whatever the configuration allows

# What reading a run's objects raises when they are missing, damaged or refused; Arrow's own errors are among them.
_UNREADABLE = (TpupipeError, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Bench:
    """Where a drill's runs happen.

    Args:
        module: The job's module, as it was named.
        config_files: As they were given.
        overrides: As they were given.
        job: The job's name.
        config: The configuration.
        store: The store.
        endpoint: Emulated Cloud Storage, or ``None``.
        cluster: The cluster that all runs share.
        name: The drill's name; the runs' names begin with it.
        folder: Local folder for logs and the report.
        say: Takes progress lines.
    """

    module: str
    config_files: tuple[Path, ...]
    overrides: tuple[str, ...]
    job: str
    config: Config
    store: Store
    endpoint: str | None
    cluster: Cluster
    name: str
    folder: Path
    say: Callable[[str], None]

    def run_name(self, scenario: str) -> str:
        """Name of a scenario's run."""
        return f"{self.name}-{scenario}"

    def paths(self, scenario: str) -> RunPaths:
        """Names of a scenario's run in the store."""
        return RunPaths(self.job, self.run_name(scenario))

    # -- running ----------------------------------------------------------------------------------

    def undisturbed(self, scenario: str, timeout_s: float) -> Ended:
        """Runs the job once without any failure.

        Raises:
            StageError: It did not end well: then there is nothing to compare with.
        """
        ended = self._attempt(Scenario(scenario), 0, timeout_s)
        if ended.exit_status != 0 or ended.result.get("status") != "done":
            within = f"did not end within {timeout_s:.0f} s" if ended.exit_status is None else "failed"
            raise StageError(
                f"The reference run {within}, so there is nothing to compare with. {ended.error}\nLog: {ended.log}",
                hint="The job must work undisturbed first: tpupipe run with the same options.",
                log=str(ended.log),
            )
        return ended

    def disturbed(
        self, scenario: Scenario, facts: JobFacts, reference: str, result: Mapping[str, Any], timeout_s: float
    ) -> Seen:
        """Runs a scenario and gathers what is judged.

        Args:
            scenario: What is done to the run.
            facts: The job.
            reference: The reference's scenario name.
            result: The reference's result.
            timeout_s: Bound on each attempt.

        Returns:
            What was seen; what cannot be read of either run is a part of it.
        """
        endings: list[Ended] = []
        left: list[str] = []
        for number, faults in enumerate(scenario.attempts):
            ended = self._attempt(scenario, number, timeout_s)
            endings.append(ended)
            left += self._left(scenario.name)
            history = AttemptHistory(faults, (), ended.exit_status == _SIGKILL, ended.ended_s)
            if left or not ended_well(AttemptSeen(history, ended.exit_status, 0.0), scenario.status_of(number)):
                break
        unreadable: list[str] = []
        events: dict[int, list[Event]] = {}
        with _noted(unreadable, "the events"):
            events = self.events(scenario.name)
        attempts = tuple(
            _seen(faults, ended, events.get(epoch, ()))
            for epoch, (faults, ended) in enumerate(zip(scenario.attempts, endings, strict=False), 1)
        )
        manifests: dict[str, Manifest | None] = {}
        for stage in facts.stages:
            if stage.kind != "train":
                with _noted(unreadable, f"stage {stage.name}: its manifest"):
                    manifests[stage.name] = manifest = self._manifest(scenario.name, stage)
                    if manifest is None and endings[-1].result.get("status") == "done":
                        unreadable.append(f"stage {stage.name}: the run is done, and the stage has no manifest")
        return Seen(
            attempts=attempts,
            result=endings[-1].result,
            unit_rows={n: [(u.unit, u.rows) for u in m.units] for n, m in manifests.items() if m is not None},
            differences=self._differences(scenario.name, facts, reference, manifests),
            digests=self._digests(scenario.name, reference, result, endings[-1].result),
            left=tuple(left),
            store_fired=store_fired([e for each in events.values() for e in each]),
            unreadable=tuple(unreadable),
        )

    def _attempt(self, scenario: Scenario, number: int, timeout_s: float) -> Ended:
        overrides = [*self.overrides, *self._common(), *scenario.overrides]
        arguments = ["run", self.module, "--run", self.run_name(scenario.name), "--json"]
        for option, values in (
            ("-c", map(str, self.config_files)),
            ("--set", overrides),
            ("--fault", scenario.attempts[number]),
            ("--store-fault", scenario.store_faults_of(number)),
        ):
            arguments += [part for value in values for part in (option, value)]
        log = self.folder / scenario.name / f"attempt-{number + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return run_attempt(arguments, log, timeout_s)

    def _common(self) -> Iterator[str]:
        yield f"cluster.address={self.cluster.address}"
        for budget in _BUDGETS:
            if getattr(self.config.budgets, budget) < _FAILURES:
                yield f"budgets.{budget}={_FAILURES}"

    # -- what is left -------------------------------------------------------------------------------

    def _left(self, scenario: str) -> list[str]:
        """What of the slice is still held some time after an attempt has ended."""
        ends = time.monotonic() + GIVEN_BACK_S
        while held := self._held(scenario):
            if time.monotonic() > ends:
                return [f"{what} ({GIVEN_BACK_S:.0f} s after the driver's end)" for what in held]
            time.sleep(_POLL_S)
        return []

    def _held(self, scenario: str) -> list[str]:
        from tpupipe.cluster.reservation import held_groups, slice_states

        ours = re.compile(re.escape(f"tpupipe/{self.job}/{self.run_name(scenario)}") + r"-\d+")
        held = [f"placement group {name}" for name in held_groups() if ours.fullmatch(name)]
        if self.cluster.started:  # nobody else is on it
            held += [
                f"{state['chips'] - state['chips_free']} of {state['chips']} chips of {state['name']}"
                for state in slice_states()
                if state["chips_free"] < state["chips"]
            ]
        return held

    # -- what was written ---------------------------------------------------------------------------

    def events(self, scenario: str) -> dict[int, list[Event]]:
        """Events of a run by lease epoch, which is the number of the attempt."""
        found: dict[int, list[Event]] = {}
        for info in self.store.list(self.paths(scenario).events + "/"):
            segment = parse_event_segment(info.name)
            if segment is not None:
                lines = self.store.read(info.name).splitlines()
                found.setdefault(segment[0], []).extend(json.loads(line) for line in lines)
        return found

    def _manifest(self, scenario: str, stage: StageFacts) -> Manifest | None:
        try:
            return read_manifest(self.store, self.paths(scenario), stage.name)
        except DataError as error:
            raise _named(self.store.uri(self.paths(scenario).manifest(stage.name)), error) from error

    def _differences(
        self, scenario: str, facts: JobFacts, reference: str, manifests: Mapping[str, Manifest | None]
    ) -> dict[str, str]:
        found = {}
        for stage in facts.stages:
            manifest = manifests.get(stage.name)
            if manifest is None:
                continue  # the run did not come that far, which is a failure of its own
            try:
                difference = self._difference(scenario, stage, reference, manifest)
            except _UNREADABLE as error:
                difference = f"stage {stage.name}: its rows could not be compared: {_told(error)}"
            if difference is not None:
                found[stage.name] = difference
        return found

    def _difference(self, scenario: str, stage: StageFacts, reference: str, manifest: Manifest) -> str | None:
        wanted = self._manifest(reference, stage)
        if wanted is None:
            return f"stage {stage.name}: the reference has no manifest any more"
        compare = first_difference if stage.by_unit else first_difference_joined
        difference = compare(
            stage.name, self._tables(reference, stage.name, wanted), self._tables(scenario, stage.name, manifest)
        )
        return difference or (self._unlisted(scenario, stage.name, manifest) if stage.by_unit else None)

    def _tables(self, scenario: str, stage: str, manifest: Manifest) -> Iterator[tuple[str, Any]]:
        paths = self.paths(scenario)
        for unit in manifest.units:
            name = paths.unit(stage, unit.unit)
            try:
                table = decode_unit(self.store.read(name))
            except DataError as error:
                raise _named(self.store.uri(name), error) from error
            yield unit.unit, table

    def _unlisted(self, scenario: str, stage: str, manifest: Manifest) -> str | None:
        """A unit's object beside those of the manifest: whoever reads the folder would see its rows twice."""
        listed = {unit.unit for unit in manifest.units}
        for info in self.store.list(self.paths(scenario).units(stage) + "/"):
            unit = parse_unit(info.name)
            if unit is not None and unit not in listed:
                return f"stage {stage}: the folder has unit {unit}, which the manifest does not list"
        return None

    # -- where digests part ---------------------------------------------------------------------------

    def _digests(
        self, scenario: str, reference: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
    ) -> dict[tuple[str, str], str]:
        told = {}
        for stage, digest in differing_digests(wanted, found):
            try:
                if digest == "sample_digest":
                    where = parting(self._sample_digests(reference, stage), self._sample_digests(scenario, stage))
                else:
                    uris = (str(result["stages"][stage]["checkpoint"]) for result in (wanted, found))
                    where = where_params_differ(self.store, self.endpoint, *uris)
            except _UNREADABLE as error:
                where = f"where cannot be told: {_told(error)}"
            told[stage, digest] = where
        return told

    def _sample_digests(self, scenario: str, stage: str) -> dict[int, int]:
        found = list_checkpoints(self.store, self.paths(scenario), stage)
        return {each.step: read_commit(self.store, each).sample_digest for each in found if each.committed}


@contextlib.contextmanager
def _noted(unreadable: list[str], what: str) -> Iterator[None]:
    """Where something of a run cannot be read inside, that is noted, and the drill goes on without it."""
    try:
        yield
    except _UNREADABLE as error:
        unreadable.append(f"{what} could not be read: {_told(error)}")


def _told(error: Exception) -> str:
    message = error.message if isinstance(error, TpupipeError) else str(error)
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no message'}"


def _named(uri: str, error: DataError) -> DataError:
    """The same error with the object that it is about."""
    return DataError(f"{uri}: {error.message}", hint=error.hint, **{**error.data, "path": uri})


def _seen(faults: tuple[str, ...], ended: Ended, events: Sequence[Event]) -> AttemptSeen:
    return AttemptSeen(
        AttemptHistory(faults, tuple(events), ended.exit_status == _SIGKILL, ended.ended_s),
        ended.exit_status,
        ended.seconds,
        ended.error,
        str(ended.log),
    )


def store_fired(events: Sequence[Event]) -> dict[str, int]:
    """Store fault to the number of requests that it hit, over all attempts."""
    found: dict[str, int] = {}
    for event in events:
        if event["kind"] == "store_faults":
            for text, number in event.get("fired", {}).items():
                found[text] = found.get(text, 0) + int(number)
    return found
