"""Compressed formats for the large slots of uploads, and the encoding of rows that contain such slots.

    fp32   the values, unchanged
    bf16   2 bytes per entry: 8 bits of mantissa, the range of float32
    fp16   2 bytes per entry: 11 bits of mantissa, up to 65,504; larger values become infinite
    int8   1 byte per entry and 4 per block of BLOCK entries:   q = round(x / a),   a = max |x| / 127 in the block

All formats round to nearest (ties to even) and use no random numbers, so the bytes are a function of the values.
Decoded values remain the same if they are encoded and decoded again. A value that is nan or infinite remains so in the
16-bit formats; in int8, its whole block becomes nan.

Dettmers. 8-Bit Approximations for Parallelism in Deep Learning. ICLR 2016. https://arxiv.org/abs/1511.04561
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from fedmpi.flat.layout import merge_spans
from fedmpi.flat.packing import Packing

BLOCK = 1024  # entries that share a scale; scales add 0.4 % to the bytes, and an outlier affects only its own block
ALIGN = 8  # bytes; each part of a message ends at a multiple, so that the next part may have any type
MIN_SCALE = 2.0**-126  # the smallest scale; below it float32 loses precision, and all values of the block become 0
ZEROED_BITS = 7  # number of low mantissa bits of a scale that are 0, so that q a is exact for |q| <= 127


class Format(ABC):
    """A lossy encoding of n numbers; the number of bytes depends only on n."""

    name: str
    # Whether the format suits only changes of the model, which are small compared with its values.
    changes_only: ClassVar[bool] = False

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the number of bytes that n encoded numbers take, rounded up to a multiple of ALIGN."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor) -> None:
        """Encode x, (n,) float32 or float64, into `out`, (size(n),) uint8 on the same device."""

    @abstractmethod
    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Decode `packed`, (size(n),) uint8, into `out`, (n,)."""


@dataclass(frozen=True)
class HalfPrecision(Format):
    """The formats bf16 and fp16, selected by `name`."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of the encoded numbers."""
        return torch.bfloat16 if self.name == "bf16" else torch.float16

    def size(self, n: int) -> int:
        return round_up_to_alignment(2 * n)

    def encode(self, x: Tensor, out: Tensor) -> None:
        _view_as(out, 0, len(x), self.dtype).copy_(x)
        out[2 * len(x) :] = 0

    def decode(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(_view_as(packed, 0, len(out), self.dtype))


@dataclass(frozen=True)
class Int8(Format):
    """The format int8: blocks of 8-bit integers, with one scale per block, stored as [scales | integers]."""

    name: str = "int8"
    changes_only = True

    def size(self, n: int) -> int:
        return round_up_to_alignment(4 * -(-n // BLOCK) + n)

    def encode(self, x: Tensor, out: Tensor) -> None:
        n = len(x)
        scales, integers = self._scales_and_integers(out, n)
        out[4 * len(scales) + n :] = 0
        offset = 0
        for rows, q in zip(_split_into_blocks(x.float()), _split_into_blocks(integers), strict=True):
            low, high = rows.aminmax(dim=1)
            scale = _block_scales(torch.maximum(-low, high))
            scales[offset : offset + len(rows)] = scale
            offset += len(rows)
            # Values that are not finite have no integer: the scale of their block is nan, and its integers are 0.
            divisor = torch.where(scale == 0, 1, scale)[:, None]
            q.copy_((rows / divisor).round_().nan_to_num_(nan=0, posinf=0, neginf=0))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        scales, integers = self._scales_and_integers(packed, len(out))
        offset = 0
        for rows, q in zip(_split_into_blocks(out), _split_into_blocks(integers), strict=True):
            rows.copy_(q.float().mul_(scales[offset : offset + len(rows), None]))
            offset += len(rows)

    def _scales_and_integers(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        blocks = -(-n // BLOCK)
        return _view_as(packed, 0, blocks, torch.float32), _view_as(packed, 4 * blocks, n, torch.int8)


class RowCodec:
    """Encodes the rows of a packing, (size,) of type `dtype`, as messages of `nbytes` bytes, and decodes them.

    Layout of a message:   [all other slots, unchanged | encoded slot | encoded slot | ...]      uint8
    """

    def __init__(self, packing: Packing, coded: Mapping[str, Format], dtype: torch.dtype) -> None:
        """Plan the layout of messages; `coded` maps the name of each slot to be encoded to its format."""
        self.dtype = dtype
        self.formats = {name: fmt for name, fmt in coded.items() if prod(packing.shapes[name])}
        self._plain = merge_spans(span for name, span in packing.spans.items() if name not in self.formats)
        self._bytes = dtype.itemsize * sum(b - a for a, b in self._plain)
        self._coded: list[tuple[slice, slice, Format]] = []  # range in a row, range in a message
        offset = round_up_to_alignment(self._bytes)
        for name, fmt in self.formats.items():
            a, b = packing.spans[name]
            self._coded.append((slice(a, b), slice(offset, offset + fmt.size(b - a)), fmt))
            offset += fmt.size(b - a)
        self.nbytes = offset  # a multiple of ALIGN
        self.num_entries = offset // dtype.itemsize  # the size of a message, in entries of type dtype

    def encode(self, row: Tensor, out: Tensor) -> Tensor:
        """Encode a row (size,) into `out`, (nbytes,) uint8 on the same device, and return `out`."""
        out[: self._bytes].view(self.dtype).copy_(torch.cat([row[a:b] for a, b in self._plain]))
        out[self._bytes : round_up_to_alignment(self._bytes)] = 0
        for row_range, message_range, fmt in self._coded:
            fmt.encode(row[row_range], out[message_range])
        return out

    def decode(self, packed: Tensor, row: Tensor) -> None:
        """Decode a message (nbytes,) into a row (size,)."""
        sizes = [b - a for a, b in self._plain]
        for (a, b), part in zip(self._plain, packed[: self._bytes].view(self.dtype).split(sizes), strict=True):
            row[a:b] = part
        for row_range, message_range, fmt in self._coded:
            fmt.decode(packed[message_range], row[row_range])

    def round_trip(self, row: Tensor) -> None:
        """Encode and decode a row in place, so that it contains the values that a receiver would get."""
        for row_range, message_range, fmt in self._coded:
            packed = torch.empty(message_range.stop - message_range.start, dtype=torch.uint8, device=row.device)
            fmt.encode(row[row_range], packed)
            fmt.decode(packed, row[row_range])


def round_up_to_alignment(size: int) -> int:
    """Return the size rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def _view_as(packed: Tensor, start: int, n: int, dtype: torch.dtype) -> Tensor:
    """View the bytes from `start` on as n numbers of type `dtype`; `start` must be a multiple of the type's size."""
    return packed[start : start + n * dtype.itemsize].view(dtype)


def _split_into_blocks(x: Tensor) -> list[Tensor]:
    """Return views of x (n,): a matrix with one complete block per row, and the remaining entries as one row."""
    full = len(x) // BLOCK * BLOCK
    return [part for part in (x[:full].view(-1, BLOCK), x[full:].view(1, -1)) if part.numel()]


def _block_scales(largest: Tensor) -> Tensor:
    """Return the scale a = max |x| / 127 of each block, (blocks,) float32; `largest` holds the max |x| of each block.

    Scales are rounded up to 17 significant bits; a scale below MIN_SCALE becomes 0.
    """
    scale = largest / 127
    mask = (1 << ZEROED_BITS) - 1
    rounded_up = ((scale.view(torch.int32) + mask) & ~mask).view(torch.float32)
    return torch.where(scale.isfinite(), torch.where(scale < MIN_SCALE, 0, rounded_up), torch.nan)
