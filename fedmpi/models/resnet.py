"""Residual networks of torchvision, with the changes that papers on federated learning make to them.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385

`stem: small` replaces the 7x7 convolution with stride 2 and the max pool, which are meant for images of 224 pixels, by
one 3x3 convolution with stride 1; `no_pool` only removes the max pool. `norm: bn_nostats` uses the statistics of the
batch in evaluations, too, and keeps no running statistics, so that only parameters are sent; `gn` is group
normalisation with 32 groups, which does not depend on the batch (Wu and He, ECCV 2018,
https://arxiv.org/abs/1803.08494).

FedUV's authors (CVPR 2024) train ResNet-18 with `stem: small, stride: 2, projection: true` and ResNet-50 with
`stem: no_pool, projection: true`.

All parameters except those of a projection head have torchvision's names, so that weights can be exchanged with
torchvision's models. Initial weights are random; `init.from` loads trained weights, for example from torchvision.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.models.building_blocks import PROJECTION_WIDTH, check_image_shape, projection_head

Stem = Literal["imagenet", "no_pool", "small"]
Norm = Literal["bn", "bn_nostats", "gn"]
Stride = Literal[1, 2]

_NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "bn": nn.BatchNorm2d,
    "bn_nostats": partial(nn.BatchNorm2d, track_running_stats=False),
    "gn": partial(nn.GroupNorm, 32),  # 32 divides every width of these networks: 64, 128, ... 2048
}


def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "imagenet",
    norm: Norm = "bn",
    stride: Stride = 1,
    projection: bool = False,
) -> nn.Module:
    """ResNet-18 from torchvision, with random initial weights; set `stem: small` for images of 32 x 32 pixels.

    stem: imagenet (7x7 convolution with stride 2, max pool), no_pool (without the max pool) or small (3x3 convolution
    with stride 1, no max pool; for images of 32 x 32 pixels).
    norm: bn, bn_nostats (no running statistics: evaluations use the statistics of each batch) or gn (group
    normalisation).
    stride: stride of the first stage.
    projection: true inserts two linear layers of 256 units, each with normalisation `norm`, before the last layer.

    For RGB images, it has 11,689,512 parameters with the stem imagenet and 1000 classes, and 11,173,962 with the stem
    small and 10 classes.
    """
    return _make_resnet("resnet18", input_shape, classes, stem, norm, stride, projection)


def resnet50(
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "imagenet",
    norm: Norm = "bn",
    stride: Stride = 1,
    projection: bool = False,
) -> nn.Module:
    """ResNet-50 from torchvision, with random initial weights; set `stem: small` for images of 32 x 32 pixels.

    stem: imagenet (7x7 convolution with stride 2, max pool), no_pool (without the max pool) or small (3x3 convolution
    with stride 1, no max pool; for images of 32 x 32 pixels).
    norm: bn, bn_nostats (no running statistics: evaluations use the statistics of each batch) or gn (group
    normalisation).
    stride: stride of the first stage.
    projection: true inserts two linear layers of 256 units, each with normalisation `norm`, before the last layer.

    For RGB images, it has 25,557,032 parameters with the stem imagenet and 1000 classes.
    """
    return _make_resnet("resnet50", input_shape, classes, stem, norm, stride, projection)


def _make_resnet(
    name: str, input_shape: tuple[int, ...], classes: int, stem: Stem, norm: Norm, stride: Stride, projection: bool
) -> nn.Module:
    channels, _, _ = check_image_shape(name, input_shape)
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, norm_layer=_NORM_LAYERS[norm])
    if stem == "small":
        model.conv1 = _make_convolution(channels, 64, 3, stride=1, padding=1)
    elif channels != 3:
        model.conv1 = _make_convolution(channels, 64, 7, stride=2, padding=3)
    if stem != "imagenet":
        model.maxpool = nn.Identity()
    if stride == 2:  # in torchvision the other stages have stride 2
        first = model.layer1[0]
        (first.conv1 if name == "resnet18" else first.conv2).stride = (2, 2)  # the 3x3 convolution
        if first.downsample is None:
            first.downsample = nn.Sequential(_make_convolution(64, 64, 1, stride=2), _NORM_LAYERS[norm](64))
        else:
            first.downsample[0].stride = (2, 2)
    if projection:
        model.fc = nn.Sequential(projection_head(model.fc.in_features, norm), nn.Linear(PROJECTION_WIDTH, classes))
    return model


def _make_convolution(inputs: int, outputs: int, kernel: int, stride: int, padding: int = 0) -> nn.Conv2d:
    """Return a convolution without bias whose weights are initialised as in torchvision's ResNet."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
