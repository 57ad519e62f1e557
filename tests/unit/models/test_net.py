"""FeaturesAndHead finds the head of any module and returns its features and logits."""

import gc
import weakref

import pytest
import torch
from torch import nn

from fedmpi.models.cnns import mcmahan_cnn
from fedmpi.models.net import FeaturesAndHead


class HeadRegisteredFirst(nn.Module):
    """A module whose head is the first layer that it registers."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(x).tanh())


class CallCounter(nn.Module):
    """A module that changes its buffer in evaluation mode, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        self.calls += 1
        return self.fc(x)


def test_head_is_the_layer_applied_last():
    module = HeadRegisteredFirst()
    net = FeaturesAndHead(module, (4,))
    x = torch.randn(5, 4)
    z, logits = net.forward(x)
    assert net.head is module.out
    assert net.head_parameter_names() == {"out.weight", "out.bias"}
    assert torch.equal(z, module.inner(x).tanh())
    assert torch.equal(logits, module(x))


def test_head_may_consist_of_several_layers():
    module = nn.Sequential()
    module.add_module("body", nn.Linear(4, 3))
    module.add_module("head", nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))
    net = FeaturesAndHead(module, (4,))
    z, logits = net.forward(torch.randn(2, 4))
    assert net.head is module.head
    assert net.head_parameter_names() == {f"head.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
    assert torch.equal(module.head(z), logits)


def test_features_and_logits_come_from_one_differentiable_pass():
    """Gradients of a loss on both equal those of the separate layers, and a failed pass leaves no hook."""
    module = HeadRegisteredFirst()
    x = torch.randn(5, 4)
    features = module.inner(x).tanh()
    loss = features.square().sum() + module.out(features).exp().sum()
    expected = torch.autograd.grad(loss, list(module.parameters()))
    net, passes = FeaturesAndHead(module, (4,)), []
    module.inner.register_forward_hook(lambda *_: passes.append(1))
    z, logits = net.forward(x)
    assert len(passes) == 1
    gradients = torch.autograd.grad(z.square().sum() + logits.exp().sum(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    with pytest.raises(RuntimeError):
        net.forward(torch.randn(2, 5))
    assert not net.head._forward_pre_hooks


def test_features_are_freed_after_the_pass():
    net = FeaturesAndHead(mcmahan_cnn((1, 8, 8), 3), (1, 8, 8))
    z, logits = net.forward(torch.randn(2, 1, 8, 8))
    references = [weakref.ref(z), weakref.ref(logits)]
    del z, logits
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_finding_the_head_changes_no_state():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), CallCounter())
    module.train()
    module[1].eval()  # a module may be in mixed modes
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    FeaturesAndHead(module, (2,))
    assert [part.training for part in module] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(part._forward_hooks for part in module.modules())


def test_a_compiled_module_returns_features():
    """A compiled module does not call the hooks of its parts."""
    module = HeadRegisteredFirst()
    net, x = FeaturesAndHead(module, (4,)), torch.randn(5, 4)
    z, logits = net.forward(x)
    module.compile(backend="eager")
    compiled_z, compiled_logits = net.forward(x)
    assert torch.equal(compiled_z, z)
    assert torch.equal(compiled_logits, logits)
    assert torch.equal(module(x), logits)
