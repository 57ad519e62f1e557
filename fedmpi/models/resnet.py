"""Residual networks, of torchvision and of its parts, with the two changes that federated papers make to them.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385

`stem: small` puts one 3x3 stride 1 convolution in the place of the 7x7 stride 2 convolution and the max pool, which are
made for 224 pixels; `no_pool` leaves out the max pool alone. `norm: bn_nostats` normalises by the batch in evaluation
too and keeps no running statistics, so nothing but parameters travels; `gn` is group normalisation, which does not look
at the batch: with 32 groups, as in Wu and He, ECCV 2018, https://arxiv.org/abs/1803.08494; `ln` is the same with one.

What FedUV's authors (CVPR 2024) train is `stem: small, stride: 2, projection: true` for ResNet-18 and `stem: no_pool,
projection: true` for ResNet-50.

All parameters but those of a projection bear torchvision's names, so weights can be exchanged with its models. Weights
are fresh; trained ones, torchvision's own among them, come in by `init.from`.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.parts import WIDTH, image
from fedmpi.models.parts import projection as projected

Stem = Literal["imagenet", "no_pool", "small"]
Norm = Literal["bn", "bn_nostats", "gn", "ln"]
Stride = Literal[1, 2]

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "bn": nn.BatchNorm2d,
    "bn_nostats": partial(nn.BatchNorm2d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),  # divides every width of these networks: 64, 128, ... 2048
    "ln": partial(nn.GroupNorm, 1),
}


def resnet8(input_shape: tuple[int, ...], classes: int, norm: Norm = "bn", projection: bool = False) -> nn.Module:
    """ResNet-8 for 32 pixels, untrained: the 6n + 2 layers of He et al.'s section 4.2, n = 1, of torchvision's blocks.

    A 3x3 convolution of 16, three stages of one block of two with 16, 32 and 64 (the later ones with stride 2 and a 1x1
    convolution as shortcut), the mean over the map, a linear layer.
    norm: bn, bn_nostats (no running statistics: in evaluation those of each batch), gn (8 groups), ln;
    projection: two linear layers of 256, each normalised by `norm`, before the last one.
    78,042 parameters with 3 channels and 10 classes.
    """
    channels, _, _ = image("resnet8", input_shape)
    layer = partial(nn.GroupNorm, 8) if norm == "gn" else _NORMS[norm]  # 32 groups do not divide 16
    parts: dict[str, nn.Module] = {
        "conv1": _fresh(nn.Conv2d(channels, 16, 3, padding=1, bias=False)),
        "bn1": layer(16),
        "relu": nn.ReLU(inplace=True),
    }
    for number, (before, width) in enumerate(((16, 16), (16, 32), (32, 64)), 1):
        stride, shortcut = width // before, None
        if stride == 2:
            shortcut = nn.Sequential(_fresh(nn.Conv2d(before, width, 1, stride=2, bias=False)), layer(width))
        block = torchvision.models.resnet.BasicBlock(before, width, stride, shortcut, norm_layer=layer)
        _fresh(block.conv1)
        _fresh(block.conv2)
        parts[f"layer{number}"] = nn.Sequential(block)
    parts |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    if projection:
        parts["projection"] = projected(64, norm)
    return nn.Sequential(OrderedDict({**parts, "fc": nn.Linear(WIDTH if projection else 64, classes)}))


def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "imagenet",
    norm: Norm = "bn",
    stride: Stride = 1,
    projection: bool = False,
) -> nn.Module:
    """ResNet-18 of torchvision, untrained; stem: small is for 32 pixels.

    norm: bn, bn_nostats (no running statistics: in evaluation those of each batch), gn (groups), ln;
    stride: of the first stage; projection: two linear layers of 256, each normalised by `norm`, before the last one.
    11,689,512 parameters (ImageNet); 11,173,962 with the small stem and 10 classes.
    """
    return _resnet("resnet18", input_shape, classes, stem, norm, stride, projection)


def resnet50(
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "imagenet",
    norm: Norm = "bn",
    stride: Stride = 1,
    projection: bool = False,
) -> nn.Module:
    """ResNet-50 of torchvision, untrained; stem: small is for 32 pixels.

    norm: bn, bn_nostats (no running statistics: in evaluation those of each batch), gn (groups), ln;
    stride: of the first stage; projection: two linear layers of 256, each normalised by `norm`, before the last one.
    25,557,032 parameters (ImageNet).
    """
    return _resnet("resnet50", input_shape, classes, stem, norm, stride, projection)


def _resnet(
    name: str, input_shape: tuple[int, ...], classes: int, stem: Stem, norm: Norm, stride: Stride, projection: bool
) -> nn.Module:
    channels, _, _ = image(name, input_shape)
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, norm_layer=_NORMS[norm])
    if stem == "small":
        model.conv1 = _fresh(nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False))
    elif channels != 3:
        model.conv1 = _fresh(nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False))
    if stem != "imagenet":
        model.maxpool = nn.Identity()
    if stride == 2:
        _halve(model, norm)
    if projection:
        model.fc = nn.Sequential(projected(model.fc.in_features, norm), nn.Linear(WIDTH, classes))
    return model


def _fresh(conv: nn.Conv2d) -> nn.Conv2d:
    """Weights as torchvision draws those of its own convolutions."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _halve(model: Any, norm: Norm) -> None:
    """Stride 2 for the first stage, where torchvision puts it in the others; its shortcut becomes a convolution."""
    first = model.layer1[0]
    strided = first.conv1 if len(first.conv1.weight[0, 0]) == 3 else first.conv2  # the 3x3 of a block with a bottleneck
    strided.stride = (2, 2)
    if first.downsample is None:
        width = first.conv1.in_channels
        first.downsample = nn.Sequential(_fresh(nn.Conv2d(width, width, 1, stride=2, bias=False)), _NORMS[norm](width))
    else:
        first.downsample[0].stride = (2, 2)
