"""The small AlexNet on which filter decomposition was evaluated.

Chen, Qiu: Extra Clients at No Extra Cost, 2025, https://arxiv.org/abs/2503.08652, section 6.1, after
Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012.

The paper says three convolutions of 64, 256 and 256 filters and fully connected layers of 256 and 128; kernels and
pooling are ours: 3x3 with padding 1, each followed by a 2x2 max pool and ReLU (in either order the same to the bit).
"""

from torch import nn

from fedmpi.models.shapes import image


def alexnet_s(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Small AlexNet of the filter decomposition paper: three 3x3 convolutions, two hidden layers; images from 8 x 8.

    3 x 32 x 32 images of 10 classes: 1,822,602 parameters.
    """
    channels, height, width = image("alexnet_s", input_shape, least=8)
    layers: list[nn.Module] = []
    for filters in (64, 256, 256):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels = filters
    flat = channels * (height // 8) * (width // 8)
    layers += [nn.Flatten(), nn.Linear(flat, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*layers)
