"""Factorised layers of FedPara: ranks, weights, initial variances, and the layers that are replaced."""

import copy

import pytest
import torch
from torch import nn

from fedmpi.models.fedpara import PERSONAL_GROUP, FactorisedLayer, factor_rank, factorise_layers


@pytest.mark.parametrize(("shape", "ratio", "r"), [((30, 50), 1e-6, 6), ((64, 49), 1e-6, 7), ((200, 100), 0.5, 17)])
def test_rank_of_linear_layers_equals_the_formula(shape, ratio, r):
    """r is minimal with 2 r (m + n) >= ratio m n and r^2 >= min(m, n): 6^2 >= 30, 7^2 = 49, 17 = ceil(10000 / 600)."""
    assert factor_rank(shape, ratio) == r


def test_weight_of_a_convolution_equals_loops_over_factors():
    torch.manual_seed(0)
    r, dense = 3, nn.Conv2d(4, 5, (2, 3))
    for personal in (False, True):
        layer = FactorisedLayer(dense, r, personal, "factors").double()
        weights = []
        for low_rank in (layer.one, layer.two):
            w = torch.zeros(5, 4, 2, 3, dtype=torch.float64)
            for x in range(r):
                for y in range(r):
                    w += low_rank.T[x, y] * (low_rank.O[x][:, None] * low_rank.I[y])[:, :, None, None]
            weights.append(w)
        expected = weights[0] * (weights[1] + personal)
        torch.testing.assert_close(layer.weight(), expected, rtol=0, atol=1e-12)


def test_a_factorised_layer_applies_its_weight():
    """It uses the stride, padding, dilation and bias of the dense layer."""
    torch.manual_seed(0)
    for dense, x in (
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), torch.randn(2, 4, 11, 9)),
        (nn.Linear(7, 5, bias=False), torch.randn(3, 7)),
    ):
        layer = FactorisedLayer(dense, 4, personal=False, init="factors")
        reference = copy.deepcopy(dense)
        with torch.no_grad():
            reference.weight.copy_(layer.weight())
        torch.testing.assert_close(layer(x), reference(x))


@pytest.mark.parametrize(
    ("dense", "r", "personal"), [(nn.Conv2d(90, 60, 3), 40, False), (nn.Linear(500, 300), 60, True)]
)
def test_initial_variances_are_as_documented(dense, r, personal):
    """With `product` W has the variance of a dense weight, 2 / fan_in; with `factors` each stored factor has its own.

    The estimated standard deviation of a factor may differ from sqrt(2 / fan_in) by 4 of its standard errors.
    """
    torch.manual_seed(0)
    layer, variance = FactorisedLayer(dense, r, personal, "product"), 2 / dense.weight[0].numel()
    assert layer.weight().var().item() == pytest.approx(variance, rel=0.05)
    assert layer.one().var().item() == pytest.approx(layer.two().var().item(), rel=0.05)
    layer = FactorisedLayer(dense, r, False, "factors")
    if isinstance(dense, nn.Conv2d):
        factors = ((layer.one.T, 360), (layer.two.O, 60), (layer.one.I, 90))
    else:
        factors = ((layer.one.X, 60), (layer.two.Y, 60))
    for factor, fan_in in factors:
        std = (2 / fan_in) ** 0.5
        assert factor.std().item() == pytest.approx(std, rel=4 / (2 * factor.numel()) ** 0.5)


@pytest.mark.parametrize("personal", [False, True])
def test_only_layers_that_become_smaller_are_factorised(personal):
    """The head, a layer that would become larger, and a grouped convolution remain dense."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),  # r = 3: 66 of 24
        nn.Conv2d(8, 64, 5),
        nn.Conv2d(64, 64, 5, groups=2),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 128)),
        nn.Linear(128, 100),
    )
    model = factorise_layers(net, 0.2, personal, "factors")
    kinds = {path: type(layer) for path, layer in model.named_modules() if "." not in path and path}
    assert [kinds[str(i)] for i in (0, 1, 2, 4)] == [nn.Conv2d, FactorisedLayer, nn.Conv2d, nn.Linear]
    assert type(model[3][1]) is FactorisedLayer
    groups = model.parameter_groups()
    personal_factors = {f"1.two.{leaf}" for leaf in "TOI"} | {f"3.1.two.{leaf}" for leaf in "XY"}
    assert groups == (dict.fromkeys(personal_factors, PERSONAL_GROUP) if personal else {})
    assert model(torch.randn(2, 3, 10, 10)).shape == (2, 100)
