"""Whether this machine can do what the settings ask of it: what a file alone cannot tell, and no library need be
imported for. A run directory's config.yaml may be read on another machine, so loading does not ask."""

import os
import platform
import shutil
import sys
from importlib.util import find_spec

from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import usable_cores
from fedmpi.common.text import shorten
from fedmpi.config.schema import Settings


def check(settings: Settings, writes: bool = True) -> None:
    """What asks more than there is.

    Args:
        writes: whether this process is the one that writes the run directory.

    Raises:
        UserError: more threads than cores; an output that is a file or that cannot be written to.
    """
    threads = settings.compute.threads
    if threads > (most := usable_cores()):
        raise UserError(
            f"{_at(settings, 'compute.threads')}: {threads} is not allowed; this process may use {most} core(s): "
            "lower it, or give each rank more (mpirun --bind-to none, srun --cpus-per-task)"
        )
    if writes:
        _check_output(settings)


def compiler(gpu: bool) -> None:
    """UserError if torch.compile, which makes C++ for a CPU and, by Triton, C for a GPU, would find no compiler at the
    first step."""
    needs, host = "compute.compile: true needs", f"host {platform.node()}"
    if gpu and find_spec("triton") is None:
        raise UserError(
            f"{needs} Triton on a GPU, and {host} has none; pip install triton, or set compute.compile: false"
        )
    variable, language = ("CC", "C") if gpu else ("CXX", "C++")
    usual = ("gcc", "clang") if gpu else ("clang++" if sys.platform == "darwin" else "g++",)
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        raise UserError(
            f"{needs} a {language} compiler, and {host} has no {names[0]}; install it, name another one in the "
            f"environment variable {variable}, or set compute.compile: false"
        )


def _check_output(settings: Settings) -> None:
    where, output = _at(settings, "output"), settings.output
    above = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))  # `/` if nothing else
    if not os.path.isdir(above):
        raise UserError(f"{where}: {above} is a file; it must be a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{where}: {above} cannot be written to; choose another output")
    if max(map(len, map(os.fsencode, output.parts)), default=0) > os.pathconf(above, "PC_NAME_MAX"):
        raise UserError(
            f"{where}: {shorten(str(output), 200)} has a part that is too long for a name; choose another output"
        )


def _at(settings: Settings, key: str) -> str:
    origin = settings.origin(key)
    return f"{origin}: {key}" if origin else key
