"""FedCM: every local step leans on the cohort's last direction."""

import pytest

BOWLS = ((1.0, 0.0), (3.0, 4.0))


def by_hand(rounds, alpha, steps, eta=0.05, x=1.0):
    delta = 0.0
    for _ in range(rounds):
        ends = []
        for k, (a, b) in enumerate(BOWLS):
            y = x
            for _ in range(steps[k]):
                y -= eta * (alpha * a * (y - b) + (1 - alpha) * delta)
            ends.append(y)
        delta = sum((x - y) / (eta * K) for y, K in zip(ends, steps, strict=True)) / 2
        x = sum(ends) / 2
    return x, delta


def test_the_servers_step_is_its_direction(play_quadratic):
    """Equal steps: w - lr K Delta is the mean of the clients' models."""
    before, after = (play_quadratic("fedcm", rounds=t).w.item() for t in (3, 4))
    delta = play_quadratic("fedcm", rounds=4).fed.server.state.delta.item()
    assert after == pytest.approx(before - 0.05 * 10 * delta, abs=1e-12)


def test_unequal_steps(play_quadratic):
    """Each client's move is divided by its own steps: one sample a step, 2 and 10 of them."""
    bowls = {"a": [[1.0], [3.0]], "b": [[0.0], [4.0]], "copies": [2, 10]}
    it = play_quadratic("fedcm", bowls, rounds=4, train={"epochs": 1, "batch_size": 1}, options={"alpha": 0.3})
    x, delta = by_hand(4, 0.3, (2, 10))
    assert it.w.item() == pytest.approx(x, abs=1e-12)
    assert it.fed.server.state.delta.item() == pytest.approx(delta, abs=1e-12)
