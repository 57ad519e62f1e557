"""Which clients take part in a round, and which rank trains each of them.

Both are functions of the seed, the round, the rank failures of the run, and the costs that rank 0 has measured and
broadcast (engine/cost_model.py), so that every rank computes the same without a message.
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
from fedmpi.engine.cost_model import MIN_GAIN, MIN_GAIN_S, MIN_ROUNDS, NORMAL, CostModel, Row, SpeedEstimator
from fedmpi.engine.faults.lost_ranks import START, LostRanks
from fedmpi.engine.federation_config import SERVERS, FederationConfig


class ClientScheduler:
    """Draws the cohort of each round, and assigns its clients to ranks; the same on every rank."""

    def __init__(self, config: FederationConfig, data: Federated, comm: Communicator, ranks: Sequence[int]) -> None:
        """ranks: those that train clients."""
        self.config, self.data, self.comm, self.ranks = config, data, comm, ranks
        self.lost_ranks = LostRanks()
        self.costs = CostModel()  # by which clients are assigned
        self.broadcast_costs = CostModel()  # those that all ranks have; at rank 0 `costs` may be newer
        self.replayed_rows: list[Row] = []  # rows of the placement.jsonl of a run whose assignment is repeated
        # At rank 0: the costs by which it will assign clients, and the round in which it chose them.
        measured = config.placement == "balanced" and config.measures_speed and len(ranks) > 1
        self.estimator = SpeedEstimator() if measured else None
        self.planned_costs, self.planned_in_round = CostModel(), 0
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
        self, members: Sequence[int], ranks: Sequence[int] | None = None, t: int = 0, costs: CostModel | None = None
    ) -> dict[int, int]:
        """Return client -> rank by the given costs. ranks: those that may train; costs: default the present ones."""
        ranks, costs = self.ranks if ranks is None else ranks, costs or self.costs
        if self.config.placement == "pinned" or len(ranks) == 1:
            return pinned(members, ranks)
        client_costs = [costs.cost(k, float(self.data.train_sizes[k])) for k in members]
        return balanced(members, client_costs, ranks, costs.of_ranks(ranks), {0: self._evaluation_cost(t, costs)})

    def _evaluation_cost(self, t: int, costs: CostModel) -> int:
        """Return the cost of what rank 0 does in round t before it trains: evaluating the round before."""
        return costs.evaluation if t and t % self.config.evaluate_every == 0 else 0

    def assign(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """Return client -> rank that trains it in round t.

        If a rank fails in round t only its clients are assigned anew. alive: default the ranks that live now.
        """
        if self.replayed_rows:
            self._replay_costs(t)
        alive = (self._ranks_at_start() if self.replayed_rows else self.comm.alive) if alive is None else alive
        all_ = self.config.placement == "pinned"
        where = self.place(self.sample(t), self.ranks if all_ else self._ranks_at_start(), t)
        moved = [k for k, rank in where.items() if rank not in alive]
        if moved:
            costs = [self.costs.cost(k, float(self.data.train_sizes[k])) for k in moved]
            ranks = [rank for rank in self.ranks if rank in alive]
            where |= balanced(moved, costs, ranks, self.costs.of_ranks(ranks))
        return {k: where[k] for k in self.cohort(t)} if self.lost_ranks.rows else where

    def _ranks_at_start(self) -> list[int]:
        """Return the training ranks that were alive when the round began; a cost of 0 marks a rank lost before."""
        return [r for r in self.ranks if self.costs.ranks.get(r, NORMAL)]

    def _replay_costs(self, t: int) -> None:
        """Take the costs of round t from the run whose assignment is repeated."""
        rows = [row for row in self.replayed_rows if row["round"] <= t]
        if rows:
            self.costs = self.broadcast_costs = CostModel.from_row(rows[-1])

    # ---- costs, at rank 0 ----
    def record_timings(
        self, t: int, members: Sequence[int], where: Mapping[int, int], seconds: Sequence[float]
    ) -> None:
        """Record what the clients of round t took, in seconds, as their uploads say."""
        if self.estimator is not None and not self.lost_ranks.of(t):
            sizes = [float(self.data.train_sizes[k]) for k in members]
            self.estimator.record(t, members, where, list(zip(sizes, seconds, strict=True)))

    def consider_rebalancing(self, t: int, evaluated_s: float | None = None) -> None:
        """Plan to assign clients by the measured costs from round t on, if that saves enough time.

        evaluated_s: what rank 0 took to evaluate before it trained its own clients; None: it did not evaluate.
        """
        if self.estimator is None or self.comm.rank:
            return
        alone = {*self.config.protocol} <= SERVERS and self.data.global_test is not None
        if evaluated_s is not None and 0 in self.ranks and alone:
            self.estimator.record_evaluation(evaluated_s)
        ranks = self._ranks_at_start()
        if self.replayed_rows or len(ranks) < 2 or t - self.planned_in_round < MIN_ROUNDS:
            return
        sizes, second = self.data.train_sizes, self.estimator.cost_of_a_second()
        new = self.estimator.estimate(t, sizes, self.costs)
        if new is None or second is None or new.close_to(self.costs, ranks):
            return
        members = self.sample(t)
        before, after = (self._longest(t, self.place(members, ranks, t, costs), new) for costs in (self.costs, new))
        if before - after >= max(MIN_GAIN * before, MIN_GAIN_S * second):
            self.planned_costs, self.planned_in_round = new, t

    def _longest(self, t: int, where: Mapping[int, int], costs: CostModel) -> float:
        """Return the cost of the rank that has most to do."""
        load = {0: float(self._evaluation_cost(t, costs))}
        for k, rank in where.items():
            cost = costs.cost(k, float(self.data.train_sizes[k])) * costs.ranks.get(rank, NORMAL)
            load[rank] = load.get(rank, 0.0) + cost
        return max(load.values())

    def commit(self, t: int) -> Row | None:
        """Assign clients by the planned costs from round t on; return a new row of placement.jsonl, if any."""
        if self.replayed_rows:
            self._replay_costs(t)
        else:
            lost = {rank: 0 for rank in self.ranks if rank not in self.comm.alive}
            self.costs = replace(
                self.planned_costs,
                ranks={r: cost for r, cost in self.planned_costs.ranks.items() if cost != NORMAL} | lost,
            )
        row = replace(self.costs, ranks=self.costs.of_ranks(self.ranks)).row()
        if row == self.recorded:
            return None
        self.recorded = row
        return {"round": t, **row}

    def memory(self) -> dict[str, Any]:
        """Return what `recall` needs when the run is resumed."""
        measured = self.estimator.memory() if self.estimator else {}
        return {"pace": self.costs.row(), "of": list(self.ranks), "since": self.planned_in_round, **measured}

    def recall(self, memory: Mapping[str, Any] | None) -> None:
        """Take over what `memory` gave, if the same ranks train; ranks that had failed are there again."""
        if memory and memory["of"] == list(self.ranks):
            before, self.planned_in_round = CostModel.from_row(memory["pace"]), memory["since"]
            self.planned_costs = replace(before, ranks={rank: cost for rank, cost in before.ranks.items() if cost})
            if self.estimator is not None and "rank" in memory:
                self.estimator.recall(memory)


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
    factors: Mapping[int, int] | None = None,
    initial_load: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Return client -> rank so that ranks finish together: the longest first, each to the rank that would finish it
    first.   Graham, 1969 (at most 4/3 of optimal on equal ranks); Gonzalez, Ibarra and Sahni, 1977 (twice, on any)

    factors: rank -> factor of a cost there (1); initial_load: rank -> cost of what it does before (0).
    """
    factors = dict.fromkeys(ranks, 1) if factors is None else factors
    load = {rank: (initial_load or {}).get(rank, 0.0) for rank in ranks}
    placed = {}
    for k, cost in sorted(zip(members, costs, strict=True), key=lambda kc: (-kc[1], kc[0])):
        rank = min(ranks, key=lambda r: (load[r] + cost * factors[r], factors[r], r))
        placed[k] = rank
        load[rank] += cost * factors[rank]
    return {k: placed[k] for k in members}


def pinned(members: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """Return client -> rank, the same in every round."""
    return {k: ranks[k % len(ranks)] for k in members}
