"""Where an inference stage's parameters come from: a checkpoint of a training stage, or files in another format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpupipe.checkpoint.commit import Commit
from tpupipe.checkpoint.restore import restore_params
from tpupipe.checkpoint.verify import newest_intact, reads_whole
from tpupipe.config import StoreConfig
from tpupipe.data.pretrained import Pretrained
from tpupipe.errors import JobError, NoIntactCheckpointError
from tpupipe.job import Infer, Train, default_params
from tpupipe.programs.sharding import put_whole
from tpupipe.programs.user_code import user_code
from tpupipe.stages.base import StageRun
from tpupipe.stages.record import read_train_record
from tpupipe.store.layout import RunPaths, parse_checkpoint
from tpupipe.store.objects import Store, open_store


class ParamsSource(ABC):
    """Parameters that were found and not read yet. Sent to every worker."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for equal parameters; written into the footer of every unit made with them."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Training step they are of, 0 where that is not known."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where they are."""

    @property
    @abstractmethod
    def told(self) -> str:
        """What to call them in a message: "parameters of ..."."""

    @abstractmethod
    def load(self, shardings: Callable[[Any], Any]) -> Any:
        """Reads them onto devices, in a worker.

        Args:
            shardings: ``shardings(tree) -> tree`` of ``jax.sharding.Sharding``, one for every leaf with a shape.
        """

    def reads_whole(self) -> bool:
        """Whether what ``load`` could not read is what it was when it was found: then the store or the network failed."""
        return False


@dataclass(frozen=True)
class CheckpointParams(ParamsSource):
    """Parameters in a training stage's checkpoint.

    Args:
        store: The store of the run that trained them.
        folder: The checkpoint's folder in it.
        commit: Its record.
        init: ``init(key) -> state`` of the training stage: the structure of the state.
        params: Picks the parameters out of the state.
    """

    store: Store
    folder: str
    commit: Commit
    init: Callable[[Any], Any]
    params: Callable[[Any], Any]

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint."""
        return self.commit.fingerprint

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.commit.step

    @property
    def uri(self) -> str:
        """Of the checkpoint's folder."""
        return self.store.uri(self.folder)

    @property
    def told(self) -> str:
        """Its step."""
        return f"step {self.commit.step}"

    def load(self, shardings: Callable[[Any], Any]) -> Any:
        """Restores them. Raises what :func:`tpupipe.checkpoint.restore.restore_params` does."""
        import jax

        shapes = jax.eval_shape(self.init, jax.random.key(0))
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings(shapes),
        )
        return restore_params(self.store, self.folder, self.commit, abstract, self.params)

    def reads_whole(self) -> bool:
        """Byte by byte."""
        return reads_whole(self.store, self.folder, self.commit)


@dataclass(frozen=True)
class PretrainedParams(ParamsSource):
    """Parameters in files that no run of ours wrote.

    Args:
        stage: Name of the inference stage, for messages.
        source: The declaration.
        files_fingerprint: Of the files' bytes as the driver saw them.
        input_options: fsspec's options for opening them.
    """

    stage: str
    source: Pretrained
    files_fingerprint: str
    input_options: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of the files' bytes."""
        return self.files_fingerprint

    @property
    def step(self) -> int:
        """Not known."""
        return 0

    @property
    def uri(self) -> str:
        """Of the files, with commas between them."""
        return ", ".join(self.source.files)

    @property
    def told(self) -> str:
        """The files' names."""
        return ", ".join(path.rpartition("/")[2] for path in self.source.files)

    def load(self, shardings: Callable[[Any], Any]) -> Any:
        """Reads the files and runs the job's ``load`` over them.

        Raises:
            DataError: They are not the files that the driver saw.
            UserCodeError: ``load`` raised, or gave what is no pytree of arrays.
        """
        import jax

        contents = self.source.read_checked(self.files_fingerprint, self.input_options)
        with user_code("load", self.stage):
            loaded = jax.tree.map(np.asarray, self.source.load(*contents))
            return jax.tree.map(put_whole, loaded, shardings(loaded))


def find_params(stage: Infer, run: StageRun) -> ParamsSource:
    """Where ``stage.params`` is: the newest intact checkpoint it names, of this run or of another by URI, or files.

    Raises:
        DataError: A file of ``Pretrained`` does not exist.
        NoIntactCheckpointError: There is none.
        JobError: The URI does not name a training stage of a run, or the job has no ``Train`` stage to take the
            model's structure from.
    """
    if isinstance(stage.params, Pretrained) or "/" in stage.params:
        return find_params_elsewhere(stage, run.config.store, run.endpoint, run.input_options)
    trained = run.job.stage(stage.params)
    if not isinstance(trained, Train):
        raise JobError(f"stage {stage.name!r}: params={stage.params!r} is not a Train stage.")
    return _checkpoint_params(stage, run.store, run.paths, trained.name, None, trained.init, trained.params)


def find_params_elsewhere(
    stage: Infer, config: StoreConfig, endpoint: str | None, input_options: Mapping[str, Any]
) -> ParamsSource:
    """The same for parameters that no stage of the job makes: of another run by URI, or files.

    Args:
        stage: The declaration.
        config: How a store is opened.
        endpoint: Emulated Cloud Storage, or ``None``.
        input_options: fsspec's options for opening files.

    Raises:
        DataError, NoIntactCheckpointError, JobError: As :func:`find_params`.
    """
    if isinstance(stage.params, Pretrained):
        _, fingerprint = stage.params.read(input_options)
        return PretrainedParams(stage.name, stage.params, fingerprint, input_options)
    store, paths, name, wanted = parse_params_uri(stage.params, config, endpoint)
    if stage.init is None:
        raise JobError(
            f"stage {stage.name!r}: params={stage.params!r} is a URI, so init= must say what the state looks like.",
            hint="Infer(init=lm.init, ...): it is only traced, never run.",
        )
    return _checkpoint_params(stage, store, paths, name, wanted, stage.init, default_params)


def _checkpoint_params(  # noqa: PLR0917 - what of which run, and its structure
    stage: Infer,
    store: Store,
    paths: RunPaths,
    name: str,
    wanted: str | None,
    init: Callable[[Any], Any],
    params: Callable[[Any], Any],
) -> CheckpointParams:
    selection = newest_intact(store, paths, name, only=wanted)
    if selection.commit is None:
        raise NoIntactCheckpointError(
            f"stage {stage.name!r}: there is no committed checkpoint at {stage.params!r}.",
            hint="Train first, or name a run's training stage or one of its checkpoints.",
            stage=stage.name,
        )
    record = read_train_record(store, paths, name) if wanted is None else None
    if record is not None and record.checkpoint_fingerprint != selection.commit.fingerprint:
        damaged = "; ".join(str(d) for d in selection.damaged) or "it is not in the store"
        raise NoIntactCheckpointError(
            f"stage {stage.name!r}: the last checkpoint of {stage.params!r} (step {record.steps}) cannot be used: {damaged}.",
            hint="Nothing was deleted. Older parameters are not taken instead; name a checkpoint's URI to use them.",
            stage=stage.name,
        )
    return CheckpointParams(store, selection.folder, selection.commit, init, params)


def parse_params_uri(uri: str, config: StoreConfig, endpoint: str | None) -> tuple[Store, RunPaths, str, str | None]:
    """Reads ``<store>/<job>/<run>/stages/<stage>[/checkpoints/<step>-<epoch>]``.

    Returns:
        Store, names of the run, training stage, and the folder where one checkpoint was named.

    Raises:
        JobError: It is not of that form.
    """
    head, found, tail = uri.rstrip("/").partition("/stages/")
    place, _, run_name = head.rpartition("/")
    root, _, job_name = place.rpartition("/")
    stage, _, checkpoint = tail.partition("/checkpoints/")
    parsed = parse_checkpoint(checkpoint) if checkpoint else None
    if not found or not root or not stage or "/" in stage or (checkpoint and parsed is None):
        raise JobError(
            f"params={uri!r} is not a training stage or checkpoint of a run.",
            hint="<store>/<job>/<run>/stages/<stage>, or that with /checkpoints/<step>-<epoch>.",
        )
    store = open_store(root, endpoint=endpoint, timeout_s=config.timeout_s, attempts=config.attempts)
    paths = RunPaths(job_name, run_name)
    return store, paths, stage, f"{paths.checkpoints(stage)}/{checkpoint}" if parsed else None
