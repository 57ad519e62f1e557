"""The privacy loss distribution of Gaussian noise added to a sum over a Poisson sample, for many releases.

One unit is drawn with probability q and adds 1 to the sum, and the noise has the standard deviation z:

    P = (1 - q) N(0, z^2) + q N(1, z^2)  with the unit,    Q = N(0, z^2)  without it
    delta(epsilon) = max(H(P, Q), H(Q, P)),   H(A, B) = E_{x ~ A}[max(0, 1 - exp(epsilon - ln A(x) / B(x)))]

Adding or removing a unit of t releases replaces A and B by their t-fold products, so that the privacy losses
ln A(x) / B(x) of the releases are added, and the distribution of the sum is a convolution. All approximations are upper
bounds of delta:

- A loss between two points of a grid is moved to both, such that its probabilities under A and B are kept
  (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi. Connect the Dots. PETS 2022. https://arxiv.org/abs/2207.04380).
- The convolution is a power of a Fourier transform. Its rounding error would hide a small delta, so the probabilities
  are multiplied by exp(theta loss - K(theta)) before, K(theta) = ln E exp(theta loss), and divided by it afterwards.
  With half of the theta of Chernoff's bound, the result is large at the losses on which delta depends.
- Losses outside of the range of the transform have a mass that Chernoff's bound limits, and count as infinite.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import fft, signal, special

Array = NDArray[np.float64]

TAIL = 10.0  # standard deviations of the noise beyond which a loss counts as infinite
POINTS_PER_DEVIATION = 20  # points of the grid per standard deviation of the loss of one release
LARGEST_STEP = 0.01  # of the grid
MOST_POINTS = 1 << 16  # of the grid, for one release
LARGEST_SIZE = 1 << 21  # of a Fourier transform
LOG_TAIL = math.log(1e-10)  # ln of the mass outside of the range of a Fourier transform, relative to sqrt(delta)
NEGATIVE_THETAS = -np.geomspace(1e5, 1e-2, 24)  # values of theta in Chernoff's bounds of low losses
POSITIVE_THETAS = 320  # number of positive values


class PoissonLossDistribution:
    """The privacy loss distributions of any number of releases, with the larger delta of both directions."""

    def __init__(self, rate: float, noise_multiplier: float) -> None:
        """Compute the distributions of one release.

        Args:
            rate: the probability with which a unit is drawn, below 1.
            noise_multiplier: standard deviation of the noise / largest norm of what a unit adds to the sum.
        """
        step, first, with_unit, without_unit = _discretize(rate, noise_multiplier)
        infinite = float((1 - rate) * special.ndtr(-TAIL - 1 / noise_multiplier) + rate * special.ndtr(-TAIL))
        self._removal = _ComposedLoss(step, *_connect_dots(step, first, with_unit, without_unit), infinite)
        last = first + len(with_unit)
        self._addition = _ComposedLoss(step, *_connect_dots(step, -last, without_unit[::-1], with_unit[::-1]), 0.0)

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the smallest epsilon of `steps` releases at a delta."""
        return max(each.epsilon(steps, delta) for each in (self._removal, self._addition))

    def delta(self, steps: int, epsilon: float) -> float:
        """Return the smallest delta of `steps` releases at an epsilon."""
        return max(each.delta(steps, epsilon) for each in (self._removal, self._addition))


class _ComposedLoss:
    """The distribution of the sum of the losses of several releases, for one direction."""

    def __init__(self, step: float, first: int, masses: Array, infinite: float) -> None:
        """Take the distribution of one release: masses[i] at the loss (first + i) step, `infinite` at infinity."""
        self._step, self._first, self._infinite = step, first, infinite
        with np.errstate(divide="ignore"):
            self._log_masses = np.log(masses)
        self._losses = step * np.arange(first, first + len(masses))
        mean = masses @ self._losses
        deviation = math.sqrt(masses @ (self._losses - mean) ** 2)
        largest = min(1e5, max(1e3, 30 / deviation))
        self._thetas = np.concatenate([NEGATIVE_THETAS, [0.0], np.geomspace(1e-5, largest, POSITIVE_THETAS)])
        self._cgf = self._compute_cgf(self._thetas)
        self._spectrum = lru_cache(maxsize=8)(self._compute_spectrum)

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the smallest epsilon at a delta; infinity if no epsilon has it."""
        zero = len(NEGATIVE_THETAS)
        bounds = (steps * self._cgf[zero + 1 :] - math.log(delta)) / self._thetas[zero + 1 :]
        sums = self._sum_tails(steps, self._thetas[bounds.argmin() + zero + 1], math.log(delta))
        if sums is None:
            return float(bounds.min())
        losses, above, weighted, infinite = sums
        if infinite > delta:
            return math.inf
        index = int(np.argmax(infinite + above - weighted <= delta))
        if index == 0 or losses[index] <= 0:
            return max(0.0, float(losses[index]))
        # Between the points index - 1 and index, delta = infinite + above - weighted exp(epsilon - losses[index - 1]).
        ratio = (infinite + above[index - 1] - delta) / weighted[index - 1]
        return max(0.0, float(losses[index - 1] + math.log(ratio)))

    def delta(self, steps: int, epsilon: float) -> float:
        """Return the smallest delta at an epsilon."""
        zero = len(NEGATIVE_THETAS)
        bounds = steps * self._cgf[zero:] - self._thetas[zero:] * epsilon
        sums = self._sum_tails(steps, self._thetas[bounds.argmin() + zero], bounds.min())
        if sums is None:
            return math.exp(bounds.min())
        losses, above, weighted, infinite = sums
        if epsilon < losses[0]:
            return 1.0
        if epsilon >= losses[-1]:
            return min(1.0, infinite)
        index = int(np.searchsorted(losses, epsilon, side="right")) - 1
        finite = float(above[index]) - float(weighted[index]) * math.exp(epsilon - losses[index])
        return min(1.0, infinite + max(0.0, finite))

    def _sum_tails(self, steps: int, best: float, log_delta: float) -> tuple[Array, Array, Array, float] | None:
        """Return sums over the masses of the losses above each point, for `steps` releases.

        Args:
            best: the theta of the smallest Chernoff bound.
            log_delta: ln delta, roughly.

        Returns:
            The losses l; the sums of the masses above each l; the sums of the masses multiplied by exp(l - loss), whose
            difference is delta at epsilon = l; the mass of infinite losses. None if there would be too many losses,
            which only happens if epsilon is far beyond 1000; Chernoff's bound is used then.
        """
        # Half of the best theta makes the masses on which delta depends about sqrt(delta), far above rounding errors,
        # and does not enlarge those of much larger losses, for which the transform would have to be longer.
        tilt = int(np.abs(self._thetas - best / 2).argmin())
        theta, cgf = self._thetas[tilt], self._cgf[tilt]
        log_tail = LOG_TAIL + log_delta / 2
        # Chernoff's bounds of the range of the tilted distribution: upper ones for larger theta, otherwise lower ones.
        bounds = np.delete(steps * (self._cgf - cgf) - log_tail, tilt) / np.delete(self._thetas - theta, tilt)
        upper = min(steps * (self._first + len(self._losses) - 1), math.ceil(bounds[tilt:].min() / self._step))
        lower = max(steps * self._first, math.floor(bounds[:tilt].max() / self._step))
        count = upper - lower + 1
        if count > LARGEST_SIZE:
            return None
        size = 1 << max(1, (count - 1).bit_length())
        spectrum = self._spectrum(tilt, size)
        power = np.zeros(len(spectrum), complex)
        large = steps * spectrum.real > -80
        power[large] = np.exp(steps * spectrum[large])
        tilted = np.roll(fft.irfft(power, size), -((lower - steps * self._first) % size))[:count]
        losses = self._step * np.arange(lower, upper + 1)
        exponents = steps * cgf - theta * losses
        # Losses far below those on which delta depends would overflow, and their masses are not needed exactly.
        masses = np.maximum(tilted, 0) * np.exp(np.minimum(exponents, 200))
        infinite = -math.expm1(steps * math.log1p(-self._infinite)) + math.exp(log_tail + min(200, exponents[-1]))
        above = np.cumsum(masses[::-1])[::-1] - masses
        decay = math.exp(-self._step)
        weighted = signal.lfilter([0.0, decay], [1.0, -decay], masses[::-1])[::-1]
        return losses, above, weighted, infinite

    def _compute_cgf(self, thetas: Array) -> Array:
        """Return K(theta) for several values; in a loop, because a matrix of all values and losses would be large."""
        result = np.empty(len(thetas))
        for i, theta in enumerate(thetas):
            exponents = self._log_masses + theta * self._losses
            largest = exponents.max()
            result[i] = largest + math.log(np.exp(exponents - largest).sum())
        return result

    def _compute_spectrum(self, tilt: int, size: int) -> NDArray[np.complex128]:
        """Return the logarithm of the Fourier transform of the masses of one release, which are tilted by a theta."""
        tilted = np.exp(self._log_masses + self._thetas[tilt] * self._losses - self._cgf[tilt])
        padded = np.zeros(-(-len(tilted) // size) * size)
        padded[: len(tilted)] = tilted
        transform = fft.rfft(padded.reshape(-1, size).sum(0))
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(transform))


def _discretize(rate: float, noise_multiplier: float) -> tuple[float, int, Array, Array]:
    """Return the probabilities of the intervals of a grid of losses.

    Returns:
        The step of the grid; the index of its first point; the probabilities of the intervals between its points with
        the unit, and without it.
    """
    top = math.log(rate) + _log_ratio(1 + TAIL * noise_multiplier, noise_multiplier)
    highest = float(np.logaddexp(math.log1p(-rate), top))
    x = np.linspace(-8 * noise_multiplier, 1 + 8 * noise_multiplier, 2001)
    losses = np.logaddexp(math.log1p(-rate), math.log(rate) + _log_ratio(x, noise_multiplier))
    density = (1 - rate) * np.exp(-((x / noise_multiplier) ** 2) / 2)
    density += rate * np.exp(-(((x - 1) / noise_multiplier) ** 2) / 2)
    density /= density.sum()
    deviation = float(np.sqrt(density @ (losses - density @ losses) ** 2))
    extent = highest - math.log1p(-rate)
    step = max(min(deviation / POINTS_PER_DEVIATION, LARGEST_STEP), extent / MOST_POINTS)
    first, last = math.floor(math.log1p(-rate) / step), math.ceil(highest / step)
    grid = step * np.arange(first, last + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The outcome x with a loss: exp(loss) = 1 - rate + rate exp((2 x - 1) / (2 z^2)).
        log_ratio = grid + np.log(-np.expm1(math.log1p(-rate) - grid)) - math.log(rate)
    log_ratio[grid <= math.log1p(-rate)] = -math.inf
    edges = noise_multiplier**2 * log_ratio + 0.5
    edges[-1] = 1 + TAIL * noise_multiplier
    without_unit = _normal_masses(edges / noise_multiplier)
    with_unit = (1 - rate) * without_unit + rate * _normal_masses((edges - 1) / noise_multiplier)
    return step, first, with_unit, without_unit


def _log_ratio(x: float | Array, noise_multiplier: float) -> Array:
    """Return ln N(x; 1, z^2) / N(x; 0, z^2)."""
    return np.asarray((2 * x - 1) / (2 * noise_multiplier**2))


def _normal_masses(edges: Array) -> Array:
    """Return the probabilities of the intervals between ascending edges under N(0, 1), with a small relative error."""
    lower, upper = edges[:-1], edges[1:]
    right = lower > 0
    return np.asarray(special.ndtr(np.where(right, -lower, upper)) - special.ndtr(np.where(right, -upper, lower)))


def _connect_dots(step: float, first: int, upper: Array, lower: Array) -> tuple[int, Array]:
    """Move the losses of each interval of a grid to its two ends, such that both probabilities are kept.

    Args:
        upper: probabilities of the intervals under A; the losses are ln A / B.
        lower: probabilities of the intervals under B.

    Returns:
        `first`, and the masses under A at the points of the grid.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = step * np.arange(first, first + len(upper)) + np.log(lower) - np.log(upper)
    share = np.where(upper > 0, np.expm1(ratio) / math.expm1(-step), 0)
    to_end = upper * np.clip(share, 0, 1)
    masses = np.zeros(len(upper) + 1)
    masses[:-1] += upper - to_end
    masses[1:] += to_end
    return first, masses
