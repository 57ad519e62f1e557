"""Determine how much memory and how many cores this process may use, given control groups and launchers."""

from __future__ import annotations

import os
from pathlib import Path


def get_available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory this process can still allocate; None if unknown.

    The limits of its control groups are taken into account. root: the directory that contains proc and sys.
    """
    free = [
        int(line.split()[1]) * 1024 for line in _read_lines(root / "proc/meminfo") if line.startswith("MemAvailable:")
    ]
    return min([*free, *(left for _, left in read_memory_limits(root))], default=None)


def read_memory_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (limit, remaining memory), both in bytes, for each control group that limits this process's memory.

    Slurm and containers set such limits, with version 1 or 2 of control groups.
    """
    groups = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        here = Path(path.strip("/"))
        for group in (top / place for place in (here, *here.parents)):  # a container may show only the top group
            limit, used = ("".join(_read_lines(group / name)) for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # version 1 writes 2^63 for no limit
                # Cached files count as used, but the kernel frees them when memory is short.
                cached = dict(line.split()[:2] for line in _read_lines(group / "memory.stat"))
                reclaimable = cached.get("total_inactive_file", cached.get("inactive_file", 0))
                groups.append((int(limit), int(limit) - int(used) + int(reclaimable)))
    return groups


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, which a launcher, a container or Slurm may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_bytes(count: float) -> str:
    """Format a number of bytes with a unit from B to GiB.

    >>> format_bytes(800), format_bytes(3 << 29)
    ('800 B', '1.5 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    power = 1 if count < 2**20 else 2 if count < 2**30 else 3
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
