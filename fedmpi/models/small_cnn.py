"""The small convolutional network of FedUV.

Son, Kim, Chung, Huang, Liu: FedUV, CVPR 2024, https://arxiv.org/abs/2402.18372, supplement, Table 1; without
biases and padding in its convolutions, and four times as wide as the base of 16, 32, 64 filters, as the authors' code.
"""

from collections import OrderedDict
from typing import Annotated

from pydantic import Field
from torch import nn

from fedmpi.models.projection import WIDTH, projection
from fedmpi.models.shapes import image

# kernel, stride, times the width
BLOCKS = (
    (3, 1, 1),
    (1, 1, 1),
    (3, 2, 2),
    (3, 1, 2),
    (1, 1, 2),
    (3, 2, 4),
    (3, 1, 4),
    (1, 1, 4),
)
LEAST = 21  # pixels: less leaves nothing for the last 3x3
Width = Annotated[int, Field(gt=0)]


def small_cnn(input_shape: tuple[int, ...], classes: int, width: Width = 64) -> nn.Module:
    """CNN of FedUV (2024): eight convolutions with batch normalisation, two hidden layers of 256; from 21 x 21 pixels.

    Each convolution is followed by batch normalisation and ReLU, then come the mean over the picture, and the
    projection. width: filters of the first two blocks; the others have two and four times as many. 3 x 32 x 32 images
    of 10 classes: 1,331,402 parameters.
    """
    channels, _, _ = image("small_cnn", input_shape, least=LEAST)
    layers: list[nn.Module] = []
    for kernel, stride, times in BLOCKS:
        filters = width * times
        layers += [nn.Conv2d(channels, filters, kernel, stride, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
        channels = filters
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), projection(channels))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(WIDTH, classes)))
