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
from tpupipe.errors import (
    BudgetExceededError,
    DataError,
    JobError,
    ObjectExistsError,
    RunChangedError,
    RunHeldError,
    StageError,
    StoreDeniedError,
    TpupipeError,
    UsageError,
)
from tpupipe.faults.points import point
from tpupipe.identity import Identity, check_identity, identify, settle_identity
from tpupipe.job import Infer, Job, Preprocess, Stage, Train
from tpupipe.store.layout import GenerationPaths, TickPaths, parse_tick_done, parse_unit
from tpupipe.store.objects import Store
from tpupipe.ticks import parse_every, parse_tick, refuse_future, tick_text, truncated

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
    """The tick asked for: ``as_of``, or now, truncated to ``schedule.every``.

    Raises:
        UsageError: It has seconds, or is in the future.
    """
    asked = options.as_of
    tick = truncated(now, parse_every(config.schedule.every)) if asked is None else parse_tick(asked.isoformat())
    refuse_future(tick, now, f"--as-of {tick_text(tick)}")
    return tick_text(tick)


def run_tick(
    job: Job,
    config: Config,
    options: RunOptions,
    store: Store,
    *,
    input_options: Mapping[str, Any],
    owned: Owned,
    params_now: Callable[[Infer], str],
) -> RunResult:
    """Runs one tick of a dataset to the end, after what earlier ticks left undone.

    An earlier tick that fails by itself does not keep the tick at hand from being done. It has a claim, or it would not
    be resumed: its inputs stay its own and are neither lost nor taken again, in whatever order the ticks are done.

    Args:
        job: The declaration.
        config: The configuration.
        options: What is asked of this attempt.
        store: The store.
        input_options: fsspec's options for opening inputs.
        owned: See ``Owned``.
        params_now: Fingerprint of the parameters that a stage would be given now.

    Raises:
        RunHeldError: Another driver is at work on this tick.
        RunChangedError: The job, its parameters or code changed since the generation began.
        TpupipeError: Also of an earlier tick, once the tick at hand is complete: see ``failed_before``.
    """
    dataset = Dataset(job, config, options, store, input_options, check_incremental(job), params_now)
    tick = tick_of(options, config, datetime.now(UTC))
    generation = dataset.open_generation(tick)
    failed: dict[str, TpupipeError] = {}
    for earlier in unfinished(read_claims(store, generation), done_ticks(store, generation), tick):
        if earlier in options.left:
            continue
        logger.info("tick %s of dataset %s is not complete: it comes first", earlier, generation.run)
        try:
            dataset.run(generation, earlier, owned, take_over=False)  # insisting is about the tick that was named
        except RunHeldError as error:
            logger.warning("tick %s is left to the driver that has it: %s", earlier, error.message)
        except TpupipeError as error:
            if not is_the_ticks_own(error):
                raise
            logger.warning("tick %s failed again; tick %s is done all the same: %s", earlier, tick, error)
            failed[earlier] = error
    result = dataset.run(generation, tick, owned, take_over=options.take_over)
    if failed:
        raise failed_before(result, failed) from next(iter(failed.values()))
    return result


def is_the_ticks_own(error: TpupipeError) -> bool:
    """Whether an error says something about the tick that failed, so that another tick may well succeed; pure.

    A stage's errors are about the tick's rows, a data or usage error about its inputs or about what was made of them
    before. An input may also be forbidden; where it is the store, the next tick is told so before it does anything. What
    is left ends the driver: Ctrl-C, the loss of the lease, a store that does not answer, no slice, no checkpoint of
    parameters, a budget that is used up.
    """
    if isinstance(error, BudgetExceededError):
        return False
    return isinstance(error, (StageError, DataError, UsageError, StoreDeniedError))


def failed_before(result: RunResult, failed: Mapping[str, TpupipeError]) -> TpupipeError:
    """The error to end with where earlier ticks failed and the tick at hand is complete: the first of them, retold; pure.

    Args:
        result: Of the tick at hand; ``data["at_hand"]``.
        failed: Errors by earlier tick, in order; ``data["earlier"]`` names the ticks, and ``data["result"]`` is the first one's.
    """
    first, error = next(iter(failed.items()))
    data = {**error.data, "tick": first, "earlier": tuple(failed), "at_hand": result}
    return type(error)(
        f"Tick {result.tick} is complete, but {len(failed)} earlier one(s) failed again: {', '.join(failed)}. "
        f"{first}: {error.message}",
        hint=error.hint,
        **data,
    )


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
        begun_for: The tick that the newest one was begun for by ``--reprocess``, if it was.
        tick: The tick at hand.
        same: Whether job and parameters are those that all of the newest generation is made with.
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
        params_now: Fingerprint of the parameters that a stage would be given now.
    """

    job: Job
    config: Config
    options: RunOptions
    store: Store
    input_options: Mapping[str, Any]
    tables: tuple[str, ...]
    params_now: Callable[[Infer], str]

    def open_generation(self, tick: str) -> GenerationPaths:
        """The generation that a tick belongs to; begins it where there is none, or a new one is asked for.

        Raises:
            RunChangedError: The job is another one than when the generation began.
        """
        newest, begun_for = self._newest()
        identity = self._identity({})
        allow, reprocess = self.options.allow_change, self.options.reprocess
        # Only then it matters: the parameters' checkpoint is looked for.
        same = reprocess and begun_for == tick and self._is_same(self._generation(newest), identity)
        number = next_generation(newest, begun_for, tick, same=same, reprocess=reprocess)
        generation = self._generation(number)
        if reprocess and number == newest:
            logger.info("generation %d was begun by the same --reprocess with nothing changed: it goes on", number)
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
            attempt.settle_params = lambda stage, fingerprint: self._settle_params(paths, stage, fingerprint)
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
        if changed:  # also with --allow-change: what was claimed cannot be read any more
            raise RunChangedError(
                f"{len(changed)} input file(s) of tick {paths.date} changed since it claimed them: {', '.join(changed[:5])}.",
                hint="Put them back as they were; new versions are taken by the next tick. Or --reprocess.",
                run=paths.run,
                changes={path: ["claimed", "changed"] for path in changed},
            )

    # -- records -------------------------------------------------------------------------------

    def _generation(self, number: int) -> GenerationPaths:
        return GenerationPaths(self.job.name, self.options.name or DEFAULT_DATASET, number)

    def _identity(self, inputs: Mapping[Source, Sequence[Unit]]) -> Identity:
        return identify(self.job, self.config, input_options=self.input_options, inputs=inputs)

    def _is_same(self, generation: GenerationPaths, identity: Identity) -> bool:
        """Whether all of a generation is made by this job with these parameters: none that was allowed in between."""
        if next(iter(self.store.list(generation.changes + "/")), None) is not None:
            return False
        try:
            check_identity(self.store, generation, identity, allow_change=False)
        except RunChangedError:
            return False
        stages = [stage for stage in self.job.stages if isinstance(stage, Infer)]
        had = [(stage, set(self._params(generation, stage.name))) for stage in stages]
        return all(fingerprints == {self.params_now(stage)} for stage, fingerprints in had if fingerprints)

    def _newest(self) -> tuple[int, str | None]:
        number, begun_for = 0, None
        while self.store.exists(self._generation(number + 1).begun):
            number += 1
            record = _record(self.store, self._generation(number).begun)
            begun_for = str(record["tick"]) if record.get("reprocess", True) else None
        return number, begun_for

    def _begin(self, generation: GenerationPaths, tick: str) -> None:
        record = {"format": FORMAT, "tick": tick, "reprocess": self.options.reprocess, "created_s": time.time()}
        try:
            self.store.create(generation.begun, json.dumps(record).encode())
        except ObjectExistsError:
            logger.info("generation %d of dataset %s was begun by another tick", generation.number, generation.run)

    def _params(self, generation: GenerationPaths, stage: str) -> list[str]:
        """Fingerprints of the parameters that a stage's partitions were made with, the newest last."""
        records = sorted(info.name for info in self.store.list(generation.params(stage) + "/"))
        return [str(_record(self.store, name)["fingerprint"]) for name in records]

    def _settle_params(self, paths: TickPaths, stage: str, fingerprint: str) -> None:
        """Notes what parameters the generation is made with, or compares.

        Raises:
            RunChangedError: They are others now, and that was not allowed; or a part of the tick is made with others.
        """
        self._check_partition(paths, stage, fingerprint)  # before the record: what is refused is not noted
        generation = paths.generation
        records = self._params(generation, stage)
        had = records[-1] if records else fingerprint
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
                self._settle_params(paths, stage, fingerprint)

    def _check_partition(self, paths: TickPaths, stage: str, fingerprint: str) -> None:
        """Refuses to go on with a partition that was begun with other parameters, whatever is allowed.

        Its first unit tells: none was ever committed beside units of others.
        """
        from tpupipe.stages.units import read_committed

        unit = next((info for info in self.store.list(paths.units(stage) + "/") if parse_unit(info.name)), None)
        had = fingerprint if unit is None else read_committed(self.store, unit).footer.params_fingerprint
        if had != fingerprint:
            raise RunChangedError(
                f"Tick {paths.date} of dataset {paths.run!r} is half done: units of stage {stage!r} are committed that were "
                f"made with other parameters ({had} then, {fingerprint} now). A partition is never made with two.",
                hint="--reprocess makes a new generation with the new ones. To finish this tick as it was begun, name the "
                "checkpoint of then: Infer(params='.../checkpoints/<step>-<epoch>'), and --allow-change.",
                run=paths.run,
                changes={f"params.{stage}": [had, fingerprint]},
            )

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
