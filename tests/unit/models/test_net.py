"""Net on modules that are not ours."""

import gc
import weakref

import pytest
import torch
from torch import nn

from fedmpi.models.cnns import mcmahan_cnn
from fedmpi.models.net import Net


class Backwards(nn.Module):
    """The last layer applied is the first one registered."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(x).tanh())


class Counting(nn.Module):
    """Changes its buffer even in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        self.calls += 1
        return self.fc(x)


def test_last_applied_not_last_registered():
    module = Backwards()
    net = Net(module, (4,))
    x = torch.randn(5, 4)
    z, logits = net.forward(x)
    assert net.head is module.out
    assert net.head_names() == {"out.weight", "out.bias"}
    assert torch.equal(z, module.inner(x).tanh())
    assert torch.equal(logits, module(x))


def test_head_may_be_more_than_a_linear_layer():
    module = nn.Sequential()
    module.add_module("body", nn.Linear(4, 3))
    module.add_module("head", nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))
    net = Net(module, (4,))
    z, logits = net.forward(torch.randn(2, 4))
    assert net.head is module.head
    assert net.head_names() == {f"head.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
    assert torch.equal(module.head(z), logits)


def test_one_pass_and_its_gradients():
    """A loss on z and logits together, against the same composed by hand; the hook of a failed pass is removed."""
    module = Backwards()
    x = torch.randn(5, 4)
    features = module.inner(x).tanh()
    loss = features.square().sum() + module.out(features).exp().sum()
    expected = torch.autograd.grad(loss, list(module.parameters()))
    net, passes = Net(module, (4,)), []
    module.inner.register_forward_hook(lambda *_: passes.append(1))
    z, logits = net.forward(x)
    assert len(passes) == 1
    got = torch.autograd.grad(z.square().sum() + logits.exp().sum(), list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(RuntimeError):
        net.forward(torch.randn(2, 5))
    assert not net.head._forward_pre_hooks


def test_nothing_outlives_the_pass():
    net = Net(mcmahan_cnn((1, 8, 8), 3), (1, 8, 8))
    z, logits = net.forward(torch.randn(2, 1, 8, 8))
    alive = [weakref.ref(z), weakref.ref(logits)]
    del z, logits
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_dry_run_leaves_no_trace():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), Counting())
    module.train()
    module[1].eval()  # a module may be in mixed modes
    before = {name: value.clone() for name, value in module.state_dict().items()}
    generator = torch.get_rng_state()
    Net(module, (2,))
    assert [part.training for part in module] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(part._forward_hooks for part in module.modules())


def test_features_of_a_compiled_module():
    """A compiled module calls no hooks of its parts: there were no features, and the run failed."""
    module = Backwards()
    net, x = Net(module, (4,)), torch.randn(5, 4)
    z, logits = net.forward(x)
    module.compile(backend="eager")
    again, same = net.forward(x)
    assert torch.equal(again, z)
    assert torch.equal(same, logits)
    assert torch.equal(module(x), logits)
