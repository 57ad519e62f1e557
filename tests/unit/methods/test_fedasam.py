"""FedASAM: further where weights are large."""

import copy
from types import SimpleNamespace

import pytest
import torch
from naive import assert_same, descend, displaced, experiment, gradient, length, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.flat.layout import Segment
from fedmpi.methods.fedasam import FedASAM

W = torch.tensor([1.0, -2, 0.5], dtype=torch.float64)  # eps below: by hand
G = torch.tensor([0.3, 0.4, 0], dtype=torch.float64)


def eps(name, **options):
    k = SimpleNamespace(w=W, segments=lambda: [Segment(name, (3,), 0, "body")])
    return FedASAM(rho=0.1, **options).perturbation(k, G).tolist()


def test_mlp_backward():
    assert eps("layer.bias", eta=0.0, scaled="all") == pytest.approx([0.0351123, 0.1872658, 0], abs=5e-8)
    assert eps("layer.bias", eta=0.2, scaled="all") == pytest.approx([0.0454359, 0.2036203, 0], abs=5e-8)
    assert eps("layer.weight", eta=0.2) == pytest.approx([0.0454359, 0.2036203, 0], abs=5e-8)
    assert eps("layer.bias", eta=0.2) == pytest.approx([0.06, 0.08, 0], abs=1e-9)  # T = 1: SAM


@pytest.mark.parametrize("scaled", ["weights", "all"])
def test_five_steps_against_two_passes(client, scaled):
    it = experiment("fedasam", {"rho": 0.5, "scaled": scaled})
    x, y = rows_of(it)
    module = copy.deepcopy(it.made.net.module)

    def direction():
        g = gradient(module, cross_entropy(module(x), y))
        T = [
            p.detach().abs() + 0.2 if scaled == "all" or name.endswith("weight") else torch.ones_like(p)
            for name, p in module.named_parameters()
        ]
        size = length([t * piece for t, piece in zip(T, g, strict=True)])
        with displaced(module, [0.5 * t**2 * piece / size for t, piece in zip(T, g, strict=True)]):
            return gradient(module, cross_entropy(module(x), y))

    descend(module, 5, direction)
    it.made.method.train(client(it))
    assert_same(it, module)
