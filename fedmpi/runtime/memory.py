"""Whether an experiment fits into memory: one that does not is refused before it starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedmpi.comm import Job
from fedmpi.common.errors import UserError
from fedmpi.common.host_memory import available_bytes, size_text
from fedmpi.common.text import count
from fedmpi.engine.federation_config import SERVERS
from fedmpi.engine.transport.gather import UNSENT, ChunkPlan, pinned
from fedmpi.flat import linear
from fedmpi.method.base import means_of
from fedmpi.runtime.build_data import training_ranks

if TYPE_CHECKING:
    from fedmpi.runtime.build import Experiment


def memory_needs(
    experiment: Experiment, size: int, gathers_on_gpu: bool, trains_on_gpu: bool = False
) -> dict[str, int]:
    """Return the bytes that each of so many ranks needs, by part.

    Args:
        experiment: the experiment that is to run.
        size: number of ranks.
        gathers_on_gpu: whether rank 0 holds the uploads on its GPU, as with NCCL and in a single process.
        trains_on_gpu: whether clients train on one. If only they do, their uploads go from there to the host.

    Returns:
        "rank 0": gathered uploads, model and server state; "a training rank": uploads, models and client states; of
        this "of which client state", and "of which on the host".
    """
    s, messages, itemsize = experiment.settings, experiment.messages, experiment.itemsize
    rounds, cohort, trainers = range(max(s.rounds, 1)), experiment.cohort_size, len(training_ranks(s, size))
    model, upload = messages.sizes["d"] + messages.sizes["b"], messages.largest_upload()
    announcement = messages.announcement().packing.size
    # Where messages travel in another format, its bytes lie beside the numbers.
    coded = max(messages.upload(t).size for t in rounds) if messages.wire.up else 0
    download = announcement + (messages.announcement().size + model if messages.wire.down else 0)

    # State: of clients that can be drawn, or of all where all are evaluated. Some may lie in files (state.memory).
    evaluated = (
        {*s.evaluate.protocol} - SERVERS or s.evaluate.best.metric is not None or experiment.data.global_test is None
    )
    clients = experiment.data.clients if evaluated else min(experiment.data.clients, len(rounds) * cohort)
    own, twice = -(-clients // trainers), -(-cohort // trainers) * experiment.needs_undo
    limit = experiment.max_states_in_memory if s.checkpoint.every else None
    states = ((own if limit is None else min(own, max(limit, twice))) + twice) * messages.client_state.size

    root_rows, rows = upload_rows(experiment, size)
    through_host = trains_on_gpu and not gathers_on_gpu
    trained_rows, packed = experiment.pack if through_host else rows, experiment.pack if experiment.pack > 1 else 0
    kept_models = 3 + (s.evaluate.best.metric is not None)
    server = itemsize * (root_rows * (upload + coded) + download + kept_models * model + messages.server_state.size)
    trainer = itemsize * (trained_rows * (upload + coded) + download + (6 + 3 * packed) * model + states)
    needs = {
        "rank 0": int(server) + linear.scratch_bytes(round(root_rows), upload, gathers_on_gpu),
        "a training rank": int(trainer),
        "of which client state": itemsize * states,
        "of which on the host": 0,
    }
    if through_host:
        root, mine = int(itemsize * upload * root_rows), int(itemsize * upload * rows)
        model_bytes = itemsize * announcement
        on_host = pinned(mine) + int(itemsize * coded * rows) + pinned(model_bytes)
        needs["of which on the host"] = on_host
        needs["a training rank"] += on_host
        needs["rank 0"] += pinned(model_bytes) - model_bytes + (pinned(root) - root if s.server.trains else 0)
    return needs


def upload_rows(experiment: Experiment, size: int) -> tuple[float, float]:
    """Return how many rows of uploads rank 0 of so many ranks holds, and a rank that trains."""
    way, cohort = upload_way(experiment, size), experiment.cohort_size
    if way == "reduced":
        return (
            1 + 2 * max(sum(map(len, (means_of(experiment.method) or {}).values())), 1),
        ) * 2  # one row, sums in 64 bits
    mine, row = (
        -(-cohort // len(training_ranks(experiment.settings, size))),
        experiment.itemsize * experiment.messages.largest_upload(),
    )
    unsent = min(mine, max(1, UNSENT // max(row, 1)))
    if way == "sharded" and size > 1:
        return cohort / size, cohort / size + unsent
    if size == 1:
        return (3, 0) if way == "streamed" else (cohort, 0)
    return 2 if way == "streamed" else cohort, unsent


def upload_way(experiment: Experiment, size: int) -> str:
    """Return how uploads travel between so many ranks (engine/transport): whole, streamed, sharded or reduced.

    Slots of one block or less are neither added up nor shared out.
    """
    server, means = experiment.settings.server, means_of(experiment.method)
    packings = {experiment.messages.upload(t).packing for t in range(max(experiment.settings.rounds, 1))}
    large = {name for packing in packings for name in ChunkPlan(packing).large}
    if large and server.placement == "sharded" and size > 1:
        return "sharded"
    if large and means is not None and large <= {*means, "_b"}:
        return "reduced" if server.reduce == "local" else "streamed" if experiment.can_stream_sums(size) else "whole"
    return "whole"


def check_job(experiment: Experiment, job: Job, devices: Sequence[torch.device] = ()) -> dict[str, int]:
    """Check that this host has the memory that its ranks need, by what one of them knows. Returns `memory_needs`.

    Args:
        experiment: the experiment that is to run.
        job: how many ranks there are, and how many of them here.
        devices: where each of those here computes; default where this one's model lies.

    Raises:
        UserError: the host, or a GPU of it, has less.
    """
    first, places = max(job.rank - job.local_rank, 0), devices or [experiment.model.w.device] * job.local_size
    gpus = {device for device in places if device.type == "cuda"}
    nccl = experiment.settings.comm.backend in ("auto", "nccl") and len(gpus) == len(places)
    gathers_on_gpu = nccl if job.size > 1 else bool(gpus)
    here = {
        rank: {
            "host": job.host,
            "gpu": str(device) if device.type == "cuda" else "",
            "needs": memory_needs(experiment, job.size, gathers_on_gpu, device.type == "cuda"),
            "free": free(device),
        }
        for rank, device in enumerate(places, first)
    }
    check(here, training_ranks(experiment.settings, job.size), gathers_on_gpu)
    return memory_needs(experiment, job.size, gathers_on_gpu)


def free(device: torch.device) -> dict[str, int | None]:
    """Return the bytes that are free on this host and, if the device is a GPU, on it; None where nothing is known."""
    return {"host": available_bytes(), "gpu": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None}


def check(ranks: Mapping[int, Mapping[str, Any]], trains: Collection[int], gathers_on_gpu: bool) -> None:
    """Check that each host and each GPU has what the ranks there need. The outcome is the same for the same facts.

    Args:
        ranks: rank -> its `host`, its `gpu` (the UUID, if it has one), what it `needs` (`memory_needs`),
            and what is `free` where it is.
        trains: the ranks that train. Models and states of clients lie where such a rank computes.
        gathers_on_gpu: whether rank 0 holds the uploads on its GPU, as with NCCL and in a single process.

    Raises:
        UserError: the first host or GPU that has less.
    """
    parts: dict[tuple[str, str], list[tuple[int, str, int]]] = {}  # (host, its GPU or "") -> who needs how much there
    for rank, each in ranks.items():
        gpu, needs = each.get("gpu", ""), each["needs"]
        if rank == 0:
            place = each["host"], gpu if gathers_on_gpu else ""
            parts.setdefault(place, []).append((rank, "rank 0", needs["rank 0"]))
        if rank in trains:
            on_host = needs["of which on the host"]
            here = rank, "a training rank", needs["a training rank"] - on_host
            parts.setdefault((each["host"], gpu), []).append(here)
            if on_host:
                parts.setdefault((each["host"], ""), []).append((rank, "a training rank", on_host))
    for (host, gpu), those in parts.items():
        needed = sum(nbytes for _, _, nbytes in those)
        free_bytes = [ranks[rank]["free"]["gpu" if gpu else "host"] for rank, _, _ in those]
        has = min((n for n in free_bytes if n is not None), default=None)
        if has is not None and needed > has:
            trainers, gathers = sum(part != "rank 0" for _, part, _ in those), those[0][1] == "rank 0"
            who = " and ".join([*["rank 0"] * gathers, *[count(trainers, "training rank")] * (trainers > 0)])
            needs = ranks[those[0][0]]["needs"]
            server, trainer, state = (
                size_text(needs[part]) for part in ("rank 0", "a training rank", "of which client state")
            )
            all_ = size_text(needed)
            elsewhere = "; comm.backend=gloo gathers the uploads in the memory of the host" * (len(ranks) > 1)
            raise UserError(
                f"memory: {who} on {f'GPU {gpu} of ' if gpu else ''}host {host} need{'s' * (len(those) == 1)} about "
                f"{all_}, but {size_text(has)} are free: rank 0 {server}, a training rank {trainer}, of which {state} "
                "is the state of its clients. Use fewer clients (data.partition.clients, cohort.fraction or "
                "cohort.size), more hosts or GPUs, or a smaller model; or let state.memory (GiB) leave the state of "
                "most clients on disk"
                f"{elsewhere if gpu and gathers else ''}"
            )
