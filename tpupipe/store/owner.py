"""Who a driver is, so that another one on the same machine can tell whether it still lives."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """One driver process.

    Attributes:
        host: Name of its machine.
        pid: Its process id.
        boot_id: Identifies the boot of the machine and the namespace that ``pid`` counts in; empty where the system
            does not tell.
        pid_start: When the process started, in the kernel's ticks since boot; 0 where the system does not tell.
        started: When it started to work on the run, seconds since 1970.
        command: What was called, for messages.
    """

    host: str
    pid: int
    boot_id: str
    pid_start: int
    started: float
    command: str

    @classmethod
    def here(cls, command: str | None = None) -> Owner:
        """This process.

        Args:
            command: What was called; by default the command line.
        """
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=_boot_id(),
            pid_start=_pid_start(os.getpid()),
            started=time.time(),
            command=shlex.join(sys.argv) if command is None else command,
        )


def same_machine(one: Owner, other: Owner) -> bool:
    """Whether both are processes of one machine since one boot, so that one may look for the other's process id."""
    return bool(one.boot_id) and (one.host, one.boot_id) == (other.host, other.boot_id)


def is_running(owner: Owner) -> bool:
    """Whether the owner's process exists; call it only on the owner's machine (see ``same_machine``)."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it exists and is somebody else's
    # The number may have been given to another process since.
    return owner.pid_start == 0 or _pid_start(owner.pid) == owner.pid_start


def _boot_id() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        # Containers share the boot, and some the host name, but number their processes separately.
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _pid_start(pid: int) -> int:
    """Field 22 of ``/proc/PID/stat`` (proc(5)); 0 for a process that has ended (a zombie too) or an unknown system."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The second field is the program's name in parentheses, which may itself contain spaces and parentheses.
    state, *fields = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])
