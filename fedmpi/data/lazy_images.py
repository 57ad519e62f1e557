"""Images that are stored as bytes, and converted to normalised floats when a batch is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fedmpi.data.streaming import Stream, concatenate_streams
from fedmpi.data.transforms.base import stored_channels_last, to_memory_format
from fedmpi.data.transforms.color import Normalize
from fedmpi.data.transforms.pipeline import ImagePipeline

MAX_FLOAT_BYTES = 1 << 28  # test images that need at most this many bytes as floats are stored as floats
IMAGES_PER_CHUNK = 1024  # number of images that are converted at once


@final
class LazyImages:
    """Images that behave like a float32 tensor (n, C, H, W) but are stored as bytes; `read` converts a batch.

    Code written for tensors also works on LazyImages: all other attributes and torch functions use the float tensor of
    all images, which is computed anew for each call.
    """

    dtype = torch.float32

    def __init__(
        self,
        stored: Tensor | Stream,
        pipeline: ImagePipeline,
        device: torch.device | None = None,
        channels_last: bool | None = None,
    ) -> None:
        """Store images and the pipeline that converts them.

        Args:
            stored: images (n, c, H, W) or volumes (n, c, D, H, W), as uint8 (in memory or on disk) or floats.
            pipeline: converts stored images to inputs of the model.
            device: device of the inputs; None: that of the stored tensor.
            channels_last: whether inputs are in the memory format channels_last; None: the format of the stored tensor.
        """
        self.stored, self.pipeline = stored, pipeline
        self.device = device or (stored.device if isinstance(stored, Tensor) else torch.device("cpu"))
        self.channels_last = (
            channels_last if channels_last is not None else isinstance(stored, Tensor) and stored_channels_last(stored)
        )

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, rows: Any) -> Any:
        """Return LazyImages for a slice or a vector of row numbers, and a float tensor for any other index."""
        is_selection = isinstance(rows, slice) or (isinstance(rows, Tensor) and rows.ndim == 1)
        return self.with_stored(self.stored[rows]) if is_selection else self.all_inputs()[rows]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.all_inputs(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def floats(x: Any) -> Any:
            return (
                [floats(each) for each in x] if isinstance(x, (list, tuple)) else getattr(x, "all_inputs", lambda: x)()
            )

        return function(*map(floats, args), **{name: floats(x) for name, x in (kwargs or {}).items()})

    @cached_property
    def shape(self) -> torch.Size:
        """The shape (n, C, H, W) of all images after conversion to inputs of the model, without random transforms."""
        return torch.Size([len(self), *self.pipeline.output_shape(tuple(self.stored.shape[1:]))])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def _version(self) -> int:
        return self.stored._version if isinstance(self.stored, Tensor) else 0

    def read(self, rows: Tensor, u: Tensor | None = None) -> Tensor:
        """Return the images with these row numbers as inputs of the model, (B, C, H, W) float32.

        Args:
            rows: row numbers, (B,).
            u: random numbers in [0, 1) for augmentation, (B, pipeline.random_numbers); None (used in evaluations): no
                random transform is applied.
        """
        return self.to_inputs(self.read_stored(rows), u)

    def read_stored(self, rows: Tensor) -> Tensor:
        """Return copies of the stored images with these row numbers, (B, c, H, W), without converting them.

        Images from disk are in pinned memory if the device is a GPU, so that the copy to the GPU can be asynchronous.
        """
        if isinstance(self.stored, Stream):
            read = self.stored.read(rows)
            return read.pin_memory() if self.device.type == "cuda" else read
        if self.channels_last and self.stored.ndim == 4:
            return self.stored.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
        return self.stored.index_select(0, rows)

    def to_inputs(self, raw: Tensor, u: Tensor | None) -> Tensor:
        """Convert images from `read_stored` to inputs of the model, (B, C, H, W); see `read` for u."""
        stored = to_memory_format(raw.to(self.device, non_blocking=True), self.channels_last)
        return to_memory_format(self.pipeline(stored, u), self.channels_last)

    def all_inputs(self) -> Tensor:
        """Return all images as inputs of the model, one float32 tensor (n, C, H, W), without augmentation."""
        out = to_memory_format(torch.empty(self.shape, device=self.device), self.channels_last)
        for start in range(0, len(self), IMAGES_PER_CHUNK):
            rows = torch.arange(start, min(start + IMAGES_PER_CHUNK, len(self)), device=self.device)
            out[start : start + IMAGES_PER_CHUNK] = self.read(rows)
        return out

    def to(self, device: torch.device | str, channels_last: bool) -> LazyImages:
        """Return these images with inputs on the given device and in the given memory format."""
        stored = self.stored
        if isinstance(stored, Tensor):
            stored = to_memory_format(stored.to(device), channels_last)
        return LazyImages(stored, self.pipeline, torch.device(device), channels_last)

    def with_stored(self, stored: Tensor | Stream) -> LazyImages:
        """Return LazyImages for other stored images, with this object's pipeline, device and memory format."""
        return LazyImages(stored, self.pipeline, self.device, self.channels_last)


def make_lazy_images(
    images: np.ndarray | Tensor | Stream,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    channels: int | None = None,
) -> LazyImages:
    """Return images that are normalised when they are read: (v / 255 - mean) / std, or (v - mean) / std for floats.

    Args:
        images: (n, c, H, W), uint8 or float32 in 0..1.
        mean: mean of pixels in 0..1, one number or one per channel; None: 0.
        std: standard deviation of pixels in 0..1, one number or one per channel; None: 1.
        channels: the number of channels of the inputs; if c is 1, the stored channel is repeated. None: c.
    """
    stored = torch.from_numpy(np.ascontiguousarray(images)) if isinstance(images, np.ndarray) else images
    has_statistics = mean is not None or std is not None
    normal = Normalize(mean=tuple(mean or (0.0,)), std=tuple(std or (1.0,))) if has_statistics else None
    is_bytes, channels = stored.dtype == torch.uint8, channels or stored.shape[1]
    return LazyImages(stored, ImagePipeline(bytes=is_bytes, unit=not is_bytes, normal=normal, channels=channels))


def concatenate_samples(parts: Sequence[Tensor | LazyImages]) -> Tensor | LazyImages:
    """Concatenate samples; the result remains on disk if all parts are on disk."""
    first = parts[0]
    if isinstance(first, LazyImages):
        stored = [part.stored for part in parts if isinstance(part, LazyImages)]
        streams = [each for each in stored if isinstance(each, Stream)]
        if len(streams) == len(stored):
            return first.with_stored(concatenate_streams(streams))
        return first.with_stored(torch.cat([each if isinstance(each, Tensor) else each.read_all() for each in stored]))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])
