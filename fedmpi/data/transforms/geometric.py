"""Transforms that move, erase or interpolate pixels. Those without interpolation accept both bytes and floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, pad

from fedmpi.common.options import option
from fedmpi.data.transforms.base import (
    Shape,
    Transform,
    crop_windows,
    stored_channels_last,
    to_uniform_integers,
    to_uniform_range,
)

MAX_SIDE = 4096  # pixels


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Crop a random window of the image after adding a border, like RandomCrop(size, padding) of torchvision."""

    main_option = "padding"
    random_numbers = 2
    padding: int = option(4, "width of the border in pixels", ge=0, le=MAX_SIDE)
    padding_mode: str = option("constant", "black border, or mirrored image", choices=("constant", "reflect"))
    size: int | None = option(None, "height and width of the window; null: those of the image", ge=1, le=MAX_SIDE)

    def output_shape(self, shape: Shape) -> Shape:
        c, height, width = shape
        h, w = self.size or height, self.size or width
        if h > height + 2 * self.padding or w > width + 2 * self.padding:
            raise ValueError(
                f"size {self.size} exceeds an image of {height} x {width} pixels with a border of {self.padding}; "
                "lower size"
            )
        if self.padding_mode == "reflect" and self.padding >= min(height, width):
            largest = min(height, width) - 1
            raise ValueError(
                f"padding: {self.padding} is too large for padding_mode: reflect with images of {height} x {width} "
                f"pixels; must be at most {largest}"
            )
        return c, h, w

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        _, h, w = self.output_shape(tuple(x.shape[1:]))
        x = add_border(x, self.padding, mirrored=self.padding_mode == "reflect")
        top, left = to_uniform_integers(u[:, 0], x.shape[2] - h + 1), to_uniform_integers(u[:, 1], x.shape[3] - w + 1)
        return crop_windows(x, top, left, h, w)


def add_border(x: Tensor, p: int, mirrored: bool) -> Tensor:
    """Add a border of p pixels to images (B, C, H, W): zeros, or the image mirrored at its edge pixels (2 1 0 1 2)."""
    channels_last = stored_channels_last(x)
    x, sides = (x.permute(0, 2, 3, 1), (1, 2)) if channels_last else (x, (2, 3))
    if not mirrored:
        x = pad(x, (0, 0, p, p, p, p) if channels_last else (p, p, p, p))
    for dim in sides if mirrored else ():
        n = x.shape[dim]
        at = torch.arange(-p, n + p, device=x.device).abs()
        x = x.index_select(dim, n - 1 - (n - 1 - at).abs())
    return x.permute(0, 3, 1, 2) if channels_last else x


@dataclass(frozen=True)
class HorizontalFlip(Transform):
    """Mirror random images horizontally, like RandomHorizontalFlip of torchvision."""

    main_option = "p"
    random_numbers = 1
    p: float = option(0.5, "probability that an image is mirrored", ge=0, le=1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        channels_last = stored_channels_last(x)
        x, across = (x.permute(0, 2, 3, 1), 2) if channels_last else (x, 3)
        n = torch.arange(len(x), device=x.device)
        out = torch.cat([x, x.flip(across)]).index_select(0, n + len(x) * (u[:, 0] < self.p))
        return out.permute(0, 3, 1, 2) if channels_last else out


@dataclass(frozen=True)
class Cutout(Transform):
    """Set a square around a random pixel of the normalised image to zero (DeVries & Taylor 2017)."""

    main_option = "size"
    random_numbers = 2
    input_stage = "normal"
    moves_pixels = False
    size: int = option(16, "height and width of the square", ge=1, le=MAX_SIDE)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        rows, columns = (self._in_square(u[:, i], x.shape[2 + i]) for i in (0, 1))
        if stored_channels_last(x):
            columns = columns.repeat_interleave(x.shape[1], 1)  # a row in memory is W x C values
            lines = x.permute(0, 2, 3, 1).view(*rows.shape, -1)
        else:
            rows, lines = rows[:, None], x
            columns = columns[:, None]
        lines.mul_((~(rows[..., None] & columns[..., None, :])).to(x.dtype))
        return x

    def _in_square(self, u: Tensor, n: int) -> Tensor:
        """Return which of the n pixels along one axis are in the square around a random centre, (B, n) bool."""
        first = to_uniform_integers(u, n) - self.size // 2
        at = torch.arange(n, device=u.device) - first[:, None]
        return (at >= 0) & (at < self.size)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """Crop the centre of training and test images, like CenterCrop(size) of torchvision."""

    main_option = "size"
    size: int = option(224, "height and width", ge=1, le=MAX_SIDE)

    def output_shape(self, shape: Shape) -> Shape:
        if self.size > min(shape[1:]):
            raise ValueError(f"size {self.size} exceeds the {shape[1]} x {shape[2]} pixels of the image; lower size")
        return shape[0], self.size, self.size

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        top, left = (round((n - self.size) / 2) for n in x.shape[2:])
        return x[:, :, top : top + self.size, left : left + self.size]


Positive = Annotated[float, Field(gt=0, le=100)]
NUM_CANDIDATES = 10  # number of crops that are drawn per image, of which the first one that fits is used


@dataclass(frozen=True)
class RandomRotation(Transform):
    """Rotate by a random angle up to `degrees`; new areas are black, as in torchvision's RandomRotation."""

    main_option = "degrees"
    random_numbers = 1
    input_stage = "floats"
    degrees: float = option(10.0, "the largest angle in either direction", ge=0, le=360)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        n, _, h, w = x.shape
        angle = to_uniform_range(u[:, 0], -self.degrees, self.degrees) * (math.pi / 180)
        cos, sin = angle.cos(), angle.sin()
        zero = torch.zeros_like(cos)
        # The grid holds, for each pixel of the result, its position in the image in units of half a side.
        rows = (torch.stack([cos, -sin * (h / w), zero], 1), torch.stack([sin * (w / h), cos, zero], 1))
        grid = affine_grid(torch.stack(rows, 1), [n, 1, h, w], align_corners=False)
        return grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Crop a region of random area and aspect ratio and resize it to size x size, like torchvision's RandomResizedCrop.

    Of ten random regions, the first that fits into the image is used. If none fits, the largest centred region whose
    aspect ratio is allowed is used.
    """

    main_option = "size"
    random_numbers = 2 * NUM_CANDIDATES + 2
    input_stage = "floats"
    size: int | None = option(None, "height and width; null: those of the image", ge=1, le=4096)
    scale: tuple[Positive, Positive] = option((0.08, 1.0), "smallest and largest fraction of the image's area")
    ratio: tuple[Positive, Positive] = option((3 / 4, 4 / 3), "smallest and largest ratio of width to height")

    def output_shape(self, shape: Shape) -> Shape:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise ValueError(f"{name} [{low:g}, {high:g}] must be in ascending order")
        return shape[0], self.size or shape[1], self.size or shape[2]

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        _, h, w = self.output_shape(tuple(x.shape[1:]))
        top, left, height, width = self.draw_boxes(u, *x.shape[2:])
        return interpolate_with_weights(
            x, interpolation_weights(top, height, x.shape[2], h), interpolation_weights(left, width, x.shape[3], w)
        )

    def draw_boxes(self, u: Tensor, h: int, w: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose a region of each image with random numbers u; return top, left, height and width, (B,) int64 each."""
        area = h * w * to_uniform_range(u[:, :NUM_CANDIDATES], *self.scale)
        aspect_ratio = to_uniform_range(
            u[:, NUM_CANDIDATES : 2 * NUM_CANDIDATES], *(math.log(r) for r in self.ratio)
        ).exp()
        widths, heights = (area * aspect_ratio).sqrt().round().long(), (area / aspect_ratio).sqrt().round().long()
        fits = (widths > 0) & (widths <= w) & (heights > 0) & (heights <= h)
        first = fits.int().argmax(1, keepdim=True)  # index of the first region that fits
        one_fits, (low, high) = fits.any(1), self.ratio
        own_ratio = w / h
        max_width = w if own_ratio <= high else round(h * high)
        max_height = h if own_ratio >= low else round(w / low)
        width = torch.where(one_fits, widths.gather(1, first)[:, 0], min(max_width, w))
        height = torch.where(one_fits, heights.gather(1, first)[:, 0], min(max_height, h))
        top = torch.where(one_fits, to_uniform_integers(u[:, -2], h - height + 1), (h - height) // 2)
        left = torch.where(one_fits, to_uniform_integers(u[:, -1], w - width + 1), (w - width) // 2)
        return top, left, height, width


def interpolation_weights(start: Tensor, length: Tensor, n: int, size: int) -> Tensor:
    """Return the weights, (B, size, n), with which n pixels along one axis are interpolated to `size` pixels.

    Row i contains the weights with which the pixels start .. start + length - 1 contribute to pixel i of the result.
    They decrease linearly with the distance from pixel i, to 0 at a distance of one pixel of the result or of the
    image, whichever is larger. This is bilinear interpolation, with antialiasing if images become smaller.
    """
    step = (length / size)[:, None, None]
    center = start[:, None, None] + (torch.arange(size, device=start.device)[:, None] + 0.5) * step
    j = torch.arange(n, device=start.device)
    share = (1 - (j + 0.5 - center).abs() / step.clamp_min(1)).clamp_min_(0)
    inside = (j >= start[:, None, None]) & (j < (start + length)[:, None, None])
    share = share * inside
    return share / share.sum(2, keepdim=True)


def interpolate_with_weights(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Interpolate images (B, C, H, W) to (B, C, h, w) with row weights (B, h, H) and column weights (B, w, W)."""
    return rows[:, None] @ (x @ columns[:, None].transpose(2, 3))


@dataclass(frozen=True)
class Resize(Transform):
    """Scale the shorter side of training and test images to `size` pixels, like Resize(size) of torchvision."""

    main_option = "size"
    input_stage = "floats"
    size: int = option(256, "shorter side in pixels", ge=1, le=4096)

    def output_shape(self, shape: Shape) -> Shape:
        c, h, w = shape
        return c, self.size * h // min(h, w), self.size * w // min(h, w)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        size = self.output_shape(tuple(x.shape[1:]))[1:]
        if size == tuple(x.shape[2:]):
            return x
        return interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
