"""Numbers as bytes: the formats in which uploads of the model's size may travel, and rows that have such slots.

    fp32   as the model holds them
    bf16   2 bytes an entry: 8 bits of mantissa, the range of float32
    fp16   2 bytes an entry: 11 bits of mantissa, up to 65,504; what is larger becomes infinite
    int8   1 byte an entry and 4 for each block of BLOCK:   q = round(x / a),   a = max |x| / 127 in the block
    topk   8 bytes for each of the k = round(fraction n) entries of the largest |x|; the others arrive as 0
A format rounds to nearest (even) and draws nothing, so its bytes are a function of its numbers. What has gone through
one goes through once more without change. What is not finite stays not finite, in int8 the whole block with it.

Seide et al. 1-Bit Stochastic Gradient Descent. Interspeech 2014; Dettmers. 8-Bit Approximations for Parallelism in Deep
Learning. ICLR 2016. https://arxiv.org/abs/1511.04561; Stich et al. Sparsified SGD with Memory. NeurIPS 2018.
https://arxiv.org/abs/1809.07599
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from fedmpi.flat.layout import Selection, merge_spans
from fedmpi.flat.packing import Packing

BLOCK = 1024  # entries that share a scale: 0.4 % more bytes, and one outlier spoils no more than these
ALIGN = 8  # bytes: whatever lies behind a part of a message may be of any type
TINY = 2.0**-126  # the smallest scale: below it float32 thins out, and the block becomes 0
LOW_BITS = 7  # of a scale's mantissa that are 0, so that q a (|q| <= 127) is exact


class Format(ABC):
    """n numbers <-> a known number of bytes."""

    name: ClassVar[str]
    # Whether it takes changes alone: what it leaves out of one, a later one brings. Of a value nothing would.
    changes_only: ClassVar[bool]

    @abstractmethod
    def size(self, n: int, itemsize: int) -> int:
        """Bytes of n numbers that take `itemsize` bytes each in memory; a multiple of ALIGN."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write numbers x, (n,) float32 or float64, in this format into out, (size,) uint8 on the same device."""

    @abstractmethod
    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Write the n numbers that `packed`, (size,) uint8, holds in this format into out, (n,)."""

    def __str__(self) -> str:
        return self.name

    def settle(self, x: Tensor) -> None:
        """x <- decode(encode(x)), in place."""
        packed = torch.empty(self.size(len(x), x.element_size()), dtype=torch.uint8, device=x.device)
        self.encode(x, packed)
        self.decode(packed, x)


@dataclass(frozen=True)
class Half(Format):
    """bf16 or fp16."""

    name: str  # type: ignore[misc]
    changes_only = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.name == "bf16" else torch.float16

    def size(self, n: int, itemsize: int) -> int:
        return aligned(2 * n)

    def encode(self, x: Tensor, out: Tensor) -> None:
        _part(out, 0, len(x), self.dtype).copy_(x)
        out[2 * len(x) :] = 0

    def decode(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(_part(packed, 0, len(out), self.dtype))


@dataclass(frozen=True)
class Int8(Format):
    """Blocks of 8-bit integers, each with its scale:  [scales | integers]."""

    name = "int8"
    changes_only = True

    def size(self, n: int, itemsize: int) -> int:
        return aligned(4 * -(-n // BLOCK) + n)

    def encode(self, x: Tensor, out: Tensor) -> None:
        n = len(x)
        scales, integers = self._parts(out, n)
        out[4 * len(scales) + n :] = 0
        at = 0
        for rows, q in zip(_rows(x.float()), _rows(integers), strict=True):
            low, high = rows.aminmax(dim=1)
            scale = _scale(torch.maximum(-low, high))
            scales[at : at + len(rows)] = scale
            at += len(rows)
            # What is not finite has no integer. In its block the scale is nan, and says so; the integers are 0.
            divisor = torch.where(scale == 0, 1, scale)[:, None]
            q.copy_((rows / divisor).round_().nan_to_num_(nan=0, posinf=0, neginf=0))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        scales, integers = self._parts(packed, len(out))
        at = 0
        for rows, q in zip(_rows(out), _rows(integers), strict=True):
            rows.copy_(q.float().mul_(scales[at : at + len(rows), None]))
            at += len(rows)

    def _parts(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        blocks = -(-n // BLOCK)
        return _part(packed, 0, blocks, torch.float32), _part(packed, 4 * blocks, n, torch.int8)


@dataclass(frozen=True)
class TopK(Format):
    """The largest entries with their places:  [values | places], places ascending; of equal ones the first."""

    fraction: float
    name = "topk"
    changes_only = True

    def __str__(self) -> str:
        return f"topk of {self.fraction:g}"

    def kept(self, n: int) -> int:
        """k, of n entries."""
        return min(max(round(self.fraction * n), 1), n)

    def size(self, n: int, itemsize: int) -> int:
        return aligned(self.kept(n) * (itemsize + 4))

    def encode(self, x: Tensor, out: Tensor) -> None:
        values, places = self._parts(out, x)
        chosen = largest(x, len(values))
        torch.index_select(x, 0, chosen, out=values)
        places.copy_(chosen)
        out[len(values) * (x.element_size() + 4) :] = 0

    def decode(self, packed: Tensor, out: Tensor) -> None:
        values, places = self._parts(packed, out)
        out.zero_().index_copy_(0, places.long(), values)

    def _parts(self, packed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.kept(len(x))
        return _part(packed, 0, k, x.dtype), _part(packed, k * x.element_size(), k, torch.int32)


def largest(x: Tensor, k: int) -> Tensor:
    """Places of the k entries of the largest |x|, ascending; of equal ones the first. What is not finite is largest.

    Which of equal entries torch.topk takes is not said; how large the k-th is does not depend on it.
    """
    if x.is_cuda:  # there sorting is fast, deterministic, and does not make the host wait for how many there are
        size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return size.sort(descending=True, stable=True).indices[:k].sort().values
    if int(x.count_nonzero()) <= k:  # it went through the format already
        above, level = x != 0, x == 0
    else:
        size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        least = size.kthvalue(len(x) - k + 1).values
        above, level = size > least, size == least
    first = above.nonzero().flatten()
    return torch.cat([first, level.nonzero().flatten()[: k - len(first)]]).sort().values


def feed_back(form: Format, x: Tensor, unsent: Tensor) -> None:
    """Error feedback, in place:   v = x + e,   x <- decode(encode(v)),   e <- v - x.

    Where x then is not finite, e stays as it was: who sent that is refused. x, unsent (n,).
    Seide et al. 2014; Karimireddy et al. Error Feedback Fixes SignSGD. ICML 2019. https://arxiv.org/abs/1901.09847
    """
    v = unsent + x
    x.copy_(v)
    form.settle(x)
    v.sub_(x)
    unsent.copy_(torch.where(v.isfinite().all(), v, unsent))


class Coding:
    """The rows (size,) of a packing, `dtype`, as messages of `nbytes` bytes. formats: slot -> format.

    [numbers that travel as they are | slot in its format | slot in its format ...]      uint8
    """

    def __init__(self, packing: Packing, formats: Mapping[str, Format], dtype: torch.dtype) -> None:
        self.packing, self.dtype = packing, dtype
        self.formats = {name: form for name, form in formats.items() if prod(packing.shapes[name])}
        self._plain = merge_spans(span for name, span in packing.spans.items() if name not in self.formats)
        self._bytes = dtype.itemsize * sum(b - a for a, b in self._plain)
        self._coded: list[tuple[str, slice, slice, Format]] = []  # slot, where in a row, where in a message
        at = aligned(self._bytes)
        for name, form in self.formats.items():
            a, b = packing.spans[name]
            size = form.size(b - a, dtype.itemsize)
            self._coded.append((name, slice(a, b), slice(at, at + size), form))
            at += size
        self.nbytes = at  # a multiple of ALIGN
        self.entries = at // dtype.itemsize  # of the packing's type that take as many bytes

    def pack(self, row: Tensor, out: Tensor) -> Tensor:
        """row (size,) -> out (nbytes,) uint8, on the same device."""
        out[: self._bytes].view(self.dtype).copy_(torch.cat([row[a:b] for a, b in self._plain]))
        out[self._bytes : aligned(self._bytes)] = 0
        for _, place, there, form in self._coded:
            form.encode(row[place], out[there])
        return out

    def unpack(self, packed: Tensor, row: Tensor) -> None:
        """packed (nbytes,) -> row (size,)."""
        sizes = [b - a for a, b in self._plain]
        for (a, b), part in zip(self._plain, packed[: self._bytes].view(self.dtype).split(sizes), strict=True):
            row[a:b] = part
        for _, place, there, form in self._coded:
            form.decode(packed[there], row[place])

    def settle(self, row: Tensor, memory: Mapping[str, tuple[Tensor, Selection | None]]) -> None:
        """row <- unpack(pack(row)) in place, with error feedback where there is memory.

        memory: slot -> what was left out so far, as wide as the slot, or of which the slot has a selection.
        """
        for name, place, _, form in self._coded:
            if name not in memory:
                form.settle(row[place])
                continue
            stored, part = memory[name]
            unsent = stored if part is None else part.take(stored)
            flat = unsent.reshape(-1)  # a copy where it is ranges of `stored`
            feed_back(form, row[place], flat)
            if part is not None and not part.whole:
                part.put(flat.view(unsent.shape), stored)


def aligned(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def _part(packed: Tensor, start: int, n: int, dtype: torch.dtype) -> Tensor:
    """n numbers of another type in the bytes from `start` on, which is a multiple of their size."""
    return packed[start : start + n * dtype.itemsize].view(dtype)


def _rows(x: Tensor) -> list[Tensor]:
    """Return views of x (n,): a matrix with one row for each complete block, then the remaining entries as one row."""
    full = len(x) // BLOCK * BLOCK
    return [part for part in (x[:full].view(-1, BLOCK), x[full:].view(1, -1)) if part.numel()]


def _scale(most: Tensor) -> Tensor:
    """a: max |x| / 127 of each block, rounded up to 17 bits; 0 below TINY. (blocks,) float32"""
    scale = most / 127
    low = (1 << LOW_BITS) - 1
    up = ((scale.view(torch.int32) + low) & ~low).view(torch.float32)
    return torch.where(scale.isfinite(), torch.where(scale < TINY, 0, up), torch.nan)
