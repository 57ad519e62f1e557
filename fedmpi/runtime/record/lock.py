"""One job at a time in a run directory: rank 0 holds a lock from before it reads it until all ranks are at their end.

flock(2) on RUN_DIR/lock, which names who holds it. The lock ends with the process, so none is ever left over. Between
hosts it holds on local disks, NFS since Linux 2.6.12, GPFS, BeeGFS and Lustre mounted with -o flock. Lustre mounted
with -o localflock sees one host alone, and where there are no locks at all a warning says so: there it is up to who
starts the jobs.

Who only wants to know whether there is a job (`look`) shares the lock for a moment; a job that begins in that moment
tries once more.
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
        said = json.dumps({**who, "since": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"})
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, said.encode(), 0)
        except OSError as error:
            raise UserError(
                f"run directory: cannot write {path}: {error.strerror}; free some space, or choose another output"
            ) from error
        yield
    finally:
        os.close(file)


def look(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> tuple[bool | None, dict[str, Any]]:
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


def _take(file: int, path: Path) -> None:
    try:
        _now_or_in_a_moment(file)
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


def _now_or_in_a_moment(file: int) -> None:
    """Take it; who only looks is gone in a moment."""
    until = time.monotonic() + MOMENT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


def _holder(file: int) -> str:
    who = _who(file)
    try:
        return f"process {who['pid']} on host {who['host']} has had it since {who['since']}"
    except KeyError:  # it has only just taken it
        return "by a process that has only just started"
