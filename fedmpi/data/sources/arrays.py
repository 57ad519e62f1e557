"""Images and volumes in one array: which of its axes are channels, and how its numbers are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.data.pictures import Pictures, of_bytes
from fedmpi.data.sources.common import finite, gaps_allowed
from fedmpi.data.sources.pictures.decode import PixelRange, check_range, scale
from fedmpi.data.streaming import ArraySource, StoredArrays, Stream

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True)
class ArrayOptions:
    """How an array of samples becomes what a model sees.

    Attributes:
        axes: of images and volumes: N, the rows, C, D, H and W in the order of the array (N may be left out); None:
            what its shape says, see `_axes_of`.
        pixel_range: (low, high), which become 0 and 1, or "file", the range of each row; None: uint8 is divided by 255,
            other numbers are what they are.
        mean, std: one number a channel (or a feature), by which the numbers are normalised then.
    """

    axes: str | None = None
    pixel_range: PixelRange | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_range(self.pixel_range)


def samples(
    array: np.ndarray | StoredArrays, options: ArrayOptions, name: str, at: Path, grey: bool = True
) -> Tensor | Pictures:
    """What a model sees of an array of samples.

    Args:
        array: (n, ...) numbers; with three to five axes images or volumes. StoredArrays stay on disk.
        name, at: of the array, and its file, for messages.
        grey: whether (n, H, W) are grey images, of one channel; False: only where `options` says axes or a range.

    Returns:
        (n, C, H, W) of images, (n, C, D, H, W) of volumes: Pictures of uint8 or with a pixel range, else a tensor; of
        another number of axes a tensor of the array's shape. Tensors are float32.

    Raises:
        UserError: numbers that are not finite, or options that do not fit the array.
    """
    key = "axes" if options.axes is not None else "pixel_range" if options.pixel_range else None
    spatial = array.ndim in (4, 5) or (array.ndim == 3 and (grey or key is not None))
    if not spatial and key is not None:
        raise UserError(f"{at}: {name} has the shape {array.shape}; data.{key} is for images and volumes: leave it out")
    axes = _axes_of(array.shape, options.axes, name, at) if spatial else ""
    if isinstance(array, StoredArrays):
        return _normalised(Stream(ArraySource(array, axes)), options)
    if options.pixel_range is not None:
        try:
            array = np.stack([scale(row, options.pixel_range) for row in array])
        except ValueError as error:
            raise UserError(f"{at}: {name}: {error}; fill or drop it") from error
    elif not spatial or array.dtype != np.uint8:
        divisor = np.float32(255 if array.dtype == np.uint8 else 1)
        with np.errstate(over="ignore"):  # what float32 has no room for is reported with its row
            array = array.astype(np.float32) / divisor
    pixels = array.dtype == np.uint8 or options.pixel_range is not None
    x = channels_first(torch.from_numpy(array), axes) if spatial else torch.from_numpy(array)
    normalised = _normalised(x, options, pixels)
    return normalised if isinstance(normalised, Pictures) else finite(normalised, name, at)


def _normalised(x: Tensor | Stream, options: ArrayOptions, pixels: bool = True) -> Tensor | Pictures:
    """(x - mean) / std by channel; pixels: x is uint8, or floats in 0..1, and becomes Pictures."""
    for name, numbers in (("mean", options.mean), ("std", options.std)):
        if numbers is not None and len(numbers) != x.shape[1]:
            raise UserError(f"data.{name} has {len(numbers)} numbers; x has {x.shape[1]} channels: give one for each")
    if isinstance(x, Stream) or pixels:
        return of_bytes(x, options.mean, options.std, x.shape[1])
    each = (-1, *[1] * (x.ndim - 2))
    x = x if options.mean is None else x - torch.tensor(options.mean).view(each)
    return x if options.std is None else x / torch.tensor(options.std).view(each)


def _axes_of(shape: Sequence[int], axes: str | None, name: str, at: Path) -> str:
    """The axes of an array of this shape: those that the config names, or what the shape says.

    It does where either the first or the last axis of a row has 1 or 3 entries, which are its channels.
    """
    has = f"{at}: {name} has the shape {tuple(shape)}"
    if axes is None:
        space = "HW" if len(shape) < 5 else "DHW"
        is_first, is_last = shape[1] in (1, 3), shape[-1] in (1, 3)
        if len(shape) > 3 and is_first == is_last:
            raise UserError(f"{has}: say data.axes, such as NCHW, NHWC, or NDHW for volumes of one channel")
        return "NHW" if len(shape) == 3 else f"NC{space}" if is_first else f"N{space}C"
    order = f"N{axes.removeprefix('N')}"
    if not {*"NHW"} <= {*order} <= {*"NCDHW"} or len({*order}) < len(order):
        allowed = "the letters N, C, D, H and W in the order of the array's axes, such as NHWC or NDHW, are needed"
        raise UserError(f"data.axes: {axes!r}; {allowed}")
    if len(order) != len(shape):
        raise UserError(f"{has}, which does not have the axes {axes} (data.axes)")
    return order


def channels_first(x: Array, axes: str) -> Array:
    """(N, C, H, W) or (N, C, D, H, W) of an array with these axes; without C it has one channel."""
    order = [axes.index(axis) for axis in "NCDHW" if axis in axes]
    x = x.permute(order) if isinstance(x, Tensor) else x.transpose(order)
    return x if "C" in axes else x[:, None]


def targets_of(array: np.ndarray, name: str, at: Path) -> Tensor:
    """(n, ...) int64 class numbers, or float32 numbers."""
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.dtype.kind in "iub":
        if int(array.min()) < 0 and array.ndim == 1:
            row = int((array < 0).argmax())
            raise UserError(f"{at}: {name} holds the label {array[row]} in row {row}; 0, 1, 2, ... are allowed")
        return torch.from_numpy(array.astype(np.int64))
    return finite(torch.from_numpy(array.astype(np.float32)), name, at, nan=gaps_allowed())
