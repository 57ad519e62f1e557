"""Choose the communication back end that suits the devices of all ranks, and give advice on NCCL failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fedmpi.common.errors import UserError

RankDescription = Mapping[str, Any]  # the description of a rank that `describe_rank` returns

# Sources: NVIDIA/nccl, src/os/linux.cc, src/bootstrap.cc and src/transport/p2p.cc; its user guide, "Runtime and MPI
# issues"; NVIDIA/nccl#1066 and #1948; srun(1), --gpu-bind.
NCCL_REMEDY = """\
Possible causes:
- A rank has died meanwhile.
- /dev/shm of a host is full or too small: remove old files /dev/shm/nccl-*, or give a container more memory there \
(docker run --shm-size=1g).
- Each rank sees only its own GPU (--gpus-per-task, --gpu-bind), which prevents peer-to-peer traffic between GPUs: \
start with --gpus-per-node and --ntasks-per-node, or add --gpu-bind=none.
- The network interface is wrong, or a firewall blocks traffic between the hosts: set comm.interface (or \
NCCL_SOCKET_IFNAME) to an interface that leads to the other hosts (`fedmpi doctor` lists the interfaces).
Set NCCL_DEBUG=WARN to see the messages of NCCL itself."""


def describe_rank(backend: str, host: str, device: torch.device) -> dict[str, Any]:
    """Describe this rank, so that all ranks can choose the same communication back end.

    Returns:
        A dictionary with the keys "backend" (comm.backend of the config), "host" (host name), "card" (PCI address of
        the GPU, "" for a CPU) and "nccl" (whether this PyTorch has NCCL).
    """
    return {"backend": backend, "host": host, "card": get_pci_address(device), "nccl": dist.is_nccl_available()}


def get_gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU or of a slice of a GPU (MIG); "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def get_pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, which is the same for all its slices (MIG); "" for a CPU.

    Old versions of PyTorch do not report the address; the UUID of the GPU or slice is then returned instead.
    """
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return get_gpu_uuid(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def choose_backend(backend: str, descriptions: Sequence[RankDescription]) -> str:
    """Return the back end for all ranks: the requested one; for `auto`, nccl if all ranks can use it, otherwise gloo.

    Args:
        backend: comm.backend of this rank's config.
        descriptions: the description of each rank (`describe_rank`).

    Raises:
        UserError: the ranks' configs request different back ends, or NCCL is requested but cannot connect these ranks.
    """
    requested = Counter(description["backend"] for description in descriptions)
    if len(requested) > 1:
        shown = ", ".join(f"{name} on {number}" for name, number in requested.items())
        raise UserError(f"comm.backend differs between ranks ({shown}); start all ranks with the same config.")
    if backend not in ("auto", "nccl"):
        return backend
    problem = _explain_why_not_nccl(descriptions)
    if problem and backend == "nccl":
        raise UserError(f"comm.backend: nccl, but {problem}")
    return "gloo" if problem else "nccl"


def _explain_why_not_nccl(descriptions: Sequence[RankDescription]) -> str:
    """Return why NCCL cannot connect these ranks, and what to do; "" if it can."""
    first_rank_of_gpu: dict[tuple[str, str], int] = {}
    for rank, description in enumerate(descriptions):
        if not description["card"] or not description["nccl"]:
            without_gpu = not description["card"]
            lacks = "computes without a GPU" if without_gpu else "has a PyTorch that was built without NCCL"
            remedy = "give this rank a GPU" if without_gpu else "install a PyTorch with NCCL there"
            return f"rank {rank} on {description['host']} {lacks}.\nSet comm.backend: gloo (or auto), or {remedy}."
        first = first_rank_of_gpu.setdefault((description["host"], description["card"]), rank)
        if first != rank:
            return (
                f"ranks {first} and {rank} share GPU {description['card']} of {description['host']} (or slices of it, "
                "MIG), which NCCL does not support.\nStart one rank fewer and let rank 0 train "
                "(server.trains_clients: true), or set comm.backend: gloo."
            )
    return ""


def shorten_error(error: Exception) -> str:
    """Shorten an error of a process group to its first line and the line after NCCL's "Last error:", if any."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    last = next(iter(str(error).partition("Last error:")[2].strip().splitlines()), "")
    return f"{first}; {last}" if last else first
