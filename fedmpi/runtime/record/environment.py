"""What a run ran on: environment.json."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmpi.common.redaction import MARK, smells
from fedmpi.common.version import __version__
from fedmpi.config.loading import shown

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "pydantic", "safetensors", "mpi4py")
DRIVER = Path("/proc/driver/nvidia/version")


def describe(launcher: str, backend: str, ranks: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """The contents of environment.json: versions, machine, command.

    Args:
        launcher: torchrun | mpi | slurm | single.
        backend: the communication back end in use.
        ranks: facts about each rank, in order, such as {"host": ..., "device": ...}, with those of `describe_gpu`.
        threads: per rank.
    """
    import torch

    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "directory": os.getcwd(),
        "launcher": launcher,
        "backend": backend,
        "threads": threads,
        "ranks": [{"rank": rank, **facts} for rank, facts in enumerate(ranks)],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "git": git(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"fedmpi": __version__, **{name: installed(name) for name in PACKAGES}},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "mpi": _mpi_library(),
    }


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """What decides the numbers of a rank that computes on a GPU, as far as it is known: UUID, versions, use of TF32.

    Empty for a rank on a CPU.
    """
    import torch

    if device.type != "cuda":
        return {}
    cudnn = torch.backends.cudnn.version()
    facts = {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "driver": _driver(),
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "tf32": _tf32(),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _driver() -> str | None:
    """The version of the NVIDIA driver in the kernel, also that of a container's host."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _tf32() -> dict[str, bool]:
    """Which operations on float32 multiply in TF32."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if not hasattr(cudnn, "conv"):  # before PyTorch 2.9
        return {"matmul": matmul.allow_tf32, "conv": cudnn.allow_tf32, "rnn": cudnn.allow_tf32}
    kinds = {"matmul": matmul, "conv": cudnn.conv, "rnn": cudnn.rnn}  # allow_tf32 raises where the two APIs were mixed
    return {name: kind.fp32_precision == "tf32" for name, kind in kinds.items()}


def command(words: Sequence[str]) -> str:
    """The command line without secrets, in any of its forms: `data.token=abc`, `--token=abc`, `--token abc`.

    >>> command(["fedmpi", "run", "a b.yaml", "data.token=abc", "--token", "abc"])
    "fedmpi run 'a b.yaml' 'data.token=<redacted>' --token '<redacted>'"
    """
    flags = ["", *words]
    hidden = [flag.startswith("-") and "=" not in flag and smells(flag) for flag in flags[:-1]]
    return shlex.join(MARK if hide else shown(word) for word, hide in zip(words, hidden, strict=True))


def git(directory: Path) -> dict[str, Any] | None:
    """The commit of the code in `directory`, and whether tracked files differ from it; None outside of a repository, or
    in one that does not know these files: a project's around its .venv."""
    commit = _output(directory, "rev-parse", "HEAD")
    if not commit or not _output(directory, "ls-files"):
        return None
    return {"commit": commit, "modified": bool(_output(directory, "status", "--porcelain", "--untracked-files=no"))}


def _output(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, errors="replace", timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mpi_library() -> str | None:
    """The version of the MPI library, only if it is in use: asking for it would load MPI."""
    loaded = sys.modules.get("mpi4py.MPI")
    return None if loaded is None else loaded.Get_library_version().split("\n", 1)[0].rstrip("\0").strip()
