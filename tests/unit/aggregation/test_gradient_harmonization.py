"""Gradient harmonization, compared with literal loops over vectors."""

import numpy as np
import pytest
import torch
from naive_conflicts import literal_hierarchy, literal_pairs

from fedmpi.aggregation.gradient_harmonization import harmonize_as_in_fedld_code, harmonize_pairs


def random_updates(m, d=9, seed=0, common=0.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, d)) + common, rng.dirichlet(np.ones(m)), rng.normal(size=d)


def combine(C, G):
    return C.numpy() @ G


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 20])
def test_harmonize_pairs_equals_the_loop_over_vectors(m):
    moved = 0
    for seed in range(5):
        G, p, _ = random_updates(m, seed=seed)
        expected = sum(pi * g for pi, g in zip(p, literal_pairs(G), strict=True))
        actual = combine(harmonize_pairs(torch.tensor(G @ G.T), torch.tensor(p)), G)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * np.abs(G).max())
        moved = max(moved, np.abs(actual - p @ G).max())
    assert m == 1 or moved > 1e-3, "nothing conflicts here"


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 13])
def test_harmonize_as_in_fedld_code_equals_the_loop_over_vectors(m):
    for seed in range(5):
        G, _, history = random_updates(m, seed=seed)
        actual = combine(harmonize_as_in_fedld_code(torch.tensor(G @ G.T), torch.tensor(G @ history)), G)
        np.testing.assert_allclose(actual, literal_hierarchy(G, history), rtol=0, atol=1e-11)


def test_opposite_vectors_cancel_exactly():
    G = torch.tensor([[3.0, -1.0, 0.5], [-3.0, 1.0, -0.5]])
    assert (harmonize_pairs(G @ G.T, torch.tensor([0.3, 0.7])) @ G.double()).tolist() == [0.0, 0.0, 0.0]


def test_updates_without_conflict_keep_their_weights():
    """The result equals the weights bit for bit; orthogonal vectors, zeros and rounding errors are not conflicts."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    G = torch.rand(4, 6, dtype=torch.float64)
    for rows in (G, torch.eye(4), torch.zeros(4, 3)):
        assert torch.equal(harmonize_pairs(rows @ rows.T, p), p)
    K = torch.eye(4, dtype=torch.float64)
    K[0, 1] = K[1, 0] = -1e-13
    assert torch.equal(harmonize_pairs(K, p), p)
