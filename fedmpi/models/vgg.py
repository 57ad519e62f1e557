"""VGG-11 for pictures of 32 pixels, as FedSOL trains it.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015, configuration A,
https://arxiv.org/abs/1409.1556, with hidden layers of 512 and without dropout and batch normalisation.
"""

import math

from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedmpi.models.shapes import image

CONFIGURATION_A = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # filters; 0: 2x2 max pool
SIDE = 32  # pixels: the five pools leave one


class VGG11(nn.Module):
    """Eight 3x3 convolutions, five max pools; linear 512, 512, `classes`. Other images are resized to 32 x 32."""

    def __init__(self, channels: int, resize: bool, classes: int) -> None:
        super().__init__()
        self.resize = resize
        layers: list[nn.Module] = []
        for filters in CONFIGURATION_A:
            if filters:
                layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            else:
                layers.insert(-1, nn.MaxPool2d(2))  # before its ReLU: the same to the bit, over fewer entries
            channels = filters or channels
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, classes)
        for layer in self.body:
            if isinstance(layer, nn.Conv2d):
                fan_out = math.prod(layer.kernel_size) * layer.out_channels
                nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_out))
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def features(self, x: Tensor) -> Tensor:
        x = interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False) if self.resize else x
        return self.body(x)  # (B, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (B, C)


def vgg11(input_shape: tuple[int, ...], classes: int) -> VGG11:
    """VGG-11 with hidden layers of 512, no normalisation (FedSOL 2024); any picture is resized to 32 x 32.

    3 x 32 x 32 images of 10 classes: 9,750,922 parameters.
    """
    channels, height, width = image("vgg11", input_shape)
    return VGG11(channels, (height, width) != (SIDE, SIDE), classes)
