"""SCAFFOLD: traces by hand, its fixed point, its control variates."""

import pytest

from fedmpi.engine import scheduler


def controls(it):
    """c, [c_k]"""
    rows = [it.kept(k).c_i.item() for k in sorted(it.fed.states.rows)]
    return it.fed.server.state.c.item(), rows


def by_hand(bowls, seed, rounds, fraction=1.0, eta=0.05, steps=10, x=1.0):
    """The algorithm as its paper prints it, plain numbers, uniform weights."""
    N, c, c_k = len(bowls), 0.0, [0.0] * len(bowls)
    for t in range(rounds):
        members = scheduler.draw_cohort(seed, t, N, fraction)
        ends, changes = [], []
        for k in members:
            a, b = bowls[k]
            y = x
            for _ in range(steps):
                y -= eta * (a * (y - b) - c_k[k] + c)
            new = c_k[k] - c + (x - y) / (steps * eta)
            ends.append(y - x)
            changes.append(new - c_k[k])
            c_k[k] = new
        x += sum(ends) / len(members)
        c += sum(changes) / N
    return x, c, c_k


def test_the_fixed_point_is_the_optimum(play_quadratic):
    """x* = 3 minimises the sum, and c_k -> grad f_k(3) = (1 (3 - 0), 3 (3 - 4)) = (3, -3)."""
    it = play_quadratic("scaffold", rounds=100)
    c, c_k = controls(it)
    assert it.w.item() == pytest.approx(3, abs=1e-9)
    assert c == pytest.approx(0, abs=1e-8)
    assert c_k == pytest.approx([3, -3], abs=1e-8)


def test_sampled_clients(play_quadratic):
    """Two of four clients a round: c moves by the mean over all N, and who is absent keeps its c_k."""
    bowls = ((1.0, 0.0), (3.0, 4.0), (2.0, -1.0), (0.5, 7.0))
    tree = {"a": [[a] for a, _ in bowls], "b": [[b] for _, b in bowls], "copies": [1, 2, 3, 4]}
    it = play_quadratic("scaffold", tree, rounds=7, seed=5, cohort={"fraction": 0.5})
    assert {len(row["cohort"]) for row in it.rows} == {2}
    x, c, c_k = by_hand(bowls, 5, 7, fraction=0.5)
    assert it.w.item() == pytest.approx(x, abs=1e-12)
    found, each = controls(it)
    assert found == pytest.approx(c, abs=1e-12)
    assert each == pytest.approx(c_k, abs=1e-12)


def test_a_weighted_mean_of_c_has_the_optimum_of_weighted_clients(play_quadratic):
    """p = (1, 3)/4: x* = sum p a b / sum p a = (3/4 * 3 * 4) / (1/4 * 1 + 3/4 * 3) = 3.6, where the uniform mean of c
    leaves a correction sum_i p_i (c - c_i) that is not 0."""
    bowls = {"a": [[1.0], [3.0]], "b": [[0.0], [4.0]], "copies": [1, 3]}
    by_samples = {"rounds": 200, "cohort": {"weighting": "samples"}}
    it = play_quadratic("scaffold", bowls, options={"mean_c": "weighted"}, **by_samples)
    assert it.w.item() == pytest.approx(3.6, abs=1e-9)
    c, c_k = controls(it)
    assert c == pytest.approx(0, abs=1e-8)
    assert c == pytest.approx(0.25 * c_k[0] + 0.75 * c_k[1], abs=1e-8)
    assert abs(play_quadratic("scaffold", bowls, **by_samples).w.item() - 3.6) > 0.01


def test_momentum_counts_how_often_a_gradient_enters(play_quadratic):
    """A constant gradient g enters w with a = (K - r (1 - r^K) / (1 - r)) / (1 - r), FedNova's a_k: (2) gives g itself.

    Almost constant: curvature 1e-6 at distance 1e6.
    """
    bowl = {"a": [[1e-6]], "b": [[1e6]], "copies": [1]}
    it = play_quadratic("scaffold", bowl, (0.0,), rounds=1, train={"momentum": 0.9})
    a = (10 - 0.9 * (1 - 0.9**10) / 0.1) / 0.1
    assert it.w.item() == pytest.approx(0.05 * a, rel=1e-4)  # against the gradient -1
    assert controls(it)[1] == pytest.approx([-1.0], rel=1e-4)
