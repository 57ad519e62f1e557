"""Operations that move or blank pixels, and compute none: they take bytes as they take floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedmpi.common.options import option
from fedmpi.data.augment.operation import Operation, Shape, whole, windows
from fedmpi.data.layout import stored_channels_last

LARGEST = 4096  # pixels


@dataclass(frozen=True)
class Crop(Operation):
    """A window anywhere in the picture with a border around it: RandomCrop(size, padding) of torchvision."""

    short = "padding"
    columns = 2
    padding: int = option(4, "pixels on each side", ge=0, le=LARGEST)
    mode: str = option(
        "zero", "what the border holds: black (zero), or the picture mirrored", choices=("zero", "reflect")
    )
    size: int | None = option(None, "height and width of the window; null: those of the picture", ge=1, le=LARGEST)

    def out(self, shape: Shape) -> Shape:
        c, height, width = shape
        h, w = self.size or height, self.size or width
        if h > height + 2 * self.padding or w > width + 2 * self.padding:
            raise ValueError(f"size {self.size} is beyond {height} x {width} pixels and a border of {self.padding}")
        if self.mode == "reflect" and self.padding >= min(height, width):
            most = min(height, width) - 1
            raise ValueError(f"a border of {self.padding} cannot mirror {height} x {width} pixels; at most {most}")
        return c, h, w

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        _, h, w = self.out(tuple(x.shape[1:]))
        x = mirrored(x, self.padding) if self.mode == "reflect" else bordered(x, self.padding)
        top, left = whole(u[:, 0], x.shape[2] - h + 1), whole(u[:, 1], x.shape[3] - w + 1)
        return windows(x, top, left, h, w)


def bordered(x: Tensor, p: int) -> Tensor:
    """x with a border of zeros, in the layout of x."""
    if stored_channels_last(x):
        return pad(x.permute(0, 2, 3, 1), (0, 0, p, p, p, p)).permute(0, 3, 1, 2)
    return pad(x, (p, p, p, p))


def mirrored(x: Tensor, p: int) -> Tensor:
    """x with a border that mirrors it at its outermost pixels, which stand once: 2 1 0 1 2."""
    blocks = stored_channels_last(x)
    x, sides = (x.permute(0, 2, 3, 1), (1, 2)) if blocks else (x, (2, 3))
    for dim in sides:
        n = x.shape[dim]
        at = torch.arange(-p, n + p, device=x.device).abs()
        x = x.index_select(dim, n - 1 - (n - 1 - at).abs())
    return x.permute(0, 3, 1, 2) if blocks else x


@dataclass(frozen=True)
class Flip(Operation):
    """Left and right exchanged, in a share of the pictures."""

    short = "p"
    columns = 1
    p: float = option(0.5, "share of the pictures", ge=0, le=1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        blocks = stored_channels_last(x)
        x, across = (x.permute(0, 2, 3, 1), 2) if blocks else (x, 3)
        n = torch.arange(len(x), device=x.device)
        found = torch.cat([x, x.flip(across)]).index_select(0, n + len(x) * (u[:, 0] < self.p))
        return found.permute(0, 3, 1, 2) if blocks else found


@dataclass(frozen=True)
class Cutout(Operation):
    """A square of zeros, its centre any pixel, cut off at the borders, after normalisation (DeVries & Taylor 2017)."""

    short = "size"
    columns = 2
    on = "normal"
    moves_pixels = False
    size: int = option(16, "height and width of the square", ge=1, le=LARGEST)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        rows, columns = (self._within(u[:, i], x.shape[2 + i]) for i in (0, 1))
        if stored_channels_last(x):
            columns = columns.repeat_interleave(x.shape[1], 1)  # as rows lie in memory
            lines = x.permute(0, 2, 3, 1).view(*rows.shape, -1)
        else:
            rows, lines = rows[:, None], x
            columns = columns[:, None]
        lines.mul_((~(rows[..., None] & columns[..., None, :])).to(x.dtype))
        return x

    def _within(self, u: Tensor, n: int) -> Tensor:
        """(B, n): which of n pixels lie within the square: from c - size // 2 on, for the centre c."""
        first = whole(u, n) - self.size // 2
        at = torch.arange(n, device=u.device) - first[:, None]
        return (at >= 0) & (at < self.size)


@dataclass(frozen=True)
class CentreCrop(Operation):
    """The middle of the picture, at tests too: CenterCrop(size) of torchvision."""

    short = "size"
    size: int = option(224, "height and width", ge=1, le=LARGEST)

    def out(self, shape: Shape) -> Shape:
        if self.size > min(shape[1:]):
            raise ValueError(f"size {self.size} is beyond the {shape[1]} x {shape[2]} pixels of the picture")
        return shape[0], self.size, self.size

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        top, left = (round((n - self.size) / 2) for n in x.shape[2:])
        return x[:, :, top : top + self.size, left : left + self.size]
