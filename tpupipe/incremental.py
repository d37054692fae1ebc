"""Incremental runs: one tick of a schedule takes what no earlier tick of the dataset took, into a partition of its own.

A tick is a run with its own lease, identity and events. Beside the ticks a dataset keeps three kinds of records, each
an object that is created once: what the job was when the generation began, which inputs a tick takes (its claim), and
that a tick is complete. See docs/decisions/2026-11-30-incremental.md for what a kill between any two of them leaves.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from tpupipe.claims import Claim, changed_inputs, claim_inputs, read_claims
from tpupipe.config import Config
from tpupipe.data.listing import InputFile, list_files
from tpupipe.data.sample import parse_sample, sample_units
from tpupipe.data.sources import Source, Unit, fingerprint_units
from tpupipe.errors import DataError, JobError, ObjectExistsError, RunChangedError, RunHeldError
from tpupipe.faults.points import point
from tpupipe.identity import Identity, check_identity, identify, settle_identity
from tpupipe.job import Infer, Job, Preprocess, Stage, Train
from tpupipe.store.layout import GenerationPaths, TickPaths, parse_tick_done
from tpupipe.store.objects import Store
from tpupipe.ticks import parse_every, tick_text, truncated

if TYPE_CHECKING:
    from tpupipe.run import Attempt, RunOptions, RunResult

logger = logging.getLogger("tpupipe")

Owned: TypeAlias = "Callable[[TickPaths, bool], AbstractContextManager[Attempt]]"
"""Takes the lease of a tick's run, from a living driver if the flag says so, and gives an attempt at it."""

DEFAULT_DATASET = "scheduled"
FORMAT = 1


def check_incremental(job: Job) -> tuple[str, ...]:
    """The stages whose rows are the dataset's tables: Infer stages, or Preprocess stages where there are none.

    Raises:
        JobError: The job trains, or has a stage that cannot be cut into ticks.
    """
    for stage in job.stages:
        if isinstance(stage, Train):
            raise JobError(
                f"stage {stage.name!r} trains; mode: incremental takes Preprocess and Infer stages only.",
                hint="Train in a run of its own, and name its parameters: Infer(params='<store>/<job>/<run>/stages/<stage>').",
                stage=stage.name,
            )
    tables: list[Stage] = [stage for stage in job.stages if isinstance(stage, Infer)] or list(job.stages)
    for stage in tables:
        if isinstance(stage, Preprocess) and stage.dataset is not None:
            raise JobError(
                f"stage {stage.name!r}: dataset= commits as a whole, so its objects cannot be a table's partition.",
                hint="Preprocess(map=...), or an Infer stage behind it.",
                stage=stage.name,
            )
    return tuple(stage.name for stage in tables)


def tick_of(options: RunOptions, config: Config, now: datetime) -> str:
    """The tick asked for: ``as_of``, or now, truncated to ``schedule.every``."""
    return tick_text(options.as_of or truncated(now, parse_every(config.schedule.every)))


def run_tick(
    job: Job,
    config: Config,
    options: RunOptions,
    store: Store,
    *,
    input_options: Mapping[str, Any],
    owned: Owned,
) -> RunResult:
    """Runs one tick of a dataset to the end, after what earlier ticks left undone.

    Args:
        job: The declaration.
        config: The configuration.
        options: What is asked of this attempt.
        store: The store.
        input_options: fsspec's options for opening inputs.
        owned: See ``Owned``.

    Raises:
        RunHeldError: Another driver is at work on this tick.
        RunChangedError: The job, its parameters or code changed since the generation began.
    """
    dataset = Dataset(job, config, options, store, input_options, check_incremental(job))
    tick = tick_of(options, config, datetime.now(UTC))
    generation = dataset.open_generation(tick)
    for earlier in unfinished(read_claims(store, generation), done_ticks(store, generation), tick):
        logger.info("tick %s of dataset %s is not complete: it comes first", earlier, generation.run)
        try:
            dataset.run(generation, earlier, owned, take_over=False)  # insisting is about the tick that was named
        except RunHeldError as error:
            logger.warning("tick %s is left to the driver that has it: %s", earlier, error.message)
    return dataset.run(generation, tick, owned, take_over=options.take_over)


def unfinished(claims: Sequence[Claim], done: Sequence[str], before: str) -> list[str]:
    """Ticks before one that have a claim and are not complete, in order; pure."""
    return sorted({claim.tick for claim in claims if claim.tick < before} - set(done))


def done_ticks(store: Store, generation: GenerationPaths) -> list[str]:
    """The complete ticks of a generation, in order."""
    found = (parse_tick_done(info.name) for info in store.list(generation.done + "/"))
    return sorted(tick for tick in found if tick is not None)


def next_generation(newest: int, begun_for: str | None, tick: str, *, same: bool, reprocess: bool) -> int:
    """Which generation a tick belongs to; pure.

    Args:
        newest: The newest generation, 0 if there is none.
        begun_for: The tick that the newest one was begun for.
        tick: The tick at hand.
        same: Whether the job is the one that the newest generation was begun with.
        reprocess: Whether a new generation is wanted. The same command given again goes on with the one it began.
    """
    if newest == 0:
        return 1
    return newest + 1 if reprocess and not (same and begun_for == tick) else newest


@dataclass(frozen=True)
class Dataset:
    """A dataset that grows tick by tick.

    Args:
        job: The declaration.
        config: The configuration.
        options: What is asked of this attempt.
        store: The store.
        input_options: fsspec's options for opening inputs.
        tables: Stages whose rows are its tables.
    """

    job: Job
    config: Config
    options: RunOptions
    store: Store
    input_options: Mapping[str, Any]
    tables: tuple[str, ...]

    def open_generation(self, tick: str) -> GenerationPaths:
        """The generation that a tick belongs to; begins it where there is none, or a new one is asked for.

        Raises:
            RunChangedError: The job is another one than when the generation began.
        """
        newest, begun_for = self._newest()
        identity = self._identity({})
        allow = self.options.allow_change
        same = newest > 0 and self._is_same(self._generation(newest), identity)
        number = next_generation(newest, begun_for, tick, same=same, reprocess=self.options.reprocess)
        generation = self._generation(number)
        try:
            if number != newest:
                self._begin(generation, tick)
                point("generation.begun", generation=number)
            settle_identity(self.store, generation, identity, allow_change=allow)
        except RunChangedError as error:
            raise RunChangedError(
                f"Dataset {generation.run!r} was begun with another job, and this would mix two in one table. {error.message}",
                hint="--reprocess makes a new generation of partitions from all inputs, beside the old one; "
                "--allow-change goes on in this one and records the change.",
                **error.data,
            ) from error
        return generation

    def run(self, generation: GenerationPaths, tick: str, owned: Owned, *, take_over: bool) -> RunResult:
        """Does one tick, or finds it done."""
        paths = generation.tick(tick, self.tables)
        with owned(paths, take_over) as attempt:
            if self.store.exists(generation.tick_done(tick)):
                return attempt.complete()
            listed = self._listed(generation)
            claim = claim_inputs(
                self.store, generation, tick, listed, until_s=self._until_s(tick), check=attempt.lease.check
            )
            point("tick.claimed", tick=tick)
            attempt.log.emit("claim", f"tick {tick}: {claim.files} new input file(s)", tick=tick, files=claim.files)
            self._check_unchanged(paths, claim, listed)
            attempt.inputs = self._planned(claim)
            attempt.settle_params = lambda stage, fingerprint: self._settle_params(generation, stage, fingerprint)
            self._complete_empty(attempt, paths)
            result = attempt.execute(self._identity(attempt.inputs))
            attempt.lease.check()
            point("tick.before_done", tick=tick)
            self._record_done(generation, claim, result)
            return result

    # -- inputs --------------------------------------------------------------------------------

    def _sources(self) -> Iterator[tuple[str, Source]]:
        """Each distinct source, with the first stage that reads it."""
        seen: list[Source] = []
        for stage in self.job.stages:
            source = stage.source if isinstance(stage, Preprocess) else stage.data
            if isinstance(source, Source) and source not in seen:
                seen.append(source)
                yield stage.name, source

    def _listed(self, generation: GenerationPaths) -> dict[str, list[InputFile]]:
        listed = {
            stage: list_files(source.pattern, storage_options=self.input_options, none_ok=True)
            for stage, source in self._sources()
        }
        # An inbox that was emptied is usual. At the very start nothing at all is more likely a wrong pattern.
        if not any(listed.values()) and not read_claims(self.store, generation):
            for _, source in self._sources():
                list_files(source.pattern, storage_options=self.input_options)
        return listed

    def _until_s(self, tick: str) -> float | None:
        if not self.options.backfilled:
            return None
        return datetime.fromisoformat(tick).replace(tzinfo=UTC).timestamp()

    def _planned(self, claim: Claim) -> dict[Source, Sequence[Unit]]:
        sample = parse_sample(self.config.sample)
        planned: dict[Source, Sequence[Unit]] = {}
        for stage, source in self._sources():
            units = source.units_of(claim.inputs.get(stage, ()), None, self.input_options)
            planned[source] = sample_units(units, sample) if sample != 1 else units
        return planned

    def _check_unchanged(self, paths: TickPaths, claim: Claim, listed: Mapping[str, list[InputFile]]) -> None:
        changed = changed_inputs(claim, listed)
        if changed and not self.options.allow_change:
            raise RunChangedError(
                f"{len(changed)} input file(s) of tick {paths.date} changed since it claimed them: {', '.join(changed[:5])}.",
                hint="Put them back as they were; new versions are taken by the next tick. Or --allow-change.",
                run=paths.run,
                changes={path: ["claimed", "changed"] for path in changed},
            )

    # -- records -------------------------------------------------------------------------------

    def _generation(self, number: int) -> GenerationPaths:
        return GenerationPaths(self.job.name, self.options.name or DEFAULT_DATASET, number)

    def _identity(self, inputs: Mapping[Source, Sequence[Unit]]) -> Identity:
        return identify(self.job, self.config, input_options=self.input_options, inputs=inputs)

    def _is_same(self, generation: GenerationPaths, identity: Identity) -> bool:
        try:
            check_identity(self.store, generation, identity, allow_change=False)
        except RunChangedError:
            return False
        return True

    def _newest(self) -> tuple[int, str | None]:
        number, begun_for = 0, None
        while self.store.exists(self._generation(number + 1).begun):
            number += 1
            begun_for = str(_record(self.store, self._generation(number).begun)["tick"])
        return number, begun_for

    def _begin(self, generation: GenerationPaths, tick: str) -> None:
        record = {"format": FORMAT, "tick": tick, "created_s": time.time()}
        try:
            self.store.create(generation.begun, json.dumps(record).encode())
        except ObjectExistsError:
            logger.info("generation %d of dataset %s was begun by another tick", generation.number, generation.run)

    def _settle_params(self, generation: GenerationPaths, stage: str, fingerprint: str) -> None:
        """Notes what parameters the generation is made with, or compares.

        Raises:
            RunChangedError: They are others now, and that was not allowed.
        """
        records = sorted(info.name for info in self.store.list(generation.params(stage) + "/"))
        had = str(_record(self.store, records[-1])["fingerprint"]) if records else fingerprint
        if had != fingerprint and not self.options.allow_change:
            raise RunChangedError(
                f"Dataset {generation.run!r}: the parameters of stage {stage!r} are not those of the earlier ticks "
                f"({had} then, {fingerprint} now).",
                hint="--reprocess makes a new generation with them; --allow-change goes on and records the change.",
                run=generation.run,
                changes={f"params.{stage}": [had, fingerprint]},
            )
        if not records or had != fingerprint:
            try:
                record = {"format": FORMAT, "fingerprint": fingerprint}
                self.store.create(generation.param(stage, len(records) + 1), json.dumps(record).encode())
            except ObjectExistsError:  # another tick was faster: compare with what it noted
                self._settle_params(generation, stage, fingerprint)

    def _complete_empty(self, attempt: Attempt, paths: TickPaths) -> None:
        """Completes the stages that have no input in this tick, with the schema that they had before."""
        from tpupipe.data.chunks import Manifest
        from tpupipe.stages.finished import read_manifest

        empty: set[str] = set()
        for stage in self.job.stages:
            data = stage.source if isinstance(stage, Preprocess) else getattr(stage, "data", None)
            if (len(attempt.inputs[data]) if isinstance(data, Source) else data not in empty) or isinstance(
                stage, Train
            ):
                continue
            empty.add(stage.name)
            if self.store.exists(paths.manifest(stage.name)):
                continue
            schema = self._schema(paths, stage.name, read_manifest)
            made_from = {"inputs": fingerprint_units([]), "rows_in": "0"}
            attempt.lease.check()
            point("stage.manifest", stage=stage.name)
            self.store.create(paths.manifest(stage.name), Manifest(stage.name, (), schema, made_from).to_json())

    def _schema(self, paths: TickPaths, stage: str, read_manifest: Callable[..., Any]) -> Any:
        import pyarrow as pa

        earlier = [tick for tick in done_ticks(self.store, paths.generation) if tick != paths.date]
        for tick in reversed(earlier):
            manifest = read_manifest(self.store, replace(paths, date=tick), stage)
            if manifest is not None and len(manifest.schema):
                return manifest.schema
        return pa.schema([])

    def _record_done(self, generation: GenerationPaths, claim: Claim, result: RunResult) -> None:
        record = {
            "format": FORMAT,
            "tick": claim.tick,
            "claim": claim.number,
            "files": claim.files,
            "rows": {name: stage["rows_out"] for name, stage in result.stages.items()},
        }
        try:
            self.store.create(generation.tick_done(claim.tick), json.dumps(record, sort_keys=True).encode())
        except ObjectExistsError:
            logger.info("tick %s was complete already", claim.tick)


def _record(store: Store, name: str) -> Mapping[str, Any]:
    try:
        record: Mapping[str, Any] = json.loads(store.read(name))
        if record["format"] == FORMAT:
            return record
        problem = f"has format {record['format']}, and this version reads {FORMAT}"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"is damaged: {error!r}"
    raise DataError(f"{store.uri(name)} {problem}.", hint="Restore it, or use another dataset (--run).", path=name)
