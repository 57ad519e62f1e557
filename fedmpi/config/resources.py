"""Check that this machine has the resources that the settings require, without importing torch.

Resources are not checked when a config is loaded, because the config.yaml of a run directory may be read on another
machine.
"""

import os
import platform
import shutil

from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import count_usable_cores
from fedmpi.common.text import locate_key
from fedmpi.config.schema import Settings


def check_threads_and_output_dir(settings: Settings, writes: bool = True) -> None:
    """Check the number of threads and the output directory.

    Args:
        settings: The settings of the run.
        writes: Whether this process writes the run directory; if not, the output directory is not checked.

    Raises:
        UserError: compute.threads exceeds the number of cores, or the output directory is a file or not writable.
    """
    threads = settings.compute.threads
    if threads > (available := count_usable_cores()):
        where = _key_location(settings, "compute.threads")
        raise UserError(
            f"{where}: {threads} is not allowed; must be at most {available}, the number of cores available to this "
            "process; lower it, or give each rank more cores (mpirun --bind-to none, srun --cpus-per-task)"
        )
    if writes:
        _check_output_directory(settings)


def check_compiler(gpu: bool) -> None:
    """Raise UserError if this host lacks the compiler that torch.compile needs: C++ for a CPU, C for a GPU."""
    variable, usual = ("CC", ("gcc", "clang")) if gpu else ("CXX", ("g++", "clang++"))
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        raise UserError(
            f"compute.compile: true needs a compiler, but host {platform.node()} has no {names[0]}; install it, set "
            f"the environment variable {variable} to another compiler, or set compute.compile: false"
        )


def _check_output_directory(settings: Settings) -> None:
    """Raise UserError if the output directory is a file or not writable."""
    where, output = _key_location(settings, "output"), settings.output
    existing = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))  # in the end `/`
    if not os.path.isdir(existing):
        raise UserError(f"{where}: {existing} is a file; choose another output directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{where}: {existing} is not writable; choose another output directory")


def _key_location(settings: Settings, key: str) -> str:
    """Return "FILE:LINE: KEY" for messages about a key, or only the key if it was not set."""
    return locate_key(settings.origin(key), key)
