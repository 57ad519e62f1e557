"""Aggregation of adapters (server.lora) against dense matrices, which PEFT and numpy compute."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi.aggregation.lora import CHANGES_BASE, RESIDUAL_NUMBER, RULES, LoraAggregation, truncate
from fedmpi.common import seeds, torchvision_compat  # noqa: F401  (before peft imports torchvision)
from fedmpi.engine.base_weights import BaseWeights, adapter_shapes
from fedmpi.flat.model import FlatModel
from fedmpi.flat.packing import Views
from fedmpi.method.context import Uploads
from fedmpi.models.lora import LoraConfig, add_adapters, iter_adapted_layers

pytest.importorskip("peft", reason="pip install 'fedmpi[lora]'")
CONFIG = LoraConfig(
    r=2, alpha=3.0, targets=None, rslora=False, dropout=0.0, head=True, base_precision="fp32", freeze_a=False
)
P = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)  # weights of three clients


class Layers(nn.Module):
    """One layer of each kind, none of them square."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.conv = nn.Conv2d(3, 5, (3, 2))
        self.linear = nn.Linear(5, 7)
        self.conv1d = Conv1D(9, 7)
        self.embedding = nn.Embedding(11, 9)
        self.head = nn.Linear(9, 4)

    def forward(self, x):
        hidden = self.conv1d(self.linear(self.conv(x).mean((2, 3))))
        return self.head(hidden + self.embedding(torch.zeros(len(x), dtype=torch.long)))


class FakeServer:
    """What a rule uses of the server."""

    def __init__(self, model, shared):
        self.segments, self.shared, self.round, self.logged = model.layout.segments, shared, 0, {}
        self.rule_state = Views({RESIDUAL_NUMBER: torch.zeros(())})

    def log_metrics(self, **values):
        self.logged |= values

    def generator(self, *purpose):
        return seeds.torch_generator(0, "server", *purpose)


def dense_deltas(module):
    """Return layer name -> s B A in the shape of the base weight, as PEFT computes it."""
    layers = iter_adapted_layers(module)
    return {x.name: module.get_submodule(x.name).get_delta_weight("default").detach().double() for x in layers}


@pytest.fixture
def federation():
    """Return a function that aggregates random adapters of three clients, and returns what it needs to judge that."""

    def aggregate(rule, r=2, large=True, common_a=False):
        torch.manual_seed(1)
        names = ("conv", "linear", "conv1d", "embedding")
        config = LoraConfig(**{**vars(CONFIG), "r": r, "targets": names, "freeze_a": rule == "freeze_a"})
        module = add_adapters(Layers(), config, (3, 6, 6), torch.float32)
        model = FlatModel(module, {"head.weight", "head.bias"})
        layers = list(iter_adapted_layers(module))
        for layer in layers if common_a else ():
            dict(module.named_parameters())[layer.frozen_factor].data.normal_()
        clients = torch.randn(3, model.layout.size)
        shared = torch.randn(model.layout.size)
        for s in model.layout.segments if common_a else ():
            if s.name in {layer.frozen_factor for layer in layers}:
                for row in clients:
                    s.view(row).copy_(s.view(shared))
        sizes = adapter_shapes(layers, dict(module.named_parameters()))
        cohort_size = 3 if large else 1000  # with 1000 clients, a matrix is smaller than its factors
        server, lora = FakeServer(model, shared), LoraAggregation(rule, sizes, cohort_size)
        updates = Uploads((0, 1, 2), P * 10, P, Views({"dw": clients - shared}))
        exact = {x.name: x.base.detach().double().clone() for x in layers}
        for weight, row in zip(P, clients, strict=True):
            model.load(row)
            for name, delta in dense_deltas(module).items():
                exact[name] += weight * delta
        direction, state = lora(updates, server, updates.mean("dw"))
        model.load(shared + direction)
        if state:
            base = BaseWeights(layers, sizes, cohort_size)
            base.add_change(Views(dict(state)))
            base.add_change(Views(dict(state)))  # a round that is repeated does not add it twice
        used = {x.name: x.base.detach().double() + dense_deltas(module)[x.name] for x in layers}
        return SimpleNamespace(**locals())

    return aggregate


@pytest.mark.parametrize("large", [True, False], ids=["factors", "matrices"])
@pytest.mark.parametrize("rule", CHANGES_BASE)
def test_exact_and_stack_use_the_dense_mean_of_products(federation, rule, large):
    f = federation(rule, large=large)
    for name, exact in f.exact.items():
        assert (f.used[name] - exact).norm() / exact.norm() < 1e-6, name
    assert f.server.logged["lora_distance"] < 1e-7


def test_stack_starts_the_adapters_again(federation):
    f = federation("stack")
    assert not any(delta.any() for delta in dense_deltas(f.module).values())
    values = dict(f.module.named_parameters())
    for layer in f.layers:  # one of the two factors is random, so that the adapter can be trained
        assert values[layer.b if layer.is_embedding else layer.a].abs().min() > 0


@pytest.mark.parametrize("r", [1, 2, 4])
def test_svd_has_the_error_of_the_truncated_svd_of_numpy(federation, r):
    f = federation("svd", r=r)
    error = size = 0.0
    for layer in f.layers:
        product = ((f.exact[layer.name] - layer.base.detach().double()) / layer.scale).flatten(1)
        left, s, right = np.linalg.svd(product.numpy())
        best = left[:, :r] * s[:r] @ right[:r]
        got = ((f.used[layer.name] - layer.base.detach().double()) / layer.scale).flatten(1).numpy()
        assert np.linalg.norm(got - best) < 1e-6 * np.linalg.norm(best), layer.name
        error, size = error + (s[r:] ** 2).sum(), size + (s**2).sum()
    assert f.server.logged["lora_distance"] == pytest.approx(np.sqrt(error / size), rel=1e-5)


def test_svd_keeps_the_mean_norm_of_a(federation):
    f = federation("svd")
    for s in f.model.layout.segments:
        if ".lora_A" in s.name or "embedding_A" in s.name:
            mean = sum(p * s.view(row).double().square().sum() for p, row in zip(P, f.clients, strict=True))
            torch.testing.assert_close(s.view(f.model.w).double().square().sum(), mean, rtol=1e-4, atol=0)


def test_svd_keeps_adapters_trainable_if_all_products_are_zero():
    b, a = truncate((torch.zeros(6, 4, dtype=torch.float64), torch.eye(4, 9, dtype=torch.float64)), 2)
    assert not b.any()
    torch.testing.assert_close(a @ a.T, torch.eye(2, dtype=torch.float64))  # so the gradient of B is not zero


def test_freeze_a_gives_the_mean_of_products(federation):
    f = federation("freeze_a")
    for name, exact in f.exact.items():
        assert (f.used[name] - exact).norm() / exact.norm() < 1e-6, name
    trained = {s.name for s in f.model.layout.segments}
    for layer in f.layers:  # A of an embedding is zero at first, so that B could not be trained
        assert (layer.a in trained, layer.b in trained) == (layer.is_embedding, not layer.is_embedding)


def test_separate_means_differ_unless_a_is_common(federation):
    f = federation("separate")
    change = {x.name: f.exact[x.name] - x.base.detach().double() for x in f.layers}
    off = {name: (f.used[name] - f.exact[name]).norm() / change[name].norm() for name in change}
    assert min(off.values()) > 0.1
    assert 0.1 < f.server.logged["lora_distance"] < 2
    same = federation("separate", common_a=True)
    assert same.server.logged["lora_distance"] < 1e-6


def test_the_head_and_all_other_parameters_are_averaged(federation):
    for rule in RULES:
        f = federation(rule)
        for s in f.model.layout.segments:
            if s.name.startswith("head"):
                mean = sum(p * s.view(row).double() for p, row in zip(P, f.clients, strict=True))
                torch.testing.assert_close(s.view(f.model.w).double(), mean, rtol=1e-5, atol=1e-6)
