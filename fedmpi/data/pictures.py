"""Images that are stored as bytes and become normalised floats when a batch is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fedmpi.data.augment.colour import Normalise
from fedmpi.data.augment.operation import stored_channels_last, to_memory_format
from fedmpi.data.augment.pipeline import ImagePipeline
from fedmpi.data.streaming import Stream, concatenate_streams

FLOATS = 1 << 28  # bytes: test pictures that take no more as floats are kept as such
CHUNK = 1024  # pictures


@final
class Pictures:
    """n samples that stand for a float32 tensor (n, C, H, W), in a quarter of its size; `read` gives rows of it.

    stored: (n, c, H, W) uint8, in memory or on disk, or floats; volumes are (n, c, D, H, W). look: how they become
    inputs. Any other attribute or function of torch works on the whole float tensor, computed for that
    purpose, so that code that changes a source's data need not know how they are stored.
    """

    dtype = torch.float32

    def __init__(
        self,
        stored: Tensor | Stream,
        look: ImagePipeline,
        device: torch.device | None = None,
        blocks: bool | None = None,
    ) -> None:
        """device, blocks: where rows that are read lie, and whether as (n, H, W, C); None: as what is stored."""
        self.stored, self.look = stored, look
        self.device = device or (stored.device if isinstance(stored, Tensor) else torch.device("cpu"))
        self.blocks = blocks if blocks is not None else isinstance(stored, Tensor) and stored_channels_last(stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, rows: Any) -> Any:
        """Pictures, of rows; of anything else the numbers."""
        some = isinstance(rows, slice) or (isinstance(rows, Tensor) and rows.ndim == 1)
        return self.like(self.stored[rows]) if some else self.floats()[rows]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.floats(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def floats(x: Any) -> Any:
            return [floats(each) for each in x] if isinstance(x, (list, tuple)) else getattr(x, "floats", lambda: x)()

        return function(*map(floats, args), **{name: floats(x) for name, x in (kwargs or {}).items()})

    @cached_property
    def shape(self) -> torch.Size:
        """Of all samples as a model sees them at tests."""
        return torch.Size([len(self), *self.look.out(tuple(self.stored.shape[1:]))])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def _version(self) -> int:
        return self.stored._version if isinstance(self.stored, Tensor) else 0

    def read(self, rows: Tensor, u: Tensor | None = None) -> Tensor:
        """(B, C, H, W) float32. u: (B, look.columns) uniform numbers; None: as at tests."""
        return self.shown(self.raw(rows), u)

    def raw(self, rows: Tensor) -> Tensor:
        """Copies of stored rows; of those on disk in pinned memory, from which a GPU copies while the host goes on."""
        if isinstance(self.stored, Stream):
            read = self.stored.read(rows)
            return read.pin_memory() if self.device.type == "cuda" else read
        if self.blocks and self.stored.ndim == 4:
            return self.stored.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
        return self.stored.index_select(0, rows)

    def shown(self, raw: Tensor, u: Tensor | None) -> Tensor:
        """Inputs of the model for stored rows, as `raw` returns them. u: as of `read`."""
        stored = to_memory_format(raw.to(self.device, non_blocking=True), self.blocks)
        return to_memory_format(self.look(stored, u), self.blocks)

    def floats(self) -> Tensor:
        """All samples."""
        out = to_memory_format(torch.empty(self.shape, device=self.device), self.blocks)
        for start in range(0, len(self), CHUNK):
            rows = torch.arange(start, min(start + CHUNK, len(self)), device=self.device)
            out[start : start + CHUNK] = self.read(rows)
        return out

    def to(self, device: torch.device | str, channels_last: bool) -> Pictures:
        stored = self.stored
        if isinstance(stored, Tensor):
            stored = to_memory_format(stored.to(device), channels_last)
        return Pictures(stored, self.look, torch.device(device), channels_last)

    def like(self, stored: Tensor | Stream) -> Pictures:
        return Pictures(stored, self.look, self.device, self.blocks)


def of_bytes(
    images: np.ndarray | Tensor | Stream,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    channels: int | None = None,
) -> Pictures:
    """Pictures that are normalised when they are read: (v / 255 - mean) / std, or (v - mean) / std of floats.

    Args:
        images: (n, c, H, W) uint8, or float32 in 0..1.
        mean, std: of pixels in 0..1, one number or one a channel; None: 0 and 1.
        channels: to which c = 1 is repeated; None: as many as there are.
    """
    stored = torch.from_numpy(np.ascontiguousarray(images)) if isinstance(images, np.ndarray) else images
    given = mean is not None or std is not None
    normal = Normalise(mean=tuple(mean or (0.0,)), std=tuple(std or (1.0,))) if given else None
    is_bytes, channels = stored.dtype == torch.uint8, channels or stored.shape[1]
    return Pictures(stored, ImagePipeline(bytes=is_bytes, unit=not is_bytes, normal=normal, channels=channels))


def stacked(parts: Sequence[Tensor | Pictures]) -> Tensor | Pictures:
    """Samples one part after the other; parts on disk stay there if all of them are."""
    first = parts[0]
    if isinstance(first, Pictures):
        stored = [part.stored for part in parts if isinstance(part, Pictures)]
        streams = [each for each in stored if isinstance(each, Stream)]
        if len(streams) == len(stored):
            return first.like(concatenate_streams(streams))
        return first.like(torch.cat([each if isinstance(each, Tensor) else each.all() for each in stored]))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])
