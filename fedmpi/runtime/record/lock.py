"""One job at a time in a run directory: rank 0 holds a lock from before it reads it until all ranks are at their end.

flock(2) on RUN_DIR/lock, which names who holds it. The lock ends with the process, so none is ever left over. Between
hosts it holds on local disks, NFS since Linux 2.6.12, GPFS, BeeGFS and Lustre mounted with -o flock. Lustre mounted
with -o localflock sees one host alone, and where there are no locks at all a warning says so: there it is up to who
starts the jobs.

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
NONE_HERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def hold(directory: Path, private: bool = False) -> Iterator[None]:
    """Hold the directory's lock. Raises UserError, having touched nothing, where another process has it."""
    path, until = directory / NAME, time.monotonic() + MOMENT_S
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o666)
    except OSError as error:
        raise UserError(f"run directory: cannot open {path}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NONE_HERE:
                    message = (
                        f"{path}: this file system has no locks ({error.strerror}); see that no second job goes on"
                    )
                    warnings.warn(f"{message} with this run while this one lives", stacklevel=2)
                    break
                if error.errno not in HELD:
                    raise UserError(f"run directory: cannot lock {path}: {error.strerror}") from error
                if time.monotonic() > until:  # who only looks was gone before
                    who, by = _who(file), "by a process that has only just started"
                    if {"pid", "host", "since"} <= who.keys():
                        by = f"process {who['pid']} on host {who['host']} has had it since {who['since']}"
                    message = f"{path.parent} is in use: {by}; nothing was touched. Wait until it has ended, or end it"
                    raise UserError(message) from error
                time.sleep(0.01)
        since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)
        except OSError as error:
            message = f"run directory: cannot write {path}: {error.strerror}; free some space, or choose another output"
            raise UserError(message) from error
        yield
    finally:
        os.close(file)


def inspect(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> tuple[bool | None, dict[str, Any]]:
    """Return whether a job works in this directory, and host, pid and since of this job, or of the last one.

    None instead of True or False: it is not known here, as there is no lock file, or the file system does not show the
    locks of other hosts.
    """
    path = directory / NAME
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, {}
    try:
        who = _who(file)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return (True if error.errno in HELD else None), who
    finally:
        os.close(file)
    elsewhere = who.get("host") != socket.gethostname() and _of_one_host(path, mounts)
    return (None if elsewhere else False), who


def _of_one_host(path: Path, mounts: Path) -> bool:
    """Whether the file system hides the locks of other hosts, as Lustre without -o flock does."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False
    above = {str(place) for place in path.resolve().parents}
    mount = max((row for row in rows if len(row) > 3 and row[1] in above), key=lambda row: len(row[1]), default=None)
    return mount is not None and mount[2] == "lustre" and "flock" not in mount[3].split(",")


def _who(file: int) -> dict[str, Any]:
    try:
        who = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}
