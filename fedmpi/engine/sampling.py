"""Who takes part in round t, and which rank trains whom. Functions of seed, round and losses: no message is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedmpi.comm import Communicator
from fedmpi.common import seeds
from fedmpi.data.federated import Federated
from fedmpi.engine.faults.losses import START, Losses
from fedmpi.engine.plan import Plan


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


class Roster:
    """Who takes part in a round and where, as the run's losses have it; the same on every rank."""

    def __init__(self, plan: Plan, data: Federated, comm: Communicator, ranks: Sequence[int]) -> None:
        """ranks: those that train."""
        self.plan, self.data, self.comm, self.ranks = plan, data, comm, ranks
        self.losses = Losses()
        self.dead: dict[int, int] = {}  # rank -> the round in which it was lost

    def drawn(self, t: int) -> list[int]:
        return cohort(self.plan.seed, t, self.data.clients, self.plan.fraction)

    def cohort(self, t: int) -> list[int]:
        """Who takes part in round t, ascending."""
        return self.losses.present(t, self.drawn(t))

    def last_rounds(self, t: int) -> dict[int, int]:
        """client -> the round, of 0..t, that made the state with which it goes into round t + 1."""
        found: dict[int, int] = {}
        for earlier in range(t + 2):
            back = self.losses.reverted(earlier)
            found = {k: r for k, r in (found | back).items() if r != START} if back else found
            if earlier <= t:
                found |= dict.fromkeys(self.cohort(earlier), earlier)
        return found

    def place(self, members: Sequence[int], ranks: Sequence[int] | None = None) -> dict[int, int]:
        """client -> rank that trains it."""
        ranks = self.ranks if ranks is None else ranks
        if self.plan.placement == "pinned":
            return pinned(members, ranks)
        return balanced(members, [float(self.data.train_sizes[k]) for k in members], ranks)

    def placed(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """client -> rank that trains it in round t. Where a rank is lost in it, those of the others stay with them."""
        alive = self.comm.alive if alive is None else alive
        all_ = self.plan.placement == "pinned"
        where = self.place(self.drawn(t), [r for r in self.ranks if all_ or self.dead.get(r, t) >= t])
        moved = [k for k, rank in where.items() if rank not in alive]
        if moved:
            sizes = [float(self.data.train_sizes[k]) for k in moved]
            where |= balanced(moved, sizes, [rank for rank in self.ranks if rank in alive])
        return {k: where[k] for k in self.cohort(t)} if self.losses.rows else where


def busiest(where: Mapping[int, int], members: Sequence[int], seconds: Sequence[float]) -> float:
    """Training seconds of the rank that trained longest."""
    busy: dict[int, float] = {}
    for client, each in zip(members, seconds, strict=True):
        busy[where[client]] = busy.get(where[client], 0.0) + each
    return max(busy.values(), default=0.0)
