"""The releases of a run under differential privacy of clients, and the epsilon that they add up to.

A release is recorded before its noise is drawn, so that a round that is repeated, after a failure or in a resumed run,
gets other noise, and both releases count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedmpi.common.errors import UserError
from fedmpi.privacy.accountant import (
    BandedEpsilonSchedule,
    EpsilonSchedule,
    Method,
    Sampling,
    find_banded_noise_multiplier,
    find_noise_multiplier,
)
from fedmpi.privacy.banded import compute_coefficients


@dataclass(frozen=True)
class Guarantee:
    """What determines epsilon: the noise, delta, how clients are drawn, and the method of accounting."""

    noise_multiplier: float
    delta: float
    sampling: Sampling
    accountant: Method = "pld"
    # Number of rounds in which each client takes part at most once (cohort.sampling: cyclic); 1: in every round.
    cycle: int = 1
    bands: int = 1  # of correlated noise (banded.py); 1: the noise of rounds is independent

    @cached_property
    def coefficients(self) -> list[float]:
        """The coefficients of correlated noise."""
        return compute_coefficients(self.bands)

    @cached_property
    def _schedule(self) -> EpsilonSchedule:
        return EpsilonSchedule(self.noise_multiplier, self.delta, self.sampling, self.accountant)

    @cached_property
    def _banded_schedule(self) -> BandedEpsilonSchedule:
        given = self.noise_multiplier, self.delta, self.coefficients, self.cycle, self.accountant
        return BandedEpsilonSchedule(*given)

    def epsilon(self, rounds: Sequence[int]) -> float:
        """Return epsilon after releases in these rounds; a round that occurs several times was repeated."""
        if self.bands > 1:
            different = len({*rounds})
            return self._banded_schedule.after(different, len(rounds) - different)
        return self._schedule.after(self.count_steps(rounds))

    def count_steps(self, rounds: Sequence[int]) -> int:
        """Return the largest number of these releases that contain the same client."""
        if self.cycle == 1:
            return len(rounds)
        most = Counter[int]()  # cycle -> the largest number of releases of one of its rounds
        for t, releases in Counter(rounds).items():
            most[t // self.cycle] = max(most[t // self.cycle], releases)
        return sum(most.values())

    def find_noise_multiplier(self, epsilon: float, rounds: int) -> float:
        """Return the smallest noise multiplier with which epsilon after a number of rounds is at most `epsilon`."""
        if self.bands > 1:
            given = self.coefficients, self.cycle, rounds, self.accountant
            return find_banded_noise_multiplier(epsilon, self.delta, *given)
        steps = self.count_steps(range(rounds))
        return find_noise_multiplier(epsilon, self.delta, self.sampling, steps, self.accountant)


class PrivacyBudget:
    """The releases of a run so far.

    Attributes:
        rounds: the round of each release, in order.
    """

    def __init__(
        self,
        guarantee: Guarantee,
        max_epsilon: float | None = None,
        rounds: Sequence[int] = (),
        write: Callable[[int, int], object] = lambda t, attempt: None,
    ) -> None:
        """Create the budget.

        Args:
            max_epsilon: the largest epsilon that the run may reach; None: no limit.
            rounds: the round of each earlier release of the run, if it is resumed.
            write: a function (round, attempt) that records a release on disk.
        """
        self.guarantee, self.max_epsilon, self.rounds, self.write = guarantee, max_epsilon, [*rounds], write

    @property
    def epsilon(self) -> float:
        """Epsilon after all releases so far."""
        return self.guarantee.epsilon(self.rounds) if self.rounds else 0.0

    def permits_round(self, t: int) -> bool:
        """Return whether epsilon would still be at most `max_epsilon` after a release in round t."""
        return self.max_epsilon is None or self.guarantee.epsilon([*self.rounds, t]) <= self.max_epsilon

    def record_release(self, t: int) -> int:
        """Record a release in round t, and return its attempt: how many releases of this round there were before."""
        attempt = self.rounds.count(t)
        self.write(t, attempt)
        self.rounds.append(t)
        return attempt

    def last_attempt(self, t: int) -> int:
        """Return the attempt of the last release of round t."""
        return self.rounds.count(t) - 1


class RepeatedBudget(PrivacyBudget):
    """The releases of a run whose rounds are trained again, to verify it: their noise is that of the run."""

    def __init__(self, guarantee: Guarantee, recorded: Sequence[int]) -> None:
        """Create the budget; `recorded` are the rounds of all releases of the run, in order."""
        super().__init__(guarantee)
        self.recorded = list(recorded)

    def record_release(self, t: int) -> int:
        """Return the attempt of the last release of round t in the run, which determines the model of that round.

        Raises:
            UserError: the run has no release of this round.
        """
        if t not in self.recorded:
            raise UserError(
                f"privacy.repeat: the run whose noise is drawn again has no release of round {t}; set rounds to the "
                "number of its rounds"
            )
        last = len(self.recorded) - 1 - self.recorded[::-1].index(t)
        self.rounds = self.recorded[: last + 1]
        return self.last_attempt(t)
