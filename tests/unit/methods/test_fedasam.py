"""FedASAM: further where weights are large."""

from types import SimpleNamespace

import pytest
import torch
from naive import assert_trains_along, displaced, experiment, gradient, length
from torch.nn.functional import cross_entropy

from fedmpi.flat.layout import Segment
from fedmpi.methods.fedasam import FedASAM

W = torch.tensor([1.0, -2, 0.5], dtype=torch.float64)
G = torch.tensor([0.3, 0.4, 0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "eta", "scaled", "expected"),
    [
        ("layer.bias", 0.0, "all", [0.0351123, 0.1872658, 0]),
        ("layer.bias", 0.2, "all", [0.0454359, 0.2036203, 0]),
        ("layer.weight", 0.2, "weights", [0.0454359, 0.2036203, 0]),
        ("layer.bias", 0.2, "weights", [0.06, 0.08, 0]),  # T = 1: SAM
    ],
)
def test_by_hand(name, eta, scaled, expected):
    client = SimpleNamespace(w=W, segments=lambda: [Segment(name, (3,), 0, "body")])
    eps = FedASAM(rho=0.1, eta=eta, scaled=scaled).perturbation(client, G)
    assert eps.tolist() == pytest.approx(expected, abs=5e-8)


@pytest.mark.parametrize("scaled", ["weights", "all"])
def test_five_steps_against_two_passes(client_of, scaled):
    it = experiment("fedasam", {"rho": 0.5, "scaled": scaled})

    def direction(module, received, x, y):
        g = gradient(module, cross_entropy(module(x), y))
        T = [
            p.detach().abs() + 0.2 if scaled == "all" or name.endswith("weight") else torch.ones_like(p)
            for name, p in module.named_parameters()
        ]
        size = length([t * piece for t, piece in zip(T, g, strict=True)])
        with displaced(module, [0.5 * t**2 * piece / size for t, piece in zip(T, g, strict=True)]):
            return gradient(module, cross_entropy(module(x), y))

    assert_trains_along(it, client_of(it), direction)
