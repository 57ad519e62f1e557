"""One job at a time in a run directory: rank 0 holds a lock from before it reads it until all ranks are at their end.

flock(2) on RUN_DIR/lock, which names who holds it. The lock ends with the process, so none is ever left over. Between
hosts it holds on local disks, NFS since Linux 2.6.12, GPFS, BeeGFS and Lustre mounted with -o flock. Where there are
no locks at all a warning says so: there it is up to who starts the jobs.

`inspect` takes a shared lock for a moment to see whether there is a job; a job that starts in that moment tries again.
The package filelock has no shared locks, and does not tell who holds one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError

NAME, MOMENT_S = "lock", 0.2
HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises UserError, having touched nothing, where another process has it."""
    path = directory / NAME
    since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("ab", buffering=0))
            _acquire(file, path)
            file.truncate(0)
            file.write(json.dumps(holder).encode())
        except OSError as error:
            message = f"run directory: cannot write {path}: {error.strerror}; free some space, or choose another output"
            raise UserError(message) from error
        yield


def _acquire(file: FileIO, path: Path) -> None:
    """Lock an open file. It is tried for MOMENT_S, since another process may only look who holds it."""
    until = time.monotonic() + MOMENT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                return warnings.warn(
                    f"{path}: this file system has no locks ({error.strerror}); see that no second job goes on with "
                    "this run while this one lives",
                    stacklevel=4,
                )
            if time.monotonic() > until:
                who = {"pid": "?", "host": "?", "since": "a moment ago", **_holder(path)}
                raise UserError(
                    f"{path.parent} is in use: process {who['pid']} on host {who['host']} has had it since "
                    f"{who['since']}; nothing was touched. Wait until it has ended, or end it"
                ) from error
        time.sleep(0.01)


def inspect(directory: Path) -> tuple[bool | None, dict[str, Any]]:
    """Return whether a job works in this directory, and host, pid and since of this job, or of the last one.

    None instead of True or False: it is not known, as there is no lock file, or the file system has no locks.
    """
    path = directory / NAME
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False, _holder(path)
    except OSError as error:
        return (True if error.errno in HELD and path.exists() else None), _holder(path)


def _holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
