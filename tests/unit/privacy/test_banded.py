"""Correlated noise and its sensitivity, against dense matrices and all patterns of participation."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedmpi.privacy.accountant import (
    BandedEpsilonSchedule,
    Sampling,
    compute_epsilon,
    find_banded_noise_multiplier,
)
from fedmpi.privacy.banded import BandedNoise, compute_coefficients, compute_squared_sensitivity


def dense(bands, rounds):
    """Return C, (rounds, rounds)."""
    matrix = np.zeros((rounds, rounds))
    for row, column in itertools.product(range(rounds), repeat=2):
        if 0 <= row - column < bands:
            matrix[row, column] = math.comb(2 * (row - column), row - column) / 4 ** (row - column)
    return matrix


def draw(t, attempt=0):
    return torch.from_numpy(np.random.default_rng((t, attempt)).standard_normal(5))


def test_coefficients_are_those_of_the_square_root_of_prefix_sums():
    matrix = dense(8, 8)
    assert np.allclose(matrix @ matrix, np.tril(np.ones((8, 8))))
    assert np.allclose(compute_coefficients(8), matrix[:, 0], rtol=1e-15)


@pytest.mark.parametrize("bands", [1, 2, 5, 12])
def test_noise_is_that_of_the_inverse_matrix(bands):
    noise = BandedNoise(compute_coefficients(bands), draw)
    independent = np.stack([draw(t).numpy() for t in range(12)])
    expected = np.linalg.solve(dense(bands, 12), independent)
    assert np.allclose(np.stack([noise.compute(t).numpy() for t in range(12)]), expected, rtol=1e-12)


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_a_resumed_run_has_the_same_noise(bands):
    once = BandedNoise(compute_coefficients(bands), draw)
    expected = [once.compute(t) for t in range(10)]
    for start in range(10):
        resumed = BandedNoise(compute_coefficients(bands), draw)
        assert all(torch.equal(resumed.compute(t), expected[t]) for t in range(start, 10))
    assert all(torch.equal(once.compute(t), expected[t]) for t in (3, 4, 8, 2))  # forward and back


def test_a_repeated_round_has_new_noise_and_later_rounds_follow_from_it():
    attempts = dict.fromkeys(range(8), 0)
    noise = BandedNoise(compute_coefficients(4), lambda t: draw(t, attempts[t]))
    first = [noise.compute(t) for t in range(6)][5]
    attempts[5] = 1
    again = noise.compute(5)
    assert torch.allclose(again - draw(5, 1), first - draw(5))
    expected = np.linalg.solve(dense(4, 8), np.stack([draw(t, attempts[t]).numpy() for t in range(8)]))
    assert np.allclose(again.numpy(), expected[5])
    assert np.allclose(noise.compute(6).numpy(), expected[6])
    assert np.allclose(noise.compute(7).numpy(), expected[7])


def test_memory_is_limited_to_the_bands():
    noise = BandedNoise(compute_coefficients(3), draw)
    for t in range(10):
        noise.compute(t)
    assert len(noise._earlier) == 2


@pytest.mark.parametrize(("bands", "separation"), [(1, 1), (1, 3), (2, 2), (3, 4), (4, 4)])
def test_sensitivity_is_the_largest_over_all_patterns_of_participation(bands, separation):
    for rounds in range(1, 10):
        matrix, largest = dense(bands, rounds), 0.0
        for pattern in itertools.product([0, 1], repeat=rounds):
            times = np.flatnonzero(pattern)
            if (np.diff(times) < separation).any():
                continue
            # The largest |C x|^2 over updates x_t of norm 1 in several dimensions: |sum_t C_t x_t|^2 is at most
            # sum_st |<C_s, C_t>|, and reaches it with equal x because all entries of C are positive.
            columns = matrix[:, times]
            largest = max(largest, (columns.T @ columns).sum())
        coefficients = compute_coefficients(bands)
        assert compute_squared_sensitivity(coefficients, rounds, separation) == pytest.approx(largest)


@pytest.mark.parametrize("repeated", range(6))
def test_sensitivity_of_a_repeated_round(repeated):
    """A row of C is added for the release that was discarded; the client takes part in both, or in neither."""
    bands, separation, rounds = 3, 3, 6
    matrix, largest = dense(bands, rounds), 0.0
    for pattern in itertools.product([0, 1], repeat=rounds):
        times = np.flatnonzero(pattern)
        if (np.diff(times) < separation).any():
            continue
        discarded = np.zeros((1, rounds + 1))
        discarded[0, :repeated] = matrix[repeated, :repeated]
        discarded[0, rounds] = 1.0  # the update of the discarded attempt differs from that of the kept one
        rows = np.concatenate([np.hstack([matrix, np.zeros((rounds, 1))]), discarded])
        columns = rows[:, [*times, rounds] if repeated in times else times]
        largest = max(largest, np.abs(columns.T @ columns).sum())
    bound = compute_squared_sensitivity(compute_coefficients(bands), rounds, separation, repetitions=1)
    assert largest <= bound + 1e-12


def test_rounds_of_a_client_that_are_too_close():
    with pytest.raises(ValueError, match="2 apart, which 3 bands do not allow"):
        compute_squared_sensitivity(compute_coefficients(3), 10, separation=2)


@pytest.mark.parametrize("rounds", [8, 32])
def test_prefix_sums_have_less_noise_than_with_independent_noise(rounds):
    """At equal privacy, for clients that take part once: the mean over rounds of the variance of the noise."""
    prefix_sums = np.tril(np.ones((rounds, rounds)))
    variances = []
    for bands in (1, 2, rounds // 2, rounds):
        squared = compute_squared_sensitivity(compute_coefficients(bands), rounds, separation=rounds)
        noise = prefix_sums @ np.linalg.inv(dense(bands, rounds)) * math.sqrt(squared)
        variances.append((noise**2).sum() / rounds)
    assert variances[0] == pytest.approx((rounds + 1) / 2)
    assert variances[0] > variances[1] > variances[2]
    assert variances[3] < variances[0] / (1.6 if rounds == 8 else 3)


def test_epsilon_of_banded_noise():
    one_band = BandedEpsilonSchedule(2.0, 1e-5, compute_coefficients(1), separation=4)
    # In 9 rounds, a client takes part in at most 3.
    assert one_band.after(9) == compute_epsilon(2.0, 1e-5, Sampling("none"), 3)
    assert one_band.after(9, repetitions=2) == compute_epsilon(2.0, 1e-5, Sampling("none"), 5)
    assert one_band.after(0) == 0
    coefficients = compute_coefficients(4)
    schedule = BandedEpsilonSchedule(2.0, 1e-5, coefficients, separation=4)
    norm = math.sqrt(sum(each**2 for each in coefficients))
    assert schedule.after(12) == pytest.approx(compute_epsilon(2.0 / norm, 1e-5, Sampling("none"), 3))
    values = [schedule.after(rounds) for rounds in range(20)]
    assert values == sorted(values)
    noise = find_banded_noise_multiplier(1.5, 1e-5, coefficients, 4, 12)
    assert BandedEpsilonSchedule(noise, 1e-5, coefficients, separation=4).after(12) <= 1.5
    assert BandedEpsilonSchedule(noise * 0.9997, 1e-5, coefficients, separation=4).after(12) > 1.5
