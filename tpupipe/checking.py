"""From a module and a configuration to what the checks look at, and what they found all in all."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpupipe.config import Config, environment, load_config, process_variables
from tpupipe.errors import ClusterError, TpupipeError
from tpupipe.job import Job
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status, worst
from tpupipe.preflight.importing import ImportReport
from tpupipe.resolve import jax_is_awake, load_build, resolve
from tpupipe.run import endpoint_of, input_options, local_root
from tpupipe.store.objects import open_store
from tpupipe.store.uri import StoreURI
from tpupipe.store.wiring import process_environment


@dataclass(frozen=True)
class CheckReport:
    """What a check found, all in all.

    Args:
        job: The job's module.
        config_hash: Hash of the configuration with its defaults, by which a verdict is found again.
        findings: In the order in which they were found.
    """

    job: str
    config_hash: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst of them."""
        return worst(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "status": self.status}


@contextlib.contextmanager
def check_context(
    module: str,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    groups: Collection[str],
    imported: ImportReport | None = None,
) -> Iterator[CheckContext]:
    """Everything that the checks look at, and its end: the embedded server stops, variables are put back.

    Args:
        module: The job's module.
        config_files: As for a run.
        overrides: As for a run.
        groups: What will be looked at; a cluster is only looked for if it is.
        imported: What happened when the module was imported alone. With an error in it there will be no job.

    Raises:
        UsageError: The configuration or the declaration of the job is not valid.
    """
    from tpupipe.cluster.connect import pickled
    from tpupipe.cluster.inspect import cluster_to_ask
    from tpupipe.cluster.reservation import check_slice

    job, config, woke = _resolved(module, config_files, overrides, imported)
    env = environment()
    with contextlib.ExitStack() as stack:
        problem: TpupipeError | None = None
        endpoint: str | None = None
        try:
            endpoint = stack.enter_context(endpoint_of(config, env))
        except ClusterError as error:  # the embedded server is not installed, or does not come up: store.create says so
            problem = error
        store = None
        if problem is None:
            store = open_store(
                config.store.uri, endpoint=endpoint, timeout_s=config.store.timeout_s, attempts=config.store.attempts
            )
            stack.enter_context(
                process_variables({**env.storage, **process_environment(endpoint, config.store.timeout_s)})
            )
        place = StoreURI.parse(config.store.uri)
        root = local_root(config, env)
        yield CheckContext(
            config=config,
            job=job,
            module=module,
            store=store,
            store_problem=problem,
            input_options=input_options(endpoint),
            local_folder=Path(place.path) if place.scheme == "file" else root if config.store.embedded else None,
            imported=imported,
            build_woke_jax=woke,
            ask_ray=check_slice,
            pickled=pickled,
            ask_cluster=cluster_to_ask(config.cluster, root=root, ray_address=env.ray_address)
            if "cluster" in groups
            else None,
        )


def _resolved(
    module: str, config_files: Sequence[Path], overrides: Sequence[str], imported: ImportReport | None
) -> tuple[Job | None, Config, bool]:
    """The job, the configuration, and whether ``build`` woke JAX.

    A module that cannot be imported, or must not because it wakes JAX, leaves the rest of the checks to be done.
    """
    if imported is not None and imported.error:
        return None, load_config(config_files, overrides), False
    before = jax_is_awake()
    build = load_build(module)
    job, config = resolve(build, config_files, overrides)
    from tpupipe.cluster.connect import ship_by_value

    ship_by_value(sys.modules[build.__module__])
    return job, config, jax_is_awake() and not before
