"""One job at a time in a run directory: rank 0 holds a lock from before it reads it until all ranks are at their end.

flock(2) on RUN_DIR/lock, which names who holds it. The lock ends with the process, so none is ever left over. Between
hosts it holds on local disks, NFS since Linux 2.6.12, GPFS, BeeGFS and Lustre mounted with -o flock. Lustre mounted
with -o localflock sees one host alone, and where there are no locks at all a warning says so: there it is up to who
starts the jobs.

Who only wants to know whether there is a job (`inspect`) shares the lock for a moment; a job that begins in that moment
tries once more. The package filelock knows no shared locks, and not who holds one.
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
                    said = f"{path}: this file system has no locks ({error.strerror}); see that no second job goes on"
                    warnings.warn(f"{said} with this run while this one lives", stacklevel=2)
                    break
                if error.errno not in HELD:
                    raise UserError(f"run directory: cannot lock {path}: {error.strerror}") from error
                if time.monotonic() > until:  # who only looks was gone before
                    who, by = _who(file), "by a process that has only just started"
                    if {"pid", "host", "since"} <= who.keys():
                        by = f"process {who['pid']} on host {who['host']} has had it since {who['since']}"
                    said = f"{path.parent} is in use: {by}; nothing was touched. Wait until it has ended, or end it"
                    raise UserError(said) from error
                time.sleep(0.01)
        since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)
        except OSError as error:
            said = f"run directory: cannot write {path}: {error.strerror}; free some space, or choose another output"
            raise UserError(said) from error
        yield
    finally:
        os.close(file)


def inspect(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> tuple[bool | None, dict[str, Any]]:
    """Whether a job works in this directory, and who that is, or was the last one: host, pid, since.

    None: nobody can tell here: there is no such file, or the file system does not show other hosts' locks.
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
    """Whether locks of other hosts are not seen: Lustre without -o flock."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False
    above = {str(place) for place in path.resolve().parents}
    found = max((row for row in rows if len(row) > 3 and row[1] in above), key=lambda row: len(row[1]), default=None)
    return found is not None and found[2] == "lustre" and "flock" not in found[3].split(",")


def _who(file: int) -> dict[str, Any]:
    try:
        who = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}
