"""Lock a run directory, so that only one job at a time uses it.

Rank 0 locks the directory before it reads any file there, and keeps the lock until all ranks have finished. The lock is
flock(2) on the file RUN_DIR/lock, which contains the host and process id of its holder. The system releases the lock
when the process ends, so no lock is left over. flock works across hosts on NFS since Linux 2.6.12, on GPFS, on BeeGFS,
and on Lustre mounted with -o flock. If a file system does not support locks, a warning is issued, and users must make
sure not to start two jobs in one directory.

`inspect_lock` briefly takes a shared lock to find out whether a job is running; a job that starts at that moment tries
again. The package filelock does not offer shared locks and does not identify the holder of a lock.
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

LOCK_FILE, RETRY_S = "lock", 0.2
LOCKED_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def hold_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory within this context.

    Raises:
        UserError: Another process holds the lock, or the lock file cannot be written.
    """
    path = directory / LOCK_FILE
    since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("ab", buffering=0))
            _acquire_lock(file, path)
            file.truncate(0)
            file.write(json.dumps(holder).encode())
        except OSError as error:
            message = f"run directory: cannot write {path}: {error.strerror}"
            raise UserError(f"{message}; free some disk space, or set output to another directory") from error
        yield


def _acquire_lock(file: FileIO, path: Path) -> None:
    """Lock an open file; retry briefly, because `inspect_lock` in another process may hold the lock for a moment."""
    until = time.monotonic() + RETRY_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in LOCKED_ERRNOS:
                return warnings.warn(
                    f"{path}: this file system has no locks ({error.strerror}); make sure that no second job resumes "
                    "this run while this one is running",
                    stacklevel=4,
                )
            if time.monotonic() > until:
                who = {"pid": "?", "host": "?", "since": "a moment ago", **_read_holder(path)}
                raise UserError(
                    f"{path.parent} is in use by process {who['pid']} on host {who['host']} since {who['since']}; "
                    "nothing was changed. Wait until that process has ended, or stop it"
                ) from error
        time.sleep(0.01)


def inspect_lock(directory: Path) -> tuple[bool | None, dict[str, Any]]:
    """Return whether a job uses this run directory, and which process has or had the lock.

    Returns:
        Whether the directory is in use, or None if there is no lock file or the file system has no locks; and a dict
        with `host`, `pid` and `since` (start time) of the current or last job, {} if unknown.
    """
    path = directory / LOCK_FILE
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False, _read_holder(path)
    except OSError as error:
        return (True if error.errno in LOCKED_ERRNOS and path.exists() else None), _read_holder(path)


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
