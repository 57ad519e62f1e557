"""Plain convolutional networks, each from one paper on federated learning.

mcmahan_cnn  McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
             Decentralized Data, AISTATS 2017, https://arxiv.org/abs/1602.05629
lenet5       Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022, section V (NIID-Bench, and
             later Flower's baselines), https://arxiv.org/abs/2102.02079; based on LeCun, Bottou, Bengio, Haffner:
             Gradient-Based Learning Applied to Document Recognition, 1998, with ReLU and max pooling, and no padding
alexnet_s    Chen, Qiu: Extra Clients at No Extra Cost, 2025, https://arxiv.org/abs/2503.08652, section 6.1; based on
             Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012.
             The paper specifies three convolutions of 64, 256 and 256 filters and fully connected layers of 256 and
             128 units; kernel sizes and pooling are our choice
small_cnn    Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1;
             as in the authors' code, the convolutions have 64, 128 and 256 filters, and neither biases nor padding
vgg11        Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015,
             configuration A, https://arxiv.org/abs/1409.1556, with hidden layers of 512 units and without dropout or
             batch normalisation, as in FedSOL

Each 2x2 max pool precedes its ReLU: outputs and gradients are bitwise equal to those of the usual order, and the ReLU
processes a quarter of the values.
"""

import math
from collections import OrderedDict
from typing import Annotated

from pydantic import Field
from torch import nn

from fedmpi.models.building_blocks import PROJECTION_WIDTH, check_image_shape, projection_head


def mcmahan_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN of the FedAvg paper (McMahan 2017): two 5x5 convolutions, one hidden layer of 512 units.

    Images need at least 4 x 4 pixels. For 1 x 28 x 28 images of 10 classes it has 1,663,370 parameters.
    """
    channels, height, width = check_image_shape("mcmahan_cnn", input_shape, min_side=4)
    body = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(512, classes)))


def lenet5(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling, the `simple-cnn` of NIID-Bench (Li 2022).

    Images need at least 16 x 16 pixels. For 10 classes it has 44,426 parameters on 1 x 28 x 28 images, and 62,006 on 3
    x 32 x 32 images.
    """
    channels, height, width = check_image_shape("lenet5", input_shape, min_side=16)
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(84, classes)))


def alexnet_s(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Small AlexNet of the filter decomposition paper: three 3x3 convolutions, two hidden layers.

    Images need at least 8 x 8 pixels. For 3 x 32 x 32 images of 10 classes it has 1,822,602 parameters.
    """
    channels, height, width = check_image_shape("alexnet_s", input_shape, min_side=8)
    layers: list[nn.Module] = []
    for filters in (64, 256, 256):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels = filters
    flat = channels * (height // 8) * (width // 8)
    layers += [nn.Flatten(), nn.Linear(flat, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*layers)


# Kernel size, stride and number of filters, as a multiple of the width, of each block
SMALL_CNN_BLOCKS = ((3, 1, 1), (1, 1, 1), (3, 2, 2), (3, 1, 2), (1, 1, 2), (3, 2, 4), (3, 1, 4), (1, 1, 4))
MIN_SIDE = 21  # pixels; with smaller images the last feature maps would be smaller than their 3x3 kernel
Width = Annotated[int, Field(gt=0)]


def small_cnn(input_shape: tuple[int, ...], classes: int, width: Width = 64) -> nn.Module:
    """CNN of FedUV (2024): eight convolutions with batch normalisation, two hidden layers of 256 units.

    Batch normalisation and ReLU follow each convolution; the last one is followed by the mean over the image, then by
    the projection head. Images need at least 21 x 21 pixels. For 3 x 32 x 32 images of 10 classes it has 1,331,402
    parameters.

    width: number of filters of the first two blocks; later blocks have two or four times as many.
    """
    channels, _, _ = check_image_shape("small_cnn", input_shape, min_side=MIN_SIDE)
    layers: list[nn.Module] = []
    for kernel, stride, times in SMALL_CNN_BLOCKS:
        filters = width * times
        layers += [nn.Conv2d(channels, filters, kernel, stride, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
        channels = filters
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), projection_head(channels))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(PROJECTION_WIDTH, classes)))


VGG11_FILTERS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # number of filters; 0: a 2x2 max pool
VGG11_SIDE = 32  # pixels; the five pools reduce a side to one pixel


def vgg11(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-11 with hidden layers of 512 units and without normalisation (FedSOL 2024).

    Images are resized to 32 x 32 pixels. For 3 x 32 x 32 images of 10 classes it has 9,750,922 parameters.
    """
    channels, *size = check_image_shape("vgg11", input_shape)
    layers: list[nn.Module] = (
        [] if size == [VGG11_SIDE, VGG11_SIDE] else [nn.Upsample((VGG11_SIDE, VGG11_SIDE), mode="bilinear")]
    )
    for filters in VGG11_FILTERS:
        if filters:
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
        else:
            layers.insert(-1, nn.MaxPool2d(2))
        channels = filters or channels
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    head = nn.Linear(512, classes)
    for layer in body:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=math.sqrt(2 / (9 * layer.out_channels)))
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(OrderedDict(body=body, head=head))
