"""Filter decomposition: averages of kernels, their variance beside a run that does not notice, and virtual clients."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, federated, play, settings
from torch import nn

from fedmpi.analysis import filter_decomposition
from fedmpi.analysis.filter_decomposition import (
    atom_layers,
    client_variance,
    dense,
    kernel_mean,
    measure_variance,
    product_mean,
    replicate_variance,
)
from fedmpi.analysis.local_models import local_models
from fedmpi.comm.base import Solo
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, COEF
from fedmpi.models.atoms import AtomConv2d, decompose
from fedmpi.runtime import build


def scalars(*values):
    """(m, 1, 1) of m numbers."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def test_two_clients_by_hand():
    """alpha = 1, 3 and D = 2, 1 with p = 1/4, 3/4: W = 2, 3."""
    p, alpha, D = torch.tensor([0.25, 0.75], dtype=torch.float64), scalars(1, 3), scalars(2, 1)
    assert kernel_mean(p, alpha, D).item() == 0.25 * 2 + 0.75 * 3 == 2.75
    # alpha_bar = 2.5, D_bar = 1.25; as a double sum 0.0625 * 2 + 0.1875 * (1 + 6) + 0.5625 * 3
    assert product_mean(p, alpha, D).item() == 2.5 * 1.25 == 0.0625 * 2 + 0.1875 * (1 + 6) + 0.5625 * 3 == 3.125
    assert 3.125 == 2.75 - 0.25 * 0.75 * (1 - 3) * (2 - 1)
    assert client_variance(p, alpha, D) == 0.25 * 0.75**2 + 0.75 * 0.25**2 == 0.1875


def random_clients(m=4, n=6, a=3, q=9):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(m, generator=g, dtype=torch.float64)
    draw = {"generator": g, "dtype": torch.float64}
    return p / p.sum(), torch.randn(m, n, a, **draw), torch.randn(m, a, q, **draw)


def test_the_product_is_the_double_sum_and_its_distance_is_that_of_the_pairs():
    p, alpha, D = random_clients()
    m = len(p)
    double = sum(p[i] * p[j] * alpha[i] @ D[j] for i in range(m) for j in range(m))
    pairs = sum(p[i] * p[j] * (alpha[i] - alpha[j]) @ (D[i] - D[j]) for i in range(m) for j in range(i + 1, m))
    torch.testing.assert_close(product_mean(p, alpha, D), double)
    torch.testing.assert_close(product_mean(p, alpha, D), kernel_mean(p, alpha, D) - pairs)


def test_replicate_variance_is_the_unbiased_one():
    W = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert replicate_variance(W) == pytest.approx(W.var(0, unbiased=True).sum().item(), rel=1e-12)


def kernels_of(module):
    return {path: layer.kernels for path, layer in module.named_modules() if isinstance(layer, AtomConv2d)}


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_factors_are_those_of_the_layers(net):
    made = build.experiment(settings("fedatom", net, options={"atoms": 3}), federated(), CPU)
    expected = kernels_of(made.model.module)
    layers = atom_layers(made)
    assert [layer.path for layer in layers] == list(expected)
    for layer in layers:
        alpha, D = layer.factors(torch.stack([made.model.w, 2 * made.model.w]))
        W = expected[layer.path].double().flatten(2).flatten(0, 1)  # (o i, u v)
        torch.testing.assert_close(alpha @ D, torch.stack([W, 4 * W]), rtol=1e-5, atol=1e-6)  # W in fp32


def test_a_model_without_atoms_is_refused():
    made = build.experiment(settings("fedavg", "cnn"), federated(), CPU)
    with pytest.raises(UserError, match=r"method\.name: fedavg on model mcmahan_cnn has no filter atoms") as caught:
        atom_layers(made)
    assert "\n" not in str(caught.value)


def test_dense_convolutions_with_the_same_kernels_give_the_same_outputs():
    """Stride, padding, groups, bias, and a layer that stands in two places."""
    torch.manual_seed(0)
    twice = nn.Conv2d(6, 6, 3, padding=1, groups=2)
    first = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False, padding_mode="circular")
    module = decompose(nn.Sequential(first, twice, nn.ReLU(), nn.BatchNorm2d(6), twice, nn.Conv2d(6, 4, 1))).eval()
    x = torch.randn(3, 2, 9, 9)
    plain = dense(module, kernels_of(module))
    assert [type(layer) for layer in plain if isinstance(layer, nn.Conv2d)] == [nn.Conv2d] * 4
    assert plain[1] is plain[4]
    torch.testing.assert_close(plain(x), module(x), rtol=1e-5, atol=1e-5)
    halved = dense(module, {path: W / 2 for path, W in kernels_of(module).items()})
    torch.testing.assert_close(halved[0](x), module[0](x) / 2)
    assert isinstance(module[0], AtomConv2d)  # the module itself stays as it was


def built(config):
    torch.set_num_threads(1)
    return build.experiment(config, federated(), CPU)


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_the_run_itself_is_that_of_a_plain_run(net):
    """Clients keep their coefficients here and send them two rounds later, so a state that was touched would show."""
    config = settings("fedatom", net, rounds=4, options={"atoms": 3, "period": 3, "alpha_fast": "keep"})
    found = []
    facts = measure_variance(built(config), 2, found.append)
    assert facts["sha256"] == play(config).hashes[-1]
    assert [row["round"] for row in found] == [0, 1, 2, 3]
    assert facts["rounds"] == found
    assert all(row["kernel_mean"] > 0 and row["product_mean"] > 0 and row["clients"] > 0 for row in found)


def test_replicates_are_rounds_with_another_seed():
    """The server's kernels after one round from the same initial model, in runs with the replicates' seeds."""
    made = built(settings("fedatom", "norm", rounds=1, options={"atoms": 3}))
    w, b = made.model.w.clone(), made.model.b.clone()
    row = measure_variance(made, 3)["rounds"][0]
    W = []
    for number in range(3):
        made.model.load(w, b)
        other = made.settings.model_copy(update={"seed": seeds.derive(made.settings.seed, "replicate", number)})
        fed = build.federation(replace(made, settings=other), Solo(CPU), lambda: False)
        fed.run()
        W.append(
            torch.cat(
                [(alpha @ D).flatten() for alpha, D in (x.factors(fed.server.w[None]) for x in atom_layers(made))]
            )
        )
    assert row["product_mean"] == pytest.approx(replicate_variance(torch.stack(W)), rel=1e-4)  # the server adds in fp32


@pytest.fixture
def made():
    torch.set_num_threads(1)
    config = settings("fedatom", "norm", rounds=2, options={"atoms": 3}, train={"lr": 0.2})
    return build.experiment(config, federated(), CPU)


@pytest.fixture
def found(made):
    fed = build.federation(made, Solo(CPU), lambda: False)
    before = fed.server.w.clone(), fed.server.b.clone()
    models = local_models(fed, build.make_trainer(made, lambda: False), [1, 2, 4], 0)
    assert torch.equal(fed.server.w, before[0])
    assert torch.equal(fed.server.b, before[1])
    assert not fed.states.rows
    return models


def test_a_product_takes_coefficients_here_atoms_there_and_the_rest_from_the_aggregate(made, found):
    w = linear.combine(found.w, found.p)
    out = filter_decomposition.product(made, w, found.w[0], found.w[2])
    for segment in made.model.layout.segments:
        source = {COEF: found.w[0], ATOM: found.w[2]}.get(segment.group, w)
        assert torch.equal(segment.view(out), segment.view(source)), segment.name
    assert {segment.group for segment in made.model.layout.segments} > {COEF, ATOM}


def test_the_weighted_mean_of_all_products_is_the_aggregate(made, found):
    w, (layer,) = linear.combine(found.w, found.p), atom_layers(made)

    def kernels(model):
        alpha, D = layer.factors(model[None])
        return (alpha @ D)[0]

    pairs = [(i, j) for i in range(3) for j in range(3)]
    mean = sum(
        found.p[i] * found.p[j] * kernels(filter_decomposition.product(made, w, found.w[i], found.w[j]))
        for i, j in pairs
    )
    torch.testing.assert_close(mean, kernels(w), rtol=1e-5, atol=1e-6)  # w in fp32


def test_averaged_kernels_stand_in_a_dense_network(made, found):
    w, b = linear.combine(found.w, found.p), linear.combine(found.b, found.p)
    plain = filter_decomposition.kernel_averaged(made, found, w, b)
    expected = torch.zeros(())
    for share, model in zip(found.p, found.w, strict=True):
        made.model.load(model)
        expected = expected + share * next(m for m in made.model.module.modules() if isinstance(m, AtomConv2d)).kernels
    torch.testing.assert_close(plain[0].weight.double(), expected.double(), rtol=1e-5, atol=1e-6)
    values = dict(made.model.layout.tensors(w))
    assert torch.equal(plain[-1].weight, values["6.weight"])
    assert torch.equal(plain[1].running_mean, made.model.buffer_layout.tensors(b)["1.running_mean"])
