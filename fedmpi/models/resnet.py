"""Residual networks of torchvision, with the changes that federated papers make to them.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385

`stem: small` puts one 3x3 stride 1 convolution in the place of the 7x7 stride 2 convolution and the max pool, which are
made for 224 pixels; `no_pool` leaves out the max pool alone. `norm: bn_nostats` normalises by the batch in evaluation
too and keeps no running statistics, so nothing but parameters travels; `gn` is group normalisation with 32 groups,
which does not look at the batch, as in Wu and He, ECCV 2018, https://arxiv.org/abs/1803.08494.

What FedUV's authors (CVPR 2024) train is `stem: small, stride: 2, projection: true` for ResNet-18 and `stem: no_pool,
projection: true` for ResNet-50.

All parameters but those of a projection bear torchvision's names, so weights can be exchanged with its models. Weights
are fresh; trained ones, torchvision's own among them, come in by `init.from`.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.parts import WIDTH, image
from fedmpi.models.parts import projection as projected

Stem = Literal["imagenet", "no_pool", "small"]
Norm = Literal["bn", "bn_nostats", "gn"]
Stride = Literal[1, 2]

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "bn": nn.BatchNorm2d,
    "bn_nostats": partial(nn.BatchNorm2d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),  # divides every width of these networks: 64, 128, ... 2048
}


def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "imagenet",
    norm: Norm = "bn",
    stride: Stride = 1,
    projection: bool = False,
) -> nn.Module:
    """ResNet-18 of torchvision, untrained; stem: small is for 32 pixels.

    norm: bn, bn_nostats (no running statistics: in evaluation those of each batch), gn (groups);
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

    norm: bn, bn_nostats (no running statistics: in evaluation those of each batch), gn (groups);
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
        model.conv1 = _convolution(channels, 64, 3, stride=1, padding=1)
    elif channels != 3:
        model.conv1 = _convolution(channels, 64, 7, stride=2, padding=3)
    if stem != "imagenet":
        model.maxpool = nn.Identity()
    if stride == 2:  # torchvision has it in the other stages
        first = model.layer1[0]
        (first.conv1 if name == "resnet18" else first.conv2).stride = (2, 2)  # the 3x3 convolution
        if first.downsample is None:
            first.downsample = nn.Sequential(_convolution(64, 64, 1, stride=2), _NORMS[norm](64))
        else:
            first.downsample[0].stride = (2, 2)
    if projection:
        model.fc = nn.Sequential(projected(model.fc.in_features, norm), nn.Linear(WIDTH, classes))
    return model


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, padding: int = 0) -> nn.Conv2d:
    """A convolution with weights as torchvision draws those of its own."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
