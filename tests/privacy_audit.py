"""An audit of differential privacy in one run: a lower bound on epsilon from guesses which canaries were included.

Each of m canaries is included with probability 1/2, independently of all others. An auditor who sees what is released
gives each canary a score, guesses that those with the highest scores were included and those with the lowest were not,
and abstains for all others. With differential privacy, few guesses can be right.

Steinke, Nasr, Jagielski. Privacy Auditing with One (1) Training Run. NeurIPS 2023. https://arxiv.org/abs/2305.08846
"""

import math

import numpy as np
from scipy import stats


def draw_included(canaries, seed):
    """Return which canaries are included, (canaries,) bool."""
    return np.random.default_rng(seed).random(canaries) < 0.5


def score_releases(releases, canaries, participation):
    """Return the score of each canary: the inner product of its updates and the releases, over all rounds.

    Args:
        releases: (rounds, parameters), sums of updates plus noise; noise that is correlated between rounds must be made
            independent before.
        canaries: (canaries, parameters), the update of each canary.
        participation: (rounds, canaries), by how much the update of a canary would be part of each release.
    """
    return ((releases @ canaries.T) * participation).sum(0)


def count_correct_guesses(scores, included, guesses):
    """Return how many of the guesses for the highest and lowest scores, half of them each, are right."""
    order = np.argsort(scores)
    half = guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def probability_of_guesses(canaries, guesses, correct, epsilon, delta):
    """Return a bound on the probability of at least `correct` right guesses: Theorem 5.2 of the paper."""
    accuracy = 1 / (1 + math.exp(-epsilon))
    enough = stats.binom.sf(correct - 1, guesses, accuracy)
    # The largest, over i, of P(correct - i <= right guesses < correct) / i.
    nearly = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    slope = (nearly / np.arange(1, correct + 1)).max(initial=0)
    return min(1.0, enough + 2 * canaries * delta * slope)


def lower_bound(canaries, guesses, correct, delta, confidence=0.95):
    """Return the largest epsilon that the number of right guesses refutes; 0 if there is none."""
    low, high = 0.0, 50.0
    if probability_of_guesses(canaries, guesses, correct, 0.0, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = probability_of_guesses(canaries, guesses, correct, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low
