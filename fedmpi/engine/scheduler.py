"""Which clients take part in a round, and which rank trains each of them.

Both are functions of the seed, the round, the rank failures of the run, and the pace of the ranks, which rank 0
measures and broadcasts, so that every rank computes the same without a message.

    q_r   seconds of rank r for a training sample in a round, as uploads say; of rank 0 with the evaluation before
    s_r   lower median of the last WINDOW q_r, where there are MIN_ROUNDS
    pace  100 s_r / min s: what a sample costs on rank r, in per cent of its cost on the fastest rank; 0: r is lost
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common import seeds
from fedmpi.data.federated import Federated
from fedmpi.engine.faults.lost_ranks import START, LostRanks
from fedmpi.engine.federation_config import SERVERS, FederationConfig

WINDOW, MIN_ROUNDS, MAX_AGE = 5, 3, 50  # rounds; after MAX_AGE rounds without a measurement a rank is tried again
NORMAL, MAX_PACE = 100, 10_000  # per cent
MIN_GAIN, MIN_GAIN_S = 0.1, 0.01  # share of a round, and seconds, that another placement must save

Row = dict[str, Any]
Pace = dict[int, int]  # rank -> per cent; ranks that are missing have NORMAL


def pace_of(row: Row) -> Pace:
    """Return the pace of the ranks that a row of placement.jsonl holds."""
    return {int(rank): int(pace) for rank, pace in row["pace"].items()}


class RankSpeeds:
    """Measures, at rank 0, what a training sample costs on each rank."""

    def __init__(self) -> None:
        self.costs: dict[int, list[float]] = {}  # rank -> its last q_r
        self.last_round: dict[int, int] = {}  # rank -> the round of the last one

    def record(self, t: int, where: Mapping[int, int], samples: Sequence[float], seconds: Sequence[float]) -> None:
        """Record round t. samples, seconds: of each client of `where`; a client that took no time does not count."""
        busy: dict[int, list[float]] = {}
        for rank, n, s in zip(where.values(), samples, seconds, strict=True):
            if n > 0 and s > 0 and math.isfinite(s):
                total = busy.setdefault(rank, [0.0, 0.0])
                total[0], total[1] = total[0] + n, total[1] + s
        for rank, (n, s) in busy.items():
            self.costs[rank] = [*self.costs.get(rank, ()), s / n][-WINDOW:]
            self.last_round[rank] = t

    def estimate(self, t: int) -> tuple[Pace, float]:
        """Return the pace of the ranks in round t ({}: unknown), and the seconds of a sample on the fastest one."""
        fresh = {r: q for r, q in self.costs.items() if len(q) >= MIN_ROUNDS and t - self.last_round[r] <= MAX_AGE}
        typical = {rank: median_low(q) for rank, q in fresh.items()}
        least = min(typical.values(), default=0.0)
        return {rank: min(round(NORMAL * s / least), MAX_PACE) for rank, s in typical.items()}, least


class ClientScheduler:
    """Draws the cohort of each round, and assigns its clients to ranks; the same on every rank."""

    def __init__(self, config: FederationConfig, data: Federated, comm: Communicator, ranks: Sequence[int]) -> None:
        """ranks: those that train clients."""
        self.config, self.data, self.comm, self.ranks = config, data, comm, ranks
        self.lost_ranks = LostRanks()
        self.pace: Pace = {}  # by which clients are assigned
        self.broadcast_pace: Pace = {}  # the one that all ranks have; at rank 0 `pace` may be newer
        self.replayed_rows: list[Row] = []  # rows of the placement.jsonl of a run whose assignment is repeated
        measured = config.placement == "balanced" and config.measures_speed and len(ranks) > 1
        self.speeds = RankSpeeds() if measured else None
        self.evaluated_s = 0.0  # what rank 0 took to evaluate before it trained its clients of this round
        self.planned_pace: Pace = {}  # by which rank 0 will assign clients, chosen in `planned_in_round`
        self.planned_in_round = 0
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
        rounds: dict[int, int] = {}
        for earlier in range(t + 2):
            back = self.lost_ranks.reverted(earlier)
            rounds = {k: r for k, r in (rounds | back).items() if r != START} if back else rounds
            if earlier <= t:
                rounds |= dict.fromkeys(self.cohort(earlier), earlier)
        return rounds

    def weights(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the training samples n_k and the weights p_k of a cohort, (m,) float64 each."""
        n = torch.tensor(self._sizes(members), dtype=torch.float64)
        return n, n / n.sum() if self.config.weighting == "samples" else torch.full_like(n, 1 / len(n))

    def _sizes(self, members: Sequence[int]) -> list[float]:
        return [float(self.data.train_sizes[k]) for k in members]

    # ---- assignment to ranks ----
    def place(
        self, members: Sequence[int], ranks: Sequence[int] | None = None, pace: Pace | None = None
    ) -> dict[int, int]:
        """Return client -> rank. ranks: those that may train; pace: default the present one."""
        ranks, pace = self.ranks if ranks is None else ranks, self.pace if pace is None else pace
        if self.config.placement == "pinned" or len(ranks) == 1:
            return pinned(members, ranks)
        return balanced(members, self._sizes(members), ranks, pace)

    def assign(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """Return client -> rank that trains it in round t.

        If a rank fails in round t only its clients are assigned anew. alive: default the ranks that live now.
        """
        if self.replayed_rows:
            self._replay_pace(t)
        alive = (self._ranks_at_start() if self.replayed_rows else self.comm.alive) if alive is None else alive
        where = self.place(self.sample(t), self.ranks if self.config.placement == "pinned" else self._ranks_at_start())
        moved = [k for k, rank in where.items() if rank not in alive]
        if moved:
            where |= balanced(moved, self._sizes(moved), [rank for rank in self.ranks if rank in alive], self.pace)
        return {k: where[k] for k in self.cohort(t)} if self.lost_ranks.rows else where

    def _ranks_at_start(self) -> list[int]:
        """Return the training ranks that were alive when the round began."""
        return [r for r in self.ranks if self.pace.get(r, NORMAL)]

    def _replay_pace(self, t: int) -> None:
        """Take the pace of round t from the run whose assignment is repeated."""
        rows = [row for row in self.replayed_rows if row["round"] <= t]
        if rows:
            self.pace = self.broadcast_pace = pace_of(rows[-1])

    # ---- the pace of ranks, at rank 0 ----
    def record_timings(self, t: int, where: Mapping[int, int], seconds: Sequence[float]) -> None:
        """Record what the clients of round t took, in seconds, as their uploads say. where: client -> rank."""
        if self.speeds is None or self.lost_ranks.of(t):
            return
        own = [i for i, rank in enumerate(where.values()) if rank == 0]
        spread = [s + self.evaluated_s / len(own) if i in own and s else s for i, s in enumerate(seconds)]
        self.speeds.record(t, where, self._sizes([*where]), spread)

    def consider_rebalancing(self, t: int, evaluated_s: float) -> None:
        """Plan to assign clients by the measured pace from round t on, if that saves enough time.

        evaluated_s: what rank 0 took to evaluate the round before; the others wait for it only if it trains, too.
        """
        if self.speeds is None or self.comm.rank:
            return
        alone = {*self.config.protocol} <= SERVERS and self.data.global_test is not None
        self.evaluated_s = evaluated_s if alone else 0.0
        ranks, (pace, sample_s) = self._ranks_at_start(), self.speeds.estimate(t)
        if not pace or self.replayed_rows or len(ranks) < 2 or t - self.planned_in_round < MIN_ROUNDS:
            return
        members = self.sample(t)
        now, then = (self._longest(self.place(members, ranks, each), pace) for each in (self.pace, pace))
        if now - then >= max(MIN_GAIN * now, MIN_GAIN_S * NORMAL / sample_s):
            self.planned_pace, self.planned_in_round = pace, t

    def _longest(self, where: Mapping[int, int], pace: Pace) -> float:
        """Return the cost (samples x per cent) of the rank that has most to do."""
        load: dict[int, float] = {}
        for n, rank in zip(self._sizes([*where]), where.values(), strict=True):
            load[rank] = load.get(rank, 0.0) + n * pace.get(rank, NORMAL)
        return max(load.values())

    def commit(self, t: int) -> Row | None:
        """Assign clients by the planned pace from round t on; return a new row of placement.jsonl, if any."""
        if self.replayed_rows:
            self._replay_pace(t)
        else:
            lost = {rank: 0 for rank in self.ranks if rank not in self.comm.alive}
            self.pace = {rank: pace for rank, pace in self.planned_pace.items() if pace != NORMAL} | lost
        row = {"pace": {str(rank): self.pace.get(rank, NORMAL) for rank in self.ranks}}
        if row == self.recorded:
            return None
        self.recorded = row
        return {"round": t, **row}

    def memory(self) -> dict[str, Any]:
        """Return what `recall` needs when the run is resumed."""
        costs = sorted(self.speeds.costs.items()) if self.speeds else []
        measured = [[rank, self.speeds.last_round[rank], q] for rank, q in costs] if self.speeds else []
        pace = sorted(self.pace.items())
        return {"ranks": list(self.ranks), "pace": pace, "since": self.planned_in_round, "measured": measured}

    def recall(self, memory: Mapping[str, Any] | None) -> None:
        """Take over what `memory` gave, if the same ranks train; ranks that had failed are there again."""
        if not memory or memory["ranks"] != list(self.ranks):
            return
        self.planned_pace, self.planned_in_round = {rank: p for rank, p in memory["pace"] if p}, memory["since"]
        if self.speeds is not None:
            self.speeds.costs = {rank: list(q) for rank, _, q in memory["measured"]}
            self.speeds.last_round = {rank: t for rank, t, _ in memory["measured"]}


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
        drawn = seeds.numpy_rng(seed, "cycle", cycle).permutation(clients)[at * m : (at + 1) * m]
    else:
        drawn = seeds.numpy_rng(seed, "cohort", t).choice(clients, size=m, replace=False)
    return sorted(int(k) for k in drawn)


def cohort_size(clients: int, fraction: float | None, members: int | None = None) -> int:
    """Return m, the most clients of a round. members: where they are given as a number (cohort.size)."""
    if members is not None:
        return members
    assert fraction is not None
    return max(int(fraction * clients + 1e-9), 1)


def balanced(
    members: Sequence[int], costs: Sequence[float], ranks: Sequence[int], pace: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Return client -> rank so that ranks finish together: the longest first, each to the rank that would finish it
    first.   Graham, 1969 (at most 4/3 of optimal on equal ranks); Gonzalez, Ibarra and Sahni, 1977 (twice, on any)

    pace: rank -> per cent that a cost takes there (100).
    """
    pace = {rank: (pace or {}).get(rank, NORMAL) for rank in ranks}
    load, placed = dict.fromkeys(ranks, 0.0), dict[int, int]()
    for k, cost in sorted(zip(members, costs, strict=True), key=lambda kc: (-kc[1], kc[0])):
        rank = min(ranks, key=lambda r: (load[r] + cost * pace[r], pace[r], r))
        placed[k] = rank
        load[rank] += cost * pace[rank]
    return {k: placed[k] for k in members}


def pinned(members: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """Return client -> rank, the same in every round."""
    return {k: ranks[k % len(ranks)] for k in members}
