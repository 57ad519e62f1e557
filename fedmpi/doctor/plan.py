"""Estimate the memory and the traffic of a run from the shapes of its tensors (`fedmpi plan`).

Data and model are built as in a run; nothing is trained. The memory of a rank has these parts:

    process      the peak memory of this process: Python, torch, data and model
    model        weights, gradients, velocities, copies, broadcast message, server state and optimiser
    rows         uploads that the rank stores at the same time
    state        client state, on the rank that stores the most
    step         activations that a forward pass stores for the backward pass, times two for their gradients

With a GPU, all parts except `process` are in GPU memory, and so are the data; host memory and GPU memory are summed
separately. However, if gloo or MPI sends the messages, the rows of all ranks and the part `model` of rank 0 are in host
memory.
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
    """Estimate the memory and traffic, in bytes, of a run on `ranks` ranks; return a dict that JSON can represent.

    Raises:
        UserError: `fedmpi validate` would reject the config, or this machine has too little memory for rank 0's part of
            a round.
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
    estimate: Estimate = {
        "config": settings.name,
        "ranks": ranks,
        "device": str(device.type),
        "rounds": settings.rounds,
    }
    estimate["cuda"] = settings.compute.device == "cuda"
    return {**estimate, **_estimate_memory(experiment, ranks), "bytes": _estimate_traffic(experiment, ranks)}


def _estimate_memory(experiment: build.Experiment, ranks: int) -> dict[str, dict[str, Parts]]:
    """Return the memory needed by rank 0 and by a rank that trains, in bytes, part by part.

    Returns:
        {kind: {rank: {part: bytes}}}. The kind is "memory" (of the host) and, if there is a GPU, also "gpu_memory"; the
        part "all" is the sum.
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
    part = -(-batch // s.train.accumulate)

    place = "gpu_memory" if on_gpu else "memory"  # memory of the tensors that a rank computes with
    carried = place if gathers_on_gpu else "memory"  # memory of the tensors that are sent
    both = Counter({("memory", "process"): _read_peak_bytes()})
    both += Counter({("gpu_memory", "data"): torch.cuda.memory_allocated() if on_gpu else 0})
    root = Counter({(carried, "model"): needs["rank 0"] - root_rows + optimiser, (carried, "rows"): root_rows})
    trainer = Counter(
        {(place, "model"): needs["a training rank"] - trainer_rows - state, (carried, "rows"): trainer_rows}
    )
    trainer += Counter({(place, "state"): state, (place, "step"): 2 * experiment.net.activation_bytes() * part})
    if ranks == 1 or s.server.trains_clients:  # rank 0 trains, too
        root += trainer
    by_rank = {"rank 0": both + root} | ({} if ranks == 1 else {"a training rank": both + trainer})
    sums: dict[str, dict[str, Parts]] = {}
    for where in ("memory", *(["gpu_memory"] if on_gpu else [])):
        named = {who: {name: n for (at, name), n in parts.items() if at == where} for who, parts in by_rank.items()}
        sums[where] = {who: {**parts, "all": sum(parts.values())} for who, parts in named.items()}
    return sums


def _read_peak_bytes() -> int:
    """Return the peak memory of this process so far, in bytes."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(peak[1]) if peak else 0


def _estimate_traffic(experiment: build.Experiment, ranks: int) -> Estimate:
    """Return rank 0's traffic in bytes, excluding client state that moves between ranks.

    Returns:
        "way": how uploads are gathered (`reduced`, `sharded`, ...); "round" and "run": bytes of the largest round and
        of the whole run, each with "up" (bytes that rank 0 receives) and "down" (bytes that it sends).
    """
    s, messages, members = experiment.settings, experiment.messages, experiment.cohort_size
    way, trainers = memory.predict_gather_mode(experiment, ranks), len(build_data.training_ranks(s, ranks))
    # reduced: each rank that trains sends one 64-bit sum; sharded: rank 0 receives only its share of the columns.
    sums = trainers * 8 / experiment.itemsize  # 64 bits per number
    rows = {"reduced": sums, "masked": sums, "sharded": members / ranks}.get(way, members)
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
def format_estimate(estimate: Estimate) -> list[str]:
    """Return the lines that `fedmpi plan` prints."""
    rows = [("plan", f"{estimate['config']} with {pluralize(estimate['ranks'], 'rank')}, {estimate['device']}")]
    for label, key, beside in (
        ("memory", "memory", ""),
        ("gpu", "gpu_memory", ", plus several hundred MiB for CUDA itself"),
    ):
        for who, parts in estimate.get(key, {}).items():
            sizes = [
                f"{name} {format_bytes(size)}" for name, size in parts.items() if name != "all" and size >= 1 << 10
            ]
            rows += [(label, f"{who}: about {format_bytes(parts['all'])}{beside}"), ("", ", ".join(sizes))]
    if estimate["cuda"] and estimate["device"] == "cpu":
        rows += [("", "estimated on a CPU; run this on a node with a GPU to estimate GPU memory separately")]
    largest, run = estimate["bytes"]["round"], estimate["bytes"]["run"]
    traffic = f"{_format_traffic(largest)} per round on rank 0's connection"
    rows += [("bytes", f"{traffic} (uploads are gathered {estimate['bytes']['way']})")]
    rows += [("", f"{_format_traffic(run)} in {pluralize(estimate['rounds'], 'round')}")]
    return [f"{name:<8}  {text}" for name, text in rows]


def _format_traffic(ways: Estimate) -> str:
    return f"{format_bytes(ways['up'])} up, {format_bytes(ways['down'])} down"
