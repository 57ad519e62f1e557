"""Estimate the memory and the traffic that a run would need, from the shapes of its tensors (`fedmpi plan`).

Data and model are built as in a run; nothing is trained. Parts of the memory of rank 0 and of a rank that trains:
    process      the peak memory of this process: Python, torch, data and model
    model        weights, gradients, velocities, copies, broadcast message, server state and optimiser
    rows         rows of uploads that rank 0, or a rank that trains, stores at the same time
    state        client state, on the rank that stores most
    step         activations that a forward pass stores for the backward pass, times two for their gradients
With a GPU all parts but the process are in GPU memory, which has a sum of its own and also contains the data.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedmpi.comm import Job, detect
from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import format_bytes
from fedmpi.common.text import pluralize
from fedmpi.config import Settings
from fedmpi.runtime import build, build_data, memory
from fedmpi.runtime.device import choose_device, configure_numerics

Estimate = dict[str, Any]
Parts = dict[str, int]  # name -> bytes


def estimate_run(settings: Settings, ranks: int) -> Estimate:
    """Return the memory and bytes that a run on `ranks` ranks would need, as values for JSON.

    Raises:
        UserError: the config is invalid, as for `fedmpi validate`; or rank 0's part of a round does not fit into the
            memory of this machine.
    """
    try:
        device = choose_device(settings, detect({}))
    except UserError:
        if settings.compute.device != "cuda":
            raise
        device = torch.device("cpu")
    configure_numerics(settings)
    silos = bool(settings.data.silos)
    if silos:
        build_data.assign_sites_to_ranks(settings, ranks)
    data = (
        build_data.build_silo_data(settings, SingleProcess(torch.device("cpu")))
        if silos
        else build_data.build_partitioned_data(settings)
    )
    experiment = build.make_experiment(settings, data, device)
    memory.check_host_memory(experiment, Job("single" if ranks == 1 else "mpi", 0, ranks, 0, min(ranks, 2), "here"))
    facts: Estimate = {"config": settings.name, "ranks": ranks, "device": str(device.type), "rounds": settings.rounds}
    facts["cuda"] = settings.compute.device == "cuda"
    return {**facts, **_estimate_memory(experiment, ranks), "bytes": _estimate_traffic(experiment, ranks)}


def _estimate_memory(experiment: build.Experiment, ranks: int) -> dict[str, dict[str, Parts]]:
    """Return the bytes of each part of the memory for rank 0 and for a rank that trains.

    Returns:
        {"memory": of the host, "gpu_memory": if there is a GPU}: {rank: {part: bytes}}; the part "all" is the sum.
    """
    s, on_gpu = experiment.settings, experiment.model.w.is_cuda
    gathers_on_gpu = on_gpu and (ranks == 1 or s.comm.backend in ("auto", "nccl"))
    needs = memory.estimate_memory(experiment, ranks, gathers_on_gpu)
    row, row_counts = (
        experiment.itemsize * experiment.messages.max_upload_size(),
        memory.count_upload_rows(experiment, ranks),
    )
    state, root_rows, trainer_rows = needs["of which client state"], int(row * row_counts[0]), int(row * row_counts[1])
    optimiser = {"sgd": 0, "momentum": 1}.get(s.server.optim, 2) * experiment.itemsize * experiment.model.layout.size
    most = int(experiment.data.train_sizes.max(initial=0))
    batch = most if s.train.batch_size == "full" else min(s.train.batch_size, most)

    place = "gpu_memory" if on_gpu else "memory"  # memory of the tensors that a rank computes with
    carried = place if gathers_on_gpu else "memory"  # memory of the tensors that are sent
    both = Counter({("memory", "process"): _read_peak_bytes()})
    both += Counter({("gpu_memory", "data"): torch.cuda.memory_allocated() if on_gpu else 0})
    root = Counter({(carried, "model"): needs["rank 0"] - root_rows + optimiser, (carried, "rows"): root_rows})
    trainer = Counter(
        {(place, "model"): needs["a training rank"] - trainer_rows - state, (carried, "rows"): trainer_rows}
    )
    trainer += Counter({(place, "state"): state, (place, "step"): 2 * experiment.net.activation_bytes() * batch})
    if ranks == 1 or s.server.trains_clients:  # rank 0 trains, too
        root += trainer
    by_rank = {"rank 0": both + root} | ({} if ranks == 1 else {"a training rank": both + trainer})
    sums: dict[str, dict[str, Parts]] = {}
    for where in ("memory", *(["gpu_memory"] if on_gpu else [])):
        named = {who: {name: n for (at, name), n in parts.items() if at == where} for who, parts in by_rank.items()}
        sums[where] = {who: {**parts, "all": sum(parts.values())} for who, parts in named.items()}
    return sums


def _read_peak_bytes() -> int:
    """Return the peak memory of this process so far in bytes: libraries, data and their loading, model."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(peak[1]) if peak else 0


def _estimate_traffic(experiment: build.Experiment, ranks: int) -> Estimate:
    """Return rank 0's traffic in bytes, without client state that moves between ranks.

    Returns:
        "way": how uploads are gathered; "round" and "run": bytes of the largest round and of the whole run, each with
        "up" (bytes that rank 0 receives) and "down" (bytes that it sends).
    """
    s, messages, members = experiment.settings, experiment.messages, experiment.cohort_size
    way, trainers = memory.choose_gather_mode(experiment, ranks), len(build_data.training_ranks(s, ranks))
    # reduced: each rank that trains sends one 64-bit sum; sharded: rank 0 receives only its share of the columns.
    rows = {"reduced": trainers * 8 / experiment.itemsize, "sharded": members / ranks}.get(way, members)
    up, down = [0], [0]
    for t in range(s.rounds):
        announced = messages.broadcast_layout(messages.groups_in_round(t - 1) if t else None).packing.size
        up.append(int(experiment.itemsize * rows * messages.upload_layout(t).size))
        down.append(experiment.itemsize * (max(ranks - 1, 1) * announced + members * messages.per_client_download.size))
    return {
        "way": way,
        "round": {"up": max(up), "down": max(down)},
        "run": {"up": sum(up), "down": sum(down)},
    }


# ---- output ----
def format_estimate(facts: Estimate) -> list[str]:
    """Return the lines that `fedmpi plan` prints."""
    rows = [("plan", f"{facts['config']} with {pluralize(facts['ranks'], 'rank')}, {facts['device']}")]
    for label, key, beside in (("memory", "memory", ""), ("gpu", "gpu_memory", ", and some hundred MiB of CUDA's own")):
        for who, parts in facts.get(key, {}).items():
            sizes = [
                f"{name} {format_bytes(size)}" for name, size in parts.items() if name != "all" and size >= 1 << 10
            ]
            rows += [(label, f"{who}: about {format_bytes(parts['all'])}{beside}"), ("", ", ".join(sizes))]
    if facts["cuda"] and facts["device"] == "cpu":
        rows += [("", "counted on a CPU: ask on a node with a GPU for the memory of each")]
    largest, run = facts["bytes"]["round"], facts["bytes"]["run"]
    rows += [
        ("bytes", f"{_format_traffic(largest)} a round (rank 0's connection; uploads travel {facts['bytes']['way']})")
    ]
    rows += [("", f"{_format_traffic(run)} in {pluralize(facts['rounds'], 'round')}")]
    return [f"{name:<8}  {text}" for name, text in rows]


def _format_traffic(ways: Estimate) -> str:
    return f"{format_bytes(ways['up'])} up, {format_bytes(ways['down'])} down"
