"""The rank of this process and the number of ranks, read from the launcher's environment variables.

Launchers are tried in this order: torchrun, MPI (Open MPI, MPICH, Cray MPICH, PMIx), Slurm; else the job is a single
process. A launcher counts as present only if all variables of its row are set: `srun --mpi=pmi2` also sets PMI_RANK and
`srun --mpi=pmix` also sets PMIX_RANK, but neither is an mpirun, and Slurm's own variables say more.
Sources: torch.distributed.run, "Environment Variables"; `env` under Open MPI 5.0 and MPICH 5.0; srun(1), "OUTPUT
ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from fedmpi.comm.launchers.job import Job
from fedmpi.common.errors import UserError

FIELDS = ("rank", "size", "local_rank", "local_size")

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Cray MPICH": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")


def detect(env: Mapping[str, str]) -> Job:
    """The job that `env` describes.

    Raises UserError if Slurm allocated several tasks but only one was started, or if a variable is not a number.

    >>> detect({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    ...         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}).size
    4
    """
    if "TORCHELASTIC_RUN_ID" in env and present(env, TORCHRUN):
        return job("torchrun", env, TORCHRUN)
    for row in MPI.values():
        if present(env, row):
            return job("mpi", env, row)
    if "PMIX_RANK" in env and ("PRTE_LAUNCHED" in env or "SLURM_STEP_ID" not in env):
        return ask_mpi()
    if "SLURM_STEP_ID" in env and present(env, SLURM) and number(env, "SLURM_STEP_NUM_TASKS") > 1:
        return slurm_step(env)
    tasks = number(env, "SLURM_NTASKS") if "SLURM_JOB_ID" in env and "SLURM_NTASKS" in env else 1
    if tasks > 1:
        raise UserError(
            f"{tasks} tasks allocated but world size 1: start it with `srun fedmpi run ...`.\n"
            f"(Slurm job {env['SLURM_JOB_ID']}, SLURM_NTASKS={tasks}; for one process on purpose ask for --ntasks=1.)"
        )
    return Job("single", 0, 1, 0, 1, socket.gethostname())


def present(env: Mapping[str, str], row: tuple[str, ...]) -> bool:
    return all(name in env for name in row)


def job(launcher: str, env: Mapping[str, str], row: tuple[str, ...]) -> Job:
    return Job(
        launcher,
        **{field: number(env, name) for field, name in zip(FIELDS, row, strict=True)},
        host=socket.gethostname(),
    )


def slurm_step(env: Mapping[str, str]) -> Job:
    rank, size, local_rank = (number(env, name) for name in SLURM[:3])
    local_size = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[number(env, "SLURM_NODEID")]
    return Job("slurm", rank, size, local_rank, local_size, socket.gethostname())


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's run-length form.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdigit():
        raise UserError(
            f"environment variable {name} = {env[name]!r}: the launcher should have set a number >= 0; unset it."
        )
    return int(env[name])


def survivors(job: Job, env: Mapping[str, str]) -> str:
    """Why the ranks of `job` cannot outlive one of them, as its launcher ends them all; "" if they can."""
    if job.launcher == "torchrun":
        return "torchrun ends all ranks of a host when one of them dies (use `mpirun --with-ft ulfm`, or srun)"
    if job.launcher == "mpi" and env.get("OMPI_MCA_mpi_ft_enable") != "1":
        return "mpirun ends all ranks when one of them dies (Open MPI 5 does not with `mpirun --with-ft ulfm`)"
    if job.launcher == "slurm" and env.get("SLURM_KILL_BAD_EXIT") == "1":
        return "srun ends all ranks when one of them dies (start it with --kill-on-bad-exit=0)"
    return ""


def ask_mpi() -> Job:
    """The job according to MPI itself: a PMIx launcher (prterun, flux) does not tell a process how many ranks exist."""
    from fedmpi.comm.backends import mpi

    return mpi.identity()
