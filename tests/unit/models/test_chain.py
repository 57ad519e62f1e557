"""Chains of layers: their forward pass from layer to layer is the module's own."""

import pytest
import torch
from torch import nn

from fedmpi.models.chain import straight
from fedmpi.models.mlp import MLP


@pytest.mark.parametrize("hidden", [(), (7, 5)])
def test_from_layer_to_layer(hidden):
    module, x = MLP(12, hidden, 3), torch.randn(4, 3, 4)
    forward = straight(module)
    assert torch.equal(forward(x), module(x))
    with torch.no_grad():
        module.head.weight.mul_(2)
    assert torch.equal(forward(x), module(x))


def test_a_layer_that_stands_in_two_places_is_passed_twice():
    """nn.Module.children() names it once."""
    twice, relu = nn.Linear(5, 5), nn.ReLU()
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), relu, twice, relu, twice)
    x = torch.randn(4, 3, 4)
    assert torch.equal(straight(module)(x), module(x))
