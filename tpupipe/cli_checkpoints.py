"""``tpupipe checkpoints``: look at a run's checkpoints, verify them, give up old ones. Ray and JAX are not needed.

Exit status: 0 fine, 1 the store failed, 2 usage or configuration, 3 a committed checkpoint is damaged (``verify``), 4 the
run is held by a driver (``prune --yes``), 130 interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tpupipe.checkpoint.inspect import (
    CheckpointView,
    Depth,
    PrunePlan,
    StageView,
    plan_prune,
    stage_names,
    view_stage,
)
from tpupipe.checkpoint.prune import remove
from tpupipe.checkpoint.verify import Found
from tpupipe.cli_common import console, errors
from tpupipe.config import Config, StoreConfig, environment, load_config
from tpupipe.errors import CheckFailedError, RunHeldError, UsageError
from tpupipe.ledger.text import human_bytes
from tpupipe.run import endpoint_of
from tpupipe.store.layout import COMMIT_NAME, RunPaths
from tpupipe.store.lease import Lease, acquire
from tpupipe.store.objects import Store, open_store
from tpupipe.store.owner import Owner
from tpupipe.store.uri import StoreURI

checkpoints_app = typer.Typer(
    help="List, verify and prune the checkpoints of a run.",
    epilog="Example: tpupipe checkpoints ls stdlib-lm/a -c configs/local.yaml",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run: its URI (gs://bucket/prefix/JOB/RUN, or its folder), or JOB/RUN in the configuration's store.",
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("-c", "--config", help="YAML file that says which store; may be repeated, later files over earlier."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override: --set store.timeout_s=10.")
]
Stage = Annotated[
    str | None, typer.Option("--stage", metavar="NAME", help="This stage only. Default: all that have any.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@checkpoints_app.command("ls", epilog="Example: tpupipe checkpoints ls stdlib-lm/a -c configs/local.yaml")
def ls_command(
    run: RunArgument,
    *,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    stage: Stage = None,
    as_json: AsJson = False,
) -> None:
    """List every checkpoint folder of a run, newest first, committed or not.

    "intact" is by what the store lists: sizes, and checksums where it keeps them. Nothing is downloaded but the commit
    records, and the exit status is 0 whatever is found: verify is the check.
    """
    with errors(as_json=as_json), _opened(run, config, overrides) as place:
        views = place.views(stage, Depth.LISTING)
        _print_views(place, views, as_json)


@checkpoints_app.command(
    "verify",
    epilog="Example: tpupipe checkpoints verify stdlib-lm/a -c configs/local.yaml --deep   "
    "Exit status: 0 all committed ones are intact, 1 the store failed, 2 usage or config, 3 damaged.",
)
def verify_command(
    run: RunArgument,
    *,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    stage: Stage = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Download every object and recompute its checksum, whatever the store says.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare size and crc32c of every committed object with the commit record.

    The checksums are those that the store keeps; where it keeps none (file://) the contents are read.
    """
    with errors(as_json=as_json), _opened(run, config, overrides) as place:
        views = place.views(stage, Depth.CONTENTS if deep else Depth.CHECKSUMS)
        damaged = [v for view in views for v in view.checkpoints if v.intact is False]
        if not (damaged and as_json):  # the error carries the report: one object is printed
            _print_views(place, views, as_json)
        if not damaged:
            return
        objects = sum(len(v.problems) for v in damaged)
        raise CheckFailedError(
            f"{objects} object(s) of {len(damaged)} committed checkpoint(s) of {place.uri} are damaged: "
            f"{', '.join(f'{v.stage} step {v.found.step}' for v in damaged)}.",
            hint="Nothing was changed. A resume takes the newest intact one; restore objects from a backup or versions.",
            report=_report(place, views),
        )


@checkpoints_app.command(
    "prune",
    epilog="Example: tpupipe checkpoints prune stdlib-lm/a -c configs/local.yaml --keep 1 --yes   "
    "Exit status: 0 done or shown, 1 the store failed, 2 usage or config, 4 held by a driver.",
)
def prune_command(
    run: RunArgument,
    *,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Intact checkpoints to keep, of each stage.")],
    config: ConfigFiles = None,
    overrides: Overrides = None,
    stage: Stage = None,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Also folders without a commit record, older than the newest intact.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, what would go is only shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which checkpoints would go, and with --yes delete them.

    What stays is first looked at as a restore would. The newest intact one and whatever is newer is never touched.
    The run is taken for the time of deleting, so that no driver restores from, or saves, what goes. That another run
    names a checkpoint by its URI is not known here.
    """
    with errors(as_json=as_json), _opened(run, config, overrides) as place:

        def plans(depth: Depth) -> list[PrunePlan]:
            return [plan_prune(view, keep, uncommitted=uncommitted) for view in place.views(stage, depth, keep)]

        found = plans(Depth.LISTING if yes else Depth.RESTORE)
        if yes and any(plan.go for plan in found):
            with _held(place) as lease:
                found = plans(Depth.RESTORE)
                if not as_json:
                    _show_plans(place, found, "to delete")
                _delete(place, found, lease)
        elif not as_json:
            _show_plans(place, found, "would be deleted")
        if as_json:
            typer.echo(json.dumps(_plan_report(place, found, keep, "deleted" if yes else "planned")))
        elif not yes and any(plan.go for plan in found):
            _say("Nothing was deleted; --yes deletes these.")


# -- where the run is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A run that exists."""

    store: Store
    paths: RunPaths

    @property
    def uri(self) -> str:
        return self.store.uri(self.paths.root)

    def views(self, stage: str | None, depth: Depth, enough: int | None = None) -> list[StageView]:
        """The stages that have checkpoints, or the one asked for.

        Raises:
            UsageError: The run has no such stage.
        """
        names = stage_names(self.store, self.paths)
        if stage is not None and stage not in names:
            raise UsageError(
                f"{self.uri} has no stage {stage!r}.", hint=f"It has: {', '.join(names) or 'none yet'}.", stage=stage
            )
        views = [
            view_stage(self.store, self.paths, name, depth, enough=enough, on_read=_tell_read)
            for name in ([stage] if stage is not None else names)
        ]
        return [view for view in views if view.checkpoints or view.other or stage is not None]


def run_place(run: str, store: str | None) -> tuple[StoreURI, RunPaths]:
    """The store and the names that ``RUN`` on the command line stands for.

    Args:
        run: ``gs://…/JOB/RUN``, ``file:///…/JOB/RUN``, a folder, or ``JOB/RUN``.
        store: The configuration's store, for ``JOB/RUN``.

    Raises:
        UsageError: It names no run, or ``JOB/RUN`` comes without a store.

    >>> run_place("gs://bucket/runs/lm/a", None)
    (StoreURI(scheme='gs', bucket='bucket', path='runs'), RunPaths(job='lm', run='a'))
    """
    parts = run.rstrip("/").split("/")
    bare = not run.startswith((".", "~", "/"))
    if bare and len(parts) == 2:
        paths = RunPaths(*parts)
        if store is None:
            raise UsageError(
                f"{run!r} is a run in the configuration's store, and no configuration is given.",
                hint=f"Add -c FILE, or give the run's URI, or ./{run} for a folder.",
                run=run,
            )
        return StoreURI.parse(store), paths
    whole = StoreURI.parse(run)
    head, _, name = whole.path.rpartition("/")
    root, slash, job = head.rpartition("/")
    if not name or not job or (bare and len(parts) == 1):
        raise UsageError(
            f"{run!r} is not a run; allowed: gs://bucket/prefix/JOB/RUN, a run's folder, or JOB/RUN with -c FILE.",
            hint="`run_uri` in the result of `tpupipe run --json` is one.",
            run=run,
        )
    return StoreURI(whole.scheme, whole.bucket, root or (slash if whole.scheme == "file" else "")), RunPaths(job, name)


@contextmanager
def _opened(run: str, files: Sequence[Path] | None, overrides: Sequence[str] | None) -> Iterator[_Place]:
    """The run, with the embedded server up if the configuration has one. Makes no bucket and no folder.

    Raises:
        UsageError: There is no such run.
        StoreError: The store is missing or cannot be asked.
    """
    config = load_config(files or (), overrides or ()) if files or overrides else None
    root, paths = run_place(run, config.store.uri if config else None)
    limits = config.store if config else StoreConfig(uri=str(root))
    with _endpoint_for(root, config) as endpoint:
        store = open_store(
            root, endpoint=endpoint, timeout_s=limits.timeout_s, attempts=limits.attempts, make_root=False
        )
        if next(store.list(f"{paths.root}/"), None) is None:
            runs = ", ".join(store.children(paths.job)[:20])
            raise UsageError(
                f"There is no run at {store.uri(paths.root)}.",
                hint=f"Runs of {paths.job} there: {runs}." if runs else f"There is no run of {paths.job} there at all.",
                run=paths.run,
            )
        yield _Place(store, paths)


def _endpoint_for(root: StoreURI, config: Config | None) -> Any:
    """As a run with this configuration would reach ``root``, which need not be the configuration's store."""
    env = environment()
    if config is None:
        return nullcontext(env.emulator if root.scheme == "gs" else None)
    embedded = config.store.embedded and root.scheme == "gs"
    there = config.store.model_copy(update={"uri": str(root), "embedded": embedded})
    return endpoint_of(config.model_copy(update={"store": there}), env)


# -- deleting -----------------------------------------------------------------------------------


@contextmanager
def _held(place: _Place) -> Iterator[Lease]:
    """Owns the run, as a driver would.

    Raises:
        RunHeldError: A live driver owns it.
    """
    try:
        lease = acquire(
            place.store,
            place.paths,
            Owner.here(),
            on_wait=lambda _, waited_s: _say(f"watching for a sign of life of the run's owner, {waited_s:.0f} s"),
        )
    except RunHeldError as error:
        error.hint = "Nothing was deleted. Its driver prunes by itself (keep=); stop it, or wait for its end."
        raise
    with lease:
        yield lease


def _delete(place: _Place, plans: Sequence[PrunePlan], lease: Lease) -> None:
    for plan in plans:
        for view in plan.go:
            lease.check()
            remove(place.store, view.found)
            count = len(view.found.objects)
            _say(f"deleted {place.store.uri(view.found.folder)} ({count} objects)")


# -- printing -----------------------------------------------------------------------------------


def _report(place: _Place, views: Sequence[StageView]) -> dict[str, Any]:
    now_s = time.time()
    everything = [v for view in views for v in view.checkpoints]
    damaged = sum(v.intact is False for v in everything)
    return {
        "run_uri": place.uri,
        "status": "damaged" if damaged else "intact",
        "committed": sum(v.found.committed for v in everything),
        "damaged": damaged,
        "uncommitted": sum(not v.found.committed for v in everything),
        "late": sum(v.taken_over_by is not None for v in everything),
        "newest_intact": {
            view.stage: place.store.uri(view.newest_intact.found.folder) if view.newest_intact else None
            for view in views
        },
        "checkpoints": [v.as_json(place.store, now_s) for v in everything],
        "other": [place.store.uri(name) for view in views for name in view.other],
    }


def _print_views(place: _Place, views: Sequence[StageView], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_report(place, views)))
        return
    everything = [v for view in views for v in view.checkpoints]
    newest = {view.newest_intact.found.folder for view in views if view.newest_intact}
    screen = console()
    if everything:
        screen.print(_table(f"checkpoints of {place.uri}", everything, newest))
    else:
        _line(screen, f"no checkpoints in {place.uri}")
    for view in everything:
        for problem in view.problems:
            _line(screen, f"damaged: {place.store.uri(f'{view.found.folder}/{problem.name}')}: {problem.problem}")
        if view.taken_over_by is not None:
            _line(screen, f"{_late(view)}, does not count: {place.store.uri(f'{view.found.folder}/{COMMIT_NAME}')}")
    for name in (name for view in views for name in view.other):
        _line(screen, f"not named as a checkpoint, left alone: {place.store.uri(name)}")


def _plan_report(place: _Place, plans: Sequence[PrunePlan], keep: int, status: str) -> dict[str, Any]:
    now_s = time.time()
    return {
        "run_uri": place.uri,
        "status": status,
        "keep": keep,
        "size_bytes": sum(v.size_bytes for plan in plans for v in plan.go),
        "delete": [v.as_json(place.store, now_s) for plan in plans for v in plan.go],
        "stay": [v.as_json(place.store, now_s) for plan in plans for v in plan.stay],
    }


def _show_plans(place: _Place, plans: Sequence[PrunePlan], verb: str) -> None:
    screen = console()
    go = [v for plan in plans for v in plan.go]
    if go:
        size = human_bytes(sum(v.size_bytes for v in go))
        screen.print(_table(f"{verb}: {len(go)} checkpoint folders of {place.uri}, {size}", go, set()))
    else:
        _line(screen, f"nothing to delete in {place.uri}")
    for view in (v for plan in plans for v in plan.stay):
        state = {True: "intact", False: "damaged", None: _late(view) or "no commit record"}[view.intact]
        _line(screen, f"stays: {view.stage} step {view.found.step}, {state}, {place.store.uri(view.found.folder)}")


def _table(title: str, views: Sequence[CheckpointView], newest: set[str]) -> Table:
    now_s = time.time()
    table = Table(title=title, title_justify="left")
    for heading in ("stage", "step", "epoch", "restart", "committed", "intact", "compared", "size", "objects", "age"):
        table.add_column(heading, justify="right" if heading in ("step", "size", "objects", "age") else "left")
    for view in views:
        found = view.found
        intact = {True: "yes", False: "no", None: ""}[view.intact]
        table.add_row(
            view.stage,
            str(found.step),
            str(found.lease_epoch),
            str(found.restart),
            "late" if view.taken_over_by is not None else "yes" if found.committed else "no record",
            f"{intact}, newest" if found.folder in newest else intact,
            view.compared or "",
            human_bytes(view.size_bytes),
            str(len(found.objects)),
            _age(now_s - view.written_s),
        )
    return table


def _late(view: CheckpointView) -> str:
    return "" if view.taken_over_by is None else f"late: written after epoch {view.taken_over_by} took over"


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)  # a name that is broken over lines cannot be copied


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _tell_read(found: Found, size_bytes: int) -> None:
    _say(f"reading step {found.step}: {human_bytes(size_bytes)}")
