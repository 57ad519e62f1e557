"""The base class of augmentations, and functions for batches of images and for random numbers.

An augmentation computes with a batch of images and with uniform random numbers that were drawn for them. A batch is
stored as (n, C, H, W), or as (n, H, W, C) with the strides of torch.channels_last and the shape (n, C, H, W).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

InputStage = Literal["any", "floats", "unit", "normal"]
Shape = tuple[int, ...]  # shape of one image: (C, H, W)


class Transform(ABC):
    """The base class of augmentations. Its fields are options; `short` is the one that `{random_crop: 4}` sets."""

    main_option: ClassVar[str] = ""
    random_numbers: ClassVar[int] = 0  # number of random numbers per sample; 0: test images are transformed, too
    # Its input: any: bytes or floats; floats; unit: floats in 0..1, before normalisation; normal: normalised floats
    input_stage: ClassVar[InputStage] = "any"
    moves_pixels: ClassVar[bool] = True  # whether a mask would have to be transformed, too

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of an image after the operation; raise ValueError if it does not apply to this shape."""
        return shape

    @abstractmethod
    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """Transform a batch.   x (B, C, H, W), u (B, columns) -> (B, C, h, w)

        x may be changed in place; u is float32, uniform in [0, 1).
        """


def to_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """Store a batch of images as (n, H, W, C) if `blocks`, otherwise as (n, C, H, W); other tensors are unchanged."""
    if x.ndim != 4 or stored_channels_last(x) == channels_last:
        return x
    # clone is used because to() does not change images of one channel, see stored_channels_last
    return x.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def stored_channels_last(x: Any) -> bool:
    """Return whether x is a batch of images stored as (n, H, W, C).

    The strides decide, as in convolutions, because a tensor of one channel is contiguous in both formats.
    """
    known = isinstance(x, Tensor) and x.ndim == 4 and x.stride(1) == 1
    return known and x.is_contiguous(memory_format=torch.channels_last)


@lru_cache(maxsize=64)
def channel_constants(
    numbers: tuple[float, ...], like: torch.Size, channels_last: bool, device: torch.device
) -> Tensor:
    """Return one number per channel as a tensor that broadcasts over images, (1, C, 1, ...).

    With `blocks` it has the shape (1, C, 1, W), so that a whole row of an image stored as (H, W, C) is processed at
    once.
    """
    by_channel = torch.tensor(numbers, device=device).view(1, -1, *[1] * (len(like) - 2))
    if not channels_last or len(numbers) == 1:
        return by_channel
    return by_channel.expand(1, like[1], 1, like[3]).clone(memory_format=torch.channels_last)


def to_uniform_integers(u: Tensor, many: int | Tensor) -> Tensor:
    """Convert uniform numbers in [0, 1), (B,), to uniform integers in 0..many-1."""
    numbers = (u * many).long()
    return numbers.clamp_max_(many - 1) if isinstance(many, int) else torch.minimum(numbers, many - 1)


def to_uniform_range(u: Tensor, low: float, high: float) -> Tensor:
    """Convert uniform numbers in [0, 1) to uniform numbers in [low, high)."""
    return low + (high - low) * u


def crop_windows(x: Tensor, top: Tensor, left: Tensor, h: int, w: int) -> Tensor:
    """Return x[b, :, top[b] : top[b] + h, left[b] : left[b] + w] for each b, (B, C, h, w), in the memory format of x.

    For each image the memory from the first to the last number of the window is copied; then the numbers in between
    that are outside of the window are left out.
    """
    channels_last = stored_channels_last(x)
    x = x if channels_last else x.contiguous()
    n, c = x.shape[:2]
    each, *steps = x.stride()
    run = 1 + sum((size - 1) * step for size, step in zip((c, h, w), steps, strict=True))
    runs = x.as_strided((max(x.numel() - run + 1, 0), run), (1, 1))
    first = torch.arange(n, device=x.device) * each + top * steps[1] + left * steps[2]
    cut = runs.index_select(0, first).as_strided((n, c, h, w), (run, *steps))
    return cut.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
