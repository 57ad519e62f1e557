"""Gather of uploads in which every rank holds the same columns of all rows: m d / W entries per rank instead of m d.

Clients send each holder its columns; small slots are sent to rank 0, which alone runs the method's `aggregate`. If
`aggregate` requests a sum, a Gram matrix, products or order statistics of a large slot, rank 0 queries the holders for
the part of their columns, and combines the parts in the order of their blocks: the bits are the same as with all rows
at rank 0. A rule that reads a slot itself receives all of it, and needs the memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fedmpi.comm.base import Lost, Message, Posted
from fedmpi.engine.transport.gather import (
    UNSENT,
    GatherContext,
    GatheredUploads,
    HeadUploads,
    SendBuffer,
    UploadGather,
    close_up,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

# Requests of rank 0: END ends the round; ONLY leaves rows out; all others have an answer.
END, ONLY, COMBINE, GRAM, PRODUCTS, TRIMMED, NORMS, FETCH = range(8)


class Question(NamedTuple):
    """How a holder computes its answer from its columns and from the numbers of the request."""

    answer: Callable[[Tensor, int, int, Tensor], Tensor]  # (rows (m, b - a), a, columns of the whole slot, numbers)
    by_block: int = 0  # 0: a number for each column, in the rows' type; 1, 2: (m,), (m, m) for each block, in float64


QUESTIONS = {
    COMBINE: Question(lambda rows, a, width, c: linear.combine(rows, c, a, width)),
    GRAM: Question(lambda rows, a, width, _: linear.gram_blocks(rows, a, width), by_block=2),
    PRODUCTS: Question(lambda rows, a, _, v: linear.product_parts(rows, v, a), by_block=1),
    TRIMMED: Question(lambda rows, _, __, trim: linear.trimmed_mean(rows, float(trim))),
    NORMS: Question(lambda rows, *_: linear.block_norms(rows), by_block=1),
    FETCH: Question(lambda rows, _, __, i: rows[int(i)]),
}


class Shard:
    """One holder's columns of the large slots, and its answers to rank 0's requests."""

    def __init__(self, context: GatherContext) -> None:
        self.context, self.chunks, self.holders = context, context.chunks, context.comm.alive
        self.me, self.m = self.holders.index(context.comm.rank), len(context.members)
        self.names = list(self.chunks.large)
        self.rows = {}
        for name in self.names:
            a, b = self.chunks.share(name, self.me, len(self.holders))
            self.rows[name] = context.buffers.rows(f"shard {name}", self.m, b - a)

    def places(self, i: int) -> list[Tensor]:
        """Return memory for this holder's columns of row i, one tensor per large slot."""
        return [rows[i] for rows in self.rows.values() if rows.shape[1]]

    def within(self, holder: int, name: str, span: Span) -> Span:
        """Return the part of a span of columns that belongs to a holder."""
        a, b = self.chunks.share(name, holder, len(self.holders))
        return max(a, span[0]), max(max(a, span[0]), min(b, span[1]))

    def answer(self, what: int, name: str, span: Span, numbers: Tensor) -> Tensor:
        """Return this holder's part of the answer to a request; `numbers` belong to its part of the span."""
        a, b = self.within(self.me, name, span)
        first = self.chunks.share(name, self.me, len(self.holders))[0]
        rows, width = self.rows[name][:, a - first : b - first], self.chunks.large[name][1]
        return QUESTIONS[what].answer(rows, a, width, numbers)

    def place(self, what: int, holder: int, name: str, span: Span) -> Tensor:
        """Return memory for a holder's part of an answer, on the communicator's device."""
        (a, b), block, by_block = self.within(holder, name, span), self.chunks.block, QUESTIONS[what].by_block
        if not by_block:
            return self.numbers(b - a, entries=True)
        blocks = -(-b // block) - a // block if a < b else 0
        return self.numbers(blocks * self.m**by_block).view(blocks, *[self.m] * by_block)

    def numbers(self, count: int, *, entries: bool = False) -> Tensor:
        """Return memory for numbers in float64, or with `entries` in the type of rows."""
        kind = self.context.buffers.like.dtype if entries else torch.float64
        return torch.empty(count, dtype=kind, device=self.context.comm.device)

    def only(self, places: Sequence[int]) -> None:
        """Keep only the rows with these indices."""
        self.m = len(places)
        self.rows = {name: close_up(rows, places) for name, rows in self.rows.items()}


class ShardedGather(UploadGather):
    """Gathers the columns of large slots at their holders: all ranks that are alive, even if they do not train."""

    def __init__(self, context: GatherContext) -> None:
        # If messages are sent only in `finish`, waiting for an earlier row would never end: all rows are buffered.
        super().__init__(context, SendBuffer(context, UNSENT // 8 if context.comm.begins else None))
        self.shard, comm = Shard(context), context.comm
        heads = len(context.members) if comm.rank == 0 else 0
        self.heads = context.buffers.rows("heads", heads, context.chunks.small.size)
        self.coming = list[Posted]()
        for i, client in enumerate(context.members):
            peer = context.where[client]
            if peer != comm.rank:
                places = [self.heads[i]] if comm.rank == 0 else []
                self.coming.append(comm.post([], [(peer, x) for x in places + self.shard.places(i)]))

    def done(self, client: int) -> None:
        row, chunks, shard, rank = self.send_buffer.of(client), self.chunks, self.shard, self.comm.rank
        i, messages = self.order[client], [(0, chunks.head(row))]
        for name in shard.names:
            shares = [chunks.share(name, number, len(shard.holders)) for number in range(len(shard.holders))]
            messages += [(to, chunks.part(row, name, *share)) for to, share in zip(shard.holders, shares, strict=True)]
            shard.rows[name][i].copy_(chunks.part(row, name, *shares[shard.me]))
        if rank == 0:
            self.heads[i] = chunks.head(row)
        self.comm.count_own(sum(x.nbytes for to, x in messages if to == rank))
        self.send_buffer.send(client, [(to, x) for to, x in messages if to != rank and len(x)])

    def _finish(self) -> GatheredUploads | None:
        for posted in self.coming:
            self.comm.finish(posted)
        self.send_buffer.wait()
        if self.comm.rank == 0:
            return GatheredShards(self.context, self.shard, self.heads)
        while self._serve():
            pass
        return None

    def _serve(self) -> bool:
        """Receive one request of rank 0 and answer it; return False if it was the last one."""
        comm, shard = self.comm, self.shard
        request = torch.empty(5, dtype=torch.int64, device=comm.device)
        comm.exchange([], [(0, request)])
        what, which, a, b, count = request.tolist()
        numbers = shard.numbers(count, entries=what == PRODUCTS)
        if count:
            comm.exchange([], [(0, numbers)])
        if what == ONLY:
            shard.only([int(place) for place in numbers.tolist()])
        elif what != END:
            answer = shard.answer(what, shard.names[which], (a, b), numbers).to(comm.device)
            if answer.numel():
                comm.exchange([(0, answer.flatten())], [])
        return bool(what != END)


class GatheredShards(GatheredUploads):
    """A round's uploads at rank 0: small slots of all rows, and access to the large slots of the other holders."""

    def __init__(self, context: GatherContext, shard: Shard, heads: Tensor) -> None:
        super().__init__(heads, context.chunks)
        self.shard, self.comm = shard, context.comm

    def query(
        self, what: int, name: str, numbers: Callable[[Span], Tensor] | None = None, span: Span | None = None
    ) -> Tensor:
        """Return the holders' answers to a request, concatenated in the order of the holders.

        Args:
            numbers: function from a holder's part of the span to the numbers that its request contains; None: no
                numbers.
        """
        shard, comm, everyone = self.shard, self.comm, range(len(self.shard.holders))
        span, numbers = span or (0, self.chunks.large[name][1]), numbers or (lambda _: torch.empty(0))
        answers = [shard.place(what, holder, name, span) for holder in everyone]
        each = [numbers(shard.within(holder, name, span)) for holder in everyone]
        incoming = [(r, x.view(-1)) for r, x in zip(shard.holders, answers, strict=True) if r != comm.rank and len(x)]
        requests = self._requests(what, shard.names.index(name), span, each)
        # for such communicators the sends and receives of one call must match a single call at the other side
        if not comm.begins:
            comm.exchange(requests, [])
            requests = []
        posted = comm.post(requests, incoming)
        answers[shard.me].copy_(shard.answer(what, name, span, each[shard.me]))
        comm.finish(posted)
        return torch.cat(answers)

    def _requests(self, what: int, which: int, span: Span, numbers: Sequence[Tensor]) -> list[Message]:
        """Return the messages of a request to all other holders: kind, slot, columns a to b, and count of numbers."""
        messages: list[Message] = []
        for rank, x in zip(self.shard.holders, numbers, strict=True):
            if rank != self.comm.rank:
                request = torch.tensor([what, which, *span, len(x)], device=self.comm.device)
                messages += [(rank, request)] + ([(rank, x.to(self.comm.device).contiguous())] if len(x) else [])
        return messages

    def _command_all(self, what: int, numbers: Sequence[float] = ()) -> None:
        """Send a request without an answer to all other holders."""
        values = torch.tensor(numbers, dtype=torch.float64)
        self.comm.exchange(self._requests(what, 0, (0, 0), [values] * len(self.shard.holders)), [])

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(self.query(NORMS, name))

    def only(self, places: Sequence[int]) -> None:
        super().only(places)
        self._command_all(ONLY, places)
        self.shard.only(places)

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return ShardedUploads(clients, n, p, self)

    def release(self) -> None:
        with suppress(Lost):  # the round is over in any case; the next message raises the error
            self._command_all(END)


class ShardedUploads(HeadUploads):
    """The uploads that hooks see: large slots by requests to their holders, small slots from rank 0's memory."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredShards) -> None:
        super().__init__(clients, n, p, gathered)
        self.gathered = gathered

    def read_large(self, name: str) -> Tensor:
        rows = [self.gathered.query(FETCH, name, _just(i)) for i in range(len(self))]
        return torch.stack(rows).view(len(self), *self.chunks.packing.shapes[name])

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().combine(coefficients, slot, span)
        c = coefficients.double()
        sum_ = self.gathered.query(COMBINE, slot, lambda _: c, span)
        return sum_ if span else sum_.view(self.chunks.packing.shapes[slot])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().gram(slot, span)
        return linear.total(self.gathered.query(GRAM, slot, span=span)).cpu()

    def inner_products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().inner_products(v, slot, span)
        flat, first = v.flatten().to(self.gathered.heads.dtype), span[0] if span else 0
        return linear.total(
            self.gathered.query(PRODUCTS, slot, lambda part: flat[part[0] - first : part[1] - first], span)
        ).cpu()

    def trimmed_mean(self, trim: float, slot: str = "dw") -> Tensor:
        if slot not in self.chunks.large:
            return super().trimmed_mean(trim, slot)
        return self.gathered.query(TRIMMED, slot, _just(trim)).view(self.chunks.packing.shapes[slot])


def _just(number: float) -> Callable[[Span], Tensor]:
    return lambda _: torch.tensor([number], dtype=torch.float64)
