"""Differential privacy of the samples of each client by DP-SGD: the noise of the steps, and their epsilon.

In every step client k, which has n_k samples, draws a Poisson batch: each of its samples with probability q_k. With the
gradients g_i of the samples, the clip norm S and the noise multiplier z_k, the gradient of the step is

    g = (sum_{i in batch} clip(g_i) + N(0, (z_k S)^2)) / (q_k n_k)                                                   (1)
    clip(g) = g min(1, S / ||g||),        q_k = min(B / n_k, 1)        for train.batch_size B

A sample changes the sum by at most S (Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with
Differential Privacy. CCS 2016. https://arxiv.org/abs/1607.00133). Two data sets are neighbours if one of them has one
sample more; n_k and q_k are public. The epsilon of a client is that of all its steps in all rounds in which it takes
part, for an observer who sees each of them. That only some clients take part in a round does not lower it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from fedmpi.common.errors import UserError
from fedmpi.privacy.accountant import EpsilonSchedule, Sampling, find_noise_multiplier

Accountant = Literal["pld", "rdp"]
# Rates are rounded up to this many significant digits in the accounting, so that fewer of them are distinct.
RATE_DIGITS = 3


def round_up(rate: float) -> float:
    """Return the smallest number with RATE_DIGITS significant digits that is at least `rate`; at most 1.

    >>> round_up(0.0300699)
    0.0301
    """
    unit = 10.0 ** (int(f"{rate:e}".partition("e")[2]) + 1 - RATE_DIGITS)
    rounded = round(rate / unit) * unit
    return min(float(f"{rounded if rounded >= rate else rounded + unit:.{RATE_DIGITS}g}"), 1.0)


@dataclass(frozen=True, eq=False)
class SampleMechanism:
    """The noise of all clients' steps, and the account of what they cost."""

    clip: float  # the clip norm S
    delta: float
    rates: Sequence[float]  # q_k of each client
    steps: Sequence[int]  # number of steps of each client in a round in which it takes part
    participations: Sequence[int]  # number of rounds of the run in which each client takes part
    noise_multiplier: float | None = None  # z of all clients; None: computed from `epsilon`
    epsilon: float | None = None  # the epsilon that each client reaches at the end of the run
    accountant: Accountant = "pld"
    _schedules: dict[tuple[float, float], EpsilonSchedule] = field(default_factory=dict)

    def noise_multiplier_of(self, client: int) -> float:
        """Return the noise multiplier z_k of a client.

        With `epsilon`, it is the smallest with which the client's epsilon after the run is at most that value.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        steps = max(self.steps[client] * self.participations[client], 1)
        return _find_noise_multiplier(self.epsilon, self.delta, round_up(self.rates[client]), steps, self.accountant)

    def expected_batch_size(self, client: int, n: int) -> float:
        """Return the expected number of samples in a batch of a client that has n samples, q_k n_k."""
        return self.rates[client] * n

    def epsilon_of(self, client: int, participations: int) -> float:
        """Return the epsilon of a client that has taken part in this many rounds."""
        steps = participations * self.steps[client]
        return self._epsilon(self.noise_multiplier_of(client), self.rates[client], steps) if steps else 0.0

    def epsilons(self, participations: Mapping[int, int]) -> dict[int, float]:
        """Return the epsilon of each client, for client -> number of rounds in which it has taken part."""
        return {client: self.epsilon_of(client, rounds) for client, rounds in sorted(participations.items())}

    def largest_epsilon(self, participations: Mapping[int, int]) -> float:
        """Return the largest epsilon of all clients, for client -> number of rounds in which it has taken part."""
        costs = {
            (self.noise_multiplier_of(k), self.rates[k], rounds * self.steps[k])
            for k, rounds in participations.items()
            if rounds * self.steps[k]
        }
        return max((self._epsilon(*cost) for cost in _select_maximal(costs)), default=0.0)

    def _epsilon(self, noise_multiplier: float, rate: float, steps: int) -> float:
        key = noise_multiplier, round_up(rate)
        if key not in self._schedules:
            self._schedules[key] = EpsilonSchedule(noise_multiplier, self.delta, _sampling(key[1]), self.accountant)
        return self._schedules[key].after(steps)


@dataclass(frozen=True)
class SampleGuarantee:
    """What the rounds of a run cost: the mechanism, and the clients that take part in each round."""

    mechanism: SampleMechanism
    cohort: Callable[[int], Sequence[int]]  # t -> the clients that take part in round t

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.mechanism.delta

    def epsilon(self, rounds: Sequence[int]) -> float:
        """Return the largest epsilon of all clients after these rounds; a repeated round occurs several times."""
        return self.mechanism.largest_epsilon(self._participations(rounds))

    def epsilons(self, rounds: Sequence[int]) -> dict[int, float]:
        """Return the epsilon of each client that has taken part in one of these rounds."""
        return self.mechanism.epsilons(self._participations(rounds))

    def _participations(self, rounds: Sequence[int]) -> Counter[int]:
        counts = Counter[int]()
        for t, attempts in Counter(rounds).items():
            counts.update(dict.fromkeys(self.cohort(t), attempts))
        return counts


def check_delta(
    delta: float, sizes: Iterable[int], names: Sequence[str] | None = None, key: str = "privacy.dp.delta"
) -> None:
    """Raise UserError if delta is not below 1 / n_k for each client with n_k samples.

    With a larger delta, a mechanism that publishes a random sample of the client would be allowed.

    Args:
        sizes: n_k of each client.
        names: the names of the clients' sites, if they have names.
        key: the key that sets delta, and its place, for the message.
    """
    largest, client = max((n, -k) for k, n in enumerate(sizes))
    if largest and delta * largest >= 1:
        name = names[-client] if names else f"client {-client}"
        raise UserError(
            f"{key}: {delta:g} is not allowed; must be below 1 / (number of samples of a client), and "
            f"{name} has {largest}; set privacy.dp.delta to less than {1 / largest:.2g}, for example "
            f"{largest**-1.1:.1g}"
        )


def _sampling(rate: float) -> Sampling:
    """Return how samples are drawn; with rate 1 all of them are in every batch."""
    return Sampling("poisson", rate) if rate < 1 else Sampling("none")


@lru_cache(maxsize=4096)
def _find_noise_multiplier(epsilon: float, delta: float, rate: float, steps: int, accountant: Accountant) -> float:
    return find_noise_multiplier(epsilon, delta, _sampling(rate), steps, accountant)


def _select_maximal(costs: Iterable[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Leave out costs (noise multiplier, rate, steps) that another cost with no more noise is at least as high as.

    Epsilon rises with the rate and the number of steps, and falls with the noise.
    """
    maximal = list[tuple[float, float, int]]()
    for z, q, steps in sorted(costs, key=lambda cost: (cost[0], -cost[1], -cost[2])):
        if not any(other >= q and more >= steps for _, other, more in maximal):
            maximal.append((z, q, steps))
    return maximal
