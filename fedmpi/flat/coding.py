"""How flat rows become bytes: the slots that have a format in theirs, all others as they are.

[numbers that travel as they are | slot in its format | slot in its format ...]      uint8, of known size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedmpi.flat.formats import Format, aligned, feed_back
from fedmpi.flat.layout import Selection, merge_spans
from fedmpi.flat.packing import Packing


@dataclass(frozen=True)
class Wire:
    """What travels in which format; None: as the model holds it. feedback: clients keep what a format left out."""

    up: Format | None = None
    down: Format | None = None
    feedback: bool = True


class Coding:
    """The rows (size,) of a packing, `dtype`, as messages of `nbytes` bytes. formats: slot -> format."""

    def __init__(self, packing: Packing, formats: Mapping[str, Format], dtype: torch.dtype) -> None:
        self.packing, self.dtype = packing, dtype
        self.formats = {name: form for name, form in formats.items() if prod(packing.shapes[name])}
        self._plain = merge_spans(span for name, span in packing.spans.items() if name not in self.formats)
        self._coded: list[tuple[str, tuple[int, int], tuple[int, int], Format]] = []  # span of a row, of a message
        self._bytes = dtype.itemsize * sum(b - a for a, b in self._plain)
        at = aligned(self._bytes)
        for name, form in self.formats.items():
            a, b = packing.spans[name]
            size = form.size(b - a, dtype.itemsize)
            self._coded.append((name, (a, b), (at, at + size), form))
            at += size
        self.nbytes = at  # a multiple of ALIGN
        self.entries = at // dtype.itemsize  # of the packing's type that take as many bytes

    def pack(self, row: Tensor, out: Tensor | None = None) -> Tensor:
        """row (size,) -> (nbytes,) uint8, on the same device; `out`, if it is given."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=row.device) if out is None else out
        plain, at = out[: self._bytes].view(self.dtype), 0
        for a, b in self._plain:
            plain[at : at + b - a] = row[a:b]
            at += b - a
        out[self._bytes : aligned(self._bytes)] = 0
        for _, (a, b), (start, stop), form in self._coded:
            form.encode(row[a:b], out[start:stop])
        return out

    def unpack(self, packed: Tensor, row: Tensor) -> None:
        """packed (nbytes,) -> row (size,)."""
        plain, at = packed[: self._bytes].view(self.dtype), 0
        for a, b in self._plain:
            row[a:b] = plain[at : at + b - a]
            at += b - a
        for _, (a, b), (start, stop), form in self._coded:
            form.decode(packed[start:stop], row[a:b])

    def settle(self, row: Tensor, memory: Mapping[str, tuple[Tensor, Selection | None]]) -> None:
        """row <- unpack(pack(row)) in place, with error feedback where there is memory.

        memory: slot -> what was left out so far, as wide as the slot, or of which the slot has a selection.
        """
        for name, (a, b), _, form in self._coded:
            if name not in memory:
                form.settle(row[a:b])
                continue
            stored, part = memory[name]
            unsent = stored if part is None else part.take(stored)
            flat = unsent.reshape(-1)  # a copy where it is ranges of `stored`
            feed_back(form, row[a:b], flat)
            if part is not None and not part.whole:
                part.put(flat.view(unsent.shape), stored)
