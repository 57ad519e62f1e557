"""MPI itself, through mpi4py: it is found, initialised and ended here; mpi_comm.py sends and receives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedmpi.comm.job import Job
from fedmpi.common.errors import UserError

# Open MPI's transport btl/ofi sleeps for a second when it is closed: within MPI_Init on a host without such a network.
# It is for one-sided communication, of which there is none here; messages over libfabric go through mtl/ofi. Only under
# Open MPI 5's mpirun, which hands on what its files of parameters say: elsewhere they would no longer count.
NO_SLEEP = "OMPI_MCA_btl", "^ofi"
RANK_0_FIRST_S = 3  # in which the launcher ends the others, so that one rank says what all have found


GUARD = """
left=$3
while sleep 1 && kill -0 $1 2>/dev/null; do
    left=$((left - 1)) said= parent=$2
    [ $left -gt 0 ] || said=$4
    { read -r line < /proc/$1/stat && line=${line##*) } && line=${line#* } && parent=${line%% *}; } 2>/dev/null
    [ $parent = $2 ] || said=$5
    [ -z "$said" ] || { echo "$said" >&2; kill -9 $1; exit; }
done
"""  # of process $1, whose parent is $2, for $3 seconds


NEEDS_MPIRUN = (
    "comm.backend=mpi needs mpirun (or srun --mpi=...); torchrun and the variables RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT go with comm.backend=gloo or nccl."
)
REMEDY = {  # launcher -> advice if it does not belong to the MPI that mpi4py loaded
    "mpi": "Start with the mpirun of that MPI; or make mpi4py load the launcher's: set MPI4PY_LIBMPI to its libmpi.so, "
    "or, with its mpicc on PATH, `pip install --force-reinstall --no-binary mpi4py mpi4py`; or use srun or torchrun.",
    "slurm": "Name the PMI that it speaks, e.g. `srun --mpi=pmix` (`srun --mpi=list` shows which there are), or start "
    "with mpirun inside the allocation, or use comm.backend=gloo.",
    "torchrun": NEEDS_MPIRUN,
    "env://": NEEDS_MPIRUN,
}


def load() -> Any:
    """mpi4py.MPI, not initialised. Raises UserError where mpi4py or its MPI library is missing."""
    if "PRTE_LAUNCHED" in os.environ:
        os.environ.setdefault(*NO_SLEEP)
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # importing MPI must not initialise it
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"started by an MPI launcher, or asked for comm.backend=mpi, but mpi4py does not load: {error}\n"
            f"Install it with `pip install 'fedmpi[mpi]'`, or start with torchrun or srun and comm.backend=gloo."
        ) from error
    return MPI


def world(job: Job, timeout_s: float) -> Any:
    """COMM_WORLD of `job`, initialised.

    Raises UserError if the launcher's MPI is not the one that mpi4py loaded. MPI_Init waits for all ranks and cannot
    be interrupted: past the time-out this process says so and exits.
    """
    if job.launcher in ("torchrun", "env://"):
        raise UserError(REMEDY[job.launcher])
    MPI = load()
    if not MPI.Is_initialized():
        with bounded(job, "MPI_Init, which waits for all ranks", timeout_s):
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
    if MPI.COMM_WORLD.size != job.size:
        raise UserError(
            f"{job.launcher} started {job.size} ranks, but MPI sees {MPI.COMM_WORLD.size}: the MPI that mpi4py loaded "
            f"({library()}) was not started by this launcher.\n{REMEDY[job.launcher]}"
        )
    return MPI.COMM_WORLD


def library() -> str:
    return str(load().Get_library_version()).split(",")[0].splitlines()[0]


def identity() -> Job:
    """The job of this process, according to MPI itself."""
    MPI = load()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return Job("mpi", MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, here.rank, here.size, MPI.Get_processor_name())


def finalize(job: Job, timeout_s: float) -> None:
    MPI = load()
    if not MPI.Is_finalized():
        with bounded(job, "MPI_Finalize, which waits for all ranks", timeout_s):
            MPI.Finalize()


@contextmanager
def bounded(job: Job, where: str, timeout_s: float) -> Iterator[None]:
    """End the process, with a word, if the block takes longer, or if the launcher dies meanwhile.

    Such a call holds the interpreter: no thread of Python runs beside it, and a shell has to look after it.
    """
    who = f"fedmpi [rank {job.rank} on {job.host}]: error: still in {where}"
    words = (f"{who}, after {timeout_s:.0f} s; a rank is dead, hung or was never started", f"{who}; the launcher died")
    pids = (str(os.getpid()), str(job.parent_pid))
    limit_s = max(1, int(timeout_s)) + (RANK_0_FIRST_S if job.rank else 0)
    guard = subprocess.Popen(["sh", "-c", GUARD, "sh", *pids, str(limit_s), *words])
    try:
        yield
    finally:
        guard.terminate()
        guard.wait()
