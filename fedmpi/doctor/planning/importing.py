"""Memory that a process takes for its libraries alone, measured by one that imports them and ends.

A build of PyTorch for CUDA takes twice what one for CPUs takes, and a quarter of that only as the process ends, when
the CUDA libraries clean up.
"""

from __future__ import annotations

import functools
import subprocess
import sys

LIMIT_S = 120.0  # a network file system may be slow
IMPORTS = """
import sys
sys.path.append(sys.path.pop(0))  # the working directory comes last
import resource
import fedmpi.runtime.run
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
# A process begins with the memory of the one that forks it, hence a small one in between.
PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True, check=True)
print(done.stdout.split()[-1], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@functools.cache
def measure_import() -> tuple[int, int]:
    """Bytes that a new process holds at most until it has imported what a run imports, and until it has ended; zeros
    where that cannot be measured."""
    command = [sys.executable, "-c", PEAK, sys.executable, "-c", IMPORTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        imported, ended = (1024 * int(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0, 0
    return imported, ended
