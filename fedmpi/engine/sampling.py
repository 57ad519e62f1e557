"""Who takes part in round t, and which rank trains whom. Functions of seed, round and losses, and of what rank 0 says
that ranks take (engine/pace.py): a message is needed where that changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common import seeds
from fedmpi.data.federated import Federated
from fedmpi.engine.faults.losses import START, Losses
from fedmpi.engine.pace import FEW, GAIN, LEAST_S, SAME, Measure, Pace, Row
from fedmpi.engine.plan import SERVERS, Plan


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


class Roster:
    """Who takes part in a round and where, as the run's losses and what ranks are known to cost have it; the same on
    every rank, which hears of both from rank 0."""

    def __init__(self, plan: Plan, data: Federated, comm: Communicator, ranks: Sequence[int]) -> None:
        """ranks: those that train."""
        self.plan, self.data, self.comm, self.ranks = plan, data, comm, ranks
        self.losses = Losses()
        self.pace = self.told = Pace()  # by which clients are placed; as all ranks know it
        self.given: list[Row] = []  # by which another run has placed them: rows of its placement.jsonl
        self.measure, self.next, self.since = Measure(), Pace(), 0  # rank 0's; `since`: the round of the last change
        self.recorded: Row = {}

    def drawn(self, t: int) -> list[int]:
        plan = self.plan
        return cohort(plan.seed, t, self.data.clients, plan.fraction, plan.draw, plan.members)

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

    def weights(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Training samples n_k and weights p_k of a cohort, (m,) float64 each."""
        n = torch.tensor([float(self.data.train_sizes[k]) for k in members], dtype=torch.float64)
        return n, n / n.sum() if self.plan.weighting == "samples" else torch.full_like(n, 1 / len(n))

    # ---- where ----
    def place(
        self, members: Sequence[int], ranks: Sequence[int] | None = None, t: int = 0, pace: Pace | None = None
    ) -> dict[int, int]:
        """client -> rank that trains it."""
        ranks, pace = self.ranks if ranks is None else ranks, pace or self.pace
        if self.plan.placement == "pinned":
            return pinned(members, ranks)
        costs = [pace.cost(k, float(self.data.train_sizes[k])) for k in members]
        return balanced(members, costs, ranks, pace.of_ranks(ranks), {0: self._ahead(t, pace)})

    def _ahead(self, t: int, pace: Pace) -> int:
        """What rank 0 has to do in round t before it trains: the evaluation of the one before."""
        return pace.ahead if t and t % self.plan.every == 0 else 0

    def placed(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """client -> rank that trains it in round t. Where a rank is lost in it, those of the others stay with them."""
        self.follow(t)
        alive = (self._began() if self.given else self.comm.alive) if alive is None else alive
        all_ = self.plan.placement == "pinned"
        where = self.place(self.drawn(t), self.ranks if all_ else self._began(), t)
        moved = [k for k, rank in where.items() if rank not in alive]
        if moved:
            costs = [self.pace.cost(k, float(self.data.train_sizes[k])) for k in moved]
            ranks = [rank for rank in self.ranks if rank in alive]
            where |= balanced(moved, costs, ranks, self.pace.of_ranks(ranks))
        return {k: where[k] for k in self.cohort(t)} if self.losses.rows else where

    def _began(self) -> list[int]:
        """The ranks, of those that train, with which the round began. Pace 0: lost before."""
        return [r for r in self.ranks if self.pace.ranks.get(r, SAME)]

    def follow(self, t: int) -> None:
        """Place clients in round t as the run did that is given, if one is."""
        rows = [row for row in self.given if row["round"] <= t]
        if rows:
            self.pace = self.told = Pace.of(rows[-1])

    # ---- rank 0's ----
    def saw(self, t: int, members: Sequence[int], where: Mapping[int, int], seconds: Sequence[float]) -> None:
        """What the uploads of round t say of their cost."""
        if self.plan.placement == "balanced" and self.plan.measured and not self.losses.of(t):
            sizes = [float(self.data.train_sizes[k]) for k in members]
            self.measure.saw(t, members, where, list(zip(sizes, seconds, strict=True)))

    def evaluated(self, seconds: float) -> None:
        """What rank 0 had to do before its clients, in a round in which it evaluated, and the others did not."""
        alone = {*self.plan.protocol} <= SERVERS and self.data.global_test is not None
        if self.comm.rank == 0 and 0 in self.ranks and alone:
            self.measure.began(seconds)

    def consider(self, t: int) -> None:
        """Whether round t is to be placed by what has been measured: where that saves enough of it."""
        ranks = self._began() if self.comm.rank == 0 else []
        fixed = self.plan.placement == "pinned" or not self.plan.measured or self.given
        if fixed or len(ranks) < 2 or t - self.since < FEW:
            return
        sizes, second = self.data.train_sizes, self.measure.second()
        new = self.measure.pace(t, sizes, self.pace)
        if new is None or second is None or new.close_to(self.pace, ranks):
            return
        members = self.drawn(t)
        before, after = (self._longest(t, self.place(members, ranks, t, pace), new) for pace in (self.pace, new))
        if before - after >= max(GAIN * before, LEAST_S * second):
            self.next, self.since = new, t

    def _longest(self, t: int, where: Mapping[int, int], pace: Pace) -> float:
        """What the rank has to do that has most."""
        load = {0: float(self._ahead(t, pace))}
        for k, rank in where.items():
            cost = pace.cost(k, float(self.data.train_sizes[k])) * pace.ranks.get(rank, SAME)
            load[rank] = load.get(rank, 0.0) + cost
        return max(load.values())

    def settle(self, t: int) -> Row | None:
        """Round t is placed by what was decided for it; the line of placement.jsonl, if that is another than before."""
        self.follow(t)
        if not self.given:
            lost = {rank: 0 for rank in self.ranks if rank not in self.comm.alive}
            self.pace = replace(
                self.next, ranks={r: pace for r, pace in self.next.ranks.items() if pace != SAME} | lost
            )
        row = replace(self.pace, ranks=self.pace.of_ranks(self.ranks)).row()
        if row == self.recorded:
            return None
        self.recorded = row
        return {"round": t, **row}

    def memory(self) -> dict[str, Any]:
        return {"pace": self.pace.row(), "of": list(self.ranks), "since": self.since, **self.measure.memory()}

    def recall(self, memory: Mapping[str, Any] | None) -> None:
        """What other ranks took says nothing; ranks that were lost are there again."""
        if memory and memory["of"] == list(self.ranks):
            before, self.since = Pace.of(memory["pace"]), memory["since"]
            self.next = replace(before, ranks={rank: pace for rank, pace in before.ranks.items() if pace})
            self.measure.recall(memory)


def busiest(where: Mapping[int, int], members: Sequence[int], seconds: Sequence[float]) -> float:
    """Training seconds of the rank that trained longest."""
    busy: dict[int, float] = {}
    for client, each in zip(members, seconds, strict=True):
        busy[where[client]] = busy.get(where[client], 0.0) + each
    return max(busy.values(), default=0.0)
