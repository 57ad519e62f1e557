"""FedSAM: the gradient from a little further up."""

import pytest
import torch
from naive import assert_trains_along, displaced, experiment, gradient, length
from torch.nn.functional import cross_entropy

from fedmpi.methods._terms import perturbation


def test_by_hand():
    """By hand: g = (.3, .4, 0), rho = .1."""
    eps = perturbation(torch.tensor([0.3, 0.4, 0], dtype=torch.float64), 0.1)
    assert eps.tolist() == pytest.approx([0.06, 0.08, 0], abs=1e-12)


def test_five_steps_against_two_passes(client_of):
    """Batch statistics move in the first pass alone."""
    it = experiment("fedsam", {"rho": 0.5})

    def direction(module, received, x, y):
        g = gradient(module, cross_entropy(module(x), y))
        with displaced(module, [0.5 * piece / length(g) for piece in g]):
            return gradient(module, cross_entropy(module(x), y))

    assert_trains_along(it, client_of(it), direction)
    assert it.made.net.module[1].num_batches_tracked == 5
