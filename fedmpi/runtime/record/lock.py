"""One job at a time in a run directory: rank 0 holds a lock from before it reads it until all ranks are at their end.

flock(2) on RUN_DIR/lock, which names who holds it. The lock ends with the process, so none is ever left over. Between
hosts it holds on local disks, NFS since Linux 2.6.12, GPFS, BeeGFS and Lustre mounted with -o flock. Lustre mounted
with -o localflock sees one host alone, and where there are no locks at all a warning says so: there it is up to who
starts the jobs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from fedmpi.common.errors import UserError

NAME = "lock"
HELD = (errno.EWOULDBLOCK, errno.EACCES)
NONE_HERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(directory: Path, private: bool = False) -> Iterator[None]:
    """Hold the directory's lock. Raises UserError, having touched nothing, where another process has it."""
    path = directory / NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o666)
    except OSError as error:
        raise UserError(f"run directory: cannot open {path}: {error.strerror}") from error
    try:
        _take(file, path)
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({**who, "since": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"}).encode(), 0)
        yield
    finally:
        os.close(file)


def _take(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NONE_HERE:
            warnings.warn(
                f"{path}: this file system has no locks ({error.strerror}); see that no second job goes on with this "
                "run while this one lives",
                stacklevel=2,
            )
            return
        if error.errno not in HELD:
            raise UserError(f"run directory: cannot lock {path}: {error.strerror}") from error
        raise UserError(
            f"{path.parent} is in use: {_holder(file)}; nothing was touched. Wait until it has ended, or end it"
        ) from error


def _holder(file: int) -> str:
    try:
        who = json.loads(os.pread(file, 4096, 0))
        return f"process {who['pid']} on host {who['host']} has had it since {who['since']}"
    except (ValueError, KeyError, TypeError):  # it has only just taken it
        return "by a process that has only just started"
