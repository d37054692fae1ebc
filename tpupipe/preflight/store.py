"""Whether the store does what a run needs of it: each operation tried once, on objects of our own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tpupipe.errors import ObjectExistsError, ObjectNotFoundError, StoreDeniedError, StoreError
from tpupipe.preflight.context import CheckContext
from tpupipe.preflight.findings import Finding, Status
from tpupipe.preflight.probe import SMALL, timed

SLOW_S = 1.0
SLOW_MB_PER_S = 10.0
_MB = 1e6
_GIB = 2**30


def refusal(check: str, what: str, permission: str, error: StoreError, store_uri: str) -> Finding:
    """The finding for an operation that failed: forbidden, no such bucket, and unreachable are different things.

    Args:
        check: Name of the check.
        what: What was tried: "Creating an object".
        permission: The IAM permission it takes.
        error: What came back.
        store_uri: The store.
    """
    from google.auth.exceptions import GoogleAuthError

    kind = type(error).__name__
    facts = {"error_kind": kind, "permission": permission}
    if isinstance(error, StoreDeniedError):
        hint = error.hint
        if store_uri.startswith("gs://") and not isinstance(error.__cause__, GoogleAuthError):  # there is an account
            hint = (
                f"Grant {permission} (roles/storage.objectUser has it) on the bucket to the account that runs this. Cloud Storage "
                "answers the same for a bucket that does not exist to an account that may not know."
            )
        return Finding(check, Status.FAILURE, f"{what} is not permitted: {error.message}", hint, facts)
    if isinstance(error, ObjectNotFoundError):
        place, hint = f"The folder {store_uri}", "Make it, or change store.uri."
        if store_uri.startswith("gs://"):
            bucket = store_uri.removeprefix("gs://").partition("/")[0]
            place = f"The bucket gs://{bucket}"
            hint = f"Change store.uri, or: gcloud storage buckets create gs://{bucket} --location=REGION_OF_THE_SLICE"
        return Finding(check, Status.FAILURE, f"{place} does not exist: {error.message}", hint, facts)
    return Finding(check, Status.FAILURE, f"{what} failed: {error.message}", error.hint, facts)


def create_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.create``: an object can be created, and how long that takes."""
    name, probe = "store.create", context.probe
    if probe is None:
        yield _no_store(name, context, first=True)
        return
    try:
        seconds = probe.create()
    except StoreError as error:
        yield refusal(name, "Creating an object", "storage.objects.create", error, probe.store.uri())
        return
    attempts = probe.created.attempts if probe.created else 1
    message = f"Created {probe.store.uri(probe.small)} in {seconds * 1000:.0f} ms, {attempts} attempt(s)."
    facts = {"seconds": round(seconds, 4), "attempts": attempts}
    if attempts > 1 or seconds > SLOW_S:
        hint = f"Expected: the first attempt, under {SLOW_S:g} s. Look at the network between here and the store."
        yield Finding(name, Status.WARNING, message, hint, facts)
        return
    yield Finding(name, Status.OK, message, facts=facts)


def read_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.read``: what was written comes back."""
    name, probe = "store.read", context.probe
    if probe is None or probe.created is None:
        yield _no_store(name, context)
        return
    try:
        data, seconds = timed(lambda: probe.store.read(probe.small))
    except StoreError as error:
        yield refusal(name, "Reading an object", "storage.objects.get", error, probe.store.uri())
        return
    if data != SMALL:
        yield Finding(
            name,
            Status.FAILURE,
            f"{len(SMALL)} bytes were written, {len(data)} others came back.",
            "Use another store.",
        )
        return
    yield Finding(name, Status.OK, f"Read it back in {seconds * 1000:.0f} ms.", facts={"seconds": round(seconds, 4)})


def list_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.list``: a listing works, and has what was created just now. Tried also where nothing could be created."""
    name, probe = "store.list", context.probe
    if probe is None:
        yield _no_store(name, context)
        return
    try:
        names, seconds = timed(lambda: [info.name for info in probe.store.list(f"{probe.folder}/")])
    except StoreError as error:
        yield refusal(name, "Listing objects", "storage.objects.list", error, probe.store.uri())
        return
    if probe.created is not None and probe.small not in names:
        yield Finding(
            name,
            Status.FAILURE,
            f"The listing does not have {probe.small}, which was created before.",
            "A run decides by listings what is done. Use a store whose listings are consistent, as Cloud Storage's are.",
        )
        return
    yield Finding(name, Status.OK, f"Listed in {seconds * 1000:.0f} ms.", facts={"seconds": round(seconds, 4)})


def overwrite_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.overwrite``: a second creation is refused and leaves the first one; it is what commits rest on."""
    name, probe = "store.overwrite", context.probe
    if probe is None or probe.created is None:
        yield _no_store(name, context)
        return
    hint = "Two drivers could both commit. Use Cloud Storage, or a file system with hard links."
    try:
        probe.patient.create(probe.small, b"another content")
    except ObjectExistsError:
        kept = probe.store.read(probe.small)
        if kept != SMALL:
            yield Finding(name, Status.FAILURE, "A creation that was refused changed the object.", hint)
            return
        yield Finding(name, Status.OK, "Creating it a second time was refused, and changed nothing.")
        return
    except StoreError as error:
        yield refusal(name, "Creating an object that exists", "storage.objects.create", error, probe.store.uri())
        return
    yield Finding(name, Status.FAILURE, "Creating an object that exists was not refused.", hint)


def rewrite_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.rewrite``: an object can be replaced, as a driver's beat is; retention policies forbid that."""
    name, probe = "store.rewrite", context.probe
    if probe is None or probe.created is None:
        yield _no_store(name, context)
        return
    try:
        _, seconds = timed(lambda: probe.patient.put(probe.small, SMALL + SMALL))
    except StoreError as error:
        yield refusal(name, "Replacing an object", "storage.objects.delete", error, probe.store.uri())
        return
    yield Finding(name, Status.OK, f"Replaced it in {seconds * 1000:.0f} ms.", facts={"seconds": round(seconds, 4)})


def throughput_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.throughput``: one object of several MiB, written and read back, in MB/s of this machine."""
    name, probe = "store.throughput", context.probe
    if probe is None or probe.created is None:
        yield _no_store(name, context)
        return
    try:
        write_s, read_s = probe.throughput(context.probe_bytes)
    except StoreError as error:
        yield refusal(
            name, f"Writing and reading {context.probe_bytes} bytes", "storage.objects.get", error, probe.store.uri()
        )
        return
    write, read = (context.probe_bytes / _MB / max(seconds, 1e-6) for seconds in (write_s, read_s))
    message = f"{context.probe_bytes / _MB:.1f} MB: written at {write:.0f} MB/s, read at {read:.0f} MB/s, one stream."
    facts = {"write_mb_per_s": round(write, 1), "read_mb_per_s": round(read, 1), "size_bytes": context.probe_bytes}
    if min(write, read) < SLOW_MB_PER_S:
        hint = f"Below {SLOW_MB_PER_S:g} MB/s saves take long. It is the speed from here; from the slice it may be another."
        yield Finding(name, Status.WARNING, message, hint, facts)
        return
    yield Finding(name, Status.OK, message, facts=facts)


def delete_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.delete``: the probe's objects go, as old checkpoints must."""
    name, probe = "store.delete", context.probe
    if probe is None or probe.created is None:
        yield _no_store(name, context)
        return
    try:
        probe.delete()
        left = [info.name for info in probe.store.list(f"{probe.folder}/")]
    except StoreError as error:
        found = refusal(name, "Deleting an object", "storage.objects.delete", error, probe.store.uri())
        hint = f"{found.hint} The probe is left in {probe.store.uri(probe.folder)}."
        yield Finding(name, found.status, found.message, hint.strip(), found.facts)
        return
    if left:
        message = f"{', '.join(left)} is still listed after it was deleted."
        yield Finding(
            name, Status.FAILURE, message, "Use a store whose listings are consistent, as Cloud Storage's are."
        )
        return
    yield Finding(name, Status.OK, "Deleted the probe; nothing is left of it.")


def space_findings(context: CheckContext) -> Iterator[Finding]:
    """``store.space``: free space, where the store is on a disk of this machine."""
    name, folder = "store.space", context.local_folder
    if folder is None:
        yield Finding(name, Status.SKIPPED, "The store is a bucket: it has no disk to fill.")
        return
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    yield judge_space(folder, usage.free, usage.total, context.config.store.min_free_gib)


def judge_space(folder: Path, free_bytes: int, total_bytes: int, needed_gib: float) -> Finding:
    """Judges free space: a failure below what is needed, a warning below 5 % of the disk. Pure."""
    name = "store.space"
    message = f"{folder} has {free_bytes / _GIB:.1f} GiB free of {total_bytes / _GIB:.1f}; store.min_free_gib is {needed_gib:g}."
    facts = {"free_bytes": free_bytes, "total_bytes": total_bytes}
    if free_bytes < needed_gib * _GIB:
        return Finding(
            name, Status.FAILURE, message, "Make room: old runs, tpupipe checkpoints prune; or another store.", facts
        )
    if free_bytes < total_bytes * 0.05:
        return Finding(
            name, Status.WARNING, message, "Less than 5 % of the disk is free: look at it before a long run.", facts
        )
    return Finding(name, Status.OK, message, facts=facts)


def _no_store(name: str, context: CheckContext, *, first: bool = False) -> Finding:
    problem = context.store_problem
    if first and problem is not None:
        facts = {"error_kind": type(problem).__name__}
        return Finding(name, Status.FAILURE, f"The store could not be opened: {problem.message}", problem.hint, facts)
    if context.probe is None and problem is None:
        return Finding(name, Status.SKIPPED, "No store was opened.")
    return Finding(name, Status.SKIPPED, "There is no probe object to try it on.", "Mend what store.create says first.")
