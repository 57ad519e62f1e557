"""Report on the host without importing a library: processors, memory, limits, disks, names."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from fedmpi.comm import network
from fedmpi.comm.job import Job
from fedmpi.common.host_memory import usable_cores
from fedmpi.common.text import count
from fedmpi.doctor.report_rows import WARN, Row, joined

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")  # names in /proc/cpuinfo
FEW_FILES, LITTLE_BYTES = 256, 100 << 20


def cpu() -> list[Row]:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    model = re.search(r"^model name\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    has = [unit for unit in UNITS if flags and unit in flags[1].split()]
    instructions = " ".join(has) if flags else "instructions unknown"
    threads = joined(f"{name}={os.environ[name]}" for name in THREADS if name in os.environ)
    return [
        Row("cpu", joined([platform.machine(), model[1] if model else "", instructions])),
        Row("cores", f"{usable_cores()} usable of {os.cpu_count() or 'unknown'}"),
        Row("threads", threads or "no variable sets them; fedmpi takes compute.threads"),
    ]


def memory() -> list[Row]:
    from fedmpi.common.host_memory import available_bytes, control_groups, size_text

    total = re.search(r"^MemTotal:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    free, limit = available_bytes(), min((limit for limit, _ in control_groups()), default=None)
    text = [size_text(free) + " free" if free is not None else "free memory unknown"]
    text += [size_text(1024 * int(total[1])) + " in all"] if total else []
    text += [size_text(limit) + " is the control group's limit" if limit else "no limit of a control group"]
    return [Row("memory", joined(text))]


def limits() -> list[Row]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    few = 0 <= files < FEW_FILES
    bound = 0 <= locked < 1 << 30 and os.path.isdir("/sys/class/infiniband")
    advice = f"; a rank may need more than {FEW_FILES}: ulimit -n 4096"
    pinned = "; InfiniBand needs it unlimited: ulimit -l unlimited, for Slurm in its unit's LimitMEMLOCK"
    return [
        Row("open files", _amount(files) + advice * few, WARN if few else " "),
        Row("locked memory", _bytes(locked) + pinned * bound, WARN if bound else " "),
    ]


def temporary() -> list[Row]:
    """Report the free space for temporary files of torch and MPI, and for the shared memory of ranks of one host."""
    lines = []
    for name, place in (("temporary", tempfile.gettempdir()), ("shared memory", "/dev/shm")):
        if os.path.isdir(place):
            free = shutil.disk_usage(place).free
            little = free < LITTLE_BYTES
            advice = "; little: make room, or name another in TMPDIR" if name == "temporary" else "; little for MPI"
            lines.append(Row(name, f"{place}, {_bytes(free)} free{advice * little}", WARN if little else " "))
    return [*lines, *_left_by_mpirun(tempfile.gettempdir())]


def _left_by_mpirun(place: str) -> list[Row]:
    """Report folders of killed mpiruns of Open MPI; a later mpirun with the same process number would not start."""
    names = [name for name in os.listdir(place) if name.startswith("ompi.") and name[5:].isdecimal()]
    left = [name for name in names if not os.path.exists(f"/proc/{name[5:]}")] if os.path.isdir("/proc/self") else []
    advice = f"; an mpirun with such a process number would not start: remove them (rm -r {place}/ompi.NUMBER)"
    text = f"{len(left)} folders of launchers that are gone in {place}{advice}"
    return [Row("left by mpirun", text, WARN)] if left else []


def names(job: Job | None) -> list[Row]:
    """Report the host's name, the address to which it resolves, and the network interfaces."""
    host = socket.gethostname()
    several = job is not None and job.local_size < job.size
    several |= os.environ.get("SLURM_JOB_NUM_NODES", "1") not in ("", "1")
    lines = [Row("interfaces", network.describe())]
    address = network.resolve(host)
    leads_elsewhere = not network.is_loopback(address) and network.is_own(address)
    text = f"{host}, resolves to {address}" if address else f"{host}, which does not resolve"
    if leads_elsewhere or (address and not several):
        return [Row("host", text), *lines]
    advice = (
        "; other hosts cannot use the name: ranks offer the launcher's address and those of the interfaces; if they do "
        "not meet set comm.interface"
    )
    if job and job.launcher == "slurm":
        advice = "; other hosts cannot use the name: add it to DNS or /etc/hosts of all nodes, or export MASTER_ADDR"
    return [Row("host", f"{text}{advice}", WARN), *lines]


def meeting(job: Job | None) -> list[Row]:
    """Report how this rank would find the others."""
    if job is None or job.size == 1:
        return []
    env = os.environ
    if job.launcher in ("torchrun", "env://"):
        host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        address = network.resolve(host)
        where = f"MASTER_ADDR={host}, MASTER_PORT={port}"
        leads = "" if address == host else f", which resolves to {address}" if address else ", which does not resolve"
        return [Row("joins", f"by torch's variables: rank 0 is at {where}{leads}", " " if address else WARN)]
    if job.launcher == "mpi":
        return [Row("joins", "by MPI: rank 0 tells its addresses by a broadcast")]
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    return [Row("joins", f"by Slurm's variables: rank 0 is on the first host of {nodes}")]


def slurm() -> list[Row]:
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return [Row("slurm", "not inside a job")]
    tasks, nodes = env.get("SLURM_NTASKS", ""), env.get("SLURM_JOB_NUM_NODES", "")
    size = [count(int(n), thing) for n, thing in ((tasks, "task"), (nodes, "node")) if n.isdigit()]
    return [Row("slurm", joined([f"inside job {env['SLURM_JOB_ID']}", *size]))]


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _bytes(limit: int) -> str:
    from fedmpi.common.host_memory import size_text

    return "unlimited" if limit == resource.RLIM_INFINITY else size_text(limit)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
