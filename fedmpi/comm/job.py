"""Who a process is among the ranks of a job, and the launcher that started it, which may die before its ranks do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

RANK = {  # launcher -> what it calls a rank
    "torchrun": ("RANK",),
    "mpi": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "slurm": ("SLURM_PROCID",),
}


@dataclass(frozen=True)
class Job:
    """Who a process is among the ranks of a job."""

    launcher: str  # torchrun | mpi | slurm | env:// | single
    rank: int  # 0 .. size-1, over all hosts
    size: int
    local_rank: int  # 0 .. local_size-1, on this host
    local_size: int
    host: str
    # The parent of this process, found as early as possible: once it is dead, another process takes its place.
    parent_pid: int = field(default_factory=os.getppid, compare=False, repr=False)

    def launcher_pid(self) -> int:
        return find_launcher(self.parent_pid, RANK.get(self.launcher, ()))


def find_launcher(parent_pid: int, names: Iterable[str]) -> int:
    """Return the pid of the launcher: the parent, or where that is a script of this rank, the process above it.

    Args:
        parent_pid: the parent of this process when it started.
        names: the environment variables that hold a rank's number. A process whose own environment has ours is a
            script that the launcher started as this rank.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    pid = parent_pid
    with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or one that hides other users' processes
        while mine & set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            above = int(_stat(pid)[1])
            _stat(above)
            pid = above
    return pid


def is_alive(pid: int, parent_pid: int) -> bool:
    """Return whether the launcher `pid` lives; a zombie counts as dead."""
    if pid == parent_pid:  # also where /proc hides it: a process that loses its parent gets another one
        return os.getppid() == parent_pid
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """Return state, parent, ... of a process: the fields that follow its name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
