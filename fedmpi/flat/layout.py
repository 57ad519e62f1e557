"""Where each tensor lies in a flat vector, and to which group of the model it belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HEAD, NORM, BODY, ATOM, COEF = "head", "norm", "body", "atom", "coef"
EVERYTHING = "*"  # all groups


@dataclass(frozen=True)
class Segment:
    """One tensor's place in a flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    group: str  # body | norm | head | atom | coef (a model may declare more)
    channels_last: bool = False  # stored as an O,H,W,I block

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """This segment of a flat vector, in the tensor's own shape; no copy."""
        return self.shaped(flat[self.start : self.stop])

    def shaped(self, piece: Tensor) -> Tensor:
        """A piece of a flat vector, (stop - start,), in the tensor's own shape; no copy."""
        if not self.channels_last:
            return piece.view(self.shape)
        o, i, h, w = self.shape
        return piece.view(o, h, w, i).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and groups of a flat vector of `size` entries, one segment after the other."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def groups(self) -> set[str]:
        return {s.group for s in self.segments}

    def select(self, groups: Collection[str]) -> Selection:
        """What belongs to these groups."""
        return self.entries([s for s in self.segments if s.group in groups])

    def entries(self, segments: Iterable[Segment]) -> Selection:
        """What belongs to these segments, in ascending order."""
        return Selection(self.size, merge_spans((s.start, s.stop) for s in segments))

    def part(self, groups: Collection[str]) -> Layout:
        """The layout of the vector that `select(groups)` takes out."""
        segments: list[Segment] = []
        for s in self.segments:
            if s.group in groups:
                segments.append(replace(s, start=segments[-1].stop if segments else 0))
        return Layout(tuple(segments))

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """name -> view of `flat` in the tensor's own shape."""
        return {s.name: s.view(flat) for s in self.segments}

    def sha256(self, flat: Tensor) -> str:
        """SHA-256 of the values as little-endian bytes, tensor after tensor in state_dict order and row-major."""
        digest, flat = hashlib.sha256(), flat.detach().cpu()  # one copy, not one for each tensor
        for s in self.segments:
            values = s.view(flat).contiguous()
            digest.update(values.view(-1).view(torch.uint8).numpy().data)  # numpy knows no bfloat16
        return digest.hexdigest()


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ascending spans that follow one another; leave out empty ones.

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
    """Copies some ranges of a flat vector into one contiguous vector of `size` entries, and back."""

    def __init__(self, full_size: int, ranges: Iterable[tuple[int, int]]) -> None:
        self.full_size, self.ranges = full_size, tuple(ranges)  # ascending
        self.size = sum(b - a for a, b in self.ranges)
        self.whole = self.size == full_size

    def take(self, flat: Tensor) -> Tensor:
        """The selected entries of `flat` (..., full size): a view where they are one range, else a copy."""
        _check(flat, self.full_size)
        if len(self.ranges) == 1:
            a, b = self.ranges[0]
            return flat[..., a:b]
        return torch.cat([flat[..., a:b] for a, b in self.ranges], -1) if self.ranges else flat[..., :0]

    def put(self, selected: Tensor, flat: Tensor) -> None:
        """Write the selected entries (..., size) into `flat`."""
        _check(selected, self.size)
        at = 0
        for a, b in self.ranges:
            flat[..., a:b] = selected[..., at : at + b - a]
            at += b - a


def _check(x: Tensor, size: int) -> None:
    """ValueError for another size: a slice would be cut short, one entry spread over all."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"a tensor of shape {tuple(x.shape)} where {size} entries are needed")
