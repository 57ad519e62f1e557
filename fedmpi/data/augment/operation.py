"""What an augmentation is: arithmetic on a batch of pictures, and on the uniform numbers drawn for them.

A batch lies in memory as (n, C, H, W), or as (n, H, W, C) blocks that are shown as (n, C, H, W).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

On = Literal["any", "floats", "unit", "normal"]
Shape = tuple[int, ...]  # of one picture: (C, H, W)


class Operation(ABC):
    """Its dataclass fields are its options; `short` is the one that `{crop: 4}` gives without its name."""

    short: ClassVar[str] = ""
    columns: ClassVar[int] = 0  # numbers drawn for a sample; 0: test pictures go through it, too
    # what it works on: any pixels, bytes too; floats; floats in 0..1, before normalisation; floats after it
    on: ClassVar[On] = "any"
    moves_pixels: ClassVar[bool] = True  # whether a mask would have to be moved along

    def out(self, shape: Shape) -> Shape:
        """Shape of a picture behind it. Raises ValueError, in words, if it cannot be done to such a picture."""
        return shape

    @abstractmethod
    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, h, w); x may be written to. u: (B, columns) float32, uniform in [0, 1)."""


def to_memory_format(x: Tensor, blocks: bool) -> Tensor:
    """Store a batch of pictures as (n, H, W, C) blocks, or as (n, C, H, W); other tensors stay as they are."""
    if x.ndim != 4 or stored_channels_last(x) == blocks:
        return x
    # clone, not to(): the latter leaves one-channel images as they are, see stored_channels_last
    return x.clone(memory_format=torch.channels_last if blocks else torch.contiguous_format)


def stored_channels_last(x: Any) -> bool:
    """Whether x is channels_last by its strides, as convolutions see it: one channel is contiguous in both formats."""
    known = isinstance(x, Tensor) and x.ndim == 4 and x.stride(1) == 1
    return known and x.is_contiguous(memory_format=torch.channels_last)


@lru_cache(maxsize=64)
def constants(numbers: tuple[float, ...], like: torch.Size, blocks: bool, device: torch.device) -> Tensor:
    """(1, C, 1, ...) numbers by channel; of `blocks` (1, C, 1, W), so that rows are gone through in one piece."""
    by_channel = torch.tensor(numbers, device=device).view(1, -1, *[1] * (len(like) - 2))
    if not blocks or len(numbers) == 1:
        return by_channel
    return by_channel.expand(1, like[1], 1, like[3]).clone(memory_format=torch.channels_last)


def whole(u: Tensor, many: int | Tensor) -> Tensor:
    """Uniform numbers (B,) as uniform whole ones 0..many-1."""
    numbers = (u * many).long()
    return numbers.clamp_max_(many - 1) if isinstance(many, int) else torch.minimum(numbers, many - 1)


def between(u: Tensor, low: float, high: float) -> Tensor:
    """Uniform numbers in [0, 1) as uniform ones in [low, high)."""
    return low + (high - low) * u


def windows(x: Tensor, top: Tensor, left: Tensor, h: int, w: int) -> Tensor:
    """x[b, :, top[b] : top[b] + h, left[b] : left[b] + w] for each b.  (B, C, h, w), in the layout of x

    Of each picture the piece of memory from the window's first number to its last is copied, then what lies in between
    is left out.
    """
    blocks = stored_channels_last(x)
    x = x if blocks else x.contiguous()
    n, c = x.shape[:2]
    each, *steps = x.stride()
    run = 1 + sum((size - 1) * step for size, step in zip((c, h, w), steps, strict=True))
    runs = x.as_strided((max(x.numel() - run + 1, 0), run), (1, 1))
    first = torch.arange(n, device=x.device) * each + top * steps[1] + left * steps[2]
    cut = runs.index_select(0, first).as_strided((n, c, h, w), (run, *steps))
    return cut.contiguous(memory_format=torch.channels_last if blocks else torch.contiguous_format)
