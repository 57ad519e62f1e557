"""How long ranks take to train, as the rounds so far show it, and what clients are placed by.

    x_k   seconds of client k in a round, as its upload says, for each of its training samples
    q_r   mean of x_k over the samples of rank r in that round, without clients beyond ODD times their lower median
    s_r   lower median of the last WINDOW q_r, where there are FEW
    f_k   least of the last FEW x_k / s_r, where there are so many: how much dearer k is than others
    pace  100 s_r / min s: what a sample costs on rank r, in per cent of what it costs on the fastest rank
A lower median takes no notice of one round that took ten times as long, a mean little of clients that took a bit more
by chance. All that is decided are whole numbers: every rank makes the same of them. What is not known counts as 100, so
that a rank of which nothing has been seen for AGE rounds is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

WINDOW, FEW, AGE = 5, 3, 50  # rounds
SAME = 100  # per cent
SLOWEST, DEAREST = 10_000, 1_000  # the most that an estimate says
PLAIN = range(67, 151)  # f_k in per cent that counts as 100
MANY = 256  # clients of which f_k is told, those to which it matters most
ODD = 2.0
CLOSE, GAIN, LEAST_S = 0.05, 0.1, 0.01  # differences not looked at; what another placement must save of a round

Row = dict[str, Any]


@dataclass(frozen=True)
class Pace:
    """What clients are placed by; who is not named is at 100."""

    ranks: Mapping[int, int] = field(default_factory=dict)  # rank -> pace
    clients: Mapping[int, int] = field(default_factory=dict)  # client -> f_k in per cent
    ahead: int = 0  # what rank 0 does first where it evaluates a round and trains; in samples x per cent x per cent

    def row(self) -> Row:
        ranks, clients = ({str(k): each[k] for k in sorted(each)} for each in (self.ranks, self.clients))
        return {"pace": ranks, "clients": clients, "ahead": self.ahead}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Pace:
        """Of a `row`."""
        ranks, clients = ({int(k): int(v) for k, v in row[name].items()} for name in ("pace", "clients"))
        return cls(ranks, clients, int(row["ahead"]))

    def cost(self, client: int, samples: float) -> float:
        return samples * self.clients.get(client, SAME)

    def of_ranks(self, ranks: Sequence[int]) -> dict[int, int]:
        return {rank: self.ranks.get(rank, SAME) for rank in ranks}

    def close_to(self, other: Pace, ranks: Sequence[int]) -> bool:
        """Whether the two differ by too little to look at where they lead."""
        mine, theirs = self.of_ranks(ranks), other.of_ranks(ranks)
        pairs = [*((mine[r], theirs[r]) for r in ranks), (self.ahead, other.ahead)]
        return self.clients == other.clients and all(abs(a - b) <= CLOSE * min(a, b) for a, b in pairs)


class Measure:
    """What rank 0 has seen."""

    def __init__(self) -> None:
        self.rank: dict[int, list[float]] = {}  # rank -> its last q_r
        self.seen: dict[int, int] = {}  # rank -> the round of the last one
        self.client: dict[int, list[float]] = {}
        self.ahead: list[float] = []  # seconds

    def saw(
        self, t: int, members: Sequence[int], where: Mapping[int, int], costs: Sequence[tuple[float, float]]
    ) -> None:
        """Round t. costs: (training samples, seconds) of each of `members`; only what is finite and positive counts."""
        found: dict[int, list[tuple[int, float, float]]] = {}
        for k, (samples, seconds) in zip(members, costs, strict=True):
            if samples > 0 and seconds > 0 and math.isfinite(seconds):
                found.setdefault(where[k], []).append((k, seconds / samples, samples))
        for rank, those in found.items():
            most = ODD * median_low(x for _, x, _ in those)
            usual = [(x, n) for _, x, n in those if x <= most]
            q = sum(x * n for x, n in usual) / sum(n for _, n in usual)
            self.rank[rank] = [*self.rank.get(rank, ()), q][-WINDOW:]
            self.seen[rank] = t
            typical = self._typical(self.rank[rank])
            if typical is not None:
                for k, x, _ in those:
                    self.client[k] = [*self.client.get(k, ()), x / typical][-FEW:]

    def began(self, seconds: float) -> None:
        """What rank 0 had to do before it trained, in a round in which it evaluated."""
        self.ahead = [*self.ahead, seconds][-WINDOW:]

    def second(self) -> float | None:
        """Samples x per cent x per cent to a second on the fastest rank; None where nothing is known."""
        known = [s for s in map(self._typical, self.rank.values()) if s is not None]
        return SAME * SAME / min(known) if known else None

    def pace(self, t: int, sizes: Sequence[float] | np.ndarray, now: Pace) -> Pace | None:
        """What these measures say for round t. now: what clients are placed by, which stands for what is not known."""
        typical = {r: self._typical(q) for r, q in self.rank.items() if t - self.seen[r] <= AGE}
        known = {r: s for r, s in typical.items() if s is not None}
        if not known:
            return None
        least = min(known.values())
        ranks = {rank: min(round(SAME * s / least), SLOWEST) for rank, s in known.items()}
        clients = dict(now.clients)
        for k, factors in self.client.items():
            if len(factors) == FEW:
                clients[k] = max(min(round(SAME * min(factors)), DEAREST), 1)
        odd = {k: f for k, f in clients.items() if f not in PLAIN}
        first = sorted(odd, key=lambda k: (-abs(odd[k] - SAME) * sizes[k], k))[:MANY]
        ahead = min(round(SAME * SAME * (self._typical(self.ahead) or 0.0) / least), 10**15)
        return Pace(ranks, {k: odd[k] for k in sorted(first)}, ahead)

    @staticmethod
    def _typical(values: Sequence[float]) -> float | None:
        return median_low(values) if len(values) >= FEW else None

    def memory(self) -> dict[str, Any]:
        """What goes into a checkpoint; clients are measured anew."""
        return {"rank": [[r, self.seen[r], q] for r, q in sorted(self.rank.items())], "ahead": self.ahead}

    def recall(self, memory: Mapping[str, Any]) -> None:
        self.rank = {rank: list(q) for rank, _, q in memory["rank"]}
        self.seen = {rank: t for rank, t, _ in memory["rank"]}
        self.ahead = list(memory["ahead"])
