"""Robust rules, compared with naive loops and known results, and with a client that sends nan."""

import numpy as np
import pytest
import torch

from fedmpi.aggregation import rules
from fedmpi.flat import linear


def rows(m, d=6, seed=0):
    return np.random.default_rng(seed).normal(size=(m, d))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 9, 10])
@pytest.mark.parametrize("trim", [0.0, 0.1, 0.3, 0.49, 0.5])
def test_trimmed_mean_equals_the_loop(m, trim):
    G = rows(m)
    b = min(int(trim * m + 1e-9), (m - 1) // 2)
    expected = [np.mean(sorted(column)[b : m - b]) for column in G.T]
    np.testing.assert_allclose(linear.trimmed_mean(torch.tensor(G), trim), expected, rtol=0, atol=1e-14)
    if trim == 0.5:
        np.testing.assert_allclose(linear.trimmed_mean(torch.tensor(G), trim), np.median(G, 0), rtol=0, atol=1e-14)


def test_number_of_trimmed_values_is_rounded_correctly():
    """0.1 x 10 and 0.3 x 10 count as integers, although they are not exact in floating point."""
    G = torch.arange(10.0)[:, None] ** 2
    assert linear.trimmed_mean(G, 0.1).item() == pytest.approx(sum(k * k for k in range(1, 9)) / 8)
    assert linear.trimmed_mean(G, 0.3).item() == pytest.approx((9 + 16 + 25 + 36) / 4)


def naive_krum(G, f, select):
    m, scores = len(G), []
    for i in range(m):
        apart = sorted(((G[i] - G[j]) ** 2).sum() for j in range(m) if j != i)
        scores.append(sum(apart[: max(m - f - 2, 1)]))
    return np.mean(G[np.argsort(scores, kind="stable")[:select]], 0)


@pytest.mark.parametrize("select", [1, 3, 99])
@pytest.mark.parametrize(("m", "f"), [(1, 0), (1, 1), (2, 0), (2, 3), (3, 1), (7, 2), (11, 0)])
def test_krum_equals_the_loop(m, f, select):
    G = rows(m)
    c = rules.krum_coefficients(torch.tensor(G @ G.T), f, select)
    np.testing.assert_allclose(c.numpy() @ G, naive_krum(G, f, select), rtol=0, atol=1e-12)
    assert c.sum().item() == pytest.approx(1)


def test_krum_never_selects_nan():
    G = rows(5)
    G[1] = np.nan
    assert rules.krum_coefficients(torch.tensor(G @ G.T), 1, 1)[1] == 0


def test_geometric_median_has_known_values():
    """On a line the weighted median, for a regular triangle its centre, and a point with more than half of the weight.

    At such a point Weiszfeld's distances vanish, and `smooth` bounds the error to about its own size.
    """
    line = torch.tensor([[0.0], [1.0], [10.0]])
    c = rules.geometric_median_coefficients(line @ line.T, torch.tensor([0.3, 0.4, 0.3]), 10_000, 1e-9)
    assert (c.float() @ line).item() == pytest.approx(1, abs=1e-3)
    angle = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64) * torch.pi / 3
    corners = torch.stack([angle.cos(), angle.sin()], 1) + 5
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    c = rules.geometric_median_coefficients(corners @ corners.T, thirds, 100, 1e-6)
    assert (c @ corners).tolist() == pytest.approx([5, 5])
    c = rules.geometric_median_coefficients(corners @ corners.T, torch.tensor([0.6, 0.2, 0.2]), 10_000, 1e-9)
    assert (c @ corners).tolist() == pytest.approx(corners[0].tolist(), abs=1e-3)


def test_geometric_median_of_one_point_is_this_point():
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for K in (torch.zeros(2, 2), torch.full((2, 2), 4.0)):
        assert torch.equal(rules.geometric_median_coefficients(K, p, 100, 1e-6), p)
