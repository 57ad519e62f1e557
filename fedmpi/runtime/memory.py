"""Whether an experiment fits into memory: one that does not is refused before it starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import count

if TYPE_CHECKING:  # messages need torch, the sizes of memory do not
    import torch

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
    scratch: int = 0,
) -> dict[str, int]:
    """Bytes that rank 0 needs (gathered uploads, model, server state), that a training rank needs (uploads, models,
    client states), and how many of the latter are client state. `itemsize`: bytes of one entry; `undoes`: the states
    of those who train are kept twice; `room`: the most client rows that a rank holds, the others lying in files;
    `held`: rows of uploads that rank 0, and a training rank, holds, if not all and its clients'; `packed`: the clients
    that it trains at once, each with weights, velocities and gradients; `chooses`: the best model is kept, too;
    `scratch`: bytes that sums over the rows of rank 0 take for themselves."""
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
        "rank 0": int(itemsize * (root * upload + announcement + (3 + chooses) * model + messages.server_state.size))
        + scratch,
        "a training rank": int(itemsize * (uploads * upload + announcement + (6 + 3 * packed) * model + kept)),
        "of which client state": itemsize * kept,
    }


def free(device: torch.device) -> dict[str, int | None]:
    """Bytes that are free on this host and, if the device is a GPU, on it; None where nothing is known."""
    import torch

    return {"host": available_bytes(), "gpu": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None}


def check(ranks: Mapping[int, Mapping[str, Any]], trains: Collection[int], gathers_on_gpu: bool) -> None:
    """Check that each host and each GPU has what the ranks there need. The outcome is the same for the same facts.

    Args:
        ranks: rank -> its `host`, its `gpu` (the UUID, if it has one), what it `needs` (as `build.memory_needs` says),
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
        asked = sum(nbytes for _, _, nbytes in those)
        known = [ranks[rank]["free"]["gpu" if gpu else "host"] for rank, _, _ in those]
        has = min((n for n in known if n is not None), default=None)
        if has is not None and asked > has:
            trainers, gathers = sum(part != "rank 0" for _, part, _ in those), those[0][1] == "rank 0"
            who = " and ".join([*["rank 0"] * gathers, *[count(trainers, "training rank")] * (trainers > 0)])
            needs = ranks[those[0][0]]["needs"]
            server, trainer, state = (
                size_text(needs[part]) for part in ("rank 0", "a training rank", "of which client state")
            )
            all_ = size_text(asked)
            elsewhere = "; comm.backend=gloo gathers the uploads in the memory of the host" * (len(ranks) > 1)
            raise UserError(
                f"memory: {who} on {f'GPU {gpu} of ' if gpu else ''}host {host} need{'s' * (len(those) == 1)} about "
                f"{all_}, but {size_text(has)} are free: rank 0 {server}, a training rank {trainer}, of which {state} "
                "is the state of its clients. Use fewer clients (data.partition.clients, cohort.fraction or "
                "cohort.size), more hosts or GPUs, or a smaller model; or let state.memory (GiB) leave the state of "
                "most clients on disk"
                f"{elsewhere if gpu and gathers else ''}"
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
