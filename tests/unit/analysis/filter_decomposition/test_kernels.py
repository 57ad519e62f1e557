"""Which entries are coefficients and atoms, and dense convolutions in their place."""

import pytest
import torch
from helpers import CPU, federated, settings
from torch import nn

from fedmpi.analysis.filter_decomposition.kernels import atom_layers, dense
from fedmpi.common.errors import UserError
from fedmpi.models.atoms import AtomConv2d, decompose
from fedmpi.runtime import build


def kernels(module):
    return {path: layer.kernels for path, layer in module.named_modules() if isinstance(layer, AtomConv2d)}


@pytest.mark.parametrize("net", ["cnn", "norm"])
def test_factors_are_those_of_the_layers(net):
    made = build.experiment(settings("fedatom", net, options={"atoms": 3}), federated(), CPU)
    expected = kernels(made.model.module)
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
    plain = dense(module, kernels(module))
    assert [type(layer) for layer in plain if isinstance(layer, nn.Conv2d)] == [nn.Conv2d] * 4
    assert plain[1] is plain[4]
    torch.testing.assert_close(plain(x), module(x), rtol=1e-5, atol=1e-5)
    halved = dense(module, {path: W / 2 for path, W in kernels(module).items()})
    torch.testing.assert_close(halved[0](x), module[0](x) / 2)
    assert isinstance(module[0], AtomConv2d)  # the module itself stays as it was
