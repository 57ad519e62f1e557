"""The layout of a flat vector: the position and the layout group of each tensor in the vector."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HEAD, NORM, BODY, ATOM, COEF = "head", "norm", "body", "atom", "coef"
ALL_GROUPS = "*"  # all groups


@dataclass(frozen=True)
class Segment:
    """The position, shape and layout group of one tensor in a flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: str  # body | norm | head | atom | coef (a model may declare more)
    channels_last: bool = False  # whether a convolution weight is stored as an O,H,W,I block

    @property
    def stop(self) -> int:
        """The index after the segment's last entry in the flat vector."""
        return self.start + torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return a view of this segment of a flat vector, in the shape of the tensor."""
        return self.reshape_entries(flat[self.start : self.stop])

    def reshape_entries(self, piece: Tensor) -> Tensor:
        """Return a view of `piece`, the entries (stop - start,) of this segment, in the shape of the tensor."""
        if not self.channels_last:
            return piece.view(self.shape)
        o, i, h, w = self.shape
        return piece.view(o, h, w, i).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Layout:
    """The names, shapes and layout groups of the tensors that make up a flat vector, in order and without gaps."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """The number of entries of the vector."""
        return self.segments[-1].stop if self.segments else 0

    def groups(self) -> set[str]:
        """Return the names of the layout groups."""
        return {s.group for s in self.segments}

    def select(self, groups: Collection[str]) -> Selection:
        """Return the selection of the vector's entries that belong to these layout groups."""
        return self.select_segments([s for s in self.segments if s.group in groups])

    def select_segments(self, segments: Iterable[Segment]) -> Selection:
        """Return the selection of the vector's entries that belong to these segments, given in ascending order."""
        return Selection(self.size, merge_spans((s.start, s.stop) for s in segments))

    def sub_layout(self, groups: Collection[str]) -> Layout:
        """Return the layout of the shorter vector that `select(groups)` extracts."""
        segments: list[Segment] = []
        for s in self.segments:
            if s.group in groups:
                segments.append(replace(s, start=segments[-1].stop if segments else 0))
        return Layout(tuple(segments))

    def named_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return, by tensor name, views of the flat vector in the shapes of the tensors."""
        return {s.name: s.view(flat) for s in self.segments}

    def sha256(self, flat: Tensor) -> str:
        """Return the SHA-256 of all values: tensor by tensor in state_dict order, row-major, little-endian."""
        digest, flat = hashlib.sha256(), flat.detach().cpu()  # one copy instead of one for each tensor
        for s in self.segments:
            values = s.view(flat).contiguous()
            digest.update(values.view(-1).view(torch.uint8).numpy().data)  # numpy does not support bfloat16
        return digest.hexdigest()


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans and drop empty ones; spans are pairs (first, end), in ascending order.

    >>> merge_spans([(0, 2), (2, 5), (5, 5), (7, 8)])
    [(0, 5), (7, 8)]
    """
    merged: list[tuple[int, int]] = []
    for a, b in spans:
        if merged and merged[-1][1] == a and a < b:
            merged[-1] = (merged[-1][0], b)
        elif a < b:
            merged.append((a, b))
    return merged


class Selection:
    """Selects ranges of a flat vector, and copies their entries to a contiguous vector of `size` entries and back."""

    def __init__(self, full_size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Select ranges (first, end) of a vector with `full_size` entries, in ascending order."""
        self.full_size, self.ranges = full_size, tuple(ranges)
        self.size = sum(b - a for a, b in self.ranges)
        self.selects_all = self.size == full_size

    def take(self, flat: Tensor) -> Tensor:
        """Return the selected entries of `flat` (..., full_size): a view if they form one range, otherwise a copy."""
        _check_size(flat, self.full_size)
        if len(self.ranges) == 1:
            a, b = self.ranges[0]
            return flat[..., a:b]
        return torch.cat([flat[..., a:b] for a, b in self.ranges], -1) if self.ranges else flat[..., :0]

    def put(self, selected: Tensor, flat: Tensor) -> None:
        """Write `selected` (..., size) into the selected entries of `flat` (..., full_size)."""
        _check_size(selected, self.size)
        offset = 0
        for a, b in self.ranges:
            flat[..., a:b] = selected[..., offset : offset + b - a]
            offset += b - a


def _check_size(x: Tensor, size: int) -> None:
    """Raise ValueError if the last dimension of x does not have this size.

    Slices and assignments would accept a wrong size silently.
    """
    if x.shape[-1:] != (size,):
        raise ValueError(f"expected {size} entries in the last dimension, but the tensor has shape {tuple(x.shape)}")
