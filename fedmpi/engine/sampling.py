"""Who takes part in round t, and which rank trains whom. Functions of seed and round alone: no message is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmpi.common import seeds


def cohort(seed: int, t: int, clients: int, fraction: float) -> list[int]:
    """The cohort S_t: m = max(floor(fraction N), 1) clients without replacement, ascending."""
    m = max(int(fraction * clients + 1e-9), 1)
    drawn = seeds.numpy_rng(seed, "cohort", t).choice(clients, size=m, replace=False)
    return sorted(int(k) for k in drawn)


def balanced(members: Sequence[int], costs: Sequence[float], ranks: Sequence[int]) -> dict[int, int]:
    """client -> rank so that ranks finish together: longest processing time first.   Graham, 1969 (at most 4/3 of
    optimal).
    """
    load = dict.fromkeys(ranks, 0.0)
    placed = {}
    for k, cost in sorted(zip(members, costs, strict=True), key=lambda kc: (-kc[1], kc[0])):
        rank = min(ranks, key=lambda r: (load[r], r))
        placed[k] = rank
        load[rank] += cost
    return {k: placed[k] for k in members}


def pinned(members: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """client -> rank, the same in every round."""
    return {k: ranks[k % len(ranks)] for k in members}


def busiest(where: Mapping[int, int], members: Sequence[int], seconds: Sequence[float]) -> float:
    """Training seconds of the rank that trained longest."""
    busy: dict[int, float] = {}
    for client, each in zip(members, seconds, strict=True):
        busy[where[client]] = busy.get(where[client], 0.0) + each
    return max(busy.values(), default=0.0)
