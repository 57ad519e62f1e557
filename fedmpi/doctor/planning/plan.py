"""`fedmpi plan`: what a run on so many ranks would need, from its settings and a few measured seconds.

Memory, of rank 0 and of a rank that trains:
    libraries    what this process holds when data and model are made, without these, and what
                 ending it takes beyond that; never less than a process that only imports them   measured
    data         samples and targets; every rank holds all of them, of sites its own ones            by shapes
    model        weights, gradients, velocities, copies, announcement, server state and optimiser    by shapes
    rows         of uploads: whole, streamed, sharded or reduced, as the run would travel                     by shapes
    state        of clients, on the rank that has most                                               by shapes
    step         what passes, batches and augmentation take beyond that                              measured
and never less than reading the data has taken here. With a GPU all but the libraries lies there, and has a sum of its
own; what rank 0 gathers lies there, too, where NCCL carries it or nothing travels.

Seconds of a round:  announcement + max over ranks of (their clients + evaluation) + last rows + server's step + OWN_S.
Ranks that train on shared cores wait for each other; between hosts NETWORK is assumed.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fedmpi.comm import Job, detect
from fedmpi.comm.base import Solo
from fedmpi.common.errors import UserError
from fedmpi.config import Settings, machine
from fedmpi.data.batches import samples_of
from fedmpi.data.federated import Federated
from fedmpi.doctor.planning import importing, measuring, rehearsal
from fedmpi.engine.federation import Federation
from fedmpi.runtime import build, build_data, memory
from fedmpi.runtime.device import pick_device, set_numerics

NETWORK = 1.25e9  # bytes a second between hosts, where there are several: 10 Gbit/s
SEEN = 20  # rounds whose cohorts are placed
ELSE = 0.25  # relative error beside that of the measurement: caches, checkpoints, whoever else is on the host
STEPS_OWN = 3  # models that a step makes, and the arithmetic has counted: gradient, velocity, upload
OWN_S = 5e-3  # what any round takes: lines, messages, files
Facts = dict[str, Any]


def plan(settings: Settings, ranks: int, hosts: int) -> Facts:
    """The facts, as JSON has them. Raises UserError as `fedmpi validate` does, and where rank 0's part of a round does
    not fit into this machine."""
    imported, ended = importing.measure_import()
    began = time.perf_counter()
    device = _device(settings)
    set_numerics(settings)
    silos = bool(settings.data.silos)
    if silos:
        build_data.site_ranks(settings, ranks)
    data = build_data.siloed(settings, Solo(torch.device("cpu"))) if silos else build_data.partitioned(settings)
    reading_s, reading = time.perf_counter() - began, _most()
    made = build.experiment(settings, data, device)
    here = 0 if made.model.w.is_cuda else _size(made.data) + made.model.w.nbytes
    libraries = max(_held() - here + ended - imported, ended)
    job = Job("single" if ranks == 1 else "mpi", 0, ranks, 0, -(-ranks // hosts), "here")
    memory.check_job(made, replace(job, local_size=min(job.local_size, 2)))
    gathers_on_gpu = made.model.w.is_cuda and (ranks == 1 or settings.comm.backend in ("auto", "nccl"))
    needed = memory.memory_needs(made, ranks, gathers_on_gpu, made.model.w.is_cuda)
    fed = build.federation(made, rehearsal.Nobody(ranks, device), lambda: False)
    before, on_gpu = _held(), _on_gpu(device)
    each = measuring.client(fed)
    per_sample = measuring.evaluation(
        fed.worker, settings.evaluate.batch_size, made.data.global_test or _tests(made.data)
    )
    step, gpu_step = max(_held() - before, 0), _on_gpu(device) - on_gpu
    moved = rehearsal.moved(fed, made.itemsize)
    way = _way(fed)
    rounds = _rehearsed(fed)
    facts: Facts = {"config": settings.name, "ranks": ranks, "hosts": hosts, "device": str(device.type)}
    facts["uploads"] = way
    facts |= _memory(made, job, needed, libraries, (step, gpu_step), reading)
    facts["bytes"] = _bytes(rounds, moved)
    seconds = _seconds(made, fed, each, per_sample, rounds, job)
    facts["seconds"] = {**seconds, "start": reading_s}
    facts["rounds"] = settings.rounds
    facts |= {"threads": settings.compute.threads, "cuda": settings.compute.device == "cuda"}
    return facts


def _device(settings: Settings) -> torch.device:
    """Where this process computes: as a rank that trains would."""
    try:
        return pick_device(settings, detect({}))
    except UserError:
        if settings.compute.device != "cuda":
            raise
        return torch.device("cpu")  # the figures say so


def _tests(data: Federated) -> Any:
    """The largest test split of a client."""
    largest = max(data.test, key=data.test_sizes.__getitem__, default=None)
    return None if largest is None else data.test[largest]


def _rehearsed(fed: Federation) -> list[rehearsal.Round]:
    try:
        return rehearsal.kinds(fed)
    except (UserError, RuntimeError) as error:
        how = "in which clients have made one step, and other ranks' parts of sums are 0"
        raise UserError(f"a round that is rehearsed for the bytes fails, {how}: {error}") from error


def _way(fed: Federation) -> str:
    """whole | streamed | sharded | reduced: how the uploads of round 0 travel."""
    made = rehearsal.way(fed, 0)
    return type(made).__name__.lower()


# ---- memory ----
HOST, GPU = "memory", "gpu_memory"  # keys of the facts
Parts = dict[tuple[str, str], int]  # (HOST or GPU, name) -> bytes


def _memory(
    made: build.Experiment, job: Job, needed: dict[str, int], libraries: int, steps: tuple[int, int], reading: int
) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by part, for rank 0 and a rank that trains: of the host, and of the GPU if this process computes on one.

    `all` is their sum; of the host it is at least what reading data has taken. steps: measured, of host and GPU.
    """
    s, row = made.settings, made.itemsize * made.messages.largest_upload()
    place = GPU if made.model.w.is_cuda else HOST  # of what a rank computes with
    on_host = needed["of which on the host"]
    carried = HOST if on_host else place  # of what travels
    trainers, held = len(build_data.training_ranks(s, job.size)), memory.upload_rows(made, job.size)
    optimiser = {"sgd": 0, "momentum": 1}.get(s.server.optim, 2) * made.itemsize * made.model.layout.size
    whole, state = _size(made.data), needed["of which client state"]
    both: Parts = {(HOST, "libraries"): libraries, (place, "data"): whole // trainers if s.data.silos else whole}
    rows = [int(row * held[0]), on_host or int(row * held[1])]
    root = {(carried, "model"): needed["rank 0"] - rows[0] + optimiser, (carried, "rows"): rows[0]}
    other = needed["a training rank"] - rows[1] - state
    step = steps[place == GPU]
    more = max(step - STEPS_OWN * made.model.w.nbytes, 0)
    trainer = {(place, "model"): other, (carried, "rows"): rows[1], (place, "state"): state, (place, "step"): more}
    if job.size == 1 or s.server.trains:  # it does both
        root = {key: root.get(key, 0) + trainer.get(key, 0) for key in {**root, **trainer}}
    else:
        root[place, "step"] = step  # it evaluates
    found: dict[str, Parts] = {"rank 0": both | root} | ({} if job.size == 1 else {"a training rank": both | trainer})
    if place == GPU:  # libraries of CUDA that the first steps load
        found = {who: parts | {(HOST, "step"): steps[0]} for who, parts in found.items()}
    sums: dict[str, dict[str, dict[str, int]]] = {}
    for where, least in ((HOST, reading), *([(GPU, 0)] if place == GPU else [])):
        named = {who: {name: n for (at, name), n in parts.items() if at == where} for who, parts in found.items()}
        sums[where] = {who: {**parts, "all": max(sum(parts.values()), least)} for who, parts in named.items()}
    return sums


def _on_gpu(device: torch.device) -> int:
    """The most that tensors of this process have held on the device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _size(data: Federated) -> int:
    """Bytes of all samples and targets, each tensor once."""
    whole = {} if data.global_test is None else {0: data.global_test}
    found: dict[int, int] = {}
    for shards in (data.train, data.test, data.validation, whole):
        for x in (each for _, *pair in samples_of(shards) for each in pair):
            for tensor in _tensors(x):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    held = [*vars(x).values()] if hasattr(x, "__dict__") else [getattr(x, name) for name in getattr(x, "__slots__", ())]
    held = [each for one in held for each in (one.values() if isinstance(one, dict) else [one])]
    return [each for each in held if isinstance(each, torch.Tensor)]


def _held() -> int:
    """Bytes of memory that this process holds now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return _most()


def _most() -> int:
    """The most that it has held; without /proc that includes what the process held that started it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- bytes ----
def _bytes(rounds: Sequence[rehearsal.Round], moved: tuple[int, int]) -> Facts:
    """Rank 0's connection: up is what it receives, down what it sends."""
    most = max(rounds, key=lambda each: each.count, default=None)
    kinds = [{"first": r.first, "rounds": r.count, "up": r.received, "down": r.sent} for r in rounds]
    up, down = (sum(getattr(r, way) * r.count for r in rounds) for way in ("received", "sent"))
    usual = {"up": most.received, "down": most.sent} if most else {"up": 0, "down": 0}
    states = {"states_up": moved[1], "states_down": moved[0]} if any(moved) else {}
    return {"round": usual, "run": {"up": up + moved[1], "down": down + moved[0]}, "kinds": kinds, **states}


# ---- seconds ----
def _seconds(
    made: build.Experiment,
    fed: Federation,
    each: measuring.Client,
    per_sample: float,
    rounds: Sequence[rehearsal.Round],
    job: Job,
) -> Facts:
    s, count = made.settings, max(made.settings.rounds, 1)
    sizes, steps = fed.worker.sizes, s.train.steps
    here = [rank for rank in fed.scheduler.ranks if rank < job.local_size]
    on_gpus = fed.worker.model.w.is_cuda or s.compute.device == "cuda"
    crowded = 1.0 if on_gpus else max(len(here) * s.compute.threads / machine.cores(), 1.0)
    busiest = []
    for t in range(min(count, SEEN)):
        load: dict[int, float] = {}
        for k, rank in fed.scheduler.assign(t).items():
            load[rank] = load.get(rank, 0.0) + each.seconds(int(sizes[k]), steps)
        busiest.append(max(load.values()))
    training = fmean(busiest) * crowded
    protocol = s.evaluate.protocol
    tests, test = int(made.data.test_sizes.sum()), made.data.global_test
    whole = len(test) if test is not None else 0
    by_clients = (tests if test is None and "global" in protocol else 0) + tests * ("personal" in protocol)
    by_clients += made.data.clients * whole * ("personal_on_global" in protocol)
    alone = per_sample * (whole * ("global" in protocol) + whole * ("sites" in protocol))
    shared = by_clients * per_sample / len(fed.scheduler.ranks) * crowded
    evaluating = (alone + shared) / s.evaluate.every
    beside = job.size > 1 and 0 not in fed.scheduler.ranks  # rank 0 evaluates while the others train
    rule = sum(r.server_s * r.count for r in rounds) / count
    speed = measuring.bandwidth() if job.size > 1 else 0.0
    network = min(NETWORK, speed) if job.local_size < job.size else speed
    up, down = (sum(getattr(r, way) * r.count for r in rounds) / count for way in ("received", "sent"))
    last_rows = up / made.cohort_size * min(len(fed.scheduler.ranks), made.cohort_size)
    transfer = (down + last_rows) / network if network else 0.0
    every = s.evaluate.every
    both = max(training + shared / every, alone / every) if beside else training + evaluating
    a_round = both + rule + transfer + OWN_S
    error = (each.error * training + ELSE * a_round + (crowded > 1) * ELSE * training) / a_round
    parts = {"training": training, "evaluation": evaluating, "server": rule, "transfer": transfer}
    a_client = {"client_fixed": each.a, "client_more": each.b, "in_steps": each.in_steps}
    return {"round": a_round, "error": error, **parts, "run": a_round * s.rounds, "crowded": crowded, **a_client}
