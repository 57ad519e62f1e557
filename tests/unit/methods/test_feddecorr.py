"""FedDecorr: the correlations of the features, as the paper has them and as its authors' code has them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.methods.feddecorr import FedDecorr, correlations

TWO = [[0.0, 0], [1, 2], [2, 1]]
THREE = [[1.0, 0, 2], [2, 1, 0], [4, 1, 1], [1, 3, 0]]
# The gradients of the authors' term there, column by column; (2) and (3) by the chain rule, mean and variance included.
SLOPE_OF_TWO = [[-1 / 3, 2 / 3, -1 / 3], [-1 / 3, -1 / 3, 2 / 3]]
SLOPE_OF_THREE = [[17 / 228, 1 / 76, -1 / 228, -1 / 12], [-36 / 361, 103 / 361, -49 / 361, -18 / 361]]
SLOPE_OF_THREE += [[0, 6 / 19, 0, -6 / 19]]


def term(rows, scale="code"):
    """The term of features `rows`, and its gradient there, in float64."""
    z = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    value = correlations(z, scale)
    return value.item(), torch.autograd.grad(value + 0 * z.sum(), z)[0]


@pytest.mark.parametrize(
    ("rows", "code", "paper", "slope"),
    [
        # columns (-1, 0, 1), (-1, 1, 0) about their means, variances 2/2, sum of products G_12 = 1, K_12 = 1/2:
        # code (1 + 1) / 2 / 3; paper (2 + 2/4) / 4
        (TWO, 1 / 3, 0.625, SLOPE_OF_TWO),
        # products about the means [[6, -1, 0], [-1, 4.75, -2.75], [0, -2.75, 2.75]]: K_12^2 = 2/57, K_13 = 0,
        # K_23^2 = 11/19; code 9/4 * 2 (2/57 + 11/19) / 6; paper (3 + 70/57) / 9
        (THREE, 35 / 76, 241 / 513, SLOPE_OF_THREE),
    ],
)
@pytest.mark.parametrize("unit", [1, 1000.0, -1000.0])
def test_by_hand(rows, code, paper, slope, unit):
    """The gradients differ by (B - 1)^2 / B * d / (d - 1). In a larger unit the 1e-8 in the variances is less."""
    (B, d), z = (len(rows), len(rows[0])), [[unit * v + 7 for v in row] for row in rows]
    for scale, value, factor in (("code", code, 1), ("paper", paper, (B - 1) ** 2 / B * d / (d - 1))):
        found, g = term(z, scale)
        assert found == pytest.approx(value, abs=3e-8 / unit**2 + 1e-13)
        expected = torch.tensor(slope, dtype=torch.float64).T / factor
        torch.testing.assert_close(unit * g, expected, rtol=0, atol=3e-8 / unit**2 + 1e-12)


@pytest.mark.parametrize("scale", ["code", "paper"])
def test_batches_without_a_slope(scale):
    """A batch of one, a single feature; two samples, as |K_ij| is 1 for any; one feature that varies."""
    for rows in ([[1.0, 2]], [[1.0], [2]]):
        value, g = term(rows, scale)
        assert (value, g.abs().max()) == (0, 0)
    for rows in ([[0.0, 5], [3, 7]], [[0.0, 5], [1, 5], [2, 5]]):
        assert term(rows, scale)[1].abs().max() < 1e-7


CLIENTS = [  # samples, batches of a round
    (4, [([[1.0, 0], [0, 1], [2, 1]], [0, 1, 0]), ([[1.0, -1]], [1])]),
    (2, [([[0.0, 2], [1, 1]], [1, 0]), ([[2.0, 0], [-1, 1]], [0, 1])]),
]


@pytest.mark.parametrize(
    ("beta", "expected"),  # A row by row, the first column of B
    [
        (0.5, [0.466435905587, -0.188927573408, 0.334445064859, 0.740965169878, 0.507543702761, -0.210248508456]),
        (0.0, [0.480744073328, -0.240661958756, 0.304768739643, 0.723056721854, 0.502821724843, -0.205441182886]),
    ],
)
def test_two_rounds_of_a_linear_net(beta, expected):
    """z = x A, logits z B, lr .1, clients weighed by samples; numbers from numpy, gradients by the chain rule.

    The second column of B is the first one's negative. Of four batches one has one sample, two have two.
    """
    w = torch.tensor([0.5, 0.25, -0.25, 0.75, 0.5, -0.25, -0.5, 0.25], dtype=torch.float64)  # columns of A, of B
    method, net = FedDecorr(beta=beta), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    k = SimpleNamespace(forward=lambda x: (net[0](x), net(x)), task_loss=lambda f, x, y: cross_entropy(f, y))
    for _ in range(2):
        ends = []
        for n, batches in CLIENTS:
            nn.utils.vector_to_parameters(w.clone(), net.parameters())
            sgd = torch.optim.SGD(net.parameters(), 0.1)
            for x, y in batches:
                sgd.zero_grad()
                method.loss(k, torch.tensor(x).double(), torch.tensor(y)).backward()
                sgd.step()
            ends.append(n / 6 * nn.utils.parameters_to_vector(net.parameters()).detach())
        w = sum(ends)
    assert [*w[:4].view(2, 2).T.flatten(), *w[4:6]] == pytest.approx(expected, abs=1e-12)
    assert w[6:].tolist() == pytest.approx((-w[4:6]).tolist(), abs=1e-12)
