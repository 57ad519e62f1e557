"""Detect a process's rank and the number of ranks in its job from the launcher's environment variables.

Launchers are tried in the order of LAUNCHERS. After them comes env://, i.e. the variables RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT, set by the user or by an operator such as Kubeflow's. If none is found, the job is a single process. A
launcher counts as present only if all variables of its row in LAUNCHERS are set: `srun --mpi=pmi2` also sets PMI_RANK
and `srun --mpi=pmix` also sets PMIX_RANK, although no mpirun is involved.

Variables are inherited: a launcher may run inside another one, or in a shell in which RANK is set. A launcher that
started several processes therefore takes precedence over one that started a single process. If an unsupported launcher
has started several ranks, an error is raised, because each of them would train alone.
Sources: torch.distributed.run, "Environment Variables"; torch.distributed, "Environment variable initialization"; `env`
under Open MPI 5.0 and MPICH 5.0; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; flux-environment(7); MVAPICH2's user guide.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedmpi.comm import network
from fedmpi.common.errors import UserError

ENV_INIT_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Launcher; the variables of rank, size, local rank and local size; other variables that must be set.
LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("TORCHELASTIC_RUN_ID",)),
    ("mpi", tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), ()),
    ("mpi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ()),  # MPICH, Intel MPI
    ("mpi", ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), ()),  # Cray MPICH
    (
        "slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_STEP_ID", "SLURM_NODEID"),
    ),
)
# Launchers that are not supported: variable of the number of ranks, variable of the rank, name of the launcher.
UNSUPPORTED_LAUNCHERS = (
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "Flux"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "LSF's jsrun"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH2"),
    ("PMI_SIZE", "PMI_RANK", "a launcher that speaks PMI-1"),
)
OUTPUT_COLLECTORS = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "SLURM_PROCID",
    *(rank for _, rank, _ in UNSUPPORTED_LAUNCHERS),
)


@dataclass(frozen=True)
class Job:
    """The position of a process among the ranks of a job, and the launcher that started it."""

    launcher: str  # torchrun, mpi, slurm, env:// or single
    rank: int  # 0 .. size-1, over all hosts
    size: int
    local_rank: int  # 0 .. local_size-1, on this host
    local_size: int
    host: str
    # Process id of the parent, read as early as possible: when the parent dies, this process gets another parent.
    parent_pid: int = field(default_factory=os.getppid, compare=False, repr=False)


def detect(env: Mapping[str, str]) -> Job:
    """Return the job that the environment variables `env` describe.

    Raises:
        UserError: an unsupported launcher started several ranks; variables are contradictory, incomplete or not
            numbers; or Slurm allocated several tasks, but only one was started.

    >>> detect({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    ...         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}).size
    4
    """
    launched = detect_launcher(env)
    if launched and launched.size > 1:
        return launched
    if job := detect_env_init(env, launched) or launched:
        return job
    reject_unsupported_launcher(env)
    tasks = read_integer(env, "SLURM_NTASKS") if "SLURM_JOB_ID" in env and "SLURM_NTASKS" in env else 1
    if tasks > 1:
        raise UserError(
            f"Slurm job {env['SLURM_JOB_ID']} has {tasks} tasks (SLURM_NTASKS), but only one process was started: "
            "start it with `srun fedmpi run ...`; if a single process is intended, request --ntasks=1"
        )
    return Job("single", 0, 1, 0, 1, socket.gethostname())


def detect_launcher(env: Mapping[str, str]) -> Job | None:
    """Return the job described by the first launcher in LAUNCHERS whose variables are all in `env`, or None.

    Slurm job steps that have only one task are ignored.
    """
    for launcher, names, others in LAUNCHERS:
        if not env.keys() >= {*names, *others}:
            continue
        if launcher != "slurm":
            numbers = [read_integer(env, name) for name in names]
        elif "PRTE_LAUNCHED" not in env and read_integer(env, names[1]) > 1:  # prterun inherits its step's variables
            per_node = parse_tasks_per_node(env[names[3]])
            numbers = [*(read_integer(env, name) for name in names[:3]), per_node[read_integer(env, "SLURM_NODEID")]]
        else:
            continue
        rank, size, local_rank, local_size = numbers
        return check_rank_below_size(Job(launcher, rank, size, local_rank, local_size, socket.gethostname()), names)
    return None


def detect_env_init(env: Mapping[str, str], launched: Job | None) -> Job | None:
    """Return the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; None if it is a single process.

    LOCAL_RANK and LOCAL_WORLD_SIZE are optional. Without them, MASTER_ADDR = 127.0.0.1 means that all ranks are on this
    host; otherwise each rank is assumed to be the only one on its host. On rank 0 the name "localhost" does not mean a
    single host: Kubeflow's PyTorchJob gives this name to rank 0, and another name to the other ranks.

    Args:
        env: environment variables.
        launched: the job of the launcher that started this single process, or None. If there is such a job, an
            incomplete set of variables is ignored. In a Slurm job, MASTER_ADDR and MASTER_PORT without the other two
            are always ignored, because job scripts often set them for other programs.

    Raises:
        UserError: only some of the variables are set.
    """
    settings = [f"{name}={env[name]}" for name in ENV_INIT_VARIABLES if env.get(name)]
    missing = [name for name in ENV_INIT_VARIABLES if not env.get(name)]
    if not settings or (env.get("WORLD_SIZE") == "1" and env.get("RANK", "0") == "0"):
        return None
    if missing and (launched or (missing[:2] == [*ENV_INIT_VARIABLES[:2]] and "SLURM_JOB_ID" in env)):
        return None
    if missing:
        raise UserError(
            f"{', '.join(settings)} {'are' if len(settings) > 1 else 'is'} set, but not {' and '.join(missing)}: to "
            f"join other ranks (PyTorch's env://), set all of {', '.join(ENV_INIT_VARIABLES)}; for a single process, "
            f"unset {' '.join(each.partition('=')[0] for each in settings)}"
        )
    rank, size = (read_integer(env, name) for name in ENV_INIT_VARIABLES[:2])
    address, _ = read_master_address(env)
    all_here = address.startswith("127.") or (address in ("localhost", "::1") and rank > 0)
    local_rank = read_integer(env, "LOCAL_RANK") if env.get("LOCAL_RANK") else rank * all_here
    least = size if all_here else local_rank + 1
    local_size = read_integer(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else least
    return check_rank_below_size(
        Job("env://", rank, size, local_rank, local_size, socket.gethostname()), ENV_INIT_VARIABLES
    )


def read_master_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port at which rank 0 can be reached, from MASTER_ADDR and MASTER_PORT.

    Raises:
        UserError: one of the two variables is not set, or the port is invalid.
    """
    if not env.get("MASTER_ADDR") or not env.get("MASTER_PORT"):
        raise UserError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not: set both, or start with torchrun"
        )
    port = read_integer(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"environment variable MASTER_PORT: {port} is not allowed; must be a port from 1 to 65535")
    return env["MASTER_ADDR"], port


def reject_unsupported_launcher(env: Mapping[str, str]) -> None:
    """Raise UserError if an unsupported launcher started this process and possibly other processes."""
    rows = [*UNSUPPORTED_LAUNCHERS, ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "an mpirun of an unknown kind")]
    for size, rank, launcher in rows:
        if env.get(size) and read_integer(env, size) > 1:
            raise UserError(
                f"{launcher} started {env[size]} processes ({size}={env[size]}), but fedmpi does not support this "
                f"launcher: each process would train alone.\n"
                f"Start with mpirun, srun or torchrun; or set PyTorch's variables in each process before `fedmpi "
                f"run`:\n    export RANK=${rank} WORLD_SIZE=${size} MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500\n"
                f"If a single process is intended, unset {size}."
            )
    if "PMIX_RANK" in env and ("PRTE_LAUNCHED" in env or "SLURM_STEP_ID" not in env):
        raise UserError(
            f"a PMIx launcher started this process (PMIX_RANK={env['PMIX_RANK']}), but the number of processes cannot "
            "be determined.\nStart with mpirun, srun or torchrun; if a single process is intended, unset PMIX_RANK"
        )


def check_rank_below_size(job: Job, names: tuple[str, ...]) -> Job:
    """Return the job unchanged; raise UserError if its rank is not less than its size.

    names: the environment variables that rank and size were read from, for the error message.
    """
    if job.rank >= job.size:
        raise UserError(
            f"environment variable {names[0]}: {job.rank} is not allowed; must be from 0 to {job.size - 1}, since "
            f"{names[1]}={job.size}"
        )
    return job


def read_integer(env: Mapping[str, str], name: str) -> int:
    """Read an environment variable as an integer; raise UserError if it is not a whole number >= 0."""
    if not env[name].isdigit():
        raise UserError(
            f"environment variable {name}: {env[name]!r} is not allowed; must be a whole number >= 0; correct or "
            "unset it"
        )
    return int(env[name])


def parse_tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's run-length encoding of the number of tasks on each node.

    >>> parse_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


# ---- properties of launchers, and the hosts of a Slurm job ----
def collects_output(job: Job, env: Mapping[str, str]) -> bool:
    """Return whether a launcher collects the output of all hosts on one console.

    mpirun, srun and similar launchers do so, even if they start torchrun on each host.
    """
    return job.launcher in ("mpi", "slurm") or any(name in env for name in OUTPUT_COLLECTORS)


def explain_why_failure_ends_job(job: Job, env: Mapping[str, str]) -> str:
    """Explain why the launcher ends all ranks when one of them dies; "" if it does not end them."""
    if job.launcher == "torchrun":
        return "torchrun ends all ranks of a host when one of them dies (use `mpirun --with-ft ulfm`, or srun)"
    if job.launcher == "mpi" and env.get("OMPI_MCA_mpi_ft_enable") != "1":
        return "mpirun ends all ranks when one of them dies (Open MPI 5 does not with `mpirun --with-ft ulfm`)"
    if job.launcher == "slurm" and env.get("SLURM_KILL_BAD_EXIT") == "1":
        return "srun ends all ranks when one of them dies (start it with --kill-on-bad-exit=0)"
    return ""


def get_first_host(hostlist: str) -> str:
    """Return the first host of a Slurm host list.

    >>> get_first_host("a[01-03,7]n[2,5],b2"), get_first_host("vm,vn")
    ('a01n2', 'vm')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hostlist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else hostlist


def resolve_slurm_node(host: str, env: Mapping[str, str]) -> str:
    """Return an address at which other hosts can reach a Slurm node.

    This is the address to which the node's name resolves or, if other hosts cannot reach that address, the address of
    MASTER_ADDR, which job scripts often set.

    Raises:
        UserError: neither name resolves.
    """
    own = network.resolve_host(host)
    for address in (own, network.resolve_host(env.get("MASTER_ADDR", ""))):
        if not network.is_loopback(address):
            return address
    if own:  # a loopback address, which Debian's /etc/hosts gives to the host itself
        return own
    raise UserError(
        f"host name {host!r} (rank 0's, from Slurm) does not resolve on {socket.gethostname()}.\n"
        f"Add it to DNS or to /etc/hosts of all nodes, set MASTER_ADDR to one of its addresses, or run on one node"
    )
