"""Report on launchers and MPI by running them as programs, each within a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedmpi.doctor.report_rows import OK, WARN, Row

LAUNCHER_S, MPI_S = 5.0, 30.0
# `python -c` looks for modules in the working directory first; a run does so last.
MPI = "import sys; sys.path.append(sys.path.pop(0)); from fedmpi.doctor.libraries import print_mpi; print_mpi()"


def run_program(words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a program; return what it prints, errors included, and what went wrong ("" if it ends with exit code 0).

    The output goes to a file, since a grandchild might keep a pipe open.
    """
    with tempfile.TemporaryFile() as out:
        try:
            # A session of its own: its children end with it.
            started = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        except OSError as error:
            return "", f"does not start: {error.strerror or error}"
        # The handler of the command leaves at once, and the program with its own session would be left over.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = started.wait(limit_s)
            if code < 0:
                name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"
                trouble = f"was ended by {name}"
            else:
                trouble = f"ends with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"gave no answer within {limit_s:g} s"
        finally:  # of Ctrl-C, too, which does not reach it
            with contextlib.suppress(OSError):
                os.killpg(started.pid, signal.SIGKILL)
            signal.signal(signal.SIGINT, handler)
        out.seek(0)
        text = out.read(1 << 20).decode(errors="replace")
    last = (text.strip().splitlines() or [""])[-1][:200]
    return text, f"{trouble}{': ' + last if last and 'ends with' in trouble else ''}"


def launcher(name: str) -> Row:
    """Report the path of mpirun or srun, and its version."""
    path = shutil.which(name)
    if path is None:
        return Row(name, "not on PATH")
    text, trouble = run_program([path, "--version"], LAUNCHER_S)
    versions = [line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)]
    if trouble:
        return Row(name, trouble, WARN)
    return Row(name, f"{versions[0]} ({path})" if versions else f"{path}, which does not say its version")


def torchrun() -> Iterator[Row]:
    """Find torchrun, which has no version of its own: it is torch's, of the Python that its first line names."""
    path = shutil.which("torchrun")
    if path is None:
        yield Row("torchrun", "not on PATH")
    elif Path(path).resolve().parent == Path(sys.executable).parent.resolve():
        yield Row("torchrun", f"of this Python ({path})")
    else:
        text = f"of another Python ({path}); its ranks may have other packages: use this one's"
        yield Row("torchrun", text, WARN)


def mpi(env: Mapping[str, str]) -> Iterator[Row]:
    """Ask the MPI that mpi4py loads, in a process of its own, and compare the mpirun on PATH with it.

    env: without variables of a rank, which that process is not.
    """
    text, trouble = run_program([sys.executable, "-c", MPI], MPI_S, env)
    lines = []
    for row in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # of a library, not of ours
            lines.append(Row(*json.loads(row)))
    if trouble:
        lines.append(Row("mpi", f"the process that looked at it {trouble}", WARN))
    lines.append(launcher("mpirun"))
    yield from lines
    texts = {line.name: line.text for line in lines if line.mark == OK}
    ours, theirs = texts.get("mpi", ""), texts.get("mpirun", "")
    version = re.search(r"\d+\.\d+(\.\d+)?", theirs)
    kind = "Open MPI"
    if ours and version and ((kind in ours) != (kind in theirs) or version[0] not in ours):  # each rank would be alone
        advice = "set MPI4PY_LIBMPI to its libmpi.so, or put the mpirun of that MPI first on PATH"
        yield Row("mpirun", f"is not of the MPI that mpi4py loads: {advice}", WARN)
