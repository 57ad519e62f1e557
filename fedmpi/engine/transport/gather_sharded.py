"""Sharded gather of uploads: each rank stores some columns of all rows, so that rank 0 need not store all entries.

A rank that stores columns is called a holder. The ranks that train clients send each holder its columns, and send small
slots to rank 0, which alone runs the method's `aggregate`. If `aggregate` needs a sum, a Gram matrix, inner products or
order statistics of a large slot, rank 0 queries the holders, each of which computes the result for its columns. Rank 0
combines the partial results in the order of the blocks, so that the result is bitwise identical to the one with all
rows on rank 0. A rule that reads the rows of a slot directly receives all of them; rank 0 then needs memory for all
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from fedmpi.comm.base import Message, Posted, RankLostError
from fedmpi.engine.transport.gather import (
    MAX_UNSENT_BYTES,
    GatherContext,
    GatheredUploads,
    SendBuffer,
    SmallSlotUploads,
    UploadGather,
    compact_rows,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

# Requests of rank 0. END ends the round, and KEEP_ROWS drops all other rows; all other requests are answered.
END, KEEP_ROWS, COMBINE, GRAM, PRODUCTS, TRIMMED, NORMS, FETCH = range(8)


class ShardQuery(NamedTuple):
    """A kind of request: how a holder computes its answer from its columns and the numeric arguments of the request."""

    # arguments: rows (m, b - a), a, number of columns of the slot, numbers
    answer: Callable[[Tensor, int, int, Tensor], Tensor]
    # the shape of an answer: 0: a number per column, in the type of the rows; 1: (m,) per block of columns, in float64;
    # 2: (m, m) per block, in float64
    axes_per_block: int = 0


SHARD_QUERIES = {
    COMBINE: ShardQuery(lambda rows, a, width, c: linear.weighted_sum(rows, c, a, width)),
    GRAM: ShardQuery(lambda rows, a, width, _: linear.gram_by_block(rows, a, width), axes_per_block=2),
    PRODUCTS: ShardQuery(lambda rows, a, _, v: linear.inner_products_by_column_block(rows, v, a), axes_per_block=1),
    TRIMMED: ShardQuery(lambda rows, _, __, trim: linear.trimmed_mean(rows, float(trim))),
    NORMS: ShardQuery(lambda rows, *_: linear.block_norms(rows), axes_per_block=1),
    FETCH: ShardQuery(lambda rows, _, __, i: rows[int(i)]),
}


class ColumnShard:
    """The columns of large slots that one holder stores; it answers requests from rank 0 about these columns."""

    def __init__(self, context: GatherContext) -> None:
        """Allocate buffers for the columns of this rank."""
        self.context, self.chunks, self.holders = context, context.chunks, context.comm.alive
        self.number, self.m = self.holders.index(context.comm.rank), len(context.cohort)
        self.names = list(self.chunks.large)
        self.rows = {}
        for name in self.names:
            a, b = self.chunks.holder_span(name, self.number, len(self.holders))
            self.rows[name] = context.buffers.get(f"shard {name}", self.m, b - a)

    def row_buffers(self, i: int) -> list[Tensor]:
        """Return the buffers for this holder's columns of row i, one tensor per large slot."""
        return [rows[i] for rows in self.rows.values() if rows.shape[1]]

    def local_span(self, holder: int, name: str, span: Span) -> Span:
        """Return the part (a, b) of a span of columns that a holder stores."""
        a, b = self.chunks.holder_span(name, holder, len(self.holders))
        return max(a, span[0]), max(max(a, span[0]), min(b, span[1]))

    def answer(self, request_kind: int, name: str, span: Span, numbers: Tensor) -> Tensor:
        """Compute this holder's part of the answer to a request.

        Args:
            request_kind: the kind of result requested, for example GRAM.
            name: the name of the large slot.
            span: the requested columns (a, b) of the slot.
            numbers: the numeric arguments of the request for the columns that this holder stores.
        """
        a, b = self.local_span(self.number, name, span)
        first = self.chunks.holder_span(name, self.number, len(self.holders))[0]
        rows, width = self.rows[name][:, a - first : b - first], self.chunks.large[name][1]
        return SHARD_QUERIES[request_kind].answer(rows, a, width, numbers)

    def answer_buffer(self, request_kind: int, holder: int, name: str, span: Span) -> Tensor:
        """Return a buffer for a holder's part of the answer to a request, on the communicator's device."""
        (a, b), block, axes_per_block = (
            self.local_span(holder, name, span),
            self.chunks.block,
            SHARD_QUERIES[request_kind].axes_per_block,
        )
        if not axes_per_block:
            return self.number_buffer(b - a, entries=True)
        blocks = -(-b // block) - a // block if a < b else 0
        return self.number_buffer(blocks * self.m**axes_per_block).view(blocks, *[self.m] * axes_per_block)

    def number_buffer(self, count: int, *, entries: bool = False) -> Tensor:
        """Return a buffer for `count` numbers.

        entries: whether the numbers are entries of rows, and so have the dtype of the rows; otherwise they are float64.
        """
        kind = self.context.buffers.like.dtype if entries else torch.float64
        return torch.empty(count, dtype=kind, device=self.context.comm.device)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Keep only the rows with these indices, given in ascending order."""
        self.m = len(indices)
        self.rows = {name: compact_rows(rows, indices) for name, rows in self.rows.items()}


class ShardedGather(UploadGather):
    """Distributes the columns of large slots over all live ranks, including those that train no clients."""

    def __init__(self, context: GatherContext) -> None:
        """Start receiving the columns that this rank stores; rank 0 also receives the small slots."""
        # If messages are sent only in `finish`, waiting for an earlier row would never end; then all rows are buffered.
        super().__init__(context, SendBuffer(context, MAX_UNSENT_BYTES // 8 if context.comm.async_sends else None))
        self.shard, comm = ColumnShard(context), context.comm
        small_rows = len(context.cohort) if comm.rank == 0 else 0
        self.small_rows = context.buffers.get("heads", small_rows, context.chunks.small.size)
        self.receiving = list[Posted]()
        for i, client in enumerate(context.cohort):
            peer = context.placement[client]
            if peer != comm.rank:
                indices = [self.small_rows[i]] if comm.rank == 0 else []
                self.receiving.append(comm.post([], [(peer, x) for x in indices + self.shard.row_buffers(i)]))

    def submit(self, client: int) -> None:
        row, chunks, shard, rank = self.send_buffer.acquired_row(client), self.chunks, self.shard, self.comm.rank
        i, messages = self.row_index[client], [(0, chunks.small_slots_part(row))]
        for name in shard.names:
            shares = [chunks.holder_span(name, number, len(shard.holders)) for number in range(len(shard.holders))]
            messages += [
                (to, chunks.large_slot_columns(row, name, *share))
                for to, share in zip(shard.holders, shares, strict=True)
            ]
            shard.rows[name][i].copy_(chunks.large_slot_columns(row, name, *shares[shard.number]))
        if rank == 0:
            self.small_rows[i] = chunks.small_slots_part(row)
        self.comm.count_local_message(sum(x.nbytes for to, x in messages if to == rank))
        self.send_buffer.send(client, [(to, x) for to, x in messages if to != rank and len(x)])

    def _finish(self) -> GatheredUploads | None:
        for posted in self.receiving:
            self.comm.finish(posted)
        self.send_buffer.wait_all()
        if self.comm.rank == 0:
            return GatheredShards(self.context, self.shard, self.small_rows)
        while self._serve_request():
            pass
        return None

    def _serve_request(self) -> bool:
        """Receive a request from rank 0 and answer it; return whether more requests will follow."""
        comm, shard = self.comm, self.shard
        request = torch.empty(5, dtype=torch.int64, device=comm.device)
        comm.exchange([], [(0, request)])
        request_kind, slot_number, a, b, count = request.tolist()
        numbers = shard.number_buffer(count, entries=request_kind == PRODUCTS)
        if count:
            comm.exchange([], [(0, numbers)])
        if request_kind == KEEP_ROWS:
            shard.keep_rows([int(place) for place in numbers.tolist()])
        elif request_kind != END:
            answer = shard.answer(request_kind, shard.names[slot_number], (a, b), numbers).to(comm.device)
            if answer.numel():
                comm.exchange([(0, answer.flatten())], [])
        return bool(request_kind != END)


class GatheredShards(GatheredUploads):
    """The uploads of a round on rank 0: the small slots, and access to large slots through queries to their holders."""

    def __init__(self, context: GatherContext, shard: ColumnShard, small_rows: Tensor) -> None:
        """Store the small slots of all rows and the shard of rank 0."""
        super().__init__(small_rows, context.chunks)
        self.shard, self.comm = shard, context.comm

    def query(
        self, request_kind: int, name: str, numbers: Callable[[Span], Tensor] | None = None, span: Span | None = None
    ) -> Tensor:
        """Send a request to all holders, and return their answers, concatenated in the order of the holders.

        Args:
            request_kind: the kind of result requested, for example GRAM.
            name: the name of the large slot.
            numbers: a function that returns the numeric arguments for one holder's part of the span; None: no
                arguments.
            span: the columns (a, b); by default all columns of the slot.
        """
        shard, comm, holder_numbers = self.shard, self.comm, range(len(self.shard.holders))
        span, numbers = span or (0, self.chunks.large[name][1]), numbers or (lambda _: torch.empty(0))
        answers = [shard.answer_buffer(request_kind, holder, name, span) for holder in holder_numbers]
        each = [numbers(shard.local_span(holder, name, span)) for holder in holder_numbers]
        incoming = [(r, x.view(-1)) for r, x in zip(shard.holders, answers, strict=True) if r != comm.rank and len(x)]
        requests = self._request_messages(request_kind, shard.names.index(name), span, each)
        # such communicators require that the sends and receives of a call match a single call at the other side
        if not comm.async_sends:
            comm.exchange(requests, [])
            requests = []
        posted = comm.post(requests, incoming)
        answers[shard.number].copy_(shard.answer(request_kind, name, span, each[shard.number]))
        comm.finish(posted)
        return torch.cat(answers)

    def _request_messages(
        self, request_kind: int, slot_number: int, span: Span, numbers: Sequence[Tensor]
    ) -> list[Message]:
        """Return the messages that make up a request to all other holders.

        A request is (kind, slot number, a, b, count), followed by `count` numeric arguments in a second message.
        """
        messages: list[Message] = []
        for rank, x in zip(self.shard.holders, numbers, strict=True):
            if rank != self.comm.rank:
                request = torch.tensor([request_kind, slot_number, *span, len(x)], device=self.comm.device)
                messages += [(rank, request)] + ([(rank, x.to(self.comm.device).contiguous())] if len(x) else [])
        return messages

    def _send_command(self, request_kind: int, numbers: Sequence[float] = ()) -> None:
        """Send all other holders a request that requires no answer."""
        values = torch.tensor(numbers, dtype=torch.float64)
        self.comm.exchange(self._request_messages(request_kind, 0, (0, 0), [values] * len(self.shard.holders)), [])

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(self.query(NORMS, name))

    def keep_rows(self, indices: Sequence[int]) -> None:
        super().keep_rows(indices)
        self._send_command(KEEP_ROWS, indices)
        self.shard.keep_rows(indices)

    def as_uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return ShardedUploads(clients, n, p, self)

    def release(self) -> None:
        with suppress(RankLostError):  # the round is over in any case; the next message raises the error
            self._send_command(END)


class ShardedUploads(SmallSlotUploads):
    """The uploads of a round as the hook `aggregate` reads them, if the server is sharded.

    Small slots are stored on rank 0. Rank 0 queries the ranks that store the columns of a large slot when the hook
    reads it.
    """

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredShards) -> None:
        """Wrap gathered uploads; n and p (m,) are the sample counts and weights of the clients."""
        super().__init__(clients, n, p, gathered)
        self.gathered = gathered

    def read_large_slot(self, name: str) -> Tensor:
        rows = [self.gathered.query(FETCH, name, _constant_for_each_holder(i)) for i in range(len(self))]
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
        return linear.sum_blocks(self.gathered.query(GRAM, slot, span=span)).cpu()

    def inner_products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().inner_products(v, slot, span)
        flat, first = v.flatten().to(self.gathered.small_rows.dtype), span[0] if span else 0
        return linear.sum_blocks(
            self.gathered.query(PRODUCTS, slot, lambda part: flat[part[0] - first : part[1] - first], span)
        ).cpu()

    def trimmed_mean(self, trim: float, slot: str = "dw") -> Tensor:
        if slot not in self.chunks.large:
            return super().trimmed_mean(trim, slot)
        return self.gathered.query(TRIMMED, slot, _constant_for_each_holder(trim)).view(
            self.chunks.packing.shapes[slot]
        )


def _constant_for_each_holder(number: float) -> Callable[[Span], Tensor]:
    """Return a function that returns this number for each holder, as the argument `numbers` of a query."""
    return lambda _: torch.tensor([number], dtype=torch.float64)
