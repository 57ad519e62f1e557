"""Report on this machine: Python and its packages, GPUs, launchers and MPI, memory, disks, host name and network.

Other programs are run with a time limit. MPI is tested in a child process, which it may kill.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedmpi.comm import network
from fedmpi.comm.launchers import detect, explain_why_failure_ends_job
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import count_usable_cores, format_bytes, get_available_bytes, read_memory_limits
from fedmpi.common.text import pluralize
from fedmpi.common.version import __version__
from fedmpi.doctor import OK, WARN, ReportRow, join_nonempty

PACKAGES = ("numpy", "scipy", "scikit-learn", "matplotlib", "safetensors", "pydantic", "torchvision", "mpi4py")
BF16_UNITS = 8  # major compute capability from which NVIDIA's GPUs have bf16 units
MIN_FREE_BYTES = 100 << 20  # warn if there is less free space
LAUNCHER_TIMEOUT_S, MPI_TIMEOUT_S = 5.0, 30.0  # time limits of the programs
# Prefixes of variables that a launcher sets for a rank; programs that initialise MPI themselves must not inherit them.
RANK_VARIABLE_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_ft", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")


# ---- software ----
def report_software() -> Iterator[ReportRow]:
    """Report the versions of fedmpi, Python and the packages that fedmpi uses."""
    from fedmpi.runtime.record.metadata import find_git_commit, find_installed_version

    at = find_git_commit(Path(__file__).parent)
    commit = f"commit {at['commit'][:12]}{' with changes' * at['modified']}" if at else ""
    yield ReportRow("fedmpi", join_nonempty([__version__, commit]))
    yield ReportRow("python", join_nonempty([platform.python_version(), platform.platform()]))
    yield ReportRow(
        "packages", join_nonempty(f"{name} {find_installed_version(name) or 'missing'}" for name in PACKAGES)
    )


def report_torch_and_gpus() -> Iterator[ReportRow]:
    """Report the version of torch, its communication back ends, and the GPUs that it can use."""
    import torch

    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield ReportRow(
        "torch", join_nonempty([torch.__version__, built, f"uses {torch.backends.cpu.get_cpu_capability()}"])
    )
    is_there = torch.distributed.is_available()
    has_gloo = is_there and torch.distributed.is_gloo_available()
    yield ReportRow("gloo", "yes" if has_gloo else "not in this torch", OK if has_gloo else WARN)
    has_nccl = is_there and torch.distributed.is_nccl_available()
    yield ReportRow("nccl", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this torch")
    if not torch.cuda.is_available():
        has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        why = (
            "; a driver is installed, but this torch cannot use it, or no GPU is assigned to this job"
            if has_driver
            else ""
        )
        yield ReportRow("gpu", f"none that torch can use{why}", WARN if has_driver else OK)
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        units = "bf16 units" if about.major >= BF16_UNITS else "no bf16 units"
        yield ReportRow(f"gpu {number}", join_nonempty([about.name, format_bytes(about.total_memory), units]))


# ---- ranks ----
def report_job() -> Iterator[ReportRow]:
    """Report the launcher and number of ranks of this process's job, and how the ranks would find each other."""
    env = os.environ
    try:
        job = detect(env)
    except UserError as error:
        yield ReportRow("started", str(error), WARN)
        return
    if job.size == 1:
        yield ReportRow("started", f"one process ({job.launcher})")
        return
    text = f"{job.size} ranks by {job.launcher}, {job.local_size} on this host"
    yield ReportRow(
        "started", f"{text}; {explain_why_failure_ends_job(job, env) or 'the other ranks survive a rank failure'}"
    )
    by = f"MASTER_ADDR={env.get('MASTER_ADDR', '')}, MASTER_PORT={env.get('MASTER_PORT', '')}"
    if job.launcher == "mpi":
        by = "MPI: rank 0 broadcasts its addresses"
    elif job.launcher == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
        by = f"Slurm's variables: rank 0 is on the first host of {nodes}"
    yield ReportRow("joins", f"by {by}")


def report_launchers() -> Iterator[ReportRow]:
    """Report the MPI library that mpi4py loads, and mpirun, srun and torchrun; warn if they do not match."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(RANK_VARIABLE_PREFIXES)}
    text, problem = run_program([sys.executable, "-m", "mpi4py", "--mpi-lib-version"], MPI_TIMEOUT_S, env)
    mpi = "" if problem else text.strip().splitlines()[0].split(", ")[0][:100]
    yield ReportRow("mpi", problem or f"{mpi}, which mpi4py loads", WARN if problem else OK)
    if mpi:
        _, problem = run_program([sys.executable, "-m", "mpi4py.bench", "helloworld"], MPI_TIMEOUT_S, env)
        yield ReportRow("mpi_init", problem or "works in one process", WARN if problem else OK)
    mpirun = report_launcher_version("mpirun")
    yield mpirun
    version = re.search(r"\d+\.\d+(\.\d+)?", mpirun.text)
    if mpi and version and (("Open MPI" in mpi) != ("Open MPI" in mpirun.text) or version[0] not in mpi):
        advice = "set MPI4PY_LIBMPI to its libmpi.so, or put the mpirun of that MPI first on PATH"
        yield ReportRow(
            "mpirun", f"does not belong to the MPI that mpi4py loads, so that each rank would run alone: {advice}", WARN
        )
    yield report_launcher_version("srun")
    path = shutil.which("torchrun")
    is_own = path is not None and Path(path).resolve().parent == Path(sys.executable).parent.resolve()
    other = f"belongs to another Python ({path}), whose packages may differ: use the torchrun of this Python"
    text = f"belongs to this Python ({path})" if is_own else other if path else "not on PATH"
    yield ReportRow("torchrun", text, OK if is_own or path is None else WARN)


def report_launcher_version(name: str) -> ReportRow:
    """Report the path and version of mpirun or srun."""
    path = shutil.which(name)
    if path is None:
        return ReportRow(name, "not on PATH")
    text, problem = run_program([path, "--version"], LAUNCHER_TIMEOUT_S)
    version = next((line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)), "unknown version")
    return ReportRow(name, problem or f"{version} ({path})", WARN if problem else OK)


def run_program(words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a program with a time limit.

    The program is run by coreutils' `timeout`, which also terminates the program's children, even if this process is
    interrupted. The output is written to a file, because a grandchild could keep a pipe open.

    Args:
        words: the program and its arguments.
        limit_s: time limit in seconds.
        env: environment variables (default: the variables of this process).

    Returns:
        The output, including stderr; and a description of the problem, or "" if the exit code is 0.
    """
    with tempfile.TemporaryFile() as out:
        command = ["timeout", "--signal=KILL", f"{limit_s:g}", *words]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env).returncode
        out.seek(0)
        text = out.read(1 << 20).decode(errors="replace")
    if code in (-9, 137):
        return text, f"did not answer within {limit_s:g} s"
    last = (text.strip().splitlines() or [""])[-1][:200]
    return text, f"failed with exit code {code}{f': {last}' * bool(last)}" if code else ""


# ---- the machine ----
def report_cores_and_memory() -> Iterator[ReportRow]:
    """Report the number of usable cores, the free memory, and the memory limit of the control group."""
    yield ReportRow("cores", f"{count_usable_cores()} usable of {os.cpu_count() or 'unknown'}, {platform.machine()}")
    free, limit = get_available_bytes(), min((limit for limit, _ in read_memory_limits()), default=None)
    parts = [f"{format_bytes(free)} free" if free is not None else "free memory unknown"]
    parts += [f"{format_bytes(limit)} is the limit of the control group"] if limit else []
    yield ReportRow("memory", join_nonempty(parts))


def report_free_disk_space() -> Iterator[ReportRow]:
    """Report the free space for temporary files of torch and MPI, and for shared memory among a host's ranks."""
    for name, place in (("temporary", tempfile.gettempdir()), ("shared memory", "/dev/shm")):
        if os.path.isdir(place):
            free = shutil.disk_usage(place).free
            is_little = free < MIN_FREE_BYTES
            advice = "; this is little: free disk space, or set TMPDIR to another folder" if is_little else ""
            yield ReportRow(name, f"{place}, {format_bytes(free)} free{advice}", WARN if is_little else OK)


def report_network() -> Iterator[ReportRow]:
    """Report the host's name, the address to which it resolves, the network interfaces, and the Slurm job."""
    host, env = socket.gethostname(), os.environ
    address = network.resolve_host(host)
    yield ReportRow(
        "host", f"{host}, {f'resolves to {address}' if address else 'which does not resolve to an address'}"
    )
    has_others = env.get("SLURM_JOB_NUM_NODES", "1") not in ("", "1")
    if has_others and (network.is_loopback(address) or not network.is_local_address(address)):
        yield ReportRow(
            "host", "other hosts cannot connect to this name: set the variable MASTER_ADDR, or comm.interface", WARN
        )
    yield ReportRow("interfaces", network.describe_interfaces())
    if "SLURM_JOB_ID" in env:
        sizes = ((env.get("SLURM_NTASKS", ""), "task"), (env.get("SLURM_JOB_NUM_NODES", ""), "node"))
        numbers = [pluralize(int(number), thing) for number, thing in sizes if number.isdigit()]
        yield ReportRow("slurm", join_nonempty([f"inside job {env['SLURM_JOB_ID']}", *numbers]))
