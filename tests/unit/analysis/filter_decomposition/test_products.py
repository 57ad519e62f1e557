"""The two averages of kernels: their identities with numbers, and by how much the second one varies less."""

import pytest
import torch

from fedmpi.analysis.filter_decomposition.products import client_variance, kernel_mean, product_mean, replicate_variance


def scalars(*values):
    """(m, 1, 1) of m numbers."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def test_two_clients_by_hand():
    """alpha = 1, 3 and D = 2, 1 with p = 1/4, 3/4: W = 2, 3."""
    p, alpha, D = torch.tensor([0.25, 0.75], dtype=torch.float64), scalars(1, 3), scalars(2, 1)
    assert kernel_mean(p, alpha, D).item() == 0.25 * 2 + 0.75 * 3 == 2.75
    # alpha_bar = 2.5, D_bar = 1.25; as a double sum 0.0625 * 2 + 0.1875 * (1 + 6) + 0.5625 * 3
    assert product_mean(p, alpha, D).item() == 2.5 * 1.25 == 0.0625 * 2 + 0.1875 * (1 + 6) + 0.5625 * 3 == 3.125
    assert 3.125 == 2.75 - 0.25 * 0.75 * (1 - 3) * (2 - 1)
    assert client_variance(p, alpha, D) == 0.25 * 0.75**2 + 0.75 * 0.25**2 == 0.1875


def random_clients(m=4, n=6, a=3, q=9):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(m, generator=g, dtype=torch.float64)
    draw = {"generator": g, "dtype": torch.float64}
    return p / p.sum(), torch.randn(m, n, a, **draw), torch.randn(m, a, q, **draw)


def test_the_product_is_the_double_sum_and_its_distance_is_that_of_the_pairs():
    p, alpha, D = random_clients()
    m = len(p)
    double = sum(p[i] * p[j] * alpha[i] @ D[j] for i in range(m) for j in range(m))
    pairs = sum(p[i] * p[j] * (alpha[i] - alpha[j]) @ (D[i] - D[j]) for i in range(m) for j in range(i + 1, m))
    torch.testing.assert_close(product_mean(p, alpha, D), double)
    torch.testing.assert_close(product_mean(p, alpha, D), kernel_mean(p, alpha, D) - pairs)


@pytest.mark.parametrize("same", ["alpha", "atoms"])
def test_the_averages_agree_where_all_clients_share_one_factor(same):
    p, alpha, D = random_clients()
    alpha, D = (alpha[:1].expand_as(alpha), D) if same == "alpha" else (alpha, D[:1].expand_as(D))
    torch.testing.assert_close(product_mean(p, alpha, D), kernel_mean(p, alpha, D))


def test_client_variance_is_the_naive_sum():
    p, alpha, D = random_clients()
    W = [one @ atoms for one, atoms in zip(alpha, D, strict=True)]
    mean = sum(share * one for share, one in zip(p, W, strict=True))
    naive = sum(share * (one - mean).square().sum() for share, one in zip(p, W, strict=True))
    assert client_variance(p, alpha, D) == pytest.approx(naive.item(), rel=1e-12)


def test_replicate_variance_is_the_unbiased_one():
    W = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert replicate_variance(W) == pytest.approx(W.var(0, unbiased=True).sum().item(), rel=1e-12)
