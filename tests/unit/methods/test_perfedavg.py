"""Per-FedAvg (4.9): its three outer gradients on quadratics and against autograd, its batches, its fine-tuning."""

import copy

import pytest
import torch
from helpers import play, prepare, settings
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedmpi.common import seeds
from fedmpi.common.errors import UserError

VARIANTS = ("first_order", "hessian_free", "exact")


def outer(module, w, batches, alpha, variant, delta):
    """The outer gradient on three batches, by autograd through the inner step where it is exact."""
    shape = copy.deepcopy(module)

    def grad(at, batch):
        vector_to_parameters(at, shape.parameters())
        x, y = batch
        return parameters_to_vector(torch.autograd.grad(cross_entropy(shape(x), y), list(shape.parameters())))

    v = grad(w - alpha * grad(w, batches[0]), batches[1])
    if variant == "first_order":
        return v
    if variant == "hessian_free":
        difference = grad(w + delta * v, batches[2]) - grad(w - delta * v, batches[2])
        return v - alpha / (2 * delta) * difference
    x, y = batches[2]
    names = [name for name, _ in module.named_parameters()]

    def loss(flat):
        pieces = flat.split([p.numel() for p in module.parameters()])
        shaped = {n: piece.view_as(p) for n, piece, p in zip(names, pieces, module.parameters(), strict=True)}
        return cross_entropy(torch.func.functional_call(module, shaped, (x,)), y)

    return v - alpha * torch.autograd.functional.hvp(loss, w, v)[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_client_by_hand(client_of, variant):
    """Batches in pairs or triples, what is left over unused; momentum and decay in the outer step alone."""
    many = 2 if variant == "first_order" else 3
    options = {"alpha": 0.1, "variant": variant, "delta": 0.01}
    it = prepare(settings("perfedavg", options=options, train={"batch_size": 4, "epochs": 2, "weight_decay": 1e-2}))
    client, module = client_of(it, 2), copy.deepcopy(it.made.net.module)
    shard = it.made.data.train[2]
    x, y = shard.x[shard.index], shard.y[shard.index]
    w = parameters_to_vector(module.parameters()).detach().requires_grad_(True)
    sgd = torch.optim.SGD([w], 0.05, 0.9, weight_decay=1e-2)
    generator, steps = seeds.generator(0, "batches", 0, 2, 0), 0
    for _ in range(2):
        cut = torch.randperm(len(x), generator=generator).split(4)
        for at in range(0, len(cut) - len(cut) % many, many):
            batches = [(x[i], y[i]) for i in cut[at : at + many]]
            assert len(batches) == many
            w.grad = outer(module, w.detach(), batches, 0.1, variant, 0.01)
            sgd.step()
            steps += 1
    it.made.method.train(client)
    assert client.steps == steps
    assert steps >= 4
    torch.testing.assert_close(client.w, w.detach(), rtol=0, atol=2e-5)
    assert (client.w - client.w0).abs().max() > 0.01


def test_variants_differ():
    hashes = [play(settings("perfedavg", options={"alpha": 0.2, "variant": v}, rounds=1)).hashes[0] for v in VARIANTS]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("size", ["full", 300])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_batch_is_cut_up_as_it_is_drawn(client_of, size, variant):
    """Not in the order of a file that lies class by class."""
    many = 2 if variant == "first_order" else 3
    it = prepare(settings("perfedavg", options={"alpha": 0.1, "variant": variant}, train={"batch_size": size}))
    client, module = client_of(it, 2), copy.deepcopy(it.made.net.module)
    shard = it.made.data.train[2]
    x, y = shard.x[shard.index], shard.y[shard.index]
    w = parameters_to_vector(module.parameters()).detach()
    rows = torch.randperm(len(x), generator=seeds.generator(0, "batches", 0, 2, 0)).chunk(many)
    g = outer(module, w.requires_grad_(True), [(x[i], y[i]) for i in rows], 0.1, variant, 0.001)
    it.made.method.train(client)
    assert client.steps == 1
    torch.testing.assert_close(
        client.w, (w - 0.05 * g).detach(), rtol=0, atol=2e-5 if variant != "hessian_free" else 1e-3
    )


@pytest.mark.parametrize(
    "train", [{"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.01}, {"optim": "adam", "momentum": None}]
)
def test_fine_tuning_is_plain_sgd_of_rate_alpha(client_of, train):
    """Whatever the optimiser of training."""
    it = prepare(settings("perfedavg", options={"alpha": 0.02}, train=train))
    module, shard = copy.deepcopy(it.made.net.module), it.made.data.train[2]
    x, y = shard.x[shard.index], shard.y[shard.index]
    client_of(it, 2).fine_tune(2)
    generator = seeds.generator(0, "batches", 0, 2, 0)
    for _ in range(2):
        for rows in torch.randperm(len(x), generator=generator).split(10):
            module.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.02 * p.grad
    torch.testing.assert_close(it.made.model.w, parameters_to_vector(module.parameters()).detach(), rtol=0, atol=1e-6)


def test_fine_tuning_by_more_of_the_same_steps(client_of):
    it = prepare(settings("perfedavg", options={"alpha": 0.02, "tuning": "meta"}))
    client_of(it, 2).fine_tune(2)
    found = it.made.model.w.clone()
    client = client_of(it, 2)
    client.fit(2)
    assert torch.equal(found, client.w)
    assert not torch.equal(client.w, client.w0)


def test_bounds():
    with pytest.raises(UserError, match=r"method\.variant"):
        prepare(settings("perfedavg", options={"variant": "second_order"}))


class Partly(nn.Module):
    """A layer that the outputs do not depend on."""

    def __init__(self, classes):
        super().__init__()
        self.used, self.unused = nn.Linear(64, classes), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x.flatten(1))


def partly(input_shape, classes):
    return Partly(classes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_that_is_not_used(variant):
    """Its gradient is zero, as in other methods."""
    config = settings("perfedavg", rounds=1, options={"variant": variant}, model={"name": f"{__file__}:partly"})
    it = play(config)
    unused = [s for s in it.made.model.layout.segments if s.name.startswith("unused")]
    assert unused
    assert all(torch.equal(s.view(it.w), s.view(it.w0)) for s in unused)
    assert not torch.equal(it.w, it.w0)
