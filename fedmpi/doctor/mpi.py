"""Report on launchers and MPI. Programs run within a time limit, and MPI in a process of its own, which it may end."""

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

from fedmpi.comm.job import Job
from fedmpi.comm.launchers import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.doctor import OK, WARN, Row

LAUNCHER_S, MPI_S = 5.0, 30.0
# `python -c` looks for modules in the working directory first; a run does so last.
MPI = "import sys; sys.path.append(sys.path.pop(0)); from fedmpi.doctor.mpi import print_library; print_library()"
OF_A_RANK = ("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_ft", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")  # variables of this process


def current_job() -> Job | None:
    """Return this process's place among the ranks; None under a PMIx launcher, which only MPI could ask.

    Raises UserError where the launcher is used wrongly.
    """
    numbers = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID")
    is_unnumbered = "PMIX_RANK" in os.environ and not any(name in os.environ for name in numbers)
    return None if is_unnumbered else detect(os.environ)


def is_silent() -> bool:
    """Return whether another rank makes the report."""
    try:
        job = current_job()
    except UserError:
        return False
    return os.environ["PMIX_RANK"] != "0" if job is None else job.rank != 0


def started() -> Iterator[Row]:
    """Report as what this process was started, and how ranks would find each other."""
    try:
        job = current_job()
    except UserError as error:
        yield Row("started", str(error), WARN)
        return
    if job is None:
        yield Row("started", "by a PMIx launcher, which does not say how many ranks there are", WARN)
    elif job.size == 1:
        yield Row("started", f"one process ({job.launcher})")
    else:
        text = f"{job.size} ranks by {job.launcher}, {job.local_size} on this host"
        yield Row("started", f"{text}; {survivors(job, os.environ) or 'the others outlive a lost rank'}")
        yield Row("joins", _rendezvous(job.launcher, os.environ))


def _rendezvous(launcher: str, env: Mapping[str, str]) -> str:
    if launcher in ("torchrun", "env://"):
        return f"by MASTER_ADDR={env.get('MASTER_ADDR', '')}, MASTER_PORT={env.get('MASTER_PORT', '')}"
    if launcher == "mpi":
        return "by MPI: rank 0 broadcasts its addresses"
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    return f"by Slurm's variables: rank 0 is on the first host of {nodes}"


def launchers() -> Iterator[Row]:
    """Report srun and torchrun; the version of torchrun is that of torch."""
    yield launcher("srun")
    path = shutil.which("torchrun")
    is_own = path is not None and Path(path).resolve().parent == Path(sys.executable).parent.resolve()
    other = f"of another Python ({path}); its ranks may have other packages: use this one's"
    text = f"of this Python ({path})" if is_own else other if path else "not on PATH"
    yield Row("torchrun", text, OK if is_own or path is None else WARN)


def launcher(name: str) -> Row:
    """Report the path of mpirun or srun, and its version."""
    path = shutil.which(name)
    if path is None:
        return Row(name, "not on PATH")
    text, problem = run_program([path, "--version"], LAUNCHER_S)
    version = next((line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)), "unknown version")
    return Row(name, problem or f"{version} ({path})", WARN if problem else OK)


def library() -> Iterator[Row]:
    """Report the MPI that mpi4py loads, asked in a process of its own, and the mpirun on PATH."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_RANK)}
    text, problem = run_program([sys.executable, "-c", MPI], MPI_S, env)
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # of a library, not of ours
            rows.append(Row(*json.loads(line)))
    if problem:
        rows.append(Row("mpi", f"the process that looked at it {problem}", WARN))
    rows.append(launcher("mpirun"))
    yield from rows
    texts = {row.name: row.text for row in rows if row.mark == OK}
    ours, theirs = texts.get("mpi", ""), texts.get("mpirun", "")
    version = re.search(r"\d+\.\d+(\.\d+)?", theirs)
    if ours and version and (("Open MPI" in ours) != ("Open MPI" in theirs) or version[0] not in ours):
        advice = "set MPI4PY_LIBMPI to its libmpi.so, or put the mpirun of that MPI first on PATH"
        yield Row("mpirun", f"is not of the MPI that mpi4py loads, and each rank would be alone: {advice}", WARN)


def print_library() -> None:
    """Print the rows about the MPI that mpi4py loads as JSON, one by one: it may end the process."""
    for row in _library():
        print(f"\n{json.dumps(row)}", flush=True)  # on a line of its own, whatever a library has printed


def _library() -> Iterator[Row]:
    from fedmpi.comm.backends import mpi

    try:
        module = mpi.load()
    except UserError as error:
        yield Row("mpi", str(error).partition("does not load: ")[2] or str(error), WARN)
        return
    version = " ".join(str(module.Get_library_version()).rstrip("\0").split())
    yield Row("mpi", f"{version.split(', ')[0][:100].rstrip(',')}, which mpi4py loads")
    module.Init_thread(module.THREAD_SERIALIZED)
    yield Row("mpi_init", "works in one process")
    try:
        module.COMM_SELF.Is_revoked()
        yield Row("ulfm", "in this MPI: a run can go on without a lost rank under `mpirun --with-ft ulfm`")
    except (NotImplementedError, module.Exception):
        yield Row("ulfm", "not in this MPI: a lost rank ends the job under its mpirun")
    module.Finalize()


def run_program(words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a program; return what it prints, errors included, and what went wrong ("" if it ends with exit code 0).

    The output goes to a file, since a grandchild might keep a pipe open.
    """
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        except OSError as error:
            return "", f"does not start: {error.strerror or error}"
        # The handler of the command ends it at once, and the program with a session of its own would be left over.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = process.wait(limit_s)
            problem = f"ends with exit code {code}" if code else ""  # -15: by signal 15
        except subprocess.TimeoutExpired:
            problem = f"gave no answer within {limit_s:g} s"
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            signal.signal(signal.SIGINT, handler)
        out.seek(0)
        text = out.read(1 << 20).decode(errors="replace")
    last = (text.strip().splitlines() or [""])[-1][:200]
    return text, f"{problem}: {last}" if last and "ends with" in problem else problem
