"""Estimates, from the rounds so far, of what training costs on each rank and for each client.

    x_k   seconds of client k in a round, as its upload says, for each of its training samples
    q_r   mean of x_k over the samples of rank r in that round, without clients beyond OUTLIER times their lower median
    s_r   lower median of the last WINDOW q_r, where there are MIN_ROUNDS
    f_k   least of the last MIN_ROUNDS x_k / s_r, where there are so many: how much dearer k is than others
    pace  100 s_r / min s: the cost of a sample on rank r, in per cent of its cost on the fastest rank
A lower median ignores a single slow round. Costs are integers, so that all ranks assign clients alike by them. Unknown
costs count as 100: a rank without measurements for MAX_AGE rounds is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

WINDOW, MIN_ROUNDS, MAX_AGE = 5, 3, 50  # rounds
NORMAL = 100  # per cent
MAX_RANK_COST, MAX_CLIENT_COST = 10_000, 1_000
NEAR_NORMAL = range(67, 151)  # f_k in per cent that counts as 100
MAX_CLIENTS = 256  # whose f_k is broadcast: those whose cost changes most
OUTLIER = 2.0  # clients of so many times the median do not count
TOLERANCE = 0.05  # differences of costs that are ignored
MIN_GAIN, MIN_GAIN_S = 0.1, 0.01  # share of a round, and seconds, that another placement must save

Row = dict[str, Any]


@dataclass(frozen=True)
class CostModel:
    """The costs by which clients are assigned to ranks, in per cent; those that are not listed are 100."""

    ranks: Mapping[int, int] = field(default_factory=dict)  # rank -> pace
    clients: Mapping[int, int] = field(default_factory=dict)  # client -> f_k in per cent
    evaluation: int = 0  # of rank 0 before it trains, if it evaluates the round before; samples x per cent x per cent

    def row(self) -> Row:
        ranks, clients = ({str(k): each[k] for k in sorted(each)} for each in (self.ranks, self.clients))
        return {"pace": ranks, "clients": clients, "ahead": self.evaluation}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> CostModel:
        """Return the costs that `row` has written."""
        ranks, clients = ({int(k): int(v) for k, v in row[name].items()} for name in ("pace", "clients"))
        return cls(ranks, clients, int(row["ahead"]))

    def cost(self, client: int, samples: float) -> float:
        return samples * self.clients.get(client, NORMAL)

    def of_ranks(self, ranks: Sequence[int]) -> dict[int, int]:
        return {rank: self.ranks.get(rank, NORMAL) for rank in ranks}

    def close_to(self, other: CostModel, ranks: Sequence[int]) -> bool:
        """Return whether the costs differ by too little to assign clients anew."""
        mine, theirs = self.of_ranks(ranks), other.of_ranks(ranks)
        pairs = [*((mine[r], theirs[r]) for r in ranks), (self.evaluation, other.evaluation)]
        return self.clients == other.clients and all(abs(a - b) <= TOLERANCE * min(a, b) for a, b in pairs)


class SpeedEstimator:
    """Estimates costs, at rank 0, from the seconds that clients took."""

    def __init__(self) -> None:
        self.rank_costs: dict[int, list[float]] = {}  # rank -> its last q_r
        self.last_round: dict[int, int] = {}  # rank -> the round of the last one
        self.client_costs: dict[int, list[float]] = {}
        self.evaluation_s: list[float] = []  # seconds

    def record(
        self, t: int, members: Sequence[int], where: Mapping[int, int], costs: Sequence[tuple[float, float]]
    ) -> None:
        """Record round t. costs: (samples, seconds) of each client; only finite positive ones count."""
        by_rank: dict[int, list[tuple[int, float, float]]] = {}
        for k, (samples, seconds) in zip(members, costs, strict=True):
            if samples > 0 and seconds > 0 and math.isfinite(seconds):
                by_rank.setdefault(where[k], []).append((k, seconds / samples, samples))
        for rank, those in by_rank.items():
            most = OUTLIER * median_low(x for _, x, _ in those)
            usual = [(x, n) for _, x, n in those if x <= most]
            q = sum(x * n for x, n in usual) / sum(n for _, n in usual)
            self.rank_costs[rank] = [*self.rank_costs.get(rank, ()), q][-WINDOW:]
            self.last_round[rank] = t
            typical = self._typical(self.rank_costs[rank])
            if typical is not None:
                for k, x, _ in those:
                    self.client_costs[k] = [*self.client_costs.get(k, ()), x / typical][-MIN_ROUNDS:]

    def record_evaluation(self, seconds: float) -> None:
        """Record the seconds that rank 0 took to evaluate a round before it trained."""
        self.evaluation_s = [*self.evaluation_s, seconds][-WINDOW:]

    def cost_of_a_second(self) -> float | None:
        """Return the cost (samples x per cent x per cent) of a second on the fastest rank; None where it is unknown."""
        known = [s for s in map(self._typical, self.rank_costs.values()) if s is not None]
        return NORMAL * NORMAL / min(known) if known else None

    def estimate(self, t: int, sizes: Sequence[float] | np.ndarray, now: CostModel) -> CostModel | None:
        """Return the costs for round t; None if none is known. now: the present costs, which stand for unknown ones."""
        typical = {r: self._typical(q) for r, q in self.rank_costs.items() if t - self.last_round[r] <= MAX_AGE}
        known = {r: s for r, s in typical.items() if s is not None}
        if not known:
            return None
        least = min(known.values())
        ranks = {rank: min(round(NORMAL * s / least), MAX_RANK_COST) for rank, s in known.items()}
        clients = dict(now.clients)
        for k, factors in self.client_costs.items():
            if len(factors) == MIN_ROUNDS:
                clients[k] = max(min(round(NORMAL * min(factors)), MAX_CLIENT_COST), 1)
        odd = {k: f for k, f in clients.items() if f not in NEAR_NORMAL}
        first = sorted(odd, key=lambda k: (-abs(odd[k] - NORMAL) * sizes[k], k))[:MAX_CLIENTS]
        ahead = min(round(NORMAL * NORMAL * (self._typical(self.evaluation_s) or 0.0) / least), 10**15)
        return CostModel(ranks, {k: odd[k] for k in sorted(first)}, ahead)

    @staticmethod
    def _typical(values: Sequence[float]) -> float | None:
        return median_low(values) if len(values) >= MIN_ROUNDS else None

    def memory(self) -> dict[str, Any]:
        """Return what `recall` needs when the run is resumed; clients are measured anew."""
        return {
            "rank": [[r, self.last_round[r], q] for r, q in sorted(self.rank_costs.items())],
            "ahead": self.evaluation_s,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.rank_costs = {rank: list(q) for rank, _, q in memory["rank"]}
        self.last_round = {rank: t for rank, t, _ in memory["rank"]}
        self.evaluation_s = list(memory["ahead"])
