"""Which back end suits the devices of all ranks, and what may be wrong where NCCL fails."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fedmpi.comm.rendezvous.lookup import line
from fedmpi.common.errors import UserError

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable: 1 lets several ranks share a GPU, from 2.30 on
SHARES_FROM = [2, 30]
Card = Mapping[str, Any]  # of a rank, as `describe` makes it

# Words of NCCL's last error -> what is wrong, and what to do. Sources: NVIDIA/nccl, src/os/linux.cc, src/bootstrap.cc
# and src/transport/p2p.cc; its user guide, "Runtime and MPI issues"; NVIDIA/nccl#1066 and #1948; srun(1), --gpu-bind.
CAUSES = {
    ("/dev/shm", "shared memory", "fallocate"): (
        "/dev/shm of a host is full or too small: remove old files /dev/shm/nccl-*, or give a container more "
        "(docker run --shm-size=1g)"
    ),
    ("invalid device ordinal", "invalid argument", "cuda ipc", "cudaipc", "peer access", "to peer with device"): (
        "each rank sees its own GPU alone (--gpus-per-task, --gpu-bind), which bars peer-to-peer traffic between GPUs: "
        "start with --gpus-per-node and --ntasks-per-node, or add --gpu-bind=none"
    ),
    ("socket", "bootstrap", "connect", "interface", "network", "net/"): (
        "the network interface is wrong, or a firewall is between the hosts: set comm.interface (or "
        "NCCL_SOCKET_IFNAME) to an interface that leads to the other hosts (fedmpi doctor lists them)"
    ),
}


def describe(backend: str, host: str, device: torch.device) -> dict[str, Any]:
    """Describe a rank to the others, which choose a back end together.

    Returns:
        comm.backend of its config; its host; the UUID of its GPU and the PCI address of the GPU's card, "" without a
        GPU; the version of NCCL, [] if this PyTorch has none; whether the user lets ranks share a GPU under NCCL.
    """
    nccl = [*torch.cuda.nccl.version()[:3]] if dist.is_nccl_available() else []
    about = {"backend": backend, "host": host, "gpu": gpu_uuid(device), "card": pci_address(device)}
    return {**about, "nccl": nccl, "shares": os.environ.get(SHARING) == "1"}


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, or of the slice of one (MIG); "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a GPU, which all slices of a card (MIG) share; its UUID where PyTorch does not tell."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return gpu_uuid(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def choose(backend: str, cards: Sequence[Card]) -> str:
    """Choose nccl or gloo, for all ranks alike. Raises UserError if ranks disagree or NCCL would refuse."""
    asked = Counter(card["backend"] for card in cards)
    if len(asked) > 1:
        raise UserError(f"comm.backend differs between ranks: {dict(asked)}; give all ranks one config.")
    if backend not in ("auto", "nccl"):
        return backend
    problem = _why_not_nccl(cards)
    if problem and backend == "nccl":
        raise UserError(f"comm.backend=nccl, but {problem}")
    return "gloo" if problem else "nccl"


def _why_not_nccl(cards: Sequence[Card]) -> str:
    """Why NCCL cannot connect these ranks, and the remedy; "" if it can."""
    for rank, card in enumerate(cards):
        if not card["gpu"]:
            without = sum(not each["gpu"] for each in cards)
            return (
                f"rank {rank} on {card['host']} computes without a GPU ({without} of {len(cards)} ranks).\n"
                "Use comm.backend=gloo (or auto), or give every rank a GPU."
            )
        if not card["nccl"]:
            return (
                f"the PyTorch of rank {rank} on {card['host']} was built without NCCL.\n"
                "Use comm.backend=gloo (or auto), or install a wheel with it (https://pytorch.org/get-started/locally)."
            )
    if all(card["shares"] and card["nccl"] >= SHARES_FROM for card in cards):
        return ""
    seen: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        first = seen.setdefault((card["host"], card["card"]), rank)
        if first != rank:
            how = "share" if cards[first]["gpu"] == card["gpu"] else "have slices (MIG) of"
            version = ".".join(map(str, min(each["nccl"] for each in cards)))
            return (
                f"ranks {first} and {rank} {how} GPU {card['card']} of {card['host']}, which NCCL refuses.\n"
                "Start one rank fewer and let rank 0 train (server.trains=true), or use comm.backend=gloo; "
                f"from NCCL 2.30 on (here: {version}) {SHARING}=1 in the environment of all ranks allows it."
            )
    return ""


def last_error(error: Exception) -> str:
    """The line in which NCCL said why it failed; "" if there is none."""
    return next(iter(str(error).partition("Last error:")[2].strip().splitlines()), "")


def in_brief(error: Exception) -> str:
    """An error of a process group without its stack: its first line and, of NCCL's, the last error."""
    return "; ".join(filter(None, (line(error), last_error(error))))


def nccl_remedy(error: Exception | None = None) -> str:
    """Return the likely causes of a failure of NCCL, each with its remedy, one in a line.

    It is a single cause if NCCL's last error points to one; otherwise all known causes are listed.

    Args:
        error: what NCCL raised; None if it did not answer at all.
    """
    message = last_error(error).lower() if error else ""
    matching = [cause for words, cause in CAUSES.items() if any(word in message for word in words)]
    causes = matching[:1] or ["a rank has died since", *CAUSES.values()]
    return "\n".join([*(f"Maybe {cause}." for cause in causes), "NCCL_DEBUG=WARN shows all that NCCL says."])
