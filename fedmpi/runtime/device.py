"""Where a rank computes, and the settings of torch that decide the last bits of results."""

from __future__ import annotations

import os

import torch

from fedmpi.comm import Job
from fedmpi.common import heap
from fedmpi.common.errors import UserError
from fedmpi.config import Settings, machine


def pick_device(settings: Settings, job: Job) -> torch.device:
    """compute.device for this rank: GPUs are dealt out by local rank. Raises UserError if a rank that trains has none,
    though the config asks for it."""
    wanted = settings.compute.device
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    trains = job.size == 1 or job.rank > 0 or settings.server.trains  # else it is a server, which needs no GPU
    if wanted == "cuda" and trains:
        remedy = "use auto or cpu" if job.rank or job.size == 1 else "use auto or cpu, or server.trains: false"
        raise UserError(f"compute.device is cuda, but {why_no_gpu(job.host)}; {remedy}")
    return torch.device("cpu")


def why_no_gpu(host: str) -> str:
    """Say why this process, which is on `host`, has no usable GPU; in the words of CUDA where it has some."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return (
            f"on host {host} this PyTorch ({torch.__version__}) was built without CUDA; install a wheel with it "
            "(https://pytorch.org/get-started/locally)"
        )
    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = f" ({(str(error).strip().splitlines() or [type(error).__name__])[0][:200]})"
    return f"host {host} has no usable GPU{reason}"


def set_numerics(settings: Settings) -> None:
    """Set the threads and kernels that decide the last bits of results, and what becomes of freed memory."""
    machine.check(settings, writes=False)
    heap.keep()
    torch.set_num_threads(settings.compute.threads)
    # These names work without a warning in every PyTorch since 2.6, and have no effect on a CPU.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.compute.tf32
    torch.backends.cudnn.benchmark = settings.compute.cudnn_benchmark
    if settings.compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
