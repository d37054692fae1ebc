"""A guard keeps a child command alive as long as it has users, then stops it.

Users hold a shared lock on a file. The guard, a detached process of its own, waits for the exclusive lock: the kernel
grants it when the last user is gone, however that user ended. Nobody has to clean up, and nobody can forget to.

The guard runs this file as a script (``python guard.py …``) without the package, so only the standard library is
imported at the top.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.02
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """What a guard is to run.

    Attributes:
        command: Program and arguments.
        facts: What users need to know to reach it (JSON values).
        environment: Its whole environment; ``None`` is the caller's.
    """

    command: Sequence[str]
    facts: Mapping[str, Any]
    environment: Mapping[str, str] | None = None


@contextlib.contextmanager
def guarded(
    folder: Path,
    make: Callable[[], Child],
    healthy: Callable[[Mapping[str, Any]], bool],
    *,
    timeout_s: float = 20.0,
    starts: int = 3,
) -> Iterator[dict[str, Any]]:
    """Shares one child among all who use ``folder``; starts it if it is not up, stops it after the last user.

    Args:
        folder: Where locks, state and the child's log (``child.log``) are; made if missing.
        make: Gives the command for a new child; called under a lock, once per start.
        healthy: Whether the child that these facts describe answers. Must not block for long.
        timeout_s: Seconds until the child must be usable.
        starts: How often a child that ends at once is started before giving up.

    Yields:
        The facts of the running child.

    Raises:
        ClusterError: The child did not become usable; the message has the end of its log.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held:
        with _locked(folder / "start.lock", fcntl.LOCK_EX, ends):
            # Refused while a guard holds the users' lock for itself, that is while it stops its child: nobody joins
            # a server on its way out.
            held.enter_context(_locked(folder / "users.lock", fcntl.LOCK_SH, ends))
            facts = _running(folder, healthy, ends)
            if facts is None:
                facts = _start(folder, make, healthy, ends, starts)
        yield facts


def running(folder: Path) -> dict[str, Any] | None:
    """Facts of the child that a guard runs for ``folder`` now, or ``None``; takes part in nothing."""
    guard = _guard_pid(folder)
    state = _read_json(folder / "state.json")
    return state["facts"] if guard and state and state["guard"] == guard else None


def _running(folder: Path, healthy: Callable[[Mapping[str, Any]], bool], ends: float) -> dict[str, Any] | None:
    """Facts of the child if it is up. One that does not answer for half of the time left is stopped."""
    patience = time.monotonic() + max(0.0, ends - time.monotonic()) / 2
    while True:
        guard = _guard_pid(folder)
        if guard is None:
            return None
        state = _read_json(folder / "state.json")
        if state and state["guard"] == guard and healthy(state["facts"]):
            facts: dict[str, Any] = state["facts"]
            return facts
        if time.monotonic() > patience or not state or state["guard"] != guard:
            # No state for a live guard: whoever started it died before the child was usable.
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard, signal.SIGTERM)
            _until(lambda: _guard_pid(folder) is None, ends, f"guard process {guard} in {folder} to stop")
            return None
        time.sleep(_POLL_S)


def _start(
    folder: Path,
    make: Callable[[], Child],
    healthy: Callable[[Mapping[str, Any]], bool],
    ends: float,
    starts: int,
) -> dict[str, Any]:
    for _ in range(starts):
        child = make()
        launch = json.dumps(
            {
                "command": list(child.command),
                "folder": str(folder),
                "environment": None if child.environment is None else dict(child.environment),
            }
        )
        # -I -S: the guard needs the standard library only, and must not depend on what else is installed or set.
        guard = [sys.executable, "-I", "-S", str(Path(__file__).absolute())]
        subprocess.run(  # noqa: S603 - our own interpreter and file
            guard, input=launch.encode(), check=True, cwd="/", timeout=max(1.0, ends - time.monotonic())
        )
        while (pid := _guard_pid(folder)) is not None:
            if healthy(child.facts):
                _write_json(folder / "state.json", {"guard": pid, "facts": dict(child.facts)})
                return dict(child.facts)
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGTERM)
                raise _unusable(folder, child, "did not answer in time")
            time.sleep(_POLL_S)
    raise _unusable(folder, child, f"ended at once, {starts} times")


def _unusable(folder: Path, child: Child, what: str) -> Exception:
    from tpupipe.errors import ClusterError  # here, because the guard itself runs without the package

    log = folder / "child.log"
    tail = log.read_text(errors="replace")[-1500:].strip() if log.exists() else ""
    return ClusterError(
        f"{Path(child.command[0]).name} {what}; the end of its log {log}: {tail or '(empty)'}",
        command=list(child.command),
        log=str(log),
    )


# -- locks and state -----------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path, kind: int, ends: float) -> Iterator[None]:
    """Holds a lock (``fcntl.LOCK_SH`` or ``LOCK_EX``) on ``path``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _until(lambda: _try_lock(descriptor, kind), ends, f"the lock {path}")
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _until(condition: Callable[[], bool], ends: float, what: str) -> None:
    while not condition():
        if time.monotonic() > ends:
            from tpupipe.errors import ClusterError  # here, because the guard itself runs without the package

            raise ClusterError(f"waited in vain for {what}.", waited_for=what)
        time.sleep(_POLL_S)


def _guard_pid(folder: Path) -> int | None:
    """Process id of the live guard of ``folder``: the one in the file, believed only while the file is locked."""
    try:
        descriptor = os.open(folder / "guard.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.read(descriptor, 32).decode().strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


# -- the guard process -----------------------------------------------------------------------------


def _main() -> int:
    """Detaches, runs the command and minds it. Standard input: one JSON object (see ``_start``)."""
    launch = json.load(sys.stdin)
    folder = Path(launch["folder"])
    own = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(own, fcntl.LOCK_EX)
    os.setsid()
    ready, tell = os.pipe()
    if os.fork():
        # The lock belongs to the open file, so it stays with the child. Leaving only after the child has written its
        # id means that whoever started us finds it there.
        os.close(tell)
        os.read(ready, 1)
        return 0
    os.ftruncate(own, 0)
    os.pwrite(own, str(os.getpid()).encode(), 0)
    os.write(tell, b"x")
    os.close(tell)
    os.close(ready)
    log = os.open(folder / "child.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for standard, target in ((0, null), (1, log), (2, log)):
        os.dup2(target, standard)
    return _mind(launch, folder)


def _mind(launch: dict[str, Any], folder: Path) -> int:
    child = subprocess.Popen(  # noqa: S603 - the command is the caller's
        launch["command"],
        env=launch["environment"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has no other threads yet
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_wait_for_last_user, args=(folder, stop), daemon=True).start()
    threading.Thread(target=_wait_for_child, args=(child, stop), daemon=True).start()
    stop.wait()
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        _signal_group(child.pid, signal.SIGCONT)  # a stopped process ends as promptly as others
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            _signal_group(child.pid, signal.SIGKILL)
            child.wait()
    _signal_group(child.pid, signal.SIGKILL)
    return 0


def _wait_for_last_user(folder: Path, stop: threading.Event) -> None:
    # Never closed: the lock stays ours until this process is gone, so that new users wait for the end of the child.
    descriptor = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    stop.set()


def _wait_for_child(child: subprocess.Popen[bytes], stop: threading.Event) -> None:
    child.wait()
    stop.set()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _die_with_parent() -> None:
    """Runs in the child before its program: an own process group, and SIGTERM if the guard is killed."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main())
