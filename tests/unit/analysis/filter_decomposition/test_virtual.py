"""The models alpha_i x D_j: their parts, their mean, and what they are compared with."""

import pytest
import torch
from helpers import CPU, federated, settings

from fedmpi.analysis.filter_decomposition import virtual
from fedmpi.analysis.filter_decomposition.kernels import atom_layers
from fedmpi.analysis.local_models import local_models
from fedmpi.comm.base import Solo
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, COEF
from fedmpi.models.atoms import AtomConv2d
from fedmpi.runtime import build


@pytest.fixture
def made():
    torch.set_num_threads(1)
    config = settings("fedatom", "norm", rounds=2, options={"atoms": 3}, train={"lr": 0.2})
    return build.experiment(config, federated(), CPU)


@pytest.fixture
def found(made):
    fed = build.federation(made, Solo(CPU), lambda: False)
    before = fed.server.w.clone(), fed.server.b.clone()
    models = local_models(fed, build.make_worker(made, lambda: False), [1, 2, 4], 0)
    assert torch.equal(fed.server.w, before[0])
    assert torch.equal(fed.server.b, before[1])
    assert not fed.states.rows
    return models


def test_weights_are_the_cohorts(made, found):
    n = torch.tensor([float(made.data.train_sizes[k]) for k in (1, 2, 4)], dtype=torch.float64)
    torch.testing.assert_close(found.p, n / n.sum())


def test_a_product_takes_coefficients_here_atoms_there_and_the_rest_from_the_aggregate(made, found):
    w = linear.combine(found.w, found.p)
    out = virtual.product(made, w, found.w[0], found.w[2])
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
    mean = sum(found.p[i] * found.p[j] * kernels(virtual.product(made, w, found.w[i], found.w[j])) for i, j in pairs)
    torch.testing.assert_close(mean, kernels(w), rtol=1e-5, atol=1e-6)  # w in fp32


def test_averaged_kernels_stand_in_a_dense_network(made, found):
    w, b = linear.combine(found.w, found.p), linear.combine(found.b, found.p)
    plain = virtual.kernel_averaged(made, found, w, b)
    expected = torch.zeros(())
    for share, model in zip(found.p, found.w, strict=True):
        made.model.load(model)
        expected = expected + share * next(m for m in made.model.module.modules() if isinstance(m, AtomConv2d)).kernels
    torch.testing.assert_close(plain[0].weight.double(), expected.double(), rtol=1e-5, atol=1e-6)
    values = dict(made.model.layout.tensors(w))
    assert torch.equal(plain[-1].weight, values["6.weight"])
    assert torch.equal(plain[1].running_mean, made.model.buffer_layout.tensors(b)["1.running_mean"])
