"""Averages of linear models: the loss, the training and the variance have closed forms."""

import pytest
import torch

from fedmpi.analysis.filter_decomposition import gaussians
from fedmpi.analysis.filter_decomposition.gaussians import (
    LR,
    MU,
    START,
    STEPS,
    averaged,
    describe,
    loss,
    trained,
)
from fedmpi.common import seeds


def sample(n, *shape):
    g = seeds.generator(3, "test")
    y = torch.randint(2, (*shape, n), generator=g).double() * 2 - 1
    return y[..., None] * MU + torch.randn(*y.shape, 2, generator=g, dtype=torch.float64), y


def test_the_loss_is_the_mean_over_many_samples():
    x, y = sample(200_000)
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    assert loss(w).item() == pytest.approx((x @ w - y).square().mean().item(), rel=0.01)


def test_training_is_gradient_descent():
    """From w_0 it arrives at w_ls + (I - 2 lr S)^T (w_0 - w_ls), S = X'X / n, w_ls the least squares solution."""
    x, y = sample(10, 3)
    for k, w in enumerate(trained(x, y)):
        S = x[k].T @ x[k] / 10
        least = torch.linalg.solve(S, x[k].T @ y[k] / 10)
        contraction = torch.linalg.matrix_power(torch.eye(2, dtype=torch.float64) - 2 * LR * S, STEPS)
        torch.testing.assert_close(w, least + contraction @ (START - least))


def test_five_times_the_clients_are_a_fifth_of_the_variance():
    """Independent clients: exactly 5 in expectation; over 4000 repetitions the ratio's standard error is below 4 %."""
    few, many = (describe(m, averaged(m, 0)) for m in gaussians.CLIENTS)
    assert few["variance"] / many["variance"] == pytest.approx(5, rel=0.1)
    assert many["loss above the least, mean"] < few["loss above the least, mean"]


def test_the_seed_decides():
    assert torch.equal(averaged(5, 0), averaged(5, 0))
    assert not torch.equal(averaged(5, 0), averaged(5, 1))
