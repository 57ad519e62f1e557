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
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError

NAME, MOMENT_S = "lock", 0.2
HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises UserError, having touched nothing, where another process has it."""
    path = directory / NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"run directory: cannot open {path}: {error.strerror}") from error
    try:
        _acquire(file, path)
        since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
        except OSError as error:
            message = f"run directory: cannot write {path}: {error.strerror}; free some space, or choose another output"
            raise UserError(message) from error
        yield
    finally:
        os.close(file)


def _acquire(file: int, path: Path) -> None:
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
                who = {"pid": "?", "host": "?", "since": "a moment ago", **_holder(file)}
                raise UserError(
                    f"{path.parent} is in use: process {who['pid']} on host {who['host']} has had it since "
                    f"{who['since']}; nothing was touched. Wait until it has ended, or end it"
                ) from error
        time.sleep(0.01)


def inspect(directory: Path) -> tuple[bool | None, dict[str, Any]]:
    """Return whether a job works in this directory, and host, pid and since of this job, or of the last one.

    None instead of True or False: it is not known, as there is no lock file, or the file system has no locks.
    """
    try:
        file = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, {}
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, _holder(file)
    except OSError as error:
        return (True if error.errno in HELD else None), _holder(file)
    finally:
        os.close(file)


def _holder(file: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}
