"""Convert arrays of images, volumes or features to tensors: reorder axes, scale and normalise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.data.lazy_images import LazyImages, make_lazy_images
from fedmpi.data.sources.images.decode import PixelRange, check_pixel_range_option, scale_to_unit_range
from fedmpi.data.sources.source_utils import check_finite, missing_targets_allowed
from fedmpi.data.streaming import Hdf5Arrays, Hdf5Source, Stream

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True)
class ArrayOptions:
    """The options for converting an array of samples to the inputs of a model.

    Attributes:
        axes: the order of the axes of images or volumes: N (samples), C (channels), D, H and W; N may be omitted. None:
            the axes are derived from the shape (`_resolve_axes`).
        pixel_range: (low, high), the values that are mapped to 0 and 1, or "file", to use the smallest and largest
            value of each image or volume. None: uint8 is divided by 255, and other types are unchanged.
        mean, std: the values with which samples are normalised after scaling, one per channel (or feature).
    """

    axes: str | None = None
    pixel_range: PixelRange | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_pixel_range_option(self.pixel_range)


def convert_samples(
    array: np.ndarray | Hdf5Arrays, options: ArrayOptions, name: str, file: Path, grey: bool = True
) -> Tensor | LazyImages:
    """Convert an array of samples to the inputs of a model.

    Args:
        array: (n, ...) numbers; images or volumes if it has four or five axes. An Hdf5Arrays object remains on disk.
        options: the order of the axes, the scaling and the normalisation.
        name: the name of the array, for messages.
        file: the file of the array, for messages.
        grey: whether an array (n, H, W) always contains images with one channel; if false, it contains images only if
            `options` sets the axes or a pixel range.

    Returns:
        Images (n, C, H, W) or volumes (n, C, D, H, W), as LazyImages if they are uint8 or have a pixel range, otherwise
        as a float32 tensor. An array with another number of axes becomes a float32 tensor of the same shape.

    Raises:
        UserError: a number is not finite, or the options do not fit the array.
    """
    key = "axes" if options.axes is not None else "pixel_range" if options.pixel_range else None
    spatial = array.ndim in (4, 5) or (array.ndim == 3 and (grey or key is not None))
    if not spatial and key is not None:
        raise UserError(
            f"{file}: data.{key} is for images and volumes, but {name} has the shape {array.shape}; remove data.{key}"
        )
    axes = _resolve_axes(array.shape, options.axes, name, file) if spatial else ""
    if isinstance(array, Hdf5Arrays):
        return _normalize(Stream(Hdf5Source(array, axes)), options)
    if options.pixel_range is not None:
        try:
            array = np.stack([scale_to_unit_range(row, options.pixel_range) for row in array])
        except ValueError as error:
            raise UserError(f"{file}: {name}: {error}; correct the value or drop the row") from error
    elif not spatial or array.dtype != np.uint8:
        divisor = np.float32(255 if array.dtype == np.uint8 else 1)
        with np.errstate(over="ignore"):  # `check_finite` reports values beyond the range of float32 with their row
            array = array.astype(np.float32) / divisor
    pixels = array.dtype == np.uint8 or options.pixel_range is not None
    x = to_channels_first(torch.from_numpy(array), axes) if spatial else torch.from_numpy(array)
    normalised = _normalize(x, options, pixels)
    return normalised if isinstance(normalised, LazyImages) else check_finite(normalised, name, file)


def _normalize(x: Tensor | Stream, options: ArrayOptions, pixels: bool = True) -> Tensor | LazyImages:
    """Return (x - mean) / std by channel, as LazyImages if x contains pixels.

    pixels: whether x contains pixels: uint8, or floats in 0..1.
    """
    for name, numbers in (("mean", options.mean), ("std", options.std)):
        if numbers is not None and len(numbers) != x.shape[1]:
            raise UserError(
                f"data.{name} has {len(numbers)} numbers, but x has {x.shape[1]} channels; set one number per channel"
            )
    if isinstance(x, Stream) or pixels:
        return make_lazy_images(x, options.mean, options.std, x.shape[1])
    each = (-1, *[1] * (x.ndim - 2))
    x = x if options.mean is None else x - torch.tensor(options.mean).view(each)
    return x if options.std is None else x / torch.tensor(options.std).view(each)


def _resolve_axes(shape: Sequence[int], axes: str | None, name: str, file: Path) -> str:
    """Return the axes of an array: those of the config, or those that can be derived from the shape.

    They can be derived if exactly one of the first and last axes of a row has 1 or 3 entries; this axis is C.
    """
    has = f"{file}: {name} has the shape {tuple(shape)}"
    if axes is None:
        space = "HW" if len(shape) < 5 else "DHW"
        is_first, is_last = shape[1] in (1, 3), shape[-1] in (1, 3)
        if len(shape) > 3 and is_first == is_last:
            raise UserError(
                f"{has}, so it is ambiguous which axis contains the channels; set data.axes to NCHW or NHWC, or to "
                "NDHW "
                "for volumes with one channel"
            )
        return "NHW" if len(shape) == 3 else f"NC{space}" if is_first else f"N{space}C"
    order = f"N{axes.removeprefix('N')}"
    if not {*"NHW"} <= {*order} <= {*"NCDHW"} or len({*order}) < len(order):
        allowed = "must contain the letters N, C, D, H and W in the order of the array's axes, such as NHWC or NDHW"
        raise UserError(f"data.axes: {axes!r} is not allowed; {allowed}")
    if len(order) != len(shape):
        raise UserError(f"{has}, which does not match data.axes: {axes}; correct data.axes")
    return order


def to_channels_first(x: Array, axes: str) -> Array:
    """Reorder an array with the given axes to (N, C, H, W) or (N, C, D, H, W); add a C axis if it has none."""
    order = [axes.index(axis) for axis in "NCDHW" if axis in axes]
    x = x.permute(order) if isinstance(x, Tensor) else x.transpose(order)
    return x if "C" in axes else x[:, None]


def convert_targets(array: np.ndarray, name: str, file: Path) -> Tensor:
    """Convert targets to int64 class numbers (n, ...) if the array contains integers, otherwise to float32."""
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.dtype.kind in "iub":
        if int(array.min()) < 0 and array.ndim == 1:
            row = int((array < 0).argmax())
            raise UserError(f"{file}: {name} contains the label {array[row]} in row {row}; labels must be 0, 1, 2, ...")
        return torch.from_numpy(array.astype(np.int64))
    return check_finite(torch.from_numpy(array.astype(np.float32)), name, file, nan=missing_targets_allowed())
