"""Whether an experiment fits into memory: one that does not is refused before it starts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fedmpi.common.errors import UserError
from fedmpi.common.text import count

if TYPE_CHECKING:  # messages need torch, the sizes of memory do not
    from fedmpi.comm.launchers.job import Job
    from fedmpi.engine.messages import Messages


def available_bytes(root: Path = Path("/")) -> int | None:
    """Free memory of this host, or what its control groups leave to this process, whichever is less; None if nothing is
    known."""
    found = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    return min([*found, *(left for _, left in groups(root))], default=None)


def groups(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, what is left of it) of the control groups above this process that have one, version 1 or 2: Slurm and
    containers set such limits."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        here = Path(path.strip("/"))
        for place in (here, *here.parents):  # of a container's path, the host's, maybe only the top is there
            limit, used = (_number(top / place / name) for name in names)
            if limit is not None and used is not None and limit < 1 << 60:  # version 1 says 2^63 for none
                found.append((limit, limit - used + _cached(top / place)))
    return found


def _number(path: Path) -> int | None:
    said = "".join(_lines(path))
    return int(said) if said.isdigit() else None


def _cached(group: Path) -> int:
    """Bytes of files that count as used and are given up when memory is short."""
    words = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
    return int(words.get("total_inactive_file", words.get("inactive_file", 0)))


def need(
    messages: Messages,
    itemsize: int,
    *,
    cohort: int,
    clients: int,
    trainers: int,
    undoes: bool = False,
    room: int | None = None,
    held: tuple[float, float] | None = None,
    packed: int = 0,
    chooses: bool = False,
) -> dict[str, int]:
    """Bytes that rank 0 needs (gathered uploads, model, server state), that a training rank needs (uploads, models,
    client states), and how many of the latter are client state. `itemsize`: bytes of one entry; `undoes`: the states
    of those who train are kept twice; `room`: the most client rows that a rank holds, the others lying in files;
    `held`: rows of uploads that rank 0, and a training rank, holds, if not all and its clients'; `packed`: the clients
    that it trains at once, each with weights, velocities and gradients; `chooses`: the best model is kept, too."""
    model = messages.sizes["d"] + messages.sizes["b"]
    upload, announcement = messages.largest_upload(), messages.announcement().packing.size
    mine, own = -(-cohort // trainers), -(-clients // trainers)
    rows = own if room is None else min(own, max(room, mine * undoes))
    kept = (rows + mine * undoes) * messages.client_state.size
    root, uploads = held or (cohort, mine)
    wire = messages.wire  # where it is another format, rows and announcement have their bytes beside them
    upload += max(messages.upload(t).size for t in range(max(messages.rounds, 1))) if wire.up else 0
    announcement += messages.announcement().size + model if wire.down else 0
    return {
        "rank 0": int(itemsize * (root * upload + announcement + (3 + chooses) * model + messages.server_state.size)),
        "a training rank": int(itemsize * (uploads * upload + announcement + (6 + 3 * packed) * model + kept)),
        "of which client state": itemsize * kept,
    }


def check(needed: dict[str, int], job: Job, trains: Collection[int], gpu: int | None = None) -> None:
    """Raises UserError where ranks ask for more than there is. trains: the ranks that train.

    A host's first rank speaks for all that train there, rank 0 for itself, too. On a GPU, where models and client
    states lie, each rank speaks for its own training, and one process for the uploads, which lie there, too.
    """
    root = int(job.rank == 0 and (gpu is None or job.size == 1))
    where = "this host" if gpu is None else f"GPU {gpu}"
    if gpu is None:
        trainers = job.local_size - (job.rank == 0 and 0 not in trains) if job.local_rank == 0 else 0
        has = available_bytes()
    else:
        import torch

        trainers, has = int(job.rank in trains), torch.cuda.mem_get_info(gpu)[0]
    asked = needed["rank 0"] * root + needed["a training rank"] * trainers
    if has is not None and asked > has:
        all_, server, trainer, state = (size_text(n) for n in (asked, *needed.values()))
        raise UserError(
            f"memory: {'rank 0 and ' * root}{count(trainers, 'training rank')} on {where} need about {all_}, but "
            f"{size_text(has)} are free: rank 0 {server}, a training rank {trainer}, of which {state} is the state of "
            "its clients. "
            "Use fewer clients (data.partition.clients, cohort.fraction), more hosts, or a smaller model; or let "
            "state.memory (GiB) leave the state of most clients on disk"
        )


def size_text(count: float) -> str:
    """Bytes for people.

    >>> size_text(800), size_text(3 << 29)
    ('800 B', '1.5 GiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    power = 1 if count < 2**20 else 2 if count < 2**30 else 3
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
