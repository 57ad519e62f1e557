"""Differential privacy of many noisy releases: epsilon from the noise, or the noise from epsilon.

Each release is a sum over a sample of the protected units, clients or samples of data, plus Gaussian noise whose
standard deviation is noise_multiplier times the largest norm that one unit adds to the sum, the clip norm. Epsilon
states how well two data sets that differ in one unit can be told apart from all releases together. What "differ" means
depends on how the sample is drawn:

    sampling             data sets differ by         method "pld"                   method "rdp"
    poisson              adding or removing a unit   privacy loss distribution      Renyi differential privacy
    without_replacement  replacing a unit            Renyi, or exact without         Renyi differential privacy
                                                     amplification if smaller
    none                 the unit is left out        exact                          Renyi differential privacy

- poisson: every unit is in the sample with the same probability, independently of all others and of other releases.
  If one draw decides about several releases, such as a client that is drawn for a round and then makes several noisy
  steps, the probability of that draw must not be part of the rate.
- without_replacement: the sample has a fixed size. A replaced unit moves the sum by up to twice the clip norm, so
  noise_multiplier / 2 counts. Privacy loss distributions of such samples cannot be composed like those of Poisson
  samples (Lebeda, Regehr, Kamath, Steinke. Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms under
  Composition. 2024), so that both methods use the bound of Wang, Balle, Kasiviswanathan (Subsampled Renyi Differential
  Privacy and Analytical Moments Accountant. AISTATS 2019).
- none: there is no amplification by sampling; `steps` is the number of releases in which one unit takes part.
  Releases together are one Gaussian mechanism (Balle, Wang. Improving the Gaussian Mechanism. ICML 2018).

Renyi differential privacy comes from the library dp_accounting. It is converted to epsilon by the bound of Canonne,
Kamath, Steinke (The Discrete Gaussian for Differential Privacy. NeurIPS 2020, Proposition 12). It is smaller than that
of Mironov (2017), by which older papers state epsilon: 0.70 in place of 0.97 for 100 of 1e5 clients, noise multiplier 1
and one round. Privacy loss distributions give less still: 7 % less after 1e6 such rounds (6.37 in place of 6.83), 42 %
less after 1e4 (0.52 in place of 0.88), and 0.015 after one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import special

from fedmpi.common.errors import UserError
from fedmpi.privacy.banded import compute_squared_sensitivity
from fedmpi.privacy.loss_distribution import PoissonLossDistribution

Method = Literal["pld", "rdp"]

# Orders of Renyi divergences. They are closer where epsilon is large, because the best order is small there.
INTEGER_ORDERS = np.array([*range(2, 64), 80, 96, 128, 257, 512])
ORDERS = np.unique(np.concatenate([[1.1, 1.25, 1.5, 1.75], np.arange(2, 16, 0.25), INTEGER_ORDERS]))
POINTS_PER_DOUBLING = 4096  # noise multipliers that are considered, 2^(i / 4096), differ by 0.017 %
LOG2_NOISE_RANGE = (-7, 20)  # the noise multipliers that are considered, as powers of 2


@dataclass(frozen=True)
class Sampling:
    """How the sample of protected units of a release is drawn; see the docstring of the module."""

    kind: Literal["poisson", "without_replacement", "none"]
    rate: float = 1.0  # poisson: the probability of each unit
    size: int = 0  # without_replacement: number of units in the sample
    population: int = 0  # without_replacement: number of all units


class EpsilonSchedule:
    """Epsilon after any number of releases with the same noise and sampling.

    The result depends on the number of releases only, not on earlier calls.
    """

    def __init__(self, noise_multiplier: float, delta: float, sampling: Sampling, method: Method = "pld") -> None:
        """Prepare the computation, which takes up to a second; each call of `after` takes milliseconds.

        Args:
            noise_multiplier: standard deviation of the noise / clip norm.
            delta: the probability with which the guarantee may fail.
            sampling: how the units of each release are drawn.
            method: "pld", which gives the smallest known epsilon, or "rdp".
        """
        self._delta = delta
        self._composition = _make_composition(noise_multiplier, sampling, method)

    def after(self, steps: int) -> float:
        """Return epsilon after a number of releases."""
        return self._composition.epsilon(steps, self._delta) if steps else 0.0


def compute_epsilon(
    noise_multiplier: float, delta: float, sampling: Sampling, steps: int, method: Method = "pld"
) -> float:
    """Return epsilon of a number of releases.

    Args:
        noise_multiplier: standard deviation of the noise / clip norm.
        delta: the probability with which the guarantee may fail.
        sampling: how the units of each release are drawn.
        steps: number of releases; a round that was repeated counts as often as it was released.
        method: "pld", which gives the smallest known epsilon, or "rdp".
    """
    return EpsilonSchedule(noise_multiplier, delta, sampling, method).after(steps)


def compute_delta(
    noise_multiplier: float, epsilon: float, sampling: Sampling, steps: int, method: Method = "pld"
) -> float:
    """Return delta of a number of releases; the arguments are those of `compute_epsilon`."""
    return _make_composition(noise_multiplier, sampling, method).delta(steps, epsilon) if steps else 0.0


def find_noise_multiplier(
    epsilon: float, delta: float, sampling: Sampling, steps: int, method: Method = "pld"
) -> float:
    """Return the smallest noise multiplier, up to 0.02 %, with which `compute_epsilon` is at most `epsilon`.

    Raises:
        UserError: no noise multiplier up to a million reaches epsilon.
    """

    def log_excess(index: int) -> float:
        """Return ln(epsilon of a noise multiplier / epsilon)."""
        reached = compute_epsilon(2 ** (index / POINTS_PER_DOUBLING), delta, sampling, steps, method)
        return math.log(max(reached, 1e-9 * epsilon) / epsilon)

    lowest, highest = (POINTS_PER_DOUBLING * each for each in LOG2_NOISE_RANGE)
    too_small, enough = lowest - 1, highest + 1  # multipliers that surround the result; the ends are not computed
    excess = dict[int, float]()
    index = 0
    while enough - too_small > 1:
        excess[index] = log_excess(index)
        if excess[index] > 0:
            too_small = index
        else:
            enough = index
        if too_small in excess and enough in excess:
            # Epsilon is nearly a power of the noise. The next point is a little beyond the one at which the line
            # through both ends is 0, so that both ends come close to it.
            share = excess[too_small] / (excess[too_small] - excess[enough])
            margin = (enough - too_small) / 64
            estimate = too_small + share * (enough - too_small) + (margin if index == too_small else -margin)
        else:  # Epsilon is roughly inversely proportional to the noise.
            estimate = index + POINTS_PER_DOUBLING * (excess[index] / math.log(2) + math.copysign(0.1, excess[index]))
        index = min(max(round(estimate), too_small + 1), enough - 1)
    if enough > highest:
        raise UserError(
            f"privacy.dp.epsilon: {epsilon:g} with privacy.dp.delta: {delta:g} cannot be reached in {steps} releases "
            f"by noise of up to {2 ** LOG2_NOISE_RANGE[1]} times privacy.dp.clip; raise privacy.dp.epsilon, or run "
            "fewer rounds"
        )
    return float(2 ** (enough / POINTS_PER_DOUBLING))


class BandedEpsilonSchedule:
    """Epsilon after any number of rounds with correlated noise (banded.py)."""

    def __init__(
        self,
        noise_multiplier: float,
        delta: float,
        coefficients: Sequence[float],
        separation: int,
        method: Method = "pld",
    ) -> None:
        """Set the computation up.

        Args:
            noise_multiplier: standard deviation of the independent noise z / clip norm.
            delta: the probability with which the guarantee may fail.
            coefficients: those of the matrix C.
            separation: the least difference between two rounds in which the same client takes part.
            method: "pld", which is exact here, or "rdp".
        """
        self._delta, self._coefficients, self._separation = delta, coefficients, separation
        self._composition = _make_gaussian_composition(noise_multiplier, method)

    def after(self, rounds: int, repetitions: int = 0) -> float:
        """Return epsilon after a number of rounds, and of releases beyond the first one of a round."""
        squared = compute_squared_sensitivity(self._coefficients, rounds, self._separation, repetitions)
        return self._composition.epsilon(squared, self._delta) if rounds else 0.0


def find_banded_noise_multiplier(
    epsilon: float, delta: float, coefficients: Sequence[float], separation: int, rounds: int, method: Method = "pld"
) -> float:
    """Return the smallest noise multiplier, up to 0.02 %, with which a `BandedEpsilonSchedule` ends below `epsilon`.

    Raises:
        UserError: no noise multiplier up to a million reaches epsilon.
    """
    squared = compute_squared_sensitivity(coefficients, rounds, separation)
    # A little more, so that rounding does not make it too small.
    return math.sqrt(squared) * find_noise_multiplier(epsilon, delta, Sampling("none"), 1, method) * (1 + 1e-9)


def _make_composition(
    noise_multiplier: float, sampling: Sampling, method: Method
) -> PoissonLossDistribution | GaussianComposition | _RenyiComposition | _Smaller:
    """Return the object that computes epsilon and delta of any number of releases."""
    if sampling.kind == "poisson" and sampling.rate < 1:
        if method == "pld":
            return PoissonLossDistribution(sampling.rate, noise_multiplier)
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, dp_accounting.GaussianDpEvent(noise_multiplier))
        return _RenyiComposition(event, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    if sampling.kind == "without_replacement":
        # The noise multiplier relative to the sensitivity, which is twice the clip norm.
        noise_multiplier = noise_multiplier / 2
        if sampling.size < sampling.population:
            renyi = _RenyiComposition(
                dp_accounting.SampledWithoutReplacementDpEvent(
                    sampling.population, sampling.size, dp_accounting.GaussianDpEvent(noise_multiplier)
                ),
                dp_accounting.NeighboringRelation.REPLACE_ONE,
                # The library interpolates between integers, and needs the square of an order up to 256 as steps.
                INTEGER_ORDERS,
                # Sampling never does harm, but the bound can be larger than that without sampling.
                limit=INTEGER_ORDERS / (2 * noise_multiplier**2),
            )
            return renyi if method == "rdp" else _Smaller(renyi, GaussianComposition(noise_multiplier))
    return _make_gaussian_composition(noise_multiplier, method)


def _make_gaussian_composition(noise_multiplier: float, method: Method) -> GaussianComposition | _RenyiComposition:
    """Return the object that computes epsilon and delta of releases without amplification."""
    if method == "pld":
        return GaussianComposition(noise_multiplier)
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    return _RenyiComposition(event, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)


class GaussianComposition:
    """Exact epsilon and delta of Gaussian mechanisms with the same noise: Balle and Wang 2018, Theorem 8."""

    def __init__(self, noise_multiplier: float) -> None:
        """Take the standard deviation of the noise of a release / sensitivity."""
        self._noise_multiplier = noise_multiplier

    def epsilon(self, steps: float, delta: float) -> float:
        """Return epsilon at a delta; `steps` may be any squared sensitivity, in units of that of a release."""
        std = self._noise_multiplier / math.sqrt(steps)
        epsilon = float(dp_accounting.get_epsilon_gaussian(std, delta))
        # The library stops within 1e-12 of the solution, on either side.
        return epsilon * (1 + 1e-9) + 1e-12 if epsilon else 0.0

    def delta(self, steps: float, epsilon: float) -> float:
        """Return delta at an epsilon; `steps` may be any squared sensitivity, in units of that of a release."""
        std = self._noise_multiplier / math.sqrt(steps)
        upper, lower = special.log_ndtr(0.5 / std - epsilon * std), special.log_ndtr(-0.5 / std - epsilon * std)
        return float(-math.exp(upper) * math.expm1(min(0.0, epsilon + lower - upper)))


class _RenyiComposition:
    """Epsilon and delta by Renyi differential privacy."""

    def __init__(
        self,
        event: dp_accounting.DpEvent,
        relation: dp_accounting.NeighboringRelation,
        orders: np.ndarray = ORDERS,
        limit: np.ndarray | float = math.inf,
    ) -> None:
        """Compute the Renyi divergences of one release at all orders, and reduce them to `limit`."""
        self._orders = orders
        accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
        with _without_library_warnings():
            accountant.compose(event)
        self._divergences = np.minimum(accountant.rdp, limit)

    def epsilon(self, steps: float, delta: float) -> float:
        """Return epsilon at a delta."""
        return float(rdp_privacy_accountant.compute_epsilon(self._orders, steps * self._divergences, delta)[0])

    def delta(self, steps: float, epsilon: float) -> float:
        """Return delta at an epsilon."""
        return float(rdp_privacy_accountant.compute_delta(self._orders, steps * self._divergences, epsilon)[0])


class _Smaller:
    """The smaller epsilon and delta of two bounds for the same releases."""

    def __init__(self, first: _RenyiComposition, second: GaussianComposition) -> None:
        self._both = first, second

    def epsilon(self, steps: float, delta: float) -> float:
        """Return epsilon at a delta."""
        return min(each.epsilon(steps, delta) for each in self._both)

    def delta(self, steps: float, epsilon: float) -> float:
        """Return delta at an epsilon."""
        return min(each.delta(steps, epsilon) for each in self._both)


@contextmanager
def _without_library_warnings() -> Iterator[None]:
    """Hide the library's warnings of orders at which its series does not converge, and which it leaves out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
