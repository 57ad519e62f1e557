"""Freed memory stays with the process, for the next tensor of its size.

glibc hands large blocks back to the kernel as soon as they are free; the next step's tensors then have to be mapped and
zeroed page by page again. That was a fifth of a training step of a CNN with 1.7 M parameters, and seven eighths of a
copy of its weights. Results do not change, nor does the most that a process ever holds by more than scraps.
"""

from __future__ import annotations

import ctypes
import os

LARGEST = 2**30  # bytes of the largest block that is kept, and of what is kept free at the heap's end
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep() -> None:
    """For this process and from now on; nothing where the C library is another one or the user has set it up."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not any(name in os.environ for name in OWN):
        for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(parameter, LARGEST)
