"""Which clients take part in a round, and which rank trains each of them.

Both are functions of the seed, the round, the rank failures of the run, and the costs that rank 0 has measured and told
to all ranks (engine/pace.py), so that every rank computes the same without a message.
"""

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
from fedmpi.engine.faults.lost_ranks import START, LostRanks
from fedmpi.engine.federation_config import SERVERS, FederationConfig
from fedmpi.engine.pace import FEW, GAIN, LEAST_S, SAME, Measure, Pace, Row


class ClientScheduler:
    """Draws the cohort of each round, and assigns its clients to ranks; the same on every rank."""

    def __init__(self, config: FederationConfig, data: Federated, comm: Communicator, ranks: Sequence[int]) -> None:
        """ranks: those that train clients."""
        self.config, self.data, self.comm, self.ranks = config, data, comm, ranks
        self.lost_ranks = LostRanks()
        self.pace = self.announced = Pace()  # the costs by which clients are assigned; those that all ranks know
        self.given: list[Row] = []  # the assignment of another run, to be repeated: rows of its placement.jsonl
        # Rank 0's: what it has measured, the costs that it plans for, and the round of their last change.
        measured = config.placement == "balanced" and config.measures_speed and len(ranks) > 1
        self.measure, self.next, self.since = Measure() if measured else None, Pace(), 0
        self.recorded: Row = {}  # the latest row of placement.jsonl

    def sample(self, t: int) -> list[int]:
        """Draw the cohort of round t, ascending; clients that rank failures have taken out included."""
        config = self.config
        return draw_cohort(config.seed, t, self.data.clients, config.fraction, config.sampling, config.members)

    def cohort(self, t: int) -> list[int]:
        """Return the clients that take part in round t, ascending."""
        drawn = self.sample(t)
        return self.lost_ranks.present(t, drawn) if self.lost_ranks.rows else drawn

    def last_rounds(self, t: int) -> dict[int, int]:
        """Return client -> the round, of 0..t, in which the state was made that it has at the start of round t + 1."""
        found: dict[int, int] = {}
        for earlier in range(t + 2):
            back = self.lost_ranks.reverted(earlier)
            found = {k: r for k, r in (found | back).items() if r != START} if back else found
            if earlier <= t:
                found |= dict.fromkeys(self.cohort(earlier), earlier)
        return found

    def weights(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the training samples n_k and the weights p_k of a cohort, (m,) float64 each."""
        n = torch.tensor([float(self.data.train_sizes[k]) for k in members], dtype=torch.float64)
        return n, n / n.sum() if self.config.weighting == "samples" else torch.full_like(n, 1 / len(n))

    # ---- assignment to ranks ----
    def place(
        self, members: Sequence[int], ranks: Sequence[int] | None = None, t: int = 0, pace: Pace | None = None
    ) -> dict[int, int]:
        """Return client -> rank by the given costs. ranks: those that may train; pace: default the present costs."""
        ranks, pace = self.ranks if ranks is None else ranks, pace or self.pace
        if self.config.placement == "pinned" or len(ranks) == 1:
            return pinned(members, ranks)
        costs = [pace.cost(k, float(self.data.train_sizes[k])) for k in members]
        return balanced(members, costs, ranks, pace.of_ranks(ranks), {0: self._ahead(t, pace)})

    def _ahead(self, t: int, pace: Pace) -> int:
        """Return the cost of what rank 0 does in round t before it trains: evaluating the round before."""
        return pace.ahead if t and t % self.config.evaluate_every == 0 else 0

    def assign(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """Return client -> rank that trains it in round t.

        If a rank fails in round t only its clients are assigned anew. alive: default the ranks that live now.
        """
        if self.given:
            self._follow_recorded(t)
        alive = (self._began() if self.given else self.comm.alive) if alive is None else alive
        all_ = self.config.placement == "pinned"
        where = self.place(self.sample(t), self.ranks if all_ else self._began(), t)
        moved = [k for k, rank in where.items() if rank not in alive]
        if moved:
            costs = [self.pace.cost(k, float(self.data.train_sizes[k])) for k in moved]
            ranks = [rank for rank in self.ranks if rank in alive]
            where |= balanced(moved, costs, ranks, self.pace.of_ranks(ranks))
        return {k: where[k] for k in self.cohort(t)} if self.lost_ranks.rows else where

    def _began(self) -> list[int]:
        """Return the training ranks that were alive when the round began; a pace of 0 marks one lost before."""
        return [r for r in self.ranks if self.pace.ranks.get(r, SAME)]

    def _follow_recorded(self, t: int) -> None:
        """Take the costs of the run whose assignment is repeated."""
        rows = [row for row in self.given if row["round"] <= t]
        if rows:
            self.pace = self.announced = Pace.of(rows[-1])

    # ---- costs, at rank 0 ----
    def record_timings(
        self, t: int, members: Sequence[int], where: Mapping[int, int], seconds: Sequence[float]
    ) -> None:
        """Record what the clients of round t took, in seconds, as their uploads say."""
        if self.measure is not None and not self.lost_ranks.of(t):
            sizes = [float(self.data.train_sizes[k]) for k in members]
            self.measure.saw(t, members, where, list(zip(sizes, seconds, strict=True)))

    def consider_rebalancing(self, t: int, evaluated_s: float | None = None) -> None:
        """Plan to assign clients by the measured costs from round t on, if that saves enough time.

        evaluated_s: what rank 0 took to evaluate before it trained its own clients; None: it did not evaluate.
        """
        if self.measure is None or self.comm.rank:
            return
        alone = {*self.config.protocol} <= SERVERS and self.data.global_test is not None
        if evaluated_s is not None and 0 in self.ranks and alone:
            self.measure.began(evaluated_s)
        ranks = self._began()
        if self.given or len(ranks) < 2 or t - self.since < FEW:
            return
        sizes, second = self.data.train_sizes, self.measure.second()
        new = self.measure.pace(t, sizes, self.pace)
        if new is None or second is None or new.close_to(self.pace, ranks):
            return
        members = self.sample(t)
        before, after = (self._longest(t, self.place(members, ranks, t, pace), new) for pace in (self.pace, new))
        if before - after >= max(GAIN * before, LEAST_S * second):
            self.next, self.since = new, t

    def _longest(self, t: int, where: Mapping[int, int], pace: Pace) -> float:
        """Return the cost of the rank that has most to do."""
        load = {0: float(self._ahead(t, pace))}
        for k, rank in where.items():
            cost = pace.cost(k, float(self.data.train_sizes[k])) * pace.ranks.get(rank, SAME)
            load[rank] = load.get(rank, 0.0) + cost
        return max(load.values())

    def commit(self, t: int) -> Row | None:
        """Assign clients by the planned costs from round t on; return a new row of placement.jsonl, if any."""
        if self.given:
            self._follow_recorded(t)
        else:
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
        """Return what `recall` needs when the run is resumed."""
        measured = self.measure.memory() if self.measure else {}
        return {"pace": self.pace.row(), "of": list(self.ranks), "since": self.since, **measured}

    def recall(self, memory: Mapping[str, Any] | None) -> None:
        """Take over what `memory` gave, if the same ranks train; ranks that had failed are there again."""
        if memory and memory["of"] == list(self.ranks):
            before, self.since = Pace.of(memory["pace"]), memory["since"]
            self.next = replace(before, ranks={rank: pace for rank, pace in before.ranks.items() if pace})
            if self.measure is not None and "rank" in memory:
                self.measure.recall(memory)


def draw_cohort(
    seed: int, t: int, clients: int, fraction: float | None, draw: str = "uniform", members: int | None = None
) -> list[int]:
    """Draw the cohort S_t: m = max(floor(fraction N), 1) clients without replacement, or m = `members`; ascending.

    draw: uniform, each round anew; cycles: in an order of its own each cycle deals out all clients once, m a round, the
    last round of a cycle takes the rest (with m = 1 and the mean: cyclic weight transfer, Chang et al. 2018).
    """
    m = cohort_size(clients, fraction, members)
    if draw == "cycles":
        cycle, at = divmod(t, -(-clients // m))
        drawn = _order_of_cycle(seed, cycle, clients)[at * m : (at + 1) * m]
    else:
        drawn = seeds.numpy_rng(seed, "cohort", t).choice(clients, size=m, replace=False)
    return sorted(int(k) for k in drawn)


@lru_cache(maxsize=2)
def _order_of_cycle(seed: int, cycle: int, clients: int) -> np.ndarray:
    """Return (N,) the order in which a cycle deals out all clients: each of its rounds asks for it, and it is slow."""
    return seeds.numpy_rng(seed, "cycle", cycle).permutation(clients)


def cohort_size(clients: int, fraction: float | None, members: int | None = None) -> int:
    """Return m, the most clients of a round. members: where they are given as a number (cohort.size)."""
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
    """Return client -> rank so that ranks finish together: the longest first, each to the rank that would finish it
    first.   Graham, 1969 (at most 4/3 of optimal on equal ranks); Gonzalez, Ibarra and Sahni, 1977 (twice, on any)

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
    """Return client -> rank, the same in every round."""
    return {k: ranks[k % len(ranks)] for k in members}
