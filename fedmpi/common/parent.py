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
    with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or one that hides other users' processes
        while mine & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            above = int(_stat(pid)[1])
            _stat(above)
            pid = above
    return pid


def alive(pid: int) -> bool:
    """Whether the launcher `pid` is; a process that is dead but not buried is not."""
    if pid == PID:  # where /proc hides it, too: who loses its parent gets another one
        return os.getppid() == PID
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process: what follows its name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
