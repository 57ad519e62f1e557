"""The process that started this one: the launcher, which may die before its ranks do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

PID = os.getppid()  # when fedmpi was imported


def launcher(names: Iterable[str]) -> int:
    """The parent; where that is a script which the launcher started as this rank, the one above it.

    names: the environment variables that hold a rank's number. Who has ours among its own is such a script.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    pid = PID
    with contextlib.suppress(OSError, ValueError, IndexError):  # another user's process, or no /proc
        while mine & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            pid = int(_stat(pid)[1])
    return pid


def alive(pid: int) -> bool:
    """Whether the launcher `pid` is; a process that is dead but not buried is not."""
    if pid == PID and os.getppid() != PID:
        return False
    try:
        return _stat(pid)[0] != "Z"
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # where there is no /proc, the parent's number has to do
    except (OSError, IndexError):
        return True


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process: what follows its name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
