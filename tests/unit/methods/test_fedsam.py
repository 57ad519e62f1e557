"""FedSAM: the gradient from a little further up."""

import copy

import pytest
import torch
from naive import assert_same, descend, displaced, experiment, gradient, length, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.methods._terms import perturbation


def test_mlp_backward():
    """By hand: g = (.3, .4, 0), rho = .1."""
    eps = perturbation(torch.tensor([0.3, 0.4, 0], dtype=torch.float64), 0.1)
    assert eps.tolist() == pytest.approx([0.06, 0.08, 0], abs=1e-12)


def test_its_length_is_rho():
    g = torch.Generator().manual_seed(0)
    for rho in (0.1, 3.0):
        assert perturbation(torch.randn(99, generator=g), rho).norm().item() == pytest.approx(rho, rel=1e-6)


def test_five_steps_against_two_passes(client):
    """Batch statistics move in the first pass alone."""
    it = experiment("fedsam", {"rho": 0.5})
    x, y = rows_of(it)
    module = copy.deepcopy(it.made.net.module)

    def direction():
        g = gradient(module, cross_entropy(module(x), y))
        with displaced(module, [0.5 * piece / length(g) for piece in g]):
            return gradient(module, cross_entropy(module(x), y))

    descend(module, 5, direction)
    it.made.method.train(client(it))
    assert_same(it, module)
    assert it.made.net.module[1].num_batches_tracked == 5
