"""Epsilon and delta against published values, exact formulas, numerical integrals and the library dp_accounting."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm

from fedmpi.common.errors import UserError
from fedmpi.privacy.accountant import (
    ORDERS,
    POINTS_PER_DOUBLING,
    EpsilonSchedule,
    Sampling,
    compute_delta,
    compute_epsilon,
    find_noise_multiplier,
)
from fedmpi.privacy.loss_distribution import PoissonLossDistribution

# McMahan, Ramage, Talwar, Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018, Table 1:
# (population, cohort, noise multiplier) -> epsilon after 1, 10, ..., 1e6 rounds, at delta = population^-1.1. The paper
# has larger values, such as 0.97 for the first, because its conversion from Renyi differential privacy to epsilon is
# Mironov's (2017). These are the values of its Renyi divergences with the conversion of Canonne et al. (2020).
ROUNDS = [10**i for i in range(7)]
TABLE = {
    (1e5, 1e2, 1): (0.697, 0.700, 0.725, 0.774, 0.884, 1.899, 6.830),
    (1e6, 1e1, 1): (0.504, 0.504, 0.504, 0.504, 0.507, 0.530, 0.532),
    (1e6, 1e3, 1): (0.892, 0.895, 0.919, 0.985, 1.095, 2.130, 7.505),
    (1e6, 1e4, 1): (1.366, 1.525, 1.685, 2.634, 7.810, 30.388, 160.853),
    (1e6, 1e3, 3): (0.162, 0.162, 0.163, 0.166, 0.200, 0.502, 1.705),
    (1e9, 1e3, 1): (0.684, 0.685, 0.685, 0.690, 0.712, 0.712, 0.712),
}
FIRST_OF_PAPER = {(1e5, 1e2, 1): 0.97, (1e6, 1e4, 1): 1.73}  # after 1 round, with Mironov's conversion
# Samples: clients are drawn with 0.1, and rows in batches of 100 of 600, which are 6 steps in a round:
# (noise multiplier, rounds, delta) -> epsilon.
SAMPLES = {(4, 640, 9e-6): 1.083, (3, 288, 9e-7): 1.109, (2, 54, 1e-11): 1.169}
SAMPLE_RATE, STEPS_PER_ROUND = 0.1 * 100 / 600, 6
# The orders by which the values were computed; closer orders give smaller values.
REFERENCE_ORDERS = [1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512]


def reference_cases():
    for (population, cohort, noise), values in TABLE.items():
        for rounds, value in zip(ROUNDS, values, strict=True):
            yield cohort / population, noise, rounds, population**-1.1, value
    for (noise, rounds, delta), value in SAMPLES.items():
        yield SAMPLE_RATE, noise, STEPS_PER_ROUND * rounds, delta, value


@pytest.fixture(scope="module")
def schedules():
    """Return a function that gives the schedule of a rate, noise, delta and method."""
    made = {}

    def find(rate, noise, delta, method):
        key = rate, noise, delta, method
        if key not in made:
            made[key] = EpsilonSchedule(noise, delta, Sampling("poisson", rate), method)
        return made[key]

    return find


def test_reference_values_follow_from_renyi_divergences():
    for rate, noise, steps, delta, value in reference_cases():
        accountant = dp_accounting.rdp.RdpAccountant(REFERENCE_ORDERS)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
        assert accountant.get_epsilon(delta) == pytest.approx(value, abs=2e-3)


def test_values_of_the_paper_follow_from_the_older_conversion():
    for (population, cohort, noise), value in FIRST_OF_PAPER.items():
        accountant = dp_accounting.rdp.RdpAccountant(REFERENCE_ORDERS)
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(cohort / population, dp_accounting.GaussianDpEvent(noise))
        )
        log_delta = -1.1 * math.log(population)
        assert (accountant.rdp - log_delta / (accountant.orders - 1)).min() == pytest.approx(value, abs=6e-3)


def test_renyi_epsilon_equals_reference_values_or_is_smaller(schedules):
    """The orders are closer than those of the references; the difference is at most 0.093, of few rounds."""
    differences = []
    for rate, noise, steps, delta, value in reference_cases():
        epsilon = schedules(rate, noise, delta, "rdp").after(steps)
        assert value - 0.1 < epsilon < value + 2e-3
        differences.append(abs(epsilon - value))
    assert sum(each < 2e-3 for each in differences) >= 28


def test_loss_distributions_give_smaller_epsilon_than_renyi_divergences(schedules):
    ratios = []
    for rate, noise, steps, delta, value in reference_cases():
        epsilon = schedules(rate, noise, delta, "pld").after(steps)
        assert 0 < epsilon < value
        ratios.append((steps, epsilon / value))
    assert all(ratio > 0.9 for steps, ratio in ratios if steps == 324 or steps in (1728, 3840))  # the three of samples
    assert ratios[0][1] < 0.03, "after 1 round, Renyi divergences give an epsilon that is 48 times as large"
    assert ratios[6][1] == pytest.approx(6.370 / 6.830, abs=2e-3)  # after 1e6 rounds, 7 % less


def test_three_gaussian_steps():
    assert compute_delta(math.sqrt(3), 1.0, Sampling("none"), 3) == pytest.approx(0.126936, abs=2e-6)


def test_three_steps_with_poisson_samples():
    assert compute_delta(0.5, 1.0, Sampling("poisson", 0.2), 3) == pytest.approx(0.15594, abs=2e-5)


def analytic_gaussian_delta(mu, epsilon):
    """Return delta of a Gaussian mechanism with mu = sensitivity / std: Balle and Wang 2018, Theorem 8."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "steps"), [(0.5, 1), (1.0, 4), (5.0, 100), (20.0, 10_000)])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_without_sampling_delta_is_exact(noise, steps, epsilon):
    delta = compute_delta(noise, epsilon, Sampling("none"), steps)
    assert delta == pytest.approx(analytic_gaussian_delta(math.sqrt(steps) / noise, epsilon), rel=1e-9)
    for method, least in (("pld", epsilon), ("rdp", epsilon)):
        assert compute_epsilon(noise, delta, Sampling("none"), steps, method) >= least
    assert compute_epsilon(noise, delta, Sampling("none"), steps) == pytest.approx(epsilon, rel=1e-7)
    assert compute_delta(noise, epsilon, Sampling("poisson", 1.0), steps) == delta
    assert compute_delta(2 * noise, epsilon, Sampling("without_replacement", size=5, population=5), steps) == (
        pytest.approx(delta)
    )


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 0.5), (0.01, 1.0), (0.5, 3.0), (0.9, 1.0)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
def test_one_step_with_poisson_samples_equals_an_integral(rate, noise, epsilon):
    def density(x, with_unit):
        without = norm.pdf(x, 0, noise)
        return (1 - rate) * without + rate * norm.pdf(x, 1, noise) if with_unit else without

    def divergence(first, second):
        low, high = -12 * noise, 1 + 12 * noise
        # The integrand has a bend where the densities cross.
        crossing = {
            sign: noise**2 * math.log((math.exp(sign * epsilon) - 1 + rate) / rate) + 0.5
            for sign in (1, -1)
            if math.exp(sign * epsilon) > 1 - rate
        }
        return quad(
            lambda x: max(0.0, density(x, first) - math.exp(epsilon) * density(x, second)),
            low, high, points=[*crossing.values()], limit=500, epsabs=1e-14,
        )[0]  # fmt: skip

    expected = max(divergence(True, False), divergence(False, True))
    delta = compute_delta(noise, epsilon, Sampling("poisson", rate), 1)
    assert expected * (1 - 1e-9) <= delta <= expected * (1 + 2e-3) + 1e-12


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "interval"),
    [
        (0.01, 1.0, 1000, 1e-6, 1e-4),
        (0.2, 0.7, 50, 1e-5, 1e-4),
        (0.5, 10.0, 100, 1e-5, 1e-4),
        (1e-3, 0.8, 300, 1e-9, 3e-5),
    ],
)
def test_loss_distributions_agree_with_the_library(rate, noise, steps, delta, interval):
    accountant = PLDAccountant(value_discretization_interval=interval)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    expected = accountant.get_epsilon(delta)
    epsilon = compute_epsilon(noise, delta, Sampling("poisson", rate), steps)
    assert expected * (1 - 2e-4) <= epsilon <= expected * (1 + 1e-3)
    assert compute_delta(noise, epsilon, Sampling("poisson", rate), steps) == pytest.approx(delta, rel=1e-6)


def test_samples_without_replacement_are_covered():
    """The Renyi divergence of two data sets that differ in one unit, integrated, is below the bound.

    The replaced unit adds 1 to the sum before, and -1 after, and nobody else adds anything.
    """
    for size, population, noise in ((10, 1000, 1.0), (5, 10, 4.0), (8, 10, 30.0)):
        rate, steps = size / population, 20
        x = np.linspace(-30 * noise - 70, 30 * noise + 70, 400_001)

        def log_density(mean, x=x, noise=noise, rate=rate):
            stay = norm.logpdf(x, 0, noise) + math.log1p(-rate)
            return np.logaddexp(stay, norm.logpdf(x, mean, noise) + math.log(rate))

        before, after = log_density(1.0), log_density(-1.0)
        integer_orders = np.arange(2, 30)
        divergences = [
            (logsumexp(order * before + (1 - order) * after) + math.log(x[1] - x[0])) / (order - 1)
            for order in integer_orders
        ]
        least = dp_accounting.rdp.rdp_privacy_accountant.compute_epsilon(
            integer_orders, steps * np.array(divergences), 1e-5
        )[0]
        sampling = Sampling("without_replacement", size=size, population=population)
        for method in ("rdp", "pld"):
            epsilon = compute_epsilon(noise, 1e-5, sampling, steps, method)
            if method == "rdp":
                assert epsilon >= least * (1 - 1e-9)
            # Without sampling, a replaced unit is a Gaussian mechanism with twice the sensitivity.
            assert epsilon <= compute_epsilon(noise / 2, 1e-5, Sampling("none"), steps, method) * (1 + 1e-9)


def test_replaced_units_need_more_noise_than_added_units():
    poisson = compute_epsilon(1.0, 1e-5, Sampling("poisson", 0.01), 100, "rdp")
    assert compute_epsilon(1.0, 1e-5, Sampling("without_replacement", size=10, population=1000), 100) > 2 * poisson


@pytest.mark.parametrize(
    ("sampling", "method"),
    [
        (Sampling("poisson", 0.05), "pld"),
        (Sampling("poisson", 0.05), "rdp"),
        (Sampling("without_replacement", size=5, population=50), "rdp"),
        (Sampling("none"), "pld"),
        (Sampling("none"), "rdp"),
    ],
)
@pytest.mark.parametrize("target", [0.3, 8.0])
def test_the_noise_that_is_found_is_the_smallest(sampling, method, target):
    noise = find_noise_multiplier(target, 1e-5, sampling, 50, method)
    assert compute_epsilon(noise, 1e-5, sampling, 50, method) <= target
    assert compute_epsilon(noise * 2 ** (-1 / POINTS_PER_DOUBLING), 1e-5, sampling, 50, method) > target


def test_an_epsilon_that_no_noise_reaches():
    with pytest.raises(UserError, match=r"privacy\.dp\.epsilon: 1e-08 .* cannot be reached in 100000 releases"):
        find_noise_multiplier(1e-8, 1e-12, Sampling("none"), 100_000)


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_epsilon_grows_with_the_releases_and_is_the_same_in_any_order(rate):
    sampling = Sampling("poisson", rate)
    schedule = EpsilonSchedule(1.0, 1e-6, sampling)
    values = [schedule.after(steps) for steps in range(300)]
    assert values[0] == 0
    assert all(later > earlier for earlier, later in itertools.pairwise(values))
    again = EpsilonSchedule(1.0, 1e-6, sampling)
    assert [again.after(steps) for steps in (299, 7, 150)] == [values[steps] for steps in (299, 7, 150)]


def test_tiny_and_large_noise():
    sampling = Sampling("poisson", 0.01)
    # A unit takes part in at least one of 100 releases with 63 %, which shows at a loss of 1 / (2 z^2).
    assert compute_epsilon(0.01, 1e-6, sampling, 100) > 5000
    assert compute_epsilon(1e5, 1e-6, sampling, 100) == 0
    assert compute_delta(0.01, 1.0, sampling, 100) == pytest.approx(1 - 0.99**100, rel=1e-3)


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.1, 0.95])
@pytest.mark.parametrize("noise", [0.4, 1.0, 8.0])
def test_loss_distributions_are_consistent_and_below_other_bounds(rate, noise):
    sampling = Sampling("poisson", rate)
    exact, renyi = PoissonLossDistribution(rate, noise), EpsilonSchedule(noise, 1e-7, sampling, "rdp")
    for steps in (1, 30, 1000, 10**6):
        epsilon = exact.epsilon(steps, 1e-7)
        assert 0 < epsilon <= renyi.after(steps)
        assert epsilon <= compute_epsilon(noise, 1e-7, Sampling("none"), steps) * (1 + 1e-3)
        assert exact.delta(steps, epsilon) == pytest.approx(1e-7, rel=0.02)


def test_orders_are_ascending():
    assert (np.diff(ORDERS) > 0).all()
