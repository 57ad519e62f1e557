"""Transforms that change the values of pixels: normalize and color_jitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedmpi.common.options import option
from fedmpi.data.transforms.base import Shape, Transform, channel_constants, stored_channels_last, to_uniform_range

LUMINANCE_WEIGHTS = (0.2989, 0.587, 0.114)  # of red, green and blue (ITU-R 601-2)
NORMALISATION_CONSTANTS = {  # mean and standard deviation of pixels in 0..1, by channel
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
    "cinic10": ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "half": ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
    "retina": ((0.5007, 0.5010, 0.5019), (0.0342, 0.0535, 0.0484)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}


@dataclass(frozen=True)
class Normalize(Transform):
    """Normalise training and test images by channel, (v - mean) / std; replaces the data source's normalisation."""

    main_option = "dataset"
    input_stage = "unit"
    moves_pixels = False
    dataset: str | None = option(
        None, "the data set whose mean and std are used", choices=sorted(NORMALISATION_CONSTANTS)
    )
    mean: tuple[float, ...] | None = option(None, "mean of pixels in 0..1: one number, or one per channel")
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = option(
        None, "standard deviation of pixels in 0..1: one number, or one per channel"
    )

    @property
    def mean_and_std(self) -> tuple[Sequence[float], Sequence[float]]:
        """The mean and the standard deviation, each as one number or one per channel."""
        if (self.dataset is None) == (self.mean is None) or (self.mean is None) != (self.std is None):
            raise ValueError("set either dataset, or mean and std, as in {normalize: {mean: [0.5], std: [0.5]}}")
        return NORMALISATION_CONSTANTS[self.dataset] if self.dataset is not None else (self.mean or (), self.std or ())

    def output_shape(self, shape: Shape) -> Shape:
        for numbers in self.mean_and_std:
            if len(numbers) not in (1, shape[0]):
                problem = f"mean or std has {len(numbers)} numbers, but images have {shape[0]} channels"
                raise ValueError(f"{problem}; give 1 or {shape[0]} numbers")
        return shape

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        layout = x.shape, stored_channels_last(x), x.device
        mean, std = (channel_constants(tuple(numbers), *layout) for numbers in self.mean_and_std)
        return x.sub_(mean).div_(std)


@dataclass(frozen=True)
class ColorJitter(Transform):
    """Change brightness, contrast and saturation by random factors, in this order (torchvision uses a random order)."""

    random_numbers = 3
    input_stage = "unit"
    moves_pixels = False
    brightness: float = option(0.0, "b; pixels are multiplied by max(0, 1 - b) to 1 + b", ge=0, le=10)
    contrast: float = option(
        0.0, "c; the distance from the mean gray value is multiplied by max(0, 1 - c) to 1 + c", ge=0, le=10
    )
    saturation: float = option(
        0.0, "s; the distance from the gray value of the pixel is multiplied by max(0, 1 - s) to 1 + s", ge=0, le=10
    )

    def output_shape(self, shape: Shape) -> Shape:
        if not (self.brightness or self.contrast or self.saturation):
            raise ValueError("brightness, contrast and saturation are all 0; set at least one of them")
        if shape[0] != 3 and self.saturation:
            raise ValueError(f"saturation needs images of 3 channels, but these have {shape[0]}; set saturation: 0")
        return shape

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        def factor(i: int, width: float) -> Tensor:
            return to_uniform_range(u[:, i], max(1 - width, 0), 1 + width).view(-1, 1, 1, 1)

        if self.brightness:
            x = blend(x, torch.zeros_like(x[:, :1, :1, :1]), factor(0, self.brightness))
        if self.contrast:
            x = blend(x, to_grayscale(x).mean((1, 2, 3), keepdim=True), factor(1, self.contrast))
        if self.saturation:
            x = blend(x, to_grayscale(x), factor(2, self.saturation))
        return x


def blend(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """Blend two batches of images: share * x + (1 - share) * other, clipped to 0..1."""
    return (share * x + (1 - share) * other).clamp_(0, 1)


def to_grayscale(x: Tensor) -> Tensor:
    """Convert colour images (B, 3, H, W) to luminance (B, 1, H, W); return other images unchanged."""
    if x.shape[1] != 3:
        return x
    red, green, blue = (x[:, i : i + 1] * share for i, share in enumerate(LUMINANCE_WEIGHTS))
    return red + green + blue
