"""Convolutions with filter atoms: outputs, initial values, and the layers of a model that are replaced."""

from functools import partial

import pytest
import torch
from torch import nn

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.flat.layout import ATOM, COEF, HEAD, NORM
from fedmpi.flat.model import FlatModel
from fedmpi.models.filter_atoms import CONV_SETTINGS, AtomConv2d, decompose_convolutions
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.resnet import resnet18

CONVOLUTIONS = {
    "no bias": nn.Conv2d(6, 8, 3, padding=1, bias=False),
    "uneven": nn.Conv2d(6, 8, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)),
    "depthwise": nn.Conv2d(6, 12, 3, padding=1, groups=6),
    "mirrored edges": nn.Conv2d(6, 8, 3, padding=2, padding_mode="reflect"),
}


def convolve_by_atoms(layer, x):
    """Convolve each input channel with each atom, then 1x1 with the coefficients, (B, c, h, w) -> (B, o, h', w')."""
    (out, into, m_a), channels = layer.coef.shape, x.shape[1]
    settings = {name: getattr(layer, name) for name in CONV_SETTINGS}
    settings |= {"in_channels": channels, "out_channels": channels * m_a, "groups": channels}
    each = nn.Conv2d(**settings, bias=False, device="meta")
    maps = each._conv_forward(x, layer.atoms.repeat(channels, 1, 1)[:, None], None)  # (B, c m_a, h', w')
    return nn.functional.conv2d(maps, layer.coef.view(out, into * m_a, 1, 1), layer.bias, groups=layer.groups)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_atom_convolution_equals_convolutions_with_its_atoms(name):
    """The reference never computes W; outputs and gradients agree to 1e-5 and 1e-4 in float32."""
    torch.manual_seed(0)
    dense, atoms = CONVOLUTIONS[name], (3, 9, 12)[[*CONVOLUTIONS].index(name) % 3]
    layer, x = AtomConv2d(dense, atoms, "he"), torch.randn(2, 6, 11, 10)
    assert layer(x).shape == dense(x).shape
    torch.testing.assert_close(layer(x), convolve_by_atoms(layer, x), rtol=1e-5, atol=1e-5)
    parameters, by_atoms = (layer.coef, layer.atoms), partial(convolve_by_atoms, layer)
    ours, reference = (torch.autograd.grad(f(x).square().sum(), parameters) for f in (layer, by_atoms))
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_fewer_atoms_give_the_best_approximation_of_their_rank():
    """By Eckart-Young the squared error is the sum of the squared singular values beyond m_a."""
    dense = nn.Conv2d(5, 7, 3)
    error = (AtomConv2d(dense, 4, "from_conv").kernels - dense.weight).square().sum()
    expected = torch.linalg.svdvals(dense.weight.detach().view(35, 9))[4:].square().sum()
    torch.testing.assert_close(error, expected, rtol=1e-4, atol=0)


# ---- networks ----
def test_1x1_convolutions_of_resnet_are_in_the_coefficient_group():
    net = decompose_convolutions(resnet18((3, 32, 32), 10, stem="small"))
    model = FlatModel(net, FeaturesAndHead(net, (3, 32, 32)).head_parameter_names())
    groups = {s.name: s.group for s in model.layout.segments}
    assert groups["layer2.0.downsample.0.weight"] == COEF
    assert type(net.layer2[0].downsample[0]) is nn.Conv2d
    assert {groups["conv1.atoms"], groups["layer4.1.conv2.atoms"]} == {ATOM}
    assert {groups["bn1.weight"], groups["layer2.0.downsample.1.bias"]} == {NORM}
    assert {groups["fc.weight"], groups["fc.bias"]} == {HEAD}
    assert model.layout.size == 11_173_962 + 17 * 81


def test_decomposition_from_kernels_preserves_the_outputs():
    """This holds with as many atoms as the largest kernel has pixels."""
    torch.manual_seed(0)
    net = torchvision.models.mobilenet_v3_small(weights=None, num_classes=5).eval()
    x = torch.randn(2, 3, 64, 64)
    before = net(x)
    largest = max(m.weight[0, 0].numel() for m in net.modules() if isinstance(m, nn.Conv2d))
    after = decompose_convolutions(net, atoms=largest, init="from_conv").eval()(x)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3 * before.abs().max().item())


def test_a_shared_layer_remains_shared():
    shared = nn.Conv2d(4, 4, 3, padding=1)
    net = decompose_convolutions(nn.Sequential(shared, nn.ReLU(), shared, nn.Flatten(), nn.Linear(64, 2)))
    assert net[0] is net[2]
    assert net[0].bias is shared.bias
    assert sum(p.numel() for p in net.parameters()) == 4 * 4 * 9 + 4 + 81 + 130


def test_a_model_without_convolutions_gives_a_warning():
    with pytest.warns(UserWarning, match="no convolution with a kernel larger than 1x1"):
        net = decompose_convolutions(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert not any(isinstance(m, AtomConv2d) for m in net.modules())
    net = decompose_convolutions(nn.Sequential(nn.Conv2d(1, 2, 3)))
    layer = net[0]
    assert decompose_convolutions(net)[0] is layer  # already decomposed


def test_special_convolutions_are_not_replaced():
    """Convolutions with their own forward function, with weight norm or with a frozen weight are not replaced."""

    class Standardised(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight / weight.norm(), bias)

    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3, padding=1))
    frozen, plain = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
    net = nn.Sequential(Standardised(1, 2, 3), normed, frozen.requires_grad_(False), plain)
    before, x = list(net), torch.randn(2, 1, 8, 8)
    expected = net[:3](x)
    decompose_convolutions(net)
    assert list(net)[:3] == before[:3]
    assert type(net[3]) is AtomConv2d
    assert torch.equal(net[:3](x), expected)
    assert {net.parameter_groups()[name] for name in ("0.weight", "2.bias")} == {COEF}
