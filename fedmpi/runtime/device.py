"""Choose the device of a rank, and apply the PyTorch settings that affect the last bits of results."""

from __future__ import annotations

import ctypes
import os

import torch

from fedmpi.comm import Job
from fedmpi.common.errors import UserError
from fedmpi.config import Settings, resources

MALLOC_LIMIT_BYTES = 2**30  # largest block of freed memory that the process keeps, and largest sum of all blocks
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_THRESHOLD = -1, -3  # malloc.h
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def choose_device(settings: Settings, job: Job) -> torch.device:
    """Return the device on which this rank computes (compute.device). GPUs are assigned by local rank.

    Raises:
        UserError: compute.device is `cuda`, but this rank trains clients and has no usable GPU.
    """
    requested = settings.compute.device
    if requested == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    # A rank that is only the server needs no GPU.
    trains = job.size == 1 or job.rank > 0 or settings.server.trains_clients
    if requested == "cuda" and trains:
        remedy = "use auto or cpu" if job.rank or job.size == 1 else "use auto or cpu, or server.trains_clients: false"
        raise UserError(f"compute.device is cuda, but {explain_missing_gpu(job.host)}; {remedy}")
    return torch.device("cpu")


def explain_missing_gpu(host: str) -> str:
    """Explain why this process on `host` has no usable GPU, with CUDA's error message if there is one."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return (
            f"PyTorch {torch.__version__} on host {host} was built without CUDA; install a wheel with CUDA "
            "(https://pytorch.org/get-started/locally)"
        )
    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = f" ({(str(error).strip().splitlines() or [type(error).__name__])[0][:200]})"
    return f"host {host} has no usable GPU{reason}"


def configure_numerics(settings: Settings) -> None:
    """Configure threads, TF32, deterministic kernels (section `compute`) and the reuse of freed memory.

    Raises UserError if compute.threads exceeds the number of cores that this process may use.
    """
    resources.check_threads_and_output_dir(settings, writes=False)
    keep_freed_memory()
    torch.set_num_threads(settings.compute.threads)
    # These names work without a warning in every PyTorch since 2.6, and have no effect on a CPU.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.compute.tf32
    torch.backends.cudnn.benchmark = settings.compute.cudnn_benchmark
    if settings.compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory in this process, so that later tensors can reuse it.

    By default glibc returns large blocks to the kernel as soon as they are freed, and the memory of the next tensors
    has to be mapped and zeroed page by page again. For a CNN with 1.7 M parameters this took a fifth of a training step
    and seven eighths of the time to copy its weights. The call has no effect with another C library, or if the user has
    configured malloc by environment variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not any(name in os.environ for name in MALLOC_VARIABLES):
        for parameter in (MALLOPT_MMAP_THRESHOLD, MALLOPT_TRIM_THRESHOLD):
            mallopt(parameter, MALLOC_LIMIT_BYTES)
