"""How an upload row is cut: the small slots, which go to rank 0, and the large ones, which come in pieces or are shared
out in whole blocks of columns (flat/linear.py)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedmpi.flat import linear
from fedmpi.flat.packing import Packing

PIECE = 1 << 21  # the most entries of a large slot that travel as one message, in whole blocks
PIECES = 8  # messages, at least, if it has so many blocks: what is done with one is done while the next one comes


class Cuts:
    """Of one packing. A slot is large if it has more columns than a block."""

    def __init__(self, packing: Packing) -> None:
        self.packing, self.block = packing, linear.block_size()
        spans = packing.spans.items()
        self.large = {name: (a, b - a) for name, (a, b) in spans if b - a > self.block}  # first entry, columns
        self.small = Packing({name: shape for name, shape in packing.shapes.items() if name not in self.large})
        self.runs: list[tuple[int, int]] = []  # the small slots' entries in a row; put together they are `small`
        for name, (a, b) in spans:
            if a == b or name in self.large:
                continue
            if self.runs and self.runs[-1][1] == a:
                self.runs[-1] = (self.runs[-1][0], b)
            else:
                self.runs.append((a, b))

    def small_parts(self, row: Tensor) -> list[Tensor]:
        return [row[a:b] for a, b in self.runs]

    def places(self, small: Tensor) -> list[Tensor]:
        """Where in a row of `small` those parts go."""
        found, at = [], 0
        for a, b in self.runs:
            found.append(small[at : at + b - a])
            at += b - a
        return found

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """(slot, its columns a to b) of all that is large, as it travels."""
        for name, (_, n) in self.large.items():
            size = max(min(PIECE, n // PIECES) // self.block, 1) * self.block
            for a in range(0, n, size):
                yield name, a, min(a + size, n)

    def parts(self, row: Tensor) -> list[Tensor]:
        """All of a row, as it travels."""
        return [*self.small_parts(row), *(self.part(row, *piece) for piece in self.pieces())]

    def part(self, row: Tensor, name: str, a: int, b: int) -> Tensor:
        """The columns a to b of a large slot in a row."""
        start, _ = self.large[name]
        return row[start + a : start + b]

    def share(self, name: str, holder: int, holders: int) -> tuple[int, int]:
        """The columns a to b of a large slot that the holder with this number has."""
        n = self.large[name][1]
        blocks = -(-n // self.block)
        a, b = (min(j * blocks // holders * self.block, n) for j in (holder, holder + 1))
        return a, b
