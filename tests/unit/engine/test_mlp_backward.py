"""Gradients of small chains without autograd have the bits of autograd's."""

import pytest
import torch
from helpers import run_experiment, small_settings
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.engine.local.mlp_backward import MLPBackward
from fedmpi.flat.model import FlatModel
from fedmpi.models.mlp import MLP
from fedmpi.tasks.classification import Classification

CHAINS = {
    "softmax regression": lambda: MLP(784, (), 10),
    "perceptron": lambda: MLP(784, (200, 200), 10),
    "narrow": lambda: MLP(12, (7, 1, 33), 2),
    "without biases": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(12, 5, bias=False), nn.ReLU(), nn.ReLU(), nn.Linear(5, 3)
    ),
    "vectors": lambda: nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3)),
}


def make_mlp_backward(module, task=None, flat=False):
    return MLPBackward.create(module, task or Classification(2), flat)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("batch", [1, 2, 10, 33])
def test_loss_and_gradients_have_the_bits_of_autograd(name, batch):
    torch.manual_seed(batch)
    module = CHAINS[name]()
    model = FlatModel(module)
    (first, *_) = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    shape = (first.in_features,) if name == "vectors" else (1, first.in_features // 4, 4)
    x = torch.randn(batch, *shape)
    f = module(x)
    y = torch.randint(f.shape[1], (batch,))
    loss = cross_entropy(f, y)
    expected = torch.autograd.grad(loss, model.parameters)
    by_hand = make_mlp_backward(module, flat=name == "vectors")
    by_hand.attach_gradients()
    for p in model.parameters:
        p.grad.fill_(7.0)
    assert torch.equal(by_hand(x, y), loss)
    for p, g in zip(model.parameters, expected, strict=True):
        assert torch.equal(p.grad, g)


@pytest.mark.parametrize(
    "train",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"optim": "adam", "momentum": None},
        {"steps": 7, "drop_last": True},
    ],
    ids=str,
)
def test_a_run_has_the_same_bits_with_and_without_mlp_backward(train, monkeypatch):
    calls, call = [], MLPBackward.__call__
    monkeypatch.setattr(MLPBackward, "__call__", lambda *a: calls.append(1) or call(*a))
    config = small_settings("fedavg", "mlp", train=train)
    with_it = run_experiment(config)
    made_calls = len(calls)
    assert made_calls
    monkeypatch.setattr(MLPBackward, "create", staticmethod(lambda *_: None))
    assert run_experiment(config).hashes == with_it.hashes
    assert len(calls) == made_calls
