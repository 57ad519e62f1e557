"""Sampling of the cohort of each round, and assignment of its clients to ranks.

Both are functions of the seed, the round, the rank failures of the run, and the relative costs of ranks, which rank 0
measures and broadcasts. All ranks therefore compute the same result without further messages.

    q_r   seconds per training sample of rank r in a round, as reported in its uploads
    s_r   lower median of the last WINDOW values of q_r, if there are at least MIN_ROUNDS
    c_r   100 s_r / min s, rounded to multiples of COST_STEP: the relative cost of rank r, i.e. its time per sample in
          per cent of the time per sample of the fastest rank; 0 if rank r has failed
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common import seeds
from fedmpi.data.federated import FederatedData
from fedmpi.engine.faults.lost_ranks import INITIAL_STATE, LostRanks
from fedmpi.engine.federation_config import FederationConfig

# rounds; a rank without a measurement for MAX_AGE rounds is regarded as fast again
WINDOW, MIN_ROUNDS, MAX_AGE = 5, 3, 50
NORMAL_COST, COST_STEP, MAX_COST = 100, 25, 10_000  # per cent

RankCosts = dict[int, int]  # rank -> c_r; ranks that are not in it have NORMAL_COST


class RankSpeeds:
    """Estimates, on rank 0, how long each rank takes to train on one sample."""

    def __init__(self) -> None:
        """Create the estimates, without any measurements yet."""
        self.seconds_per_sample: dict[int, list[float]] = {}  # rank -> its last values of q_r
        self.last_round: dict[int, int] = {}  # rank -> the round of its last measurement

    def record(self, t: int, placement: Mapping[int, int], samples: Sequence[float], seconds: Sequence[float]) -> None:
        """Record the training times of round t.

        Args:
            placement: client -> the rank that trained it.
            samples, seconds: the number of training samples and the training time of each client in `placement`;
                clients with a time of 0 are ignored.
        """
        trained, busy = dict[int, float](), dict[int, float]()  # rank -> samples, seconds
        for rank, n, s in zip(placement.values(), samples, seconds, strict=True):
            if n > 0 and s > 0 and math.isfinite(s):
                trained[rank], busy[rank] = trained.get(rank, 0.0) + n, busy.get(rank, 0.0) + s
        for rank, s in busy.items():
            self.seconds_per_sample[rank] = [*self.seconds_per_sample.get(rank, ()), s / trained[rank]][-WINDOW:]
            self.last_round[rank] = t

    def relative_costs(self, t: int) -> RankCosts:
        """Return rank -> relative cost at round t, for all ranks that are slower than the fastest one."""
        fresh = {
            r: q
            for r, q in self.seconds_per_sample.items()
            if len(q) >= MIN_ROUNDS and t - self.last_round[r] <= MAX_AGE
        }
        typical = {rank: median_low(q) for rank, q in fresh.items()}
        least = min(typical.values(), default=1.0)
        rank_costs = {
            rank: min(COST_STEP * round(NORMAL_COST / COST_STEP * s / least), MAX_COST) for rank, s in typical.items()
        }
        return {rank: percent for rank, percent in rank_costs.items() if percent != NORMAL_COST}


class ClientScheduler:
    """Draws the cohort of each round and assigns its clients to ranks, with the same result on every rank."""

    def __init__(self, config: FederationConfig, data: FederatedData, comm: Communicator, ranks: Sequence[int]) -> None:
        """Create the scheduler; `ranks` are the ranks that train clients."""
        self.config, self.data, self.comm, self.ranks = config, data, comm, ranks
        self.cohort_seed = config.seed  # the seed of cohorts; a secret one if nobody may know who takes part
        # Round -> number of its releases before this job, of which each had a cohort of its own; only secret cohorts
        # are drawn again if a round is repeated.
        self.earlier_releases = Counter[int]()
        self.first_round: float = 0  # the first round whose latest release is not among them
        self.lost_ranks = LostRanks()
        self.rank_costs: RankCosts = {}  # the relative costs by which clients are assigned; the same on every rank
        measured = config.placement == "balanced" and config.measures_speed and len(ranks) > 1
        self.speeds = RankSpeeds() if measured else None
        self._measured_costs: RankCosts = {}  # the latest measured relative costs, on rank 0

    def sample_cohort(self, t: int) -> list[int]:
        """Draw the cohort of round t, in ascending order; clients of failed ranks are included."""
        config, attempt = self.config, max(self.earlier_releases[t] - (t < self.first_round), 0)
        how = config.fraction, config.sampling, config.cohort_size
        return draw_cohort(self.cohort_seed, t, self.data.clients, *how, attempt)

    def cohort(self, t: int) -> list[int]:
        """Return the cohort of round t without clients excluded by rank failures, in ascending order."""
        drawn = self.sample_cohort(t)
        return self.lost_ranks.participants(t, drawn) if self.lost_ranks.rows else drawn

    def last_trained_rounds(self, t: int) -> dict[int, int]:
        """Return the round (0 to t) that produced each client's state at the start of round t + 1.

        Clients whose state is still the initial one are left out.
        """
        rounds: dict[int, int] = {}
        for earlier in range(t + 2):
            back = self.lost_ranks.reverted_states(earlier)
            rounds = {k: r for k, r in (rounds | back).items() if r != INITIAL_STATE} if back else rounds
            if earlier <= t:
                rounds |= dict.fromkeys(self.cohort(earlier), earlier)
        return rounds

    def cohort_weights(self, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the numbers of training samples n_k and the weights p_k of these clients, (m,) float64 each."""
        n = torch.tensor(self._num_samples(clients), dtype=torch.float64)
        if self.config.client_weights is not None:
            return n, self.config.client_weights[list(clients)]
        return n, n / n.sum() if self.config.weighting == "samples" else torch.full_like(n, 1 / max(len(n), 1))

    def _num_samples(self, clients: Sequence[int]) -> list[float]:
        """Return the number of training samples of each client."""
        return [float(self.data.train_sizes[k]) for k in clients]

    # ---- assignment to ranks ----
    def assign_clients(self, t: int, alive: Collection[int] | None = None) -> dict[int, int]:
        """Assign the clients of round t to ranks; return client -> rank.

        If a rank fails in round t, only its clients are assigned to other ranks.

        Args:
            alive: the ranks that are alive; by default all that the communicator considers alive.
        """
        alive = self.comm.alive if alive is None else alive
        clients = self.sample_cohort(t)
        if self.config.placement == "pinned":
            placement = assign_pinned(clients, self.ranks)
        else:
            placement = assign_balanced(
                clients, self._num_samples(clients), self._alive_ranks_at_round_start(t), self.rank_costs
            )
        moved = [k for k, rank in placement.items() if rank not in alive]
        if moved:
            placement |= assign_balanced(
                moved, self._num_samples(moved), [rank for rank in self.ranks if rank in alive], self.rank_costs
            )
        return {k: placement[k] for k in self.cohort(t)} if self.lost_ranks.rows else placement

    def _alive_ranks_at_round_start(self, t: int) -> list[int]:
        """Return the training ranks alive at the start of round t; in a replay, those alive in the recorded run."""
        lost = [row["ranks"] for row in self.lost_ranks.rows if row["round"] < t and self.config.replays_failures]
        away = {int(rank) for ranks in lost for rank in ranks}
        return [r for r in self.ranks if self.rank_costs.get(r, NORMAL_COST) and r not in away]

    # ---- relative costs of ranks, on rank 0 ----
    def record_timings(self, t: int, placement: Mapping[int, int], seconds: Sequence[float]) -> None:
        """Record how long the clients in `placement` trained in round t; `seconds` is in the order of `placement`."""
        if self.speeds is not None and not self.lost_ranks.in_round(t):
            self.speeds.record(t, placement, self._num_samples([*placement]), seconds)

    def choose_rank_costs(self, t: int) -> RankCosts:
        """Return, on rank 0, the relative costs by which clients are assigned to ranks from round t on.

        These costs are updated every MIN_ROUNDS rounds.
        """
        if self.speeds is not None and t % MIN_ROUNDS == 0:
            self._measured_costs = self.speeds.relative_costs(t)
        return self._measured_costs | {rank: 0 for rank in self.ranks if rank not in self.comm.alive}


def draw_cohort(
    seed: int,
    t: int,
    clients: int,
    fraction: float | None,
    sampling: str = "uniform",
    size: int | None = None,
    attempt: int = 0,
) -> list[int]:
    """Draw the cohort S_t of round t without replacement, in ascending order.

    Args:
        clients: the number N of clients.
        fraction: determines the number of clients in the cohort, m = max(floor(fraction N), 1).
        sampling: uniform: each cohort is drawn independently; cyclic: every client takes part once in each cycle of
            rounds, m clients per round and the remaining ones in the last round of the cycle (with m = 1 and mean
            aggregation this is cyclic weight transfer, Chang et al. 2018); poisson: each client takes part with
            probability `fraction`, or size / N, independently, so that a cohort may be empty; fixed_cycle:
            cyclic with the same order in all cycles.
        size: the number m of clients, in place of `fraction`.
        attempt: how often an independent cohort (uniform or poisson) of this round has been drawn before.
    """
    m = cohort_size(clients, fraction, size)
    purpose: list[str | int] = ["cohort", t, *([attempt] if attempt else [])]
    if sampling == "poisson":
        probability = size / clients if size is not None else fraction or 0.0
        return [int(k) for k in np.flatnonzero(seeds.numpy_generator(seed, *purpose).random(clients) < probability)]
    if sampling in ("cyclic", "fixed_cycle"):
        cycle, position = divmod(t, -(-clients // m))
        cycle = 0 if sampling == "fixed_cycle" else cycle
        drawn = seeds.numpy_generator(seed, "cycle", cycle).permutation(clients)[position * m : (position + 1) * m]
    else:
        drawn = seeds.numpy_generator(seed, *purpose).choice(clients, size=m, replace=False)
    return sorted(int(k) for k in drawn)


def cohort_size(clients: int, fraction: float | None, size: int | None = None) -> int:
    """Return the number of clients in a round: `size` if it is given, otherwise max(floor(fraction clients), 1)."""
    if size is not None:
        return size
    assert fraction is not None
    return max(int(fraction * clients + 1e-9), 1)


def assign_balanced(
    clients: Sequence[int], costs: Sequence[float], ranks: Sequence[int], rank_costs: Mapping[int, int] | None = None
) -> dict[int, int]:
    """Assign clients to ranks so that all ranks finish at about the same time; return client -> rank.

    Clients are assigned in descending order of cost, each to the rank that would finish it first. The longest time is
    at most 4/3 of the optimum if all ranks are equally fast (Graham, 1969), and otherwise at most twice the optimum
    (Gonzalez, Ibarra and Sahni, 1977).

    Args:
        costs: the cost of each client, for example its number of samples.
        rank_costs: rank -> the relative time, in per cent, that the rank takes per unit of cost; 100 for ranks that
            are not listed.
    """
    if len(ranks) == 1:
        return dict.fromkeys(clients, ranks[0])
    rank_costs = {rank: (rank_costs or {}).get(rank, NORMAL_COST) for rank in ranks}
    load, placed = dict.fromkeys(ranks, 0.0), dict[int, int]()
    for k, cost in sorted(zip(clients, costs, strict=True), key=lambda kc: (-kc[1], kc[0])):
        rank = min(ranks, key=lambda r: (load[r] + cost * rank_costs[r], rank_costs[r], r))
        placed[k] = rank
        load[rank] += cost * rank_costs[rank]
    return {k: placed[k] for k in clients}


def assign_pinned(clients: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
    """Assign each client to the rank at position (client modulo number of ranks) in `ranks`; return client -> rank."""
    return {k: ranks[k % len(ranks)] for k in clients}
