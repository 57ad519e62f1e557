"""The base class of image transforms, and functions for batches of images and for random numbers.

A transform receives a batch of images and the uniform random numbers that were drawn for it. A batch has the shape
(n, C, H, W); in memory it is stored in this order, or in the memory format torch.channels_last, as (n, H, W, C).
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
    """The base class of image transforms. Subclasses are frozen dataclasses whose fields are options."""

    main_option: ClassVar[str] = ""  # the option that a bare value sets, such as `padding` in {random_crop: 4}
    random_numbers: ClassVar[int] = 0  # number of random numbers per sample; if 0, test images are transformed, too
    # The input: any (bytes or floats), floats, unit (floats in 0..1, before normalisation) or normal (after it)
    input_stage: ClassVar[InputStage] = "any"
    moves_pixels: ClassVar[bool] = True  # if so, targets that are masks would have to be transformed, too

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of a transformed image of the given shape; raise ValueError if that shape is unsuitable."""
        return shape

    @abstractmethod
    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """Transform a batch of images (B, C, H, W) to (B, C, h, w).

        Args:
            x: the images, which may be changed in place.
            u: random numbers, uniform in [0, 1), (B, random_numbers) float32.
        """


def to_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """Convert a batch of images to the memory format channels_last or contiguous; return other tensors unchanged."""
    if x.ndim != 4 or stored_channels_last(x) == channels_last:
        return x
    # clone, because to() does not change images of one channel (see stored_channels_last)
    return x.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def stored_channels_last(x: Any) -> bool:
    """Return whether x is a batch of images in the memory format channels_last.

    This compares strides, as convolutions do, because an image with one channel is contiguous in both formats.
    """
    is_batch = isinstance(x, Tensor) and x.ndim == 4 and x.stride(1) == 1
    return is_batch and x.is_contiguous(memory_format=torch.channels_last)


@lru_cache(maxsize=64)
def channel_constants(
    numbers: tuple[float, ...], image_shape: torch.Size, channels_last: bool, device: torch.device
) -> Tensor:
    """Return one number per channel as a tensor that broadcasts over images, (1, C, 1, ...).

    For images in the memory format channels_last the tensor has the shape (1, C, 1, W), so that a whole row of an image
    is processed at once.

    Args:
        numbers: one number per channel, or one for all channels.
        channels_last: whether the images are in this memory format.
    """
    by_channel = torch.tensor(numbers, device=device).view(1, -1, *[1] * (len(image_shape) - 2))
    if not channels_last or len(numbers) == 1:
        return by_channel
    return by_channel.expand(1, image_shape[1], 1, image_shape[3]).clone(memory_format=torch.channels_last)


def to_uniform_integers(u: Tensor, n: int | Tensor) -> Tensor:
    """Convert uniform numbers in [0, 1), (B,), to uniform integers in 0..n-1."""
    numbers = (u * n).long()
    return numbers.clamp_max_(n - 1) if isinstance(n, int) else torch.minimum(numbers, n - 1)


def to_uniform_range(u: Tensor, low: float, high: float) -> Tensor:
    """Convert uniform numbers in [0, 1) to uniform numbers in [low, high)."""
    return low + (high - low) * u


def crop_windows(x: Tensor, top: Tensor, left: Tensor, h: int, w: int) -> Tensor:
    """Cut a window out of each image: x[b, :, top[b] : top[b] + h, left[b] : left[b] + w], (B, C, h, w).

    For each image, the contiguous memory from the first to the last number of the window is copied; then the numbers in
    it that are outside the window are dropped. The result has the memory format of x.
    """
    channels_last = stored_channels_last(x)
    x = x if channels_last else x.contiguous()
    n, c = x.shape[:2]
    image_stride, *steps = x.stride()
    run = 1 + sum((size - 1) * step for size, step in zip((c, h, w), steps, strict=True))
    runs = x.as_strided((max(x.numel() - run + 1, 0), run), (1, 1))
    first = torch.arange(n, device=x.device) * image_stride + top * steps[1] + left * steps[2]
    windows = runs.index_select(0, first).as_strided((n, c, h, w), (run, *steps))
    return windows.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
