"""Report on this machine: Python and its packages, GPUs, launchers and MPI, memory, disks, host name and network.

Other programs are run with a time limit. MPI is tested in a child process, since it may end the process.
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
from fedmpi.comm.launchers import detect, survivors
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import available_bytes, control_groups, size_text, usable_cores
from fedmpi.common.text import count
from fedmpi.common.version import __version__
from fedmpi.doctor import OK, WARN, Row, joined

PACKAGES = ("numpy", "scipy", "scikit-learn", "matplotlib", "safetensors", "pydantic", "torchvision", "mpi4py")
BF16_UNITS = 8  # major compute capability from which NVIDIA's GPUs have bf16 units
LITTLE_BYTES = 100 << 20  # warn if there is less free space
LAUNCHER_S, MPI_S = 5.0, 30.0  # time limits of the programs
# Prefixes of variables that a launcher sets for one rank; programs that start MPI themselves must not inherit them.
OF_A_RANK = ("OMPI_COMM_WORLD_", "OMPI_MCA_mpi_ft", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")


# ---- software ----
def software() -> Iterator[Row]:
    """Report the versions of fedmpi, Python and the packages that fedmpi uses."""
    from fedmpi.runtime.record.metadata import find_git_commit, find_installed_version

    at = find_git_commit(Path(__file__).parent)
    commit = f"commit {at['commit'][:12]}{' with changes' * at['modified']}" if at else ""
    yield Row("fedmpi", joined([__version__, commit]))
    yield Row("python", joined([platform.python_version(), platform.platform()]))
    yield Row("packages", joined(f"{name} {find_installed_version(name) or 'missing'}" for name in PACKAGES))


def torch() -> Iterator[Row]:
    """Report the version of torch, its communication back ends, and the GPUs that it can use."""
    import torch

    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Row("torch", joined([torch.__version__, built, f"uses {torch.backends.cpu.get_cpu_capability()}"]))
    is_there = torch.distributed.is_available()
    has_gloo = is_there and torch.distributed.is_gloo_available()
    yield Row("gloo", "yes" if has_gloo else "not in this torch", OK if has_gloo else WARN)
    has_nccl = is_there and torch.distributed.is_nccl_available()
    yield Row("nccl", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this torch")
    if not torch.cuda.is_available():
        has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        why = "; a driver is there: this torch cannot use it, or none is given to this job" if has_driver else ""
        yield Row("gpu", f"none that torch can use{why}", WARN if has_driver else OK)
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        units = "bf16 units" if about.major >= BF16_UNITS else "no bf16 units"
        yield Row(f"gpu {number}", joined([about.name, size_text(about.total_memory), units]))


# ---- ranks ----
def started() -> Iterator[Row]:
    """Report the launcher and the ranks of this process's job, and how the ranks would find each other."""
    env = os.environ
    try:
        job = detect(env)
    except UserError as error:
        yield Row("started", str(error), WARN)
        return
    if job.size == 1:
        yield Row("started", f"one process ({job.launcher})")
        return
    text = f"{job.size} ranks by {job.launcher}, {job.local_size} on this host"
    yield Row("started", f"{text}; {survivors(job, env) or 'the others outlive a lost rank'}")
    by = f"MASTER_ADDR={env.get('MASTER_ADDR', '')}, MASTER_PORT={env.get('MASTER_PORT', '')}"
    if job.launcher == "mpi":
        by = "MPI: rank 0 broadcasts its addresses"
    elif job.launcher == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
        by = f"Slurm's variables: rank 0 is on the first host of {nodes}"
    yield Row("joins", f"by {by}")


def launchers() -> Iterator[Row]:
    """Report the MPI library that mpi4py loads, and mpirun, srun and torchrun; warn if they do not match."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_RANK)}
    text, problem = run_program([sys.executable, "-m", "mpi4py", "--mpi-lib-version"], MPI_S, env)
    mpi = "" if problem else text.strip().splitlines()[0].split(", ")[0][:100]
    yield Row("mpi", problem or f"{mpi}, which mpi4py loads", WARN if problem else OK)
    if mpi:
        _, problem = run_program([sys.executable, "-m", "mpi4py.bench", "helloworld"], MPI_S, env)
        yield Row("mpi_init", problem or "works in one process", WARN if problem else OK)
    mpirun = launcher("mpirun")
    yield mpirun
    version = re.search(r"\d+\.\d+(\.\d+)?", mpirun.text)
    if mpi and version and (("Open MPI" in mpi) != ("Open MPI" in mpirun.text) or version[0] not in mpi):
        advice = "set MPI4PY_LIBMPI to its libmpi.so, or put the mpirun of that MPI first on PATH"
        yield Row("mpirun", f"is not of the MPI that mpi4py loads, and each rank would be alone: {advice}", WARN)
    yield launcher("srun")
    path = shutil.which("torchrun")
    is_own = path is not None and Path(path).resolve().parent == Path(sys.executable).parent.resolve()
    other = f"of another Python ({path}); its ranks may have other packages: use this one's"
    text = f"of this Python ({path})" if is_own else other if path else "not on PATH"
    yield Row("torchrun", text, OK if is_own or path is None else WARN)


def launcher(name: str) -> Row:
    """Report the path and version of mpirun or srun."""
    path = shutil.which(name)
    if path is None:
        return Row(name, "not on PATH")
    text, problem = run_program([path, "--version"], LAUNCHER_S)
    version = next((line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)), "unknown version")
    return Row(name, problem or f"{version} ({path})", WARN if problem else OK)


def run_program(words: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a program with a time limit.

    The program is run by coreutils' `timeout`, which also ends the program's children, even after this process was
    interrupted. The output is written to a file, since a grandchild might keep a pipe open.

    Args:
        words: the program and its arguments.
        limit_s: time limit in seconds.
        env: environment variables (default: the variables of this process).

    Returns:
        The output, errors included; a description of the problem, "" if the exit code is 0.
    """
    with tempfile.TemporaryFile() as out:
        command = ["timeout", "--signal=KILL", f"{limit_s:g}", *words]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env).returncode
        out.seek(0)
        text = out.read(1 << 20).decode(errors="replace")
    if code in (-9, 137):
        return text, f"gave no answer within {limit_s:g} s"
    last = (text.strip().splitlines() or [""])[-1][:200]
    return text, f"ends with exit code {code}{f': {last}' * bool(last)}" if code else ""


# ---- the machine ----
def processors_and_memory() -> Iterator[Row]:
    """Report the number of usable cores, the free memory, and the memory limit of the control group."""
    yield Row("cores", f"{usable_cores()} usable of {os.cpu_count() or 'unknown'}, {platform.machine()}")
    free, limit = available_bytes(), min((limit for limit, _ in control_groups()), default=None)
    parts = [f"{size_text(free)} free" if free is not None else "free memory unknown"]
    parts += [f"{size_text(limit)} is the limit of the control group"] if limit else []
    yield Row("memory", joined(parts))


def disks() -> Iterator[Row]:
    """Report the free space for temporary files of torch and MPI, and for shared memory between ranks of a host."""
    for name, place in (("temporary", tempfile.gettempdir()), ("shared memory", "/dev/shm")):
        if os.path.isdir(place):
            free = shutil.disk_usage(place).free
            is_little = free < LITTLE_BYTES
            advice = "; little: make room, or name another folder in TMPDIR" if is_little else ""
            yield Row(name, f"{place}, {size_text(free)} free{advice}", WARN if is_little else OK)


def network_names() -> Iterator[Row]:
    """Report the host's name, the address to which it resolves, the network interfaces, and the Slurm job."""
    host, env = socket.gethostname(), os.environ
    address = network.resolve(host)
    yield Row("host", f"{host}, {f'resolves to {address}' if address else 'which does not resolve'}")
    has_others = env.get("SLURM_JOB_NUM_NODES", "1") not in ("", "1")
    if has_others and (network.is_loopback(address) or not network.is_own(address)):
        yield Row("host", "other hosts cannot use this name: export MASTER_ADDR, or set comm.interface", WARN)
    yield Row("interfaces", network.describe())
    if "SLURM_JOB_ID" in env:
        sizes = ((env.get("SLURM_NTASKS", ""), "task"), (env.get("SLURM_JOB_NUM_NODES", ""), "node"))
        numbers = [count(int(number), thing) for number, thing in sizes if number.isdigit()]
        yield Row("slurm", joined([f"inside job {env['SLURM_JOB_ID']}", *numbers]))
