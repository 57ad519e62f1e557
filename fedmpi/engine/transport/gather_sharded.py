"""Uploads of which every rank holds the same columns of all rows: m d / W entries a rank instead of m d on one.

Clients send each holder its columns; small slots go to rank 0, which alone runs the method's `aggregate`. Where that
asks for a sum, a Gram matrix, products or order statistics of a large slot, rank 0 asks the holders for their columns'
part of it, and puts the parts together in the order of their blocks: the bits are those of rows in one place. A rule
that reads a slot itself is given all of it, at the price of its memory.
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
    GatheredHeads,
    GatheredUploads,
    HeadUploads,
    SendBuffer,
    UploadGather,
    close_up,
    scale,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

# Requests of rank 0: END, the round is over; SCALE and ONLY change the rows; the others have an answer.
END, COMBINE, GRAM, PRODUCTS, TRIMMED, NORMS, FETCH, SCALE, ONLY = range(9)


class Question(NamedTuple):
    """How a holder computes its answer from its columns and the numbers of the request."""

    answer: Callable[[Tensor, int, int, Tensor], Tensor]  # (rows (m, b - a), a, columns of the whole slot, numbers)
    by_block: int = 0  # 0: a number for each column, in the rows' type; 1, 2: (m,), (m, m) for each block, in float64
    entries: bool = False  # the numbers are entries of a vector, in the rows' type; else float64


QUESTIONS = {
    COMBINE: Question(lambda rows, a, width, c: linear.combine(rows, c, a, width)),
    GRAM: Question(lambda rows, a, width, _: linear.gram_blocks(rows, a, width), by_block=2),
    PRODUCTS: Question(lambda rows, a, _, v: linear.product_parts(rows, v, a), by_block=1, entries=True),
    TRIMMED: Question(lambda rows, _, __, trim: linear.trimmed_mean(rows, float(trim))),
    NORMS: Question(lambda rows, *_: linear.block_norms(rows), by_block=1),
    FETCH: Question(lambda rows, _, __, i: rows[int(i)]),
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
        return QUESTIONS[what].answer(rows, a, width, numbers)

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


class ShardedGather(UploadGather):
    """Every rank that lives is a holder, rank 0 and those that do not train too."""

    def __init__(self, context: GatherContext) -> None:
        super().__init__(context)
        self.shard, comm = Shard(context), context.comm
        # Where messages begin only with `finish`, waiting for an earlier row would never end: all rows are buffered.
        self.send_buffer = SendBuffer(context, UNSENT // 8 if comm.begins else None)
        heads = len(context.members) if comm.rank == 0 else 0
        self.heads = context.buffers.rows("heads", heads, context.chunks.small.size)
        self.coming = list[Posted]()
        for i, client in enumerate(context.members):
            peer = context.where[client]
            if peer != comm.rank:
                places = self.chunks.places(self.heads[i]) if comm.rank == 0 else []
                self.coming.append(comm.post([], [(peer, x) for x in places + self.shard.places(i)]))

    def row(self, client: int) -> Tensor:
        return self.send_buffer.row(client)

    def done(self, client: int) -> None:
        row, chunks, shard, rank = self.send_buffer.of(client), self.chunks, self.shard, self.comm.rank
        i, messages = self.order[client], [(0, x) for x in chunks.small_parts(row)]
        for name in shard.names:
            messages += zip(shard.holders, shard.parts(row, name), strict=True)
            shard.rows[name][i].copy_(chunks.part(row, name, *chunks.share(name, shard.me, len(shard.holders))))
        if rank == 0:
            chunks.copy_small(row, self.heads[i])
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
        numbers = shard.numbers(what, count)
        if count:
            comm.exchange([], [(0, numbers)])
        if what == SCALE:
            place, factor = numbers.tolist()
            shard.scale(int(place), factor)
        elif what == ONLY:
            shard.only([int(place) for place in numbers.tolist()])
        elif what != END:
            answer = shard.answer(what, shard.names[which], (a, b), numbers).to(comm.device)
            if answer.numel():
                comm.exchange([(0, answer.flatten())], [])
        return bool(what != END)


class GatheredShards(GatheredHeads):
    """A round's uploads at rank 0: small slots of all rows, and large ones by requests to the ranks that hold them."""

    def __init__(self, context: GatherContext, shard: Shard, heads: Tensor) -> None:
        super().__init__(context, heads)
        self.shard, self.comm = shard, context.comm

    def query(
        self, what: int, name: str, numbers: Callable[[Span], Tensor] | None = None, span: Span | None = None
    ) -> list[Tensor]:
        """Return the answer of each holder, in their order. numbers: those that go with a holder's part of the span."""
        shard, comm = self.shard, self.comm
        span, numbers = span or (0, self.chunks.large[name][1]), numbers or _nothing
        answers = [shard.place(what, holder, name, span) for holder in range(len(shard.holders))]
        each = [numbers(shard.within(holder, name, span)) for holder in range(len(shard.holders))]
        others = [(rank, x) for rank, x in zip(shard.holders, answers, strict=True) if rank != comm.rank and x.numel()]
        requests = self._requests(what, shard.names.index(name), span, each)
        if not comm.begins:  # there a group that sends and receives would have to be one on the other side, too
            comm.exchange(requests, [])
            requests = []
        posted = comm.post(requests, [(r, x.view(-1)) for r, x in others])
        answers[shard.me].copy_(shard.answer(what, name, span, each[shard.me]))
        comm.finish(posted)
        return answers

    def _requests(self, what: int, which: int, span: Span, numbers: Sequence[Tensor]) -> list[Message]:
        """Return a message to each other holder: request, slot, columns a to b, and how many numbers follow."""
        messages: list[Message] = []
        for rank, x in zip(self.shard.holders, numbers, strict=True):
            if rank == self.comm.rank:
                continue
            request = torch.tensor([what, which, *span, len(x)], device=self.comm.device)
            messages += [(rank, request)] + ([(rank, x.to(self.comm.device).contiguous())] if len(x) else [])
        return messages

    def _command_all(self, what: int, numbers: Sequence[float] = ()) -> None:
        """Let every other holder do the same."""
        values = torch.tensor(numbers, dtype=torch.float64)
        self.comm.exchange(self._requests(what, 0, (0, 0), [values] * len(self.shard.holders)), [])

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(torch.cat(self.query(NORMS, name)))

    def scale(self, place: int, factor: float) -> None:
        if "dw" in self.shard.names:
            self._command_all(SCALE, [place, factor])
            self.shard.scale(place, factor)
        else:
            scale(self.small.dw[place].view(-1), factor)

    def only(self, places: Sequence[int]) -> None:
        self.heads = close_up(self.heads, places)
        self.small = self.chunks.small.views(self.heads)
        self._command_all(ONLY, places)
        self.shard.only(places)

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return ShardedUploads(clients, n, p, self)

    def release(self) -> None:
        with suppress(Lost):  # the round is over all the same; the next message meets the loss
            self._command_all(END)


class ShardedUploads(HeadUploads):
    """The parts of large slots come from their holders, small ones lie here."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredShards) -> None:
        super().__init__(clients, n, p, gathered)
        self.gathered = gathered

    def read_large(self, name: str) -> Tensor:
        rows = [torch.cat(self.gathered.query(FETCH, name, _just(i))) for i in range(len(self))]
        return torch.stack(rows).view(len(self), *self.chunks.packing.shapes[name])

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().combine(coefficients, slot, span)
        c = coefficients.double()
        sum_ = torch.cat(self.gathered.query(COMBINE, slot, lambda _: c, span))
        return sum_ if span else sum_.view(self.chunks.packing.shapes[slot])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().gram(slot, span)
        return linear.total(torch.cat(self.gathered.query(GRAM, slot, span=span))).cpu()

    def products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().products(v, slot, span)
        flat, first = v.flatten().to(self.gathered.heads.dtype), span[0] if span else 0

        def entries(part: Span) -> Tensor:
            return flat[part[0] - first : part[1] - first]

        return linear.total(torch.cat(self.gathered.query(PRODUCTS, slot, entries, span))).cpu()

    def trimmed(self, trim: float, slot: str = "dw") -> Tensor:
        if slot not in self.chunks.large:
            return super().trimmed(trim, slot)
        mean = torch.cat(self.gathered.query(TRIMMED, slot, _just(trim)))
        return mean.view(self.chunks.packing.shapes[slot])


def _nothing(_: Span) -> Tensor:
    return torch.empty(0, dtype=torch.float64)


def _just(number: float) -> Callable[[Span], Tensor]:
    return lambda _: torch.tensor([number], dtype=torch.float64)
