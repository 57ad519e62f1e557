"""A small U-Net for segmentation of images and volumes.

Ronneberger, Fischer, Brox: U-Net, MICCAI 2015, https://arxiv.org/abs/1505.04597; for volumes: Çiçek, Abdulkadir,
Lienkamp, Brox, Ronneberger: 3D U-Net, MICCAI 2016, https://arxiv.org/abs/1606.06650. Convolutions are padded, so that
the output has the size of the input, and strided convolutions replace max pools, whose 3-D gradient has no
deterministic CUDA kernel.
"""

from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedmpi.common.errors import UserError

GROUPS = 8  # number of groups of channels in group normalisation
Width = Annotated[int, Field(ge=GROUPS, multiple_of=GROUPS, le=1024)]


class UNet(nn.Module):
    """A U-Net with two convolutions on each level of the encoder and the decoder, and a final 1x1 convolution.

    Args:
        dims: 2 for images, (B, C, H, W) -> (B, classes, H, W); 3 for volumes, (B, C, D, H, W) -> (B, classes, D, H, W).
        channels: channels C of a sample.
        width: number of filters of the first level.
        levels: number of times that the encoder halves height and width (and depth).
        norm: gn or bn (see `unet`).
    """

    def __init__(self, dims: int, channels: int, classes: int, width: int, levels: int, norm: str) -> None:
        super().__init__()
        conv: Any = (nn.Conv2d, nn.Conv3d)[dims - 2]
        transposed: Any = (nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 2]
        batch_norm: Any = (nn.BatchNorm2d, nn.BatchNorm3d)[dims - 2]

        def block(before: int, filters: int, stride: int = 1) -> nn.Sequential:
            layers: list[nn.Module] = []
            for inputs, step in ((before, stride), (filters, 1)):
                normal = batch_norm(filters) if norm == "bn" else nn.GroupNorm(GROUPS, filters)
                layers += [conv(inputs, filters, 3, stride=step, padding=1, bias=False), normal, nn.ReLU()]
            return nn.Sequential(*layers)

        widths = [width << level for level in range(levels + 1)]
        pairs = list(pairwise(widths))  # (width of a level, width of the next level)
        self.first = block(channels, width)
        self.down = nn.ModuleList(block(upper, lower, stride=2) for upper, lower in pairs)
        self.up = nn.ModuleList(transposed(lower, upper, 2, stride=2) for upper, lower in reversed(pairs))
        self.merge = nn.ModuleList(block(2 * upper, upper) for upper, _ in reversed(pairs))
        self.head = conv(width, classes, 1)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = up(x)
            for axis in range(2, x.ndim):  # odd sizes were rounded up when they were halved
                x = x.narrow(axis, 0, skip.shape[axis])
            x = merge(torch.cat([skip, x], 1))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def unet(
    input_shape: tuple[int, ...],
    classes: int,
    width: Width = 16,
    levels: Annotated[int, Field(ge=1, le=6)] = 2,
    norm: Literal["gn", "bn"] = "gn",
) -> UNet:
    """U-Net for segmentation of images (C, H, W) or, with 3-D convolutions, of volumes (C, D, H, W).

    width: number of filters of the first level; each lower level has twice as many as the level above.
    levels: number of times that the encoder halves height and width (and depth), which need not be even.
    norm: gn (group normalisation with 8 groups) or bn (batch normalisation).

    For volumes of one channel and 2 classes it has 339,586 parameters.
    """
    if len(input_shape) not in (3, 4):
        raise UserError(
            f"model unet: a sample has the shape {tuple(input_shape)}, but the model needs images (channels, height, "
            "width) or volumes (channels, depth, height, width); choose another model for this data set"
        )
    return UNet(len(input_shape) - 1, input_shape[0], classes, width, levels, norm)
