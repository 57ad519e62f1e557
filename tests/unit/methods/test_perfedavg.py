"""Per-FedAvg (4.9): its three outer gradients on quadratics and by autograd, its batches, its fine-tuning."""

import pytest
import torch
from helpers import prepare, run_experiment, settings
from naive import flat, module_of, rows_of, train_epochs
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds

VARIANTS = ("first_order", "hessian_free", "exact")


def outer_gradient(module, w, batches, alpha, variant, delta):
    """Return the outer gradient on three batches; the exact variant uses autograd through the inner step."""
    shapes = {name: p.shape for name, p in module.named_parameters()}

    def loss(w, batch):
        x, y = batch
        parts = w.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return cross_entropy(torch.func.functional_call(module, named, (x,)), y)

    def grad(w, batch):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(loss(w, batch), w)[0]

    v = grad(w - alpha * grad(w, batches[0]), batches[1])
    if variant == "first_order":
        return v
    if variant == "hessian_free":
        difference = grad(w + delta * v, batches[2]) - grad(w - delta * v, batches[2])
        return v - alpha / (2 * delta) * difference
    return v - alpha * torch.autograd.functional.hvp(lambda w: loss(w, batches[2]), w, v)[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_of_one_client_equal_values_by_hand(client_of, variant):
    """Incomplete pairs or triples of batches are not used; momentum and decay are in the outer step only."""
    many = 2 if variant == "first_order" else 3
    options = {"alpha": 0.1, "variant": variant, "delta": 0.01}
    it = prepare(settings("perfedavg", options=options, train={"batch_size": 4, "epochs": 2, "weight_decay": 1e-2}))
    client, module, (x, y) = client_of(it, 2), module_of(it), rows_of(it, 2)
    w = flat(module).requires_grad_(True)
    sgd = torch.optim.SGD([w], 0.05, 0.9, weight_decay=1e-2)
    generator, steps = seeds.torch_generator(0, "batches", 0, 2, 0), 0
    for _ in range(2):
        cut = torch.randperm(len(x), generator=generator).split(4)
        for at in range(0, len(cut) - len(cut) % many, many):
            batches = [(x[i], y[i]) for i in cut[at : at + many]]
            w.grad = outer_gradient(module, w.detach(), batches, 0.1, variant, 0.01)
            sgd.step()
            steps += 1
    it.experiment.method.train(client)
    assert client.steps == steps >= 4
    torch.testing.assert_close(client.w, w.detach(), rtol=0, atol=2e-5)
    assert (client.w - client.w0).abs().max() > 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_single_batch_is_divided_in_random_order(client_of, variant):
    """The order is not that of the file, which may be sorted by class."""
    many = 2 if variant == "first_order" else 3
    it = prepare(settings("perfedavg", options={"alpha": 0.1, "variant": variant}, train={"batch_size": "full"}))
    client, module, (x, y) = client_of(it, 2), module_of(it), rows_of(it, 2)
    w = flat(module).requires_grad_(True)
    rows = torch.randperm(len(x), generator=seeds.torch_generator(0, "batches", 0, 2, 0)).chunk(many)
    expected = (w - 0.05 * outer_gradient(module, w, [(x[i], y[i]) for i in rows], 0.1, variant, 0.001)).detach()
    it.experiment.method.train(client)
    assert client.steps == 1
    torch.testing.assert_close(client.w, expected, rtol=0, atol=1e-3 if variant == "hessian_free" else 2e-5)


@pytest.mark.parametrize(
    "train", [{"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.01}, {"optim": "adam", "momentum": None}]
)
def test_fine_tuning_is_plain_sgd_with_rate_alpha(client_of, train):
    """This holds for any optimiser of training."""
    it = prepare(settings("perfedavg", options={"alpha": 0.02}, train=train))
    module = module_of(it)
    client_of(it, 2).fine_tune(2)
    train_epochs(module, rows_of(it, 2), (0, 2, 0), 0.02, 2, momentum=0.0)
    torch.testing.assert_close(it.experiment.model.w, flat(module), rtol=0, atol=1e-6)
    it = prepare(settings("perfedavg", options={"alpha": 0.02, "tuning": "meta"}))  # more of the steps of training
    client_of(it, 2).fine_tune(2)
    tuned, client = it.experiment.model.w.clone(), client_of(it, 2)
    client.fit(2)
    assert torch.equal(tuned, client.w)


def with_unused_layer(input_shape, classes):
    """Build a model with a layer on which the outputs do not depend."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    net[0].unused = nn.Linear(3, 2)
    return net


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_unused_layer_has_gradient_zero(variant):
    """As in other methods."""
    config = settings(
        "perfedavg", rounds=1, options={"variant": variant}, model={"name": f"{__file__}:with_unused_layer"}
    )
    it = run_experiment(config)
    unused = [s for s in it.experiment.model.layout.segments if "unused" in s.name]
    assert unused
    assert all(torch.equal(s.view(it.w), s.view(it.w0)) for s in unused)
    assert not torch.equal(it.w, it.w0)
