"""Architectures: parameter counts, division into features and head, shapes, and equality with naive implementations."""

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.models import registry, sl_vit
from fedmpi.models.mlp import MLP, make_forward_without_hooks
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.recurrent import without_cudnn_rnn


def build(name, input_shape, classes, **options):
    module, _, function = registry[name].partition(":")
    return getattr(import_module(module), function)(input_shape, classes, **options)


def count_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "options", "expected"),
    [
        # (25 * channels + 1) * 32 + (25 * 32 + 1) * 64 + (64 * (side // 4)^2 + 1) * 512 + 513 * classes
        ("mcmahan_cnn", (3, 32, 32), 10, {}, 2_156_490),
        ("mcmahan_cnn", (1, 28, 28), 10, {}, 1_663_370),  # as in McMahan et al. 2017, section 3
        ("alexnet_s", (3, 32, 32), 10, {}, 1_822_602),
        # eight convolutions (9 in + 1) out: 9,220,480; two layers of 513 * 512; the head 513 * 10
        ("vgg11", (3, 32, 32), 10, {}, 9_220_480 + 2 * 262_656 + 5_130),
        ("logistic", (1, 28, 28), 10, {}, 784 * 10 + 10),
        # embedding; four gates a layer, with two biases each, as torch has them; linear
        ("char_lstm", (80,), 65, {}, 65 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 257 * 65),
        ("logistic", (13,), 2, {"reference": True}, 14),
        ("mlp", (1, 28, 28), 10, {}, 199_210),  # the 2NN of McMahan et al. 2017, section 3
        ("resnet18", (3, 224, 224), 1000, {}, 11_689_512),  # torchvision's documentation of its weights
        ("resnet50", (3, 224, 224), 1000, {}, 25_557_032),  # likewise
        # the stem loses (49 - 9) * 3 * 64 weights, the head 513 * (1000 - 10); a shortcut of 64 * 64 weights and 2 * 64
        # of its normalisation; 513 * 256 + 257 * 256 + 4 * 256 of scales and shifts, a head of 257 * 10, not 513 * 10
        (
            "resnet18",
            (3, 32, 32),
            10,
            {"stem": "small", "stride": 2, "projection": True},
            11_689_512 - 7_680 - 507_870 + 4_096 + 128 + 131_328 + 65_792 + 1_024 - 2_560,
        ),
        # 2,049 * 256 + 257 * 256 + 1,024 + 257 * 10, without 2,049 * 1,000
        ("resnet50", (3, 64, 64), 10, {"stem": "no_pool", "projection": True}, 25_557_032 + 593_930 - 2_049_000),
        ("small_cnn", (3, 32, 32), 10, {}, 1_331_402),  # only linear layers have biases
        ("lenet5", (3, 32, 32), 10, {}, 62_006),  # the published count of this network on CIFAR-10
        # patches 2 * 960 + 961 * 192; token and positions 18 * 192; nine layers of attention (384 + 1 + 192 * 2,304 +
        # 769 * 192) and of two linear ones (384 + 2 * 193 * 192); LayerNorm and head 384 + 193 * 10
        ("sl_vit", (3, 32, 32), 10, {}, 186_432 + 3_456 + 9 * (590_401 + 74_496) + 384 + 1_930),
        # 3^3 of (1 + 16) 16, (16 + 32) 32, (32 + 64) 64, (64 + 32) 32, (32 + 16) 16; normalisation 4 of each width; up
        # (8 * 64 + 1) 32 and (8 * 32 + 1) 16; the head 17 * 2
        ("unet", (1, 8, 8, 8), 2, {}, 27 * 11_792 + 4 * 160 + 513 * 32 + 257 * 16 + 34),
        ("unet", (1, 8, 8), 2, {}, 9 * 11_792 + 4 * 160 + (4 * 64 + 1) * 32 + (4 * 32 + 1) * 16 + 34),
    ],
)
def test_parameter_counts_equal_the_closed_forms(name, input_shape, classes, options, expected):
    assert count_parameters(build(name, input_shape, classes, **options)) == expected


@pytest.mark.parametrize(("shape", "norm"), [((1, 9, 6, 7), "gn"), ((3, 5, 8), "bn"), ((2, 1, 1, 1), "gn")])
def test_unet_returns_logits_for_each_pixel_of_any_size(shape, norm):
    module = build("unet", shape, 4, width=8, levels=3, norm=norm)
    net = FeaturesAndHead(module, shape)
    assert net.output_shape == (4, *shape[1:])
    assert (net.feature_dim, net.head_parameter_names()) == (None, HEAD)


@pytest.mark.parametrize("name", ["mcmahan_cnn", "alexnet_s", "lenet5"])
def test_pooling_before_relu_equals_pooling_after_it(name):
    """Both orders give the same outputs and gradients, since the maximum and max(., 0) commute."""
    torch.manual_seed(0)
    module = build(name, (3, 32, 32), 10).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(module)  # with ReLU before each max pool, as in the papers
    layers = getattr(reference, "body", reference)
    swapped = 0
    for i, layer in enumerate(list(layers)):
        if isinstance(layer, nn.MaxPool2d):
            layers[i], layers[i + 1], swapped = nn.ReLU(), nn.MaxPool2d(2), swapped + 1
    assert swapped >= 2
    x = torch.randn(6, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for net in (module, reference):
        nn.functional.cross_entropy(net(x), torch.arange(6)).backward()
    assert torch.equal(module(x), reference(x))
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


HEAD, FC = ({f"{name}.weight", f"{name}.bias"} for name in ("head", "fc"))
SMALL = [
    ("mcmahan_cnn", (3, 13, 9), {}, 512, HEAD),
    ("alexnet_s", (1, 20, 9), {}, 128, {"14.weight", "14.bias"}),
    ("vgg11", (1, 28, 28), {}, 512, HEAD),
    ("small_cnn", (1, 21, 30), {"width": 4}, 256, HEAD),
    ("lenet5", (1, 16, 19), {}, 84, HEAD),
    ("sl_vit", (1, 28, 28), {"depth": 2}, 192, HEAD),
    ("sl_vit", (3, 70, 64), {"depth": 1, "shift": "original"}, 192, HEAD),
    ("resnet18", (3, 32, 32), {"stem": "small", "stride": 2, "projection": True}, 256, {"fc.1.weight", "fc.1.bias"}),
    ("resnet50", (3, 32, 32), {"stem": "no_pool", "stride": 2, "norm": "gn"}, 2048, FC),
    ("logistic", (3, 5), {"reference": True}, 15, {"head.linear.weight", "head.linear.bias"}),
    ("mlp", (6,), {"hidden": [5, 4]}, 4, HEAD),
]


@pytest.mark.parametrize(("name", "input_shape", "options", "width", "head"), SMALL)
def test_logits_are_the_head_of_the_features(name, input_shape, options, width, head):
    torch.manual_seed(0)
    module = build(name, input_shape, 3, **options)
    x = torch.randn(4, *input_shape)
    for mode in (True, False):
        net = FeaturesAndHead(module.train(mode), input_shape)
        z, logits = net.forward(x)
        assert (net.feature_dim, net.num_outputs, net.head_parameter_names()) == (width, 3, head)
        assert (z.shape, logits.shape) == ((4, width), (4, 3))
        assert torch.equal(net.head(z), logits)
        assert torch.equal(module(x), logits)  # also in training, which uses the statistics of the batch
        if hasattr(module, "features"):
            assert torch.equal(module.features(x), z)
        assert module.training is mode


def test_attention_equals_a_loop_over_heads_and_tokens():
    """No token attends to itself or to tokens of another image."""
    torch.manual_seed(0)
    layer = sl_vit.Attention(6, heads=2, head=3).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    expected = torch.empty_like(x)
    for b in range(2):
        normed = nn.functional.layer_norm(x[b], (6,), layer.norm.weight, layer.norm.bias)
        q, k, v = ((normed @ part.T).view(4, 2, 3) for part in layer.qkv.weight.chunk(3))
        for i in range(4):
            outputs = []
            for h in range(2):
                others = [j for j in range(4) if j != i]
                scores = torch.stack([q[i, h] @ k[j, h] for j in others]) / 3**0.5
                outputs.append(sum(a * v[j, h] for a, j in zip(scores.softmax(0), others, strict=True)))
            expected[b, i] = layer.out(torch.cat(outputs))
    torch.testing.assert_close(layer(x), expected)


def test_shifted_copies_move_in_the_given_directions():
    x = torch.arange(1.0, 10).view(1, 1, 3, 3)
    unshifted, down, up, right, left = sl_vit.append_shifted_copies(x, sl_vit.AXIS_SHIFTS, 1)[0].tolist()
    assert unshifted == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert down == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert up == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]
    assert right == [[0, 1, 2], [0, 4, 5], [0, 7, 8]]
    assert left == [[2, 3, 0], [5, 6, 0], [8, 9, 0]]
    down_right = sl_vit.append_shifted_copies(x, sl_vit.DIAGONAL_SHIFTS, 2)[0, 1]
    assert down_right.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_logistic_with_a_reference_class_is_the_sigmoid():
    """Loss and gradients equal those of FLamby's model for heart disease: Linear(13, 1), sigmoid, cross-entropy."""
    torch.manual_seed(0)
    module, x, y = build("logistic", (13,), 2, reference=True), torch.randn(6, 13), torch.tensor([0, 1, 1, 0, 1, 0])
    linear = copy.deepcopy(module.head.linear)
    loss = nn.functional.cross_entropy(module(x), y)
    expected = nn.functional.binary_cross_entropy(torch.sigmoid(linear(x))[:, 0], y.float())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(module.head.linear.weight.grad, linear.weight.grad)
    torch.testing.assert_close(module.head.linear.bias.grad, linear.bias.grad)
    with pytest.raises(UserError, match=r"model\.reference: true needs a task with classes"):
        build("logistic", (13,), 1, reference=True)


def test_char_lstm_uses_only_earlier_symbols():
    torch.manual_seed(0)
    module = build("char_lstm", (6,), 5, hidden=7, layers=2)
    x = torch.tensor([[0, 1, 2, 3, 4, 0]])
    later = x.clone()
    later[0, 3] = 0
    before, after = module(x), module(later)
    assert before.shape == (1, 6, 5)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(2).any()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mcmahan_cnn", (30,), r"mcmahan_cnn.*\(30,\).*mlp"),
        ("resnet18", (30,), r"resnet18.*\(30,\).*mlp"),
        ("mcmahan_cnn", (1, 5, 3), r"5 x 3 pixels.*4 x 4"),
        ("unet", (5,), r"model unet: a sample has the shape \(5,\), but the model needs images"),
        ("char_lstm", (1, 8, 8), r"char_lstm: a sample has the shape \(1, 8, 8\), but the model needs texts"),
    ],
)
def test_unsuitable_sample_shapes_are_errors(name, shape, message):
    with pytest.raises(UserError, match=message):
        build(name, shape, 2)


def test_forward_without_hooks_equals_the_modules_forward_pass():
    """Also if weights change in place, and for a layer used twice, which nn.Module.children() lists once."""
    x = torch.randn(4, 3, 4)
    repeated, relu = nn.Linear(5, 5), nn.ReLU()
    for module in (
        MLP(12, (), 3),
        MLP(12, (7, 5), 3),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 5), relu, repeated, relu, repeated),
    ):
        forward = make_forward_without_hooks(module)
        assert torch.equal(forward(x), module(x))
        with torch.no_grad():
            next(module.parameters()).mul_(2)
        assert torch.equal(forward(x), module(x))


@pytest.mark.parametrize("module", [nn.Sequential(nn.LSTM(2, 2)), nn.Sequential(nn.Linear(2, 2))])
def test_cudnn_is_disabled_only_for_modules_with_recurrent_layers(module):
    before = torch.backends.cudnn.enabled
    with without_cudnn_rnn(module):
        assert torch.backends.cudnn.enabled == (before and not isinstance(module[0], nn.LSTM))
    assert torch.backends.cudnn.enabled == before
