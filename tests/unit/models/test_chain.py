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


def hooked(where):
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    where(module)
    return module


class Own(nn.Linear):
    """May do anything in its forward pass."""


@pytest.mark.parametrize(
    "module",
    [
        hooked(lambda m: m.register_forward_hook(lambda *_: None)),
        hooked(lambda m: m[1].register_forward_pre_hook(lambda *_: None)),
        hooked(lambda m: m[1].register_full_backward_hook(lambda *_: None)),
        hooked(lambda m: m[1].register_full_backward_pre_hook(lambda *_: None)),
        hooked(lambda m: m.compile()),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 3)),
        nn.Sequential(Own(12, 3)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 3))),
        nn.Sequential(),
    ],
)
def test_other_models_are_called_as_ever(module):
    assert straight(module) is None
