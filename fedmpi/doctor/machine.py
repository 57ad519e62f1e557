"""Report on this machine: Python and its packages, GPUs, processors, memory, disks, names."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedmpi.comm import network
from fedmpi.common.host_memory import available_bytes, control_groups, size_text, usable_cores
from fedmpi.common.text import count
from fedmpi.common.version import __version__
from fedmpi.doctor import WARN, Row, joined

PACKAGES = ("numpy", "scipy", "scikit-learn", "matplotlib", "safetensors", "pydantic", "torchvision", "mpi4py")
BF16_UNITS = 8  # compute capability (major) from which NVIDIA's GPUs have them
LITTLE_BYTES = 100 << 20


def python() -> Iterator[Row]:
    from fedmpi.runtime.record.metadata import git_commit

    at = git_commit(Path(__file__).parent)
    commit = f"commit {at['commit'][:12]}{' with changes' * at['modified']}" if at else ""
    yield Row("fedmpi", joined([__version__, commit]))
    yield Row("python", joined([platform.python_version(), platform.platform()]))


def packages() -> Iterator[Row]:
    from fedmpi.runtime.record.metadata import installed_version

    for name in PACKAGES:
        yield Row(name, installed_version(name) or "not installed")


def torch() -> Iterator[Row]:
    import torch

    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Row("torch", joined([torch.__version__, built, f"uses {torch.backends.cpu.get_cpu_capability()}"]))
    is_there = torch.distributed.is_available()
    has_gloo = is_there and torch.distributed.is_gloo_available()
    yield Row("gloo", "yes" if has_gloo else "not in this torch", " " if has_gloo else WARN)
    has_nccl = is_there and torch.distributed.is_nccl_available()
    yield Row("nccl", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not in this torch")


def gpus() -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        why = "; a driver is there: this torch cannot use it, or none is given to this job" if has_driver else ""
        yield Row("gpu", f"none that torch can use{why}", WARN if has_driver else " ")
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        units = "bf16 units" if about.major >= BF16_UNITS else "no bf16 units"
        yield Row(f"gpu {number}", joined([about.name, size_text(about.total_memory), units]))


def processors() -> Iterator[Row]:
    model = re.search(r"^model name\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    yield Row("cpu", joined([platform.machine(), model[1] if model else ""]))
    yield Row("cores", f"{usable_cores()} usable of {os.cpu_count() or 'unknown'}")


def memory() -> Iterator[Row]:
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    free, limit = available_bytes(), min((limit for limit, _ in control_groups()), default=None)
    parts = [f"{size_text(free)} free" if free is not None else "free memory unknown"]
    parts += [f"{size_text(1024 * int(total[1]))} in all"] if total else []
    parts += [f"{size_text(limit)} is the limit of the control group"] if limit else []
    yield Row("memory", joined(parts))


def disks() -> Iterator[Row]:
    """Report the free space for temporary files of torch and MPI, and for the shared memory of ranks of one host."""
    for name, place in (("temporary", tempfile.gettempdir()), ("shared memory", "/dev/shm")):
        if os.path.isdir(place):
            free = shutil.disk_usage(place).free
            is_little = free < LITTLE_BYTES
            advice = "; little: make room, or name another folder in TMPDIR" if is_little else ""
            yield Row(name, f"{place}, {size_text(free)} free{advice}", WARN if is_little else " ")


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


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
