"""Server optimisers, compared with three steps written in numpy (Reddi et al. 2021, Algorithm 2)."""

import numpy as np
import pytest
import torch
from helpers import prepare, settings

from fedmpi.aggregation.server_optimizers import ServerOptimizer

LR, BETA1, BETA2, EPS = 0.3, 0.8, 0.95, 0.01
D = np.array([[0.5, -2.0, 0.0, 1e-3], [0.1, 3.0, 0.0, -1e-3], [-0.7, 0.2, 4.0, 5e-3]])  # three directions


def numpy_steps(name, w):
    m, v = np.zeros(4), np.full(4, EPS**2)
    for d in D:
        if name == "sgd":
            w = w + LR * d
            continue
        if name == "momentum":
            m = BETA1 * m + d
            w = w + LR * m
            continue
        m = BETA1 * m + (1 - BETA1) * d
        if name == "adagrad":
            v = v + d**2
        elif name == "adam":
            v = BETA2 * v + (1 - BETA2) * d**2
        else:
            v = v - (1 - BETA2) * d**2 * np.sign(v - d**2)
        w = w + LR * m / (np.sqrt(v) + EPS)
    return w


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "yogi"])
def test_three_steps_equal_the_formulas(name):
    w = torch.tensor([1.0, -1, 0.5, 2], dtype=torch.float64)
    expected = numpy_steps(name, w.numpy().copy())
    optim = ServerOptimizer(name, w, LR, BETA1, BETA2, EPS)
    assert len(optim.state) == {"sgd": 0, "momentum": 1}.get(name, 2)
    for d in D:
        optim.step(w, torch.from_numpy(d), optim.state)
    np.testing.assert_allclose(w.numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_equals_torch_sgd_on_the_negative_direction(nesterov):
    """With nesterov, and AdamW on the clients, this is DiLoCo's outer step; the tolerance is needed because torch adds
    before it scales.
    """
    theirs = torch.nn.Parameter(torch.tensor([1.0, -1, 0.5, 2], dtype=torch.float64))
    ours = theirs.detach().clone()
    reference = torch.optim.SGD([theirs], LR, BETA1, nesterov=nesterov)
    optim = ServerOptimizer("momentum", ours, LR, BETA1, nesterov=nesterov)
    for d in torch.from_numpy(np.concatenate([D, -2 * D])):
        optim.step(ours, d, optim.state)
        theirs.grad = -d
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("server", "beta1"),
    [
        ({"optim": "momentum", "momentum": 0.5}, 0.5),
        ({"optim": "momentum", "nesterov": True}, 0.9),
        ({"optim": "adam", "beta1": 0.8}, 0.8),
    ],
)
def test_config_keys_reach_the_optimizer(server, beta1):
    optim = prepare(settings(server={"lr": 0.25, **server})).fed.server.optimizer
    assert (optim.lr, optim.beta1, optim.beta2, optim.eps) == (0.25, beta1, 0.99, 1e-3)
    assert optim.nesterov == server.get("nesterov", False)
