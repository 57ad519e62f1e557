"""Audits of the noise and the accountant: what can be guessed from the releases of one run must not refute epsilon.

The largest updates that the clip norm allows are summed: canary i adds `clip` to parameter i, so that the noise of each
canary is independent of that of all others.
"""

import math

import numpy as np
import pytest
from privacy_audit import count_correct_guesses, draw_included, lower_bound, probability_of_guesses, score_releases

from fedmpi.privacy.accountant import (
    BandedEpsilonSchedule,
    Sampling,
    compute_epsilon,
    find_banded_noise_multiplier,
    find_noise_multiplier,
)
from fedmpi.privacy.banded import BandedNoise, compute_coefficients
from fedmpi.privacy.noise import NoiseKey

CANARIES, GUESSES, ROUNDS, CLIP, EPSILON, DELTA = 2000, 200, 12, 0.3, 4.0, 1e-5
KEY = NoiseKey(b"0123456789abcdef" * 4, "run of the audit")


def audit(noise_of_round, takes_part, known=True, decorrelate=None):
    """Return the lower bound on epsilon.

    Args:
        noise_of_round: returns the noise of a round, (CANARIES,).
        takes_part: (ROUNDS, CANARIES), which canaries take part in each round if they are included.
        known: whether the auditor knows it.
        decorrelate: (ROUNDS, ROUNDS), the matrix that makes the noise of rounds independent.
    """
    included = draw_included(CANARIES, seed=1)
    releases = np.stack([noise_of_round(t) for t in range(ROUNDS)]) + CLIP * (takes_part & included)
    participation = takes_part.astype(float) if known else np.ones_like(releases)
    if decorrelate is not None:
        releases, participation = decorrelate @ releases, decorrelate @ participation
    scores = score_releases(releases, CLIP * np.eye(CANARIES), participation)
    return lower_bound(CANARIES, GUESSES, count_correct_guesses(scores, included, GUESSES), DELTA)


def independent_noise(noise_multiplier):
    return lambda t: KEY.gaussian(CANARIES, noise_multiplier * CLIP, "round", t).numpy()


def silence(t):
    return np.zeros(CANARIES)


def test_independent_noise():
    noise_multiplier = find_noise_multiplier(EPSILON, DELTA, Sampling("none"), ROUNDS)
    bound = audit(independent_noise(noise_multiplier), np.ones((ROUNDS, CANARIES), bool))
    assert 0.5 < bound < compute_epsilon(noise_multiplier, DELTA, Sampling("none"), ROUNDS) <= EPSILON


def test_poisson_samples():
    """Epsilon holds for an auditor who does not know who was drawn."""
    sampling = Sampling("poisson", 0.5)
    noise_multiplier = find_noise_multiplier(EPSILON, DELTA, sampling, ROUNDS)
    drawn = np.random.default_rng(2).random((ROUNDS, CANARIES)) < sampling.rate
    bound = audit(independent_noise(noise_multiplier), drawn, known=False)
    assert 0.5 < bound < compute_epsilon(noise_multiplier, DELTA, sampling, ROUNDS) <= EPSILON


def test_too_little_noise_is_noticed():
    noise_multiplier = find_noise_multiplier(EPSILON, DELTA, Sampling("none"), ROUNDS)
    everybody = np.ones((ROUNDS, CANARIES), bool)
    assert audit(silence, everybody) > EPSILON
    assert audit(independent_noise(noise_multiplier / 5), everybody) > EPSILON


def test_banded_noise():
    bands = separation = 4
    coefficients = compute_coefficients(bands)
    noise_multiplier = find_banded_noise_multiplier(EPSILON, DELTA, coefficients, separation, ROUNDS)
    epsilon = BandedEpsilonSchedule(noise_multiplier, DELTA, coefficients, separation).after(ROUNDS)
    assert epsilon == pytest.approx(EPSILON, rel=1e-3)
    noise = BandedNoise(coefficients, lambda t: KEY.gaussian(CANARIES, noise_multiplier * CLIP, "round", t))
    takes_part = np.arange(ROUNDS)[:, None] % separation == np.zeros(CANARIES)
    decorrelate = sum(coefficient * np.eye(ROUNDS, k=-shift) for shift, coefficient in enumerate(coefficients))
    assert 0.5 < audit(lambda t: noise.compute(t).numpy(), takes_part, decorrelate=decorrelate) < epsilon
    assert audit(silence, takes_part, decorrelate=decorrelate) > epsilon


def test_the_bound_of_the_audit():
    """Against the definition: randomized response with epsilon is as accurate as any guess can be."""
    for epsilon in (0.5, 2.0):
        accuracy = 1 / (1 + math.exp(-epsilon))
        for correct in (0, 5, 10):
            tail = sum(math.comb(10, v) * accuracy**v * (1 - accuracy) ** (10 - v) for v in range(correct, 11))
            assert probability_of_guesses(50, 10, correct, epsilon, 0.0) == pytest.approx(min(1, tail))
            assert probability_of_guesses(50, 10, correct, epsilon, 1e-3) >= min(1, tail)
    # All of 100 guesses are right: accuracy^100 = 0.05.
    accuracy = 0.05 ** (1 / 100)
    assert lower_bound(100, 100, 100, 0.0) == pytest.approx(math.log(accuracy / (1 - accuracy)), abs=1e-5)
    assert lower_bound(100, 100, 50, 0.0) == 0
