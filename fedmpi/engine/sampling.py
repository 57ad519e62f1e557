"""Cohorts and their placement on ranks, as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from fedmpi.common import seeds


def cohort(
    seed: int, t: int, clients: int, fraction: float | None, draw: str = "uniform", members: int | None = None
) -> list[int]:
    """The cohort S_t: m = max(floor(fraction N), 1) clients without replacement, or m = `members`; ascending.

    draw: uniform, each round anew; cycles: in an order of its own each cycle deals out all clients once, m a round, the
    last round of a cycle takes the rest (with m = 1 and the mean: cyclic weight transfer, Chang et al. 2018).
    """
    m = size(clients, fraction, members)
    if draw == "cycles":
        cycle, at = divmod(t, -(-clients // m))
        drawn = _order_of_cycle(seed, cycle, clients)[at * m : (at + 1) * m]
    else:
        drawn = seeds.numpy_rng(seed, "cohort", t).choice(clients, size=m, replace=False)
    return sorted(int(k) for k in drawn)


@lru_cache(maxsize=2)
def _order_of_cycle(seed: int, cycle: int, clients: int) -> np.ndarray:
    """(N,) the order in which a cycle deals out all clients; it takes long for many, and each of its rounds asks for
    it."""
    return seeds.numpy_rng(seed, "cycle", cycle).permutation(clients)


def size(clients: int, fraction: float | None, members: int | None = None) -> int:
    """m, the clients of a round; the most of them. members: where they are given as a number (cohort.size)."""
    if members is not None:
        return members
    assert fraction is not None
    return max(int(fraction * clients + 1e-9), 1)


def balanced(
    members: Sequence[int],
    costs: Sequence[float],
    ranks: Sequence[int],
    pace: Mapping[int, int] | None = None,
    ahead: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """client -> rank so that ranks finish together: longest processing time first, each to the rank that would finish
    it first.   Graham, 1969 (at most 4/3 of optimal on equal ranks); Gonzalez, Ibarra and Sahni, 1977 (twice, on any)

    pace: rank -> factor of a cost there (1); ahead: rank -> what it has to do before (0).
    """
    pace = dict.fromkeys(ranks, 1) if pace is None else pace
    load = {rank: (ahead or {}).get(rank, 0.0) for rank in ranks}
    placed = {}
    for k, cost in sorted(zip(members, costs, strict=True), key=lambda kc: (-kc[1], kc[0])):
        rank = min(ranks, key=lambda r: (load[r] + cost * pace[r], pace[r], r))
        placed[k] = rank
        load[rank] += cost * pace[rank]
    return {k: placed[k] for k in members}


def pinned(members: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """client -> rank, the same in every round."""
    return {k: ranks[k % len(ranks)] for k in members}
