"""Report on torch, torchvision, GPUs and MPI."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterator
from importlib.util import cache_from_source

from fedmpi.common.errors import UserError
from fedmpi.common.text import count
from fedmpi.doctor.report_rows import WARN, Row, joined

BF16_UNITS = 8  # compute capability (major) from which NVIDIA's GPUs have them


def torch() -> Iterator[Row]:
    """Report torch's version, build, back ends between ranks, and use of the processor."""
    import torch

    hip = getattr(torch.version, "hip", None)
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else f"built with ROCm {hip}" if hip else ""
    yield Row("torch", joined([torch.__version__, built or "built without CUDA or ROCm"]))
    capability, threads = torch.backends.cpu.get_cpu_capability(), count(torch.get_num_threads(), "thread")
    yield Row("torch on cpu", f"uses {capability}; {threads} by itself, compute.threads in a run")
    there = torch.distributed.is_available()
    gloo = there and torch.distributed.is_gloo_available()
    yield Row("gloo", "yes" if gloo else "not in this torch", " " if gloo else WARN)
    nccl = there and torch.distributed.is_nccl_available()
    yield Row("nccl", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this torch")
    # Some installers write no bytecode. Where Python cannot either, each process compiles torch anew, at every start.
    if not os.path.exists(cache_from_source(torch.__file__)):
        place = os.path.dirname(torch.__path__[0])
        text = f"torch's is not in {place}: each rank compiles it at every start, for many seconds; have who may write "
        yield Row("bytecode", f"{text}there do that once: python -m compileall -q {place}", WARN)


def gpus() -> Iterator[Row]:
    """Report the name and memory of each GPU, and whether it has bf16 units."""
    import torch

    from fedmpi.common.host_memory import size_text

    if not torch.cuda.is_available():
        device = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        why = "; a driver is there: this torch cannot use it, or none is given to this job" if device else ""
        yield Row("gpu", f"none that torch can use{why}", WARN if device else " ")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        text = f"{about.name}, {size_text(about.total_memory)}, compute capability {about.major}.{about.minor}"
        yield Row(f"gpu {number}", f"{text}, {'bf16 units' if about.major >= BF16_UNITS else 'no bf16 units'}")


def torchvision() -> Iterator[Row]:
    """Report whether torchvision's own operators were loaded; fedmpi calls none of them."""
    from fedmpi.common import torchvision_compat

    own = not torchvision_compat._declared
    text = "" if own else "its own operators did not load, built for another torch; fedmpi needs none of them"
    yield Row("torchvision", joined([torchvision_compat.torchvision.__version__, text or "with its own operators"]))


def print_mpi() -> None:
    """Print the lines about the MPI that mpi4py loads, as JSON, one by one: it may end the process."""
    for line in _mpi():
        print(f"\n{json.dumps(line)}", flush=True)  # on a line of its own, whatever a library has printed


def _mpi() -> Iterator[Row]:
    """Report the library that mpi4py loads, and what it can do once it is initialised in one process."""
    from fedmpi.comm.backends import mpi

    try:
        MPI = mpi.load()
    except UserError as error:
        yield Row("mpi", str(error).partition("does not load: ")[2] or str(error), WARN)
        return
    text = " ".join(str(MPI.Get_library_version()).rstrip("\0").split())
    yield Row("mpi", f"{text.split(', ')[0][:100].rstrip(',')}, which mpi4py loads")
    yield Row("mpi and gpus", _gpu_aware())
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    level = "" if MPI.Query_thread() >= MPI.THREAD_SERIALIZED else "; with fewer threads than fedmpi asks for"
    yield Row("mpi_init", f"works in one process{level}", WARN if level else " ")
    try:
        MPI.COMM_SELF.Is_revoked()
        yield Row("ulfm", "in this MPI; a lost rank can be done without if started by `mpirun --with-ft ulfm`")
    except (NotImplementedError, MPI.Exception):
        yield Row("ulfm", "not in this MPI: a lost rank ends the job under its mpirun")
    MPI.Finalize()


def _gpu_aware() -> str:
    """Return whether the MPI library is aware of GPUs, by its extension MPIX_Query_..._support."""
    with open("/proc/self/maps") as maps:
        loaded = {row.split()[-1] for row in maps if re.search(r"/lib\w*mpi[^/]*\.so", row)}
    for path in sorted(loaded):
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):
            kinds = [kind for kind in ("cuda", "rocm") if hasattr(library, f"MPIX_Query_{kind}_support")]
            supported = [kind.upper() for kind in kinds if getattr(library, f"MPIX_Query_{kind}_support")()]
            return f"aware of {' and '.join(supported)}" if supported else "not aware of CUDA"
    return "unknown whether it is aware of CUDA"
