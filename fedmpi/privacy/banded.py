"""DP-FTRL with a banded matrix: noise that is correlated between rounds, for clients that take part at intervals.

The sums of the updates of all rounds so far, A x, determine the model, where A is the lower triangular matrix of ones.
With A = B C, B (C x + z) = A x + B z has the privacy of the Gaussian mechanism C x + z, and independent noise z becomes

    x_t + zhat_t,   zhat = C^-1 z,   zhat_t = z_t - sum_{j = 1}^{bands - 1} c_j zhat_{t - j}                     (1)

of which later noise takes back a part. C is the lower triangular Toeplitz matrix of the coefficients of the square root
of A, c_j = binom(2 j, j) / 4^j, of which the first `bands` are kept. If rounds of the same client are at least `bands`
apart, the columns of C that belong to them have no row in common, and k of them have the squared sensitivity

    clip^2 k (c_0^2 + ... + c_{bands - 1}^2)                                                                      (2)

without any sampling. One band is independent noise in each round.

Kairouz, McMahan, Song, Thakkar, Thakurta, Xu. Practical and Private (Deep) Learning without Sampling or Shuffling.
ICML 2021. https://arxiv.org/abs/2103.00039
Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu. (Amplified) Banded Matrix Factorization: A unified
approach to private training. NeurIPS 2023. https://arxiv.org/abs/2306.08153
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor


def compute_coefficients(bands: int) -> list[float]:
    """Return c_0, ..., c_{bands - 1}, the first coefficients of the power series of (1 - x)^(-1/2)."""
    coefficients = [1.0]
    for j in range(1, bands):
        coefficients.append(coefficients[-1] * (2 * j - 1) / (2 * j))
    return coefficients


def compute_squared_sensitivity(
    coefficients: Sequence[float], rounds: int, separation: int, repetitions: int = 0
) -> float:
    """Return by how much one client can change the rounds so far, squared and in units of clip^2.

    This is the number of independent Gaussian mechanisms with sensitivity `clip` to which the rounds are equivalent.

    A round that is repeated has one more row of C, in which a client has at most the entry 1, because all other entries
    belong to rounds in which it cannot take part. This holds if the client takes part in the repeated round, or not,
    like in the round before.

    Args:
        coefficients: those of C.
        rounds: number of rounds that have been released.
        separation: the least difference between two rounds of a client, at least the number of coefficients.
        repetitions: number of releases beyond the first one of each round.
    """
    if separation < len(coefficients):
        raise ValueError(f"rounds of a client are {separation} apart, which {len(coefficients)} bands do not allow")
    squares = [each**2 for each in coefficients]
    # A client that takes part as early and as often as possible; the column of its last round ends with the last round.
    starts = range(0, rounds, separation)
    return sum(sum(squares[: rounds - start]) for start in starts) + repetitions


class BandedNoise:
    """The noise zhat_t of equation (1), for rounds t = 0, 1, ..."""

    def __init__(self, coefficients: Sequence[float], draw: Callable[[int], Tensor]) -> None:
        """Set the noise up.

        Args:
            coefficients: c_0 = 1, c_1, ..., one for each band.
            draw: returns independent noise z_t of a round as a new tensor. It must return the same numbers whenever it
                is called for an earlier round, and other numbers for a round that is repeated.
        """
        self._coefficients, self._draw = coefficients, draw
        self._round = -1
        self._newest: Tensor | None = None  # the noise of self._round
        self._earlier = deque[Tensor](maxlen=len(coefficients) - 1)  # of the rounds before it, the last one first

    def compute(self, t: int) -> Tensor:
        """Return the noise of round t.

        The next round, and the same round once more, need one draw. Any other round, such as the first one after a
        resume, needs the draws of all rounds up to it.

        Returns:
            The noise, which must not be changed.
        """
        if len(self._coefficients) == 1:
            return self._draw(t)
        if t < self._round:
            self._round, self._newest = -1, None
            self._earlier.clear()
        if t == self._round:
            self._newest = self._combine(t)
        while self._round < t:
            if self._newest is not None:
                self._earlier.appendleft(self._newest)
            self._round += 1
            self._newest = self._combine(self._round)
        assert self._newest is not None
        return self._newest

    def _combine(self, t: int) -> Tensor:
        noise = self._draw(t)
        for coefficient, earlier in zip(self._coefficients[1:], self._earlier, strict=False):
            noise.sub_(earlier, alpha=coefficient)
        return noise
