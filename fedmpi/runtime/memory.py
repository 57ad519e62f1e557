"""Estimate the memory that an experiment needs, and check before it starts that hosts and GPUs have enough."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedmpi.comm import Job
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import format_bytes, get_available_bytes
from fedmpi.common.text import pluralize
from fedmpi.engine.federation_config import SERVER_PROTOCOLS
from fedmpi.engine.transport.gather import MAX_UNSENT_BYTES, ChunkPlan
from fedmpi.flat import linear
from fedmpi.method.base import get_mean_only_slots
from fedmpi.runtime.build_data import training_ranks

if TYPE_CHECKING:
    from fedmpi.runtime.build import Experiment

RANK_0, TRAINING_RANK, CLIENT_STATE = "rank 0", "a training rank", "of which client state"


def estimate_memory(experiment: Experiment, size: int, gathers_on_gpu: bool) -> dict[str, int]:
    """Return the bytes of memory that rank 0 and each training rank need for models, messages and state.

    Args:
        size: The number of ranks.
        gathers_on_gpu: Whether rank 0 stores uploads on its GPU, as with NCCL and in a single process.

    Returns:
        A dict with the keys RANK_0 (bytes on rank 0 for uploads, models and server state), TRAINING_RANK (bytes on a
        training rank for uploads, models and client states) and CLIENT_STATE (the part of these for client states).
    """
    s, messages = experiment.settings, experiment.messages
    model, upload = messages.sizes["d"] + messages.sizes["b"], messages.max_upload_size()
    if messages.upload_format:  # the encoded bytes are in memory together with the numbers
        upload += max(messages.upload_layout(t).size for t in range(max(s.rounds, 1)))
    announcement = messages.broadcast_layout().packing.size
    states = _max_client_states(experiment, size) * messages.client_state.size
    root_rows, trainer_rows = count_upload_rows(experiment, size)
    server_models = 3 + (s.evaluate.best.metric is not None)
    client_models = 6 + 3 * (experiment.clients_per_pass if experiment.clients_per_pass > 1 else 0)
    server = (
        root_rows * upload
        + announcement
        + server_models * model
        + messages.server_state.size
        + messages.rule_state.size
    )
    trainer = trainer_rows * upload + announcement + client_models * model + states
    scratch = linear.scratch_bytes(round(root_rows), messages.max_upload_size(), gathers_on_gpu)
    needs = {
        part: int(experiment.itemsize * n)
        for part, n in ((RANK_0, server), (TRAINING_RANK, trainer), (CLIENT_STATE, states))
    }
    return needs | {RANK_0: needs[RANK_0] + scratch}


def _max_client_states(experiment: Experiment, size: int) -> int:
    """Return the maximum number of client states in the memory of a training rank.

    Only clients that can be sampled, or that have a model to evaluate, have a state in memory.
    """
    s, clients, cohort = experiment.settings, experiment.data.clients, experiment.cohort_size
    evaluated = {*s.evaluate.protocol} - SERVER_PROTOCOLS or s.evaluate.best.metric is not None
    if not evaluated and experiment.data.global_test is not None:
        clients = min(clients, max(s.rounds, 1) * cohort)
    trainers = len(training_ranks(s, size))
    own, twice = -(-clients // trainers), -(-cohort // trainers) * experiment.needs_undo
    limit = experiment.max_states_in_memory if s.checkpoint.every else None  # the other states are in files
    return twice + (own if limit is None else min(own, max(limit, twice)))


def count_upload_rows(experiment: Experiment, size: int) -> tuple[float, float]:
    """Return how many upload rows rank 0 and a training rank have in memory, in a job of `size` ranks."""
    way, cohort = predict_gather_mode(experiment, size), experiment.cohort_size
    if way == "masked":  # one row, and a sum with 64 bits per number
        return (1 + 8 / experiment.itemsize,) * 2
    if way == "reduced":  # one row, and sums with 64 bits per number
        sums = sum(map(len, (get_mean_only_slots(experiment.method) or {}).values()))
        return (2 * (1 + 2 * max(sums, 1)),) * 2
    if size == 1:
        return (3, 0) if way == "streamed" else (cohort, 0)
    mine = -(-cohort // len(training_ranks(experiment.settings, size)))
    unsent = min(mine, max(1, MAX_UNSENT_BYTES // max(experiment.itemsize * experiment.messages.max_upload_size(), 1)))
    if way == "sharded":
        return cohort / size, cohort / size + unsent
    return 2 if way == "streamed" else cohort, unsent


def predict_gather_mode(experiment: Experiment, size: int) -> str:
    """Return how uploads are gathered in a job of `size` ranks, for estimates of memory.

    "whole": rank 0 stores all uploads. "streamed": rank 0 adds uploads up as they arrive. "sharded": each rank stores
    some columns of all uploads. "reduced": each rank adds up the uploads of its own clients. "masked": the
    same, with sums that are masked (privacy.secagg).
    """
    server, means = experiment.settings.server, get_mean_only_slots(experiment.method)
    if experiment.settings.privacy.secagg is not None:
        return "masked"
    packings = {experiment.messages.upload_layout(t).packing for t in range(max(experiment.settings.rounds, 1))}
    large = {name for packing in packings for name in ChunkPlan(packing).large}
    if large and server.placement == "sharded" and size > 1:
        return "sharded"
    if large and means is not None and large <= {*means, "_b"}:
        return "reduced" if server.reduce == "local" else "streamed" if experiment.can_stream_sums(size) else "whole"
    return "whole"


def check_host_memory(experiment: Experiment, job: Job) -> dict[str, int]:
    """Check that this host has enough memory for its ranks, before they connect; return `estimate_memory`'s result.

    Raises:
        UserError: The host or one of its GPUs has too little free memory.
    """
    gpus = 0 if experiment.settings.compute.device == "cpu" else torch.cuda.device_count()
    nccl = experiment.settings.comm.backend in ("auto", "nccl") and gpus >= job.local_size
    gathers_on_gpu = bool(gpus) if job.size == 1 else nccl
    needs, ranks = estimate_memory(experiment, job.size, gathers_on_gpu), dict[int, dict[str, Any]]()
    for local_rank in range(job.local_size):
        device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
        place = {"host": job.host, "gpu": str(device) if gpus else ""}
        ranks[max(job.rank - job.local_rank, 0) + local_rank] = {
            **place,
            "needs": needs,
            "free": measure_free_bytes(device),
        }
    check_memory(ranks, training_ranks(experiment.settings, job.size), gathers_on_gpu)
    return needs


def measure_free_bytes(device: torch.device) -> dict[str, int | None]:
    """Return the free bytes of this host (key "host") and of a GPU (key "gpu"); None if unknown or on a CPU."""
    return {"host": get_available_bytes(), "gpu": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None}


def check_memory(ranks: Mapping[int, Mapping[str, Any]], trains: Collection[int], gathers_on_gpu: bool) -> None:
    """Check that each host and each GPU has enough memory for the ranks that use it.

    All ranks obtain the same result, because it depends only on the arguments.

    Args:
        ranks: A dict from rank to a dict with the rank's `host`, `gpu` ("" without a GPU), `needs` (the result of
            `estimate_memory`) and `free` bytes (the result of `measure_free_bytes`).
        trains: The ranks that train clients.
        gathers_on_gpu: Whether rank 0 stores uploads on its GPU.

    Raises:
        UserError: A host or GPU has too little free memory.
    """
    # (host, GPU or "") -> for each rank that uses it: the kind of rank, bytes needed, bytes free
    places: dict[tuple[str, str], list[tuple[str, int, int | None]]] = {}
    for rank, facts in ranks.items():
        gpu = facts["gpu"]
        parts = [(RANK_0, gpu if gathers_on_gpu else "")] * (rank == 0) + [(TRAINING_RANK, gpu)] * (rank in trains)
        for who, where in parts:
            has = facts["free"]["gpu" if where else "host"]
            places.setdefault((facts["host"], where), []).append((who, facts["needs"][who], has))
    for (host, gpu), those in places.items():
        needed, has = sum(n for _, n, _ in those), min((n for *_, n in those if n is not None), default=None)
        if has is not None and needed > has:
            trainers = sum(who == TRAINING_RANK for who, *_ in those)
            named = [RANK_0] if those[0][0] == RANK_0 else []
            named += [pluralize(trainers, "training rank")] if trainers else []
            raise UserError(
                f"memory: {' and '.join(named)} on {f'GPU {gpu} of ' if gpu else ''}host {host} "
                f"need{'s' * (len(those) == 1)} about {format_bytes(needed)}, but {format_bytes(has)} are free. Use "
                "fewer clients per round (cohort.size), more hosts or GPUs, or a smaller model; or let "
                "client_state.max_gib leave the state of most clients on disk"
            )
