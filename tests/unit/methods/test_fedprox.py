"""FedProx: its fixed point on quadratics."""

import pytest


def test_trace_and_fixed_point(play_quadratic):
    """Towards x0 the local problem is a quadratic of curvature a + mu around (a b + mu x0) / (a + mu)."""
    mu, eta, steps = 1.0, 0.05, 10
    it = play_quadratic("fedprox", options={"mu": mu}, rounds=80)
    x = 1.0
    for row in it.rows[:3]:
        ends = []
        for a, b in ((1, 0), (3, 4)):
            centre = (a * b + mu * x) / (a + mu)
            ends.append(centre + (1 - eta * (a + mu)) ** steps * (x - centre))
        x = sum(ends) / 2
        assert row["x0"] == pytest.approx(x, abs=1e-12)
    # q_i = a_i / (a_i + mu) (1 - (1 - eta (a_i + mu))^K), x* = sum q_i b_i / sum q_i
    assert it.w.item() == pytest.approx(2.6909822, abs=5e-8)
