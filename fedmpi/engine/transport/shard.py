"""One rank's columns of all rows, and what rank 0 may request of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedmpi.engine.transport.gather import GatherContext, close_up, scale
from fedmpi.flat import linear
from fedmpi.method.context import Span

# Requests of rank 0: END, the round is over; SCALE and ONLY change the rows; the others have an answer.
END, COMBINE, GRAM, PRODUCTS, TRIMMED, NORMS, FETCH, SCALE, ONLY = range(9)


class Part(NamedTuple):
    """The columns of a request that a holder has."""

    rows: Tensor  # (m, b - a)
    a: int
    width: int  # columns of the whole slot


class Question(NamedTuple):
    """How a holder computes its answer from its columns and the numbers of the request."""

    answer: Callable[[Part, Tensor], Tensor]
    by_block: int = 0  # 0: a number for each column, in the rows' type; 1, 2: (m,), (m, m) for each block, in float64
    entries: bool = False  # the numbers are entries of a vector, in the rows' type; else float64


QUESTIONS = {
    COMBINE: Question(lambda part, c: linear.combine(part.rows, c, part.a, part.width)),
    GRAM: Question(lambda part, _: linear.gram_blocks(part.rows, part.a, part.width), by_block=2),
    PRODUCTS: Question(lambda part, v: linear.product_parts(part.rows, v, part.a), by_block=1, entries=True),
    TRIMMED: Question(lambda part, trim: linear.trimmed_mean(part.rows, float(trim))),
    NORMS: Question(lambda part, _: linear.block_norms(part.rows), by_block=1),
    FETCH: Question(lambda part, i: part.rows[int(i)]),
}


class Shard:
    """One holder's columns of the large slots, and its answers about them."""

    def __init__(self, context: GatherContext) -> None:
        self.context, self.chunks, self.holders = context, context.chunks, context.comm.alive
        self.me, self.m = self.holders.index(context.comm.rank), len(context.members)
        self.names = list(self.chunks.large)
        self.rows = {}
        for name in self.names:
            a, b = self.chunks.share(name, self.me, len(self.holders))
            self.rows[name] = context.buffers.rows(f"shard {name}", self.m, b - a)

    def parts(self, row: Tensor, name: str) -> list[Tensor]:
        """Return the message of a row to each holder of a large slot: its columns."""
        shares = [self.chunks.share(name, number, len(self.holders)) for number in range(len(self.holders))]
        return [self.chunks.part(row, name, a, b) for a, b in shares]

    def places(self, i: int) -> list[Tensor]:
        """Return memory for this holder's columns of row i."""
        return [rows[i] for rows in self.rows.values() if rows.shape[1]]

    # ---- what is asked of them ----
    def within(self, holder: int, name: str, span: Span) -> Span:
        """Return the part of a span of columns that a holder has."""
        a, b = self.chunks.share(name, holder, len(self.holders))
        return max(a, span[0]), max(max(a, span[0]), min(b, span[1]))

    def answer(self, what: int, name: str, span: Span, numbers: Tensor) -> Tensor:
        """Return this holder's part of the answer. numbers: for its part of the span."""
        a, b = self.within(self.me, name, span)
        first = self.chunks.share(name, self.me, len(self.holders))[0]
        rows, width = self.rows[name][:, a - first : b - first], self.chunks.large[name][1]
        return QUESTIONS[what].answer(Part(rows, a, width), numbers)

    def place(self, what: int, holder: int, name: str, span: Span) -> Tensor:
        """Return memory for a holder's part of the answer, on the communicator's device."""
        (a, b), block, by_block = self.within(holder, name, span), self.chunks.block, QUESTIONS[what].by_block
        like, device = self.context.buffers.like.dtype, self.context.comm.device
        if not by_block:
            return torch.empty(b - a, dtype=like, device=device)
        blocks = -(-b // block) - a // block if a < b else 0
        return torch.empty((blocks, *[self.m] * by_block), dtype=torch.float64, device=device)

    def numbers(self, what: int, count: int) -> Tensor:
        """Return memory for the numbers that go with a request."""
        entries = what in QUESTIONS and QUESTIONS[what].entries
        kind = self.context.buffers.like.dtype if entries else torch.float64
        return torch.empty(count, dtype=kind, device=self.context.comm.device)

    # ---- what becomes of them ----
    def scale(self, place: int, factor: float) -> None:
        """Scale one row: dw <- factor dw."""
        scale(self.rows["dw"][place], factor)

    def only(self, places: Sequence[int]) -> None:
        """Keep only these rows."""
        self.m = len(places)
        self.rows = {name: close_up(rows, places) for name, rows in self.rows.items()}
