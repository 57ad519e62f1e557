"""Schedules of the learning rate."""

import pytest

from fedmpi.engine.local.local_training_config import learning_rate


@pytest.mark.parametrize(
    ("schedule", "decay", "rates"),
    [
        ("constant", None, {0: 0.2, 7: 0.2}),
        ("exponential", None, {0: 0.2, 1: 0.2 * 0.99, 3: 0.2 * 0.99**3}),
        ("exponential", 0.5, {0: 0.2, 3: 0.025}),
        # eta_0 / 2 (1 + cos(pi t / T)): 1 at t = 0, 1/2 at T/2, (1 + cos(pi/4)) / 2 at T/4
        ("cosine", None, {0: 0.2, 2: 0.1 * (1 + 0.5**0.5), 4: 0.1, 6: 0.1 * (1 - 0.5**0.5)}),
        ("step", None, {0: 0.2, 3: 0.2, 4: 0.02, 5: 0.02, 6: 0.002, 7: 0.002}),
        ("step", 0.5, {3: 0.2, 4: 0.1, 6: 0.05}),
    ],
)
def test_learning_rates_of_eight_rounds(schedule, decay, rates):
    assert {t: learning_rate(0.2, schedule, t, 8, decay) for t in rates} == pytest.approx(rates, rel=1e-12)


def test_step_schedule_with_an_odd_number_of_rounds():
    """With T = 5, T/2 = 2.5 and 3T/4 = 3.75, so the rate falls in rounds 3 and 4."""
    rates = [learning_rate(1.0, "step", t, 5) for t in range(5)]
    assert rates == pytest.approx([1, 1, 1, 0.1, 0.01])


def test_warm_up_multiplies_the_schedule():
    """The factor is min(1, t / R)."""
    rates = [learning_rate(1.0, "exponential", t, 10, 0.5, warmup_rounds=5) for t in range(7)]
    assert rates == pytest.approx([0, 0.2 * 0.5, 0.4 * 0.25, 0.6 * 0.125, 0.8 / 16, 1 / 32, 1 / 64])
