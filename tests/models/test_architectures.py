"""What every registered architecture promises: counts, the cut between features and head, shapes, memory formats."""

import copy
import doctest
from importlib import import_module

import pytest
import torch
from torch import nn

from fedmpi.common import options
from fedmpi.common.errors import UserError
from fedmpi.models import registry, shapes
from fedmpi.models.net import Net


def build(name, input_shape, classes, **given):
    module, _, function = registry[name].partition(":")
    return getattr(import_module(module), function)(input_shape, classes, **given)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "given", "expected"),
    [
        # (25 * channels + 1) * 32 + (25 * 32 + 1) * 64 + (64 * (side // 4)^2 + 1) * 512 + 513 * classes
        ("mcmahan_cnn", (3, 32, 32), 10, {}, 2_156_490),
        ("mcmahan_cnn", (3, 28, 28), 10, {}, 1_664_970),
        ("mcmahan_cnn", (1, 28, 28), 10, {}, 1_663_370),  # also the figure in McMahan et al. 2017, section 3
        ("mcmahan_cnn", (1, 8, 8), 10, {}, 832 + 51_264 + 131_584 + 5_130),
        ("alexnet_s", (3, 32, 32), 10, {}, 1_822_602),
        ("alexnet_s", (3, 32, 32), 100, {}, 1_834_212),
        ("alexnet_s", (3, 64, 64), 200, {}, 4_992_840),
        # eight convolutions (9 in + 1) out: 9,220,480; two layers of 513 * 512; the head 513 * 10
        ("vgg11", (3, 32, 32), 10, {}, 9_220_480 + 2 * 262_656 + 5_130),
        ("vgg11", (1, 28, 28), 10, {}, 9_220_480 + 2 * 262_656 + 5_130 - 2 * 9 * 64),
        ("logistic", (1, 28, 28), 10, {}, 784 * 10 + 10),
        ("mlp", (1, 28, 28), 10, {}, 199_210),  # the 2NN of McMahan et al. 2017, section 3
        ("mlp", (30,), 2, {"hidden": [7]}, 31 * 7 + 8 * 2),
        ("resnet18", (3, 224, 224), 1000, {}, 11_689_512),  # torchvision's documentation of its weights
        ("resnet50", (3, 224, 224), 1000, {}, 25_557_032),  # likewise
        # the stem loses (49 - 9) * 3 * 64 weights, the head 513 * (1000 - 10)
        ("resnet18", (3, 32, 32), 10, {"stem": "small"}, 11_689_512 - 7_680 - 507_870),
        ("resnet18", (1, 28, 28), 10, {}, 11_689_512 - 2 * 49 * 64 - 507_870),
    ],
)
def test_parameter_counts(name, input_shape, classes, given, expected):
    assert count(build(name, input_shape, classes, **given)) == expected


@pytest.mark.parametrize("name", ["mcmahan_cnn", "alexnet_s", "vgg11"])
def test_a_pool_before_its_relu_is_a_pool_behind_it_to_the_bit(name):
    """Max and max(., 0) commute; a gradient goes where the largest entry is, and nowhere where that is negative."""
    torch.manual_seed(0)
    module = build(name, (3, 32, 32), 10).to(memory_format=torch.channels_last)
    papers = copy.deepcopy(module)
    layers = next(part for part in papers.modules() if isinstance(part, nn.Sequential))
    swapped = 0
    for i, layer in enumerate(list(layers)):
        if isinstance(layer, nn.MaxPool2d):
            layers[i], layers[i + 1], swapped = nn.ReLU(), nn.MaxPool2d(2), swapped + 1
    assert swapped >= 2
    x = torch.randn(6, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for net in (module, papers):
        nn.functional.cross_entropy(net(x), torch.arange(6)).backward()
    assert torch.equal(module(x), papers(x))
    for p, q in zip(module.parameters(), papers.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


SMALL = [
    ("mcmahan_cnn", (1, 8, 8), {}, 512, {"head.weight", "head.bias"}),
    ("mcmahan_cnn", (3, 13, 9), {}, 512, {"head.weight", "head.bias"}),
    ("alexnet_s", (1, 8, 8), {}, 128, {"14.weight", "14.bias"}),
    ("alexnet_s", (3, 20, 9), {}, 128, {"14.weight", "14.bias"}),
    ("vgg11", (1, 28, 28), {}, 512, {"head.weight", "head.bias"}),
    ("vgg11", (3, 32, 32), {}, 512, {"head.weight", "head.bias"}),
    ("logistic", (3, 5), {}, 15, {"head.weight", "head.bias"}),
    ("mlp", (6,), {"hidden": [5, 4]}, 4, {"head.weight", "head.bias"}),
    ("resnet18", (1, 8, 8), {"stem": "small", "norm": "bn_nostats"}, 512, {"fc.weight", "fc.bias"}),
    ("resnet18", (3, 33, 20), {"norm": "gn"}, 512, {"fc.weight", "fc.bias"}),
    ("resnet50", (3, 32, 32), {}, 2048, {"fc.weight", "fc.bias"}),
]


@pytest.mark.parametrize(("name", "input_shape", "given", "width", "head"), SMALL)
@pytest.mark.parametrize("mode", [True, False])
def test_logits_are_the_head_of_the_features(name, input_shape, given, width, head, mode):
    torch.manual_seed(0)
    module = build(name, input_shape, 3, **given)
    net = Net(module.train(mode), input_shape)
    x = torch.randn(4, *input_shape)
    z, logits = net.forward(x)
    assert (net.feature_dim, net.outputs, net.head_names()) == (width, 3, head)
    assert z.shape == (4, width)
    assert logits.shape == (4, 3)
    assert torch.equal(net.head(z), logits)
    assert torch.equal(module(x), logits)  # in training the batch's own statistics, so a second pass gives the same
    if hasattr(module, "features"):
        assert torch.equal(module.features(x), z)
    assert module.training is mode


@pytest.mark.parametrize(("name", "input_shape"), [("mcmahan_cnn", (3, 16, 16)), ("resnet18", (3, 32, 32))])
def test_memory_format_changes_nothing_but_rounding(name, input_shape):
    torch.manual_seed(0)
    module = build(name, input_shape, 5).double().eval()
    x = torch.randn(2, *input_shape, dtype=torch.float64)
    expected = module(x)
    module.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        module(x.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-10, atol=1e-10
    )


def test_mlp_by_hand():
    module = build("mlp", (2, 1), 1, hidden=[2])
    with torch.no_grad():
        module.body[1].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 0.0]]))
        module.body[1].bias.copy_(torch.tensor([0.5, -1.0]))
        module.head.weight.copy_(torch.tensor([[3.0, 4.0]]))
        module.head.bias.fill_(0.25)
    x = torch.tensor([[[1.0], [3.0]], [[3.0], [1.0]]])
    # rows: relu(1 - 3 + .5, 2 - 1) = (0, 1) -> 4.25; relu(3 - 1 + .5, 6 - 1) = (2.5, 5) -> 7.5 + 20 + .25
    assert module(x).flatten().tolist() == [4.25, 27.75]


@pytest.mark.parametrize("name", ["mcmahan_cnn", "resnet18", "resnet50"])
def test_a_table_is_no_image(name):
    with pytest.raises(UserError, match=rf"{name}.*\(30,\).*mlp"):
        build(name, (30,), 2)


def test_image_too_small():
    with pytest.raises(UserError, match=r"5 x 3 pixels.*4 x 4"):
        build("mcmahan_cnn", (1, 5, 3), 2)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("mlp", {"hidden": [5, 0]}),
        ("mlp", {"hidden": []}),
        ("resnet18", {"stem": "tiny"}),
        ("resnet50", {"norm": "no"}),
    ],
)
def test_options_have_bounds(name, given):
    module, _, function = registry[name].partition(":")
    with pytest.raises(UserError, match=rf"model\.{next(iter(given))}"):
        options.check(getattr(import_module(module), function), given, "model", ("input_shape", "classes"))


def test_docstring_examples():
    for module in (shapes, import_module("fedmpi.models.net")):
        assert doctest.testmod(module, extraglobs={"nn": nn}).failed == 0
