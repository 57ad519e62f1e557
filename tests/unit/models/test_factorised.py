"""Factorised layers (FedPara): sizes of the paper, weights by loops, ranks."""

import copy

import pytest
import torch
from torch import nn

from fedmpi.models.fedpara import OWN, Factorised, factorise, rank_for


@pytest.mark.parametrize(("shape", "ratio", "r"), [((30, 50), 1e-6, 6), ((64, 49), 1e-6, 7), ((200, 100), 0.5, 17)])
def test_rank_of_linear_layers(shape, ratio, r):
    """2 r (m + n) reaches ratio m n, r^2 the smaller side: 5^2 < 30 <= 6^2, 7^2 = 49; 17 = ceil(10000 / 600)."""
    assert rank_for(shape, ratio) == r


def test_weight_of_a_convolution_by_loops():
    torch.manual_seed(0)
    r, dense = 3, nn.Conv2d(4, 5, (2, 3))
    for personal in (False, True):
        made = Factorised(dense, r, personal, "factors").double()
        sides = []
        for side in (made.one, made.two):
            w = torch.zeros(5, 4, 2, 3, dtype=torch.float64)
            for x in range(r):
                for y in range(r):
                    w += side.T[x, y][None, None] * (side.O[x][:, None] * side.I[y][None, :])[:, :, None, None]
            sides.append(w)
        expected = sides[0] * (sides[1] + personal)
        torch.testing.assert_close(made.weight(), expected, rtol=0, atol=1e-12)


def test_a_factorised_layer_applies_its_weight():
    """Stride, padding, dilation and bias are those of the dense layer."""
    torch.manual_seed(0)
    for dense, x in (
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), torch.randn(2, 4, 11, 9)),
        (nn.Linear(7, 5, bias=False), torch.randn(3, 7)),
    ):
        made = Factorised(dense, 4, personal=False, init="factors")
        twin = copy.deepcopy(dense)
        with torch.no_grad():
            twin.weight.copy_(made.weight())
        torch.testing.assert_close(made(x), twin(x))


@pytest.mark.parametrize(
    ("dense", "r", "personal"), [(nn.Conv2d(90, 60, 3), 40, False), (nn.Linear(500, 300), 60, True)]
)
def test_initial_variances(dense, r, personal):
    """`product`: W has the variance of a dense weight, 2 / fan_in. `factors`: each factor has standard deviation
    sqrt(2 / fan_in) as it is stored, within 4 sigma of the estimate's own spread."""
    torch.manual_seed(0)
    made, wanted = Factorised(dense, r, personal, "product"), 2 / dense.weight[0].numel()
    assert made.weight().var().item() == pytest.approx(wanted, rel=0.05)
    assert made.one().var().item() == pytest.approx(made.two().var().item(), rel=0.05)
    made = Factorised(dense, r, False, "factors")
    if isinstance(dense, nn.Conv2d):
        factors = ((made.one.T, 360), (made.two.O, 60), (made.one.I, 90))
    else:
        factors = ((made.one.X, 60), (made.two.Y, 60))
    for factor, fan_in in factors:
        std = (2 / fan_in) ** 0.5
        assert factor.std().item() == pytest.approx(std, rel=4 / (2 * factor.numel()) ** 0.5)


@pytest.mark.parametrize("personal", [False, True])
def test_layers_that_shrink_are_factorised(personal):
    """But not the head, the layers that would grow, a grouped convolution."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),  # r = 3: 66 of 24
        nn.Conv2d(8, 64, 5),
        nn.Conv2d(64, 64, 5, groups=2),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 128)),
        nn.Linear(128, 100),
    )
    made = factorise(net, 0.2, personal, "factors")
    kinds = {path: type(layer) for path, layer in made.named_modules() if "." not in path and path}
    assert [kinds[str(i)] for i in (0, 1, 2, 4)] == [nn.Conv2d, Factorised, nn.Conv2d, nn.Linear]
    assert type(made[3][1]) is Factorised
    groups = made.parameter_groups()
    own = {f"1.two.{leaf}" for leaf in "TOI"} | {f"3.1.two.{leaf}" for leaf in "XY"}
    assert groups == (dict.fromkeys(own, OWN) if personal else {})
    assert made(torch.randn(2, 3, 10, 10)).shape == (2, 100)
