"""Filter decomposition: averages of kernels, their variance in an unchanged run, and virtual clients."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, federated, run_experiment, settings

from fedmpi.analysis import filter_decomposition
from fedmpi.analysis.filter_decomposition import (
    client_variance,
    extract_factors,
    kernel_mean,
    product_mean,
    replicate_variance,
    train_and_measure_variance,
)
from fedmpi.analysis.local_models import train_local_models
from fedmpi.comm.base import SingleProcess
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, COEF
from fedmpi.models.filter_atoms import AtomConv2d
from fedmpi.runtime import build


def scalars(*values):
    """Return m numbers as a tensor (m, 1, 1)."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def test_averages_of_two_clients_by_hand():
    """With alpha = 1, 3, D = 2, 1 and p = 1/4, 3/4, the kernels W are 2 and 3."""
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


def test_the_product_mean_is_a_double_sum():
    p, alpha, D = random_clients()
    m = len(p)
    double = sum(p[i] * p[j] * alpha[i] @ D[j] for i in range(m) for j in range(m))
    pairs = sum(p[i] * p[j] * (alpha[i] - alpha[j]) @ (D[i] - D[j]) for i in range(m) for j in range(i + 1, m))
    torch.testing.assert_close(product_mean(p, alpha, D), double)
    torch.testing.assert_close(product_mean(p, alpha, D), kernel_mean(p, alpha, D) - pairs)


def test_replicate_variance_is_unbiased():
    W = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert replicate_variance(W) == pytest.approx(W.var(0, unbiased=True).sum().item(), rel=1e-12)


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_factors_multiply_to_the_kernels_of_the_layers(net):
    experiment = build.make_experiment(settings("fedatom", net, options={"atoms": 3}), federated(), CPU)
    module, w = experiment.model.module, experiment.model.w
    kernels = {path: layer.kernels for path, layer in module.named_modules() if isinstance(layer, AtomConv2d)}
    layers = extract_factors(experiment, torch.stack([w, 2 * w]))
    assert list(layers) == list(kernels)
    for path, (alpha, D) in layers.items():
        W = kernels[path].double().flatten(2).flatten(0, 1)  # (o i, u v)
        torch.testing.assert_close(alpha @ D, torch.stack([W, 4 * W]), rtol=1e-5, atol=1e-6)  # W in fp32


def test_a_model_without_atoms_is_refused():
    experiment = build.make_experiment(settings("fedavg", "cnn"), federated(), CPU)
    with pytest.raises(UserError, match=r"method\.name: fedavg on model mcmahan_cnn has no filter atoms") as caught:
        extract_factors(experiment, experiment.model.w[None])
    assert "\n" not in str(caught.value)


def build_experiment(config):
    torch.set_num_threads(1)
    return build.make_experiment(config, federated(), CPU)


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_measuring_does_not_change_the_run(net):
    """Clients store their coefficients and send them two rounds later, so a changed client state would be detected."""
    config = settings("fedatom", net, rounds=4, options={"atoms": 3, "period": 3, "alpha_fast": "keep"})
    rows = []
    facts = train_and_measure_variance(build_experiment(config), 2, rows.append)
    assert facts["sha256"] == run_experiment(config).hashes[-1]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert facts["rounds"] == rows
    assert all(row["kernel_mean"] > 0 and row["product_mean"] > 0 and row["clients"] > 0 for row in rows)


def test_replicates_are_rounds_with_other_seeds():
    """Compare with the server's kernels after one round from the same initial model, for the seed of each replicate."""
    experiment = build_experiment(settings("fedatom", "norm", rounds=1, options={"atoms": 3}))
    w, b = experiment.model.w.clone(), experiment.model.b.clone()
    row = train_and_measure_variance(experiment, 3)["rounds"][0]
    W = []
    for number in range(3):
        experiment.model.load(w, b)
        other = experiment.settings.model_copy(
            update={"seed": seeds.derive_seed(experiment.settings.seed, "replicate", number)}
        )
        fed = build.make_federation(replace(experiment, settings=other), SingleProcess(CPU), lambda: False)
        fed.run()
        W.append(
            torch.cat([(alpha @ D).flatten() for alpha, D in extract_factors(experiment, fed.server.w[None]).values()])
        )
    assert row["product_mean"] == pytest.approx(replicate_variance(torch.stack(W)), rel=1e-4)  # the server adds in fp32


@pytest.fixture
def experiment():
    torch.set_num_threads(1)
    config = settings("fedatom", "norm", rounds=2, options={"atoms": 3}, train={"lr": 0.2})
    return build.make_experiment(config, federated(), CPU)


@pytest.fixture
def rows(experiment):
    fed = build.make_federation(experiment, SingleProcess(CPU), lambda: False)
    before = fed.server.w.clone(), fed.server.b.clone()
    models = train_local_models(fed, build.make_trainer(experiment, lambda: False), [1, 2, 4], 0)
    assert torch.equal(fed.server.w, before[0])
    assert torch.equal(fed.server.b, before[1])
    assert not fed.states.rows
    return models


def test_a_virtual_client_combines_coefficients_atoms_and_the_aggregate(experiment, rows):
    w = linear.weighted_sum(rows.w, rows.p)
    out = filter_decomposition.recombine_filters(experiment, w, rows.w[0], rows.w[2])
    for segment in experiment.model.layout.segments:
        source = {COEF: rows.w[0], ATOM: rows.w[2]}.get(segment.group, w)
        assert torch.equal(segment.view(out), segment.view(source)), segment.name
    assert {segment.group for segment in experiment.model.layout.segments} > {COEF, ATOM}


def test_the_weighted_mean_of_all_virtual_clients_is_the_aggregate(experiment, rows):
    w = linear.weighted_sum(rows.w, rows.p)

    def kernels(model):
        ((alpha, D),) = extract_factors(experiment, model[None]).values()
        return (alpha @ D)[0]

    pairs = [(i, j) for i in range(3) for j in range(3)]
    mean = sum(
        rows.p[i] * rows.p[j] * kernels(filter_decomposition.recombine_filters(experiment, w, rows.w[i], rows.w[j]))
        for i, j in pairs
    )
    torch.testing.assert_close(mean, kernels(w), rtol=1e-5, atol=1e-6)  # w in fp32
