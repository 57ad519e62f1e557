"""Gather modes that store sums of uploads instead of rows, so that memory does not depend on the size of the cohort.

They are used for methods that read large slots only through `updates.mean` (declared in `mean_only_slots`).

Streaming: rank 0 adds rows up in the order of the clients and piece by piece, while it receives the next pieces. Rows
with nan or inf cannot be excluded, because they are recognised only after they have been added.

Reducing (`server.reduce: local`): each rank adds up the rows of its own clients, and sends one sum:

    total_r = sum over clients i of rank r of round(p_i x_i / UNIT)     64-bit integers, elementwise
    mean    = UNIT sum_r total_r                                        reduced over a binomial tree of ranks

A sum of integers does not depend on the order, so the result is bitwise identical for any number of ranks and any
placement of clients. Its last bits differ from those of the other gather modes, because rounding differs: here each
p_i x_i is rounded once to float64 and once to a multiple of UNIT, and the sum of the rounded values is exact. The
amount of data that a rank sends, and that rank 0 receives, does not grow with the cohort.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from fedmpi.comm.base import Message, Posted, find_tree_neighbours
from fedmpi.common.errors import UserError
from fedmpi.engine.transport.gather import (
    GatherContext,
    GatheredUploads,
    SendBuffer,
    SmallSlotUploads,
    UploadGather,
    receive_ahead,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

Means = Mapping[str, tuple[str, ...]]  # large slot -> the weights of the means that are read: "p", "uniform"
Incoming = Iterator[tuple[Message, Callable[[], None]]]
PIECES_AHEAD = 3  # number of pieces that are being received while one is added
UNIT = 2.0**-50  # integer sums count multiples of this number, 9e-16
MAX_ENTRY = 2.0**12  # Bound on entries. Weights sum to one, so sums have the same bound: half of the range of 64 bits.


class GatheredSums(GatheredUploads):
    """The uploads of a round: small slots row by row, and large slots as sums over the rows.

    For large slots, only weighted sums of the rows and the norm of each block of each row are stored.
    """

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """Allocate buffers for the sums of a round.

        Args:
            means: slot -> which of its means will be read: "p" (with the weights of the cohort), "uniform", or both.
                Slots that are not listed are averaged with the weights p.
            p: (m,), the weights of the cohort.
        """
        self.context, m = context, len(context.cohort)
        super().__init__(context.buffers.get("heads", m, context.chunks.small.size), context.chunks)
        self.weights = {"p": p, "uniform": torch.full((m,), 1 / m, dtype=torch.float64)}
        same = torch.equal(p, self.weights["uniform"])
        self.means: dict[tuple[str, str], tuple[linear.RunningSum, list[float]]] = {}
        for name, (_, n) in self.chunks.large.items():
            for kind in dict.fromkeys("p" if same else each for each in means.get(name, ("p",))):
                self.means[name, kind] = self.make_sum(name, kind, n), self.weights[kind].tolist()
        self.norm_parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(m)] for name in self.chunks.large}

    def make_sum(self, name: str, kind: str, n: int) -> linear.RunningSum:
        """Allocate a buffer for a weighted sum of a large slot's rows.

        Args:
            kind: which weights the sum uses: p (those of the cohort) or uniform.
            n: the number of columns of the slot.
        """
        dtype, memory = self.context.buffers.like.dtype, self.context.buffers
        return linear.RunningSum(memory.get(f"sum {name} {kind}", 1, n, linear.sum_dtype(n, dtype))[0], dtype)

    def sums_for_slot(self, slot: str) -> Iterator[tuple[linear.RunningSum, list[float]]]:
        """Yield the sums of a large slot, each with its weights (m,)."""
        return (each for (name, _), each in self.means.items() if name == slot)

    def add_columns(self, i: int, name: str, a: int, x: Tensor) -> None:
        """Add some columns of row i to the sums of a large slot; rows must be added in order.

        Args:
            a: the slot's column at which x begins.
            x: the entries of row i in these columns.
        """
        for sum_, weights in self.sums_for_slot(name):
            sum_.add(x, weights[i], i == 0, a)
        self.norm_parts[name][i].append(linear.block_norms(x[None])[:, 0])

    def add_row(self, i: int, row: Tensor) -> None:
        """Add row i to all sums; rows must be added in order."""
        self.small_rows[i] = self.chunks.small_slots_part(row)
        # A CPU adds piece by piece, so that a piece is still in the cache when it is read again; a GPU needs few
        # launches.
        full_slots = ((name, 0, n) for name, (_, n) in self.chunks.large.items())
        for name, a, b in full_slots if row.is_cuda else self.chunks.pieces():
            self.add_columns(i, name, a, self.chunks.large_slot_columns(row, name, a, b))

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(torch.stack([torch.cat(parts) for parts in self.norm_parts[name]], 1))

    def as_uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return SummedUploads(clients, n, p, self)


class SummedUploads(SmallSlotUploads):
    """The uploads as hooks see them: means of large slots, and all rows of small slots."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, sums: GatheredSums) -> None:
        """Wrap gathered sums; n and p (m,) are the sample counts and weights of the clients."""
        super().__init__(clients, n, p, sums)
        self.sums = sums

    def read_large_slot(self, name: str) -> Tensor:
        raise _undeclared_use_error(name, f"reads updates.{name}")

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().combine(coefficients, slot, span)
        for (name, kind), (sum_, _) in self.sums.means.items():
            if name == slot and span is None and torch.equal(coefficients, self.sums.weights[kind]):
                return sum_.value().view(self.chunks.packing.shapes[slot])
        raise _undeclared_use_error(slot, "computes another sum of it")


def _undeclared_use_error(slot: str, does: str) -> UserError:
    """Return the error for a method that reads more of a mean-only slot than the means that it has declared.

    does: what the method does with the slot, as a verb phrase for the message.
    """
    return UserError(
        f"mean_only_slots declares that aggregate reads slot {slot!r} only through updates.mean with the declared "
        f"weights, but it {does}; remove {slot!r} from mean_only_slots, and the server stores all rows"
    )


@cache
def _adder_thread() -> ThreadPoolExecutor:
    """Return the background thread that adds rows while the main thread waits for messages."""
    return ThreadPoolExecutor(1, thread_name_prefix="fedmpi-adder")


class StreamingGather(UploadGather):
    """Adds up all rows on rank 0, which trains no clients unless it is the only rank."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """Create the gather; `p` (m,) are the weights of the cohort."""
        super().__init__(context, SendBuffer(context, 0) if context.comm.size == 1 else SendBuffer(context))
        self.sums = GatheredSums(context, means, p) if self.comm.rank == 0 else None
        self.pending_adds = deque[Future[None]]()

    def submit(self, client: int) -> None:
        row, chunks = self.send_buffer.acquired_row(client), self.chunks
        if self.sums is not None:
            self.sums.add_row(self.row_index[client], row)
            self.comm.count_local_message(row.element_size() * self.context.upload.size)
            return
        parts = [chunks.small_slots_part(row), *(chunks.large_slot_columns(row, *piece) for piece in chunks.pieces())]
        self.send_buffer.send(client, [(0, part) for part in parts])

    def _finish(self) -> GatheredUploads | None:
        if self.sums is None:
            self.send_buffer.wait_all()
        elif self.comm.size > 1:
            try:
                receive_ahead(self.comm, self._incoming_messages(self.sums), PIECES_AHEAD)
                for each in self.pending_adds:
                    each.result()
            finally:
                wait(self.pending_adds)  # even after an error, before the memory is used for something else
        return self.sums

    def _add_in_background(self, add: Callable[[], None]) -> None:
        """Add a piece in the background thread, while the main thread receives the next piece."""
        self.pending_adds.append(_adder_thread().submit(add))
        if len(self.pending_adds) > 1:
            self.pending_adds[0].result()
            self.pending_adds.popleft()

    def _incoming_messages(self, sums: GatheredSums) -> Incoming:
        """Yield each message to receive, in sending order, with the function that adds it to the sums."""
        context, chunks, turn = self.context, self.chunks, 0
        num_buffers = PIECES_AHEAD + 2  # two more: one is being added, and one is about to be received
        buffers = context.buffers.get("pieces", num_buffers, max((b - a for _, a, b in chunks.pieces()), default=0))
        for i, client in enumerate(context.cohort):
            peer = context.placement[client]
            yield (peer, sums.small_rows[i]), lambda: None
            for name, a, b in chunks.pieces():
                received = buffers[turn % num_buffers][: b - a]
                yield (
                    (peer, received),
                    partial(self._add_in_background, partial(sums.add_columns, i, name, a, received)),
                )
                turn += 1


class IntegerSum(linear.RunningSum):
    """The sum of round(c_i x_i / UNIT) over vectors x_i, as int64 (n,); the vectors may be added in any order."""

    def add(self, x: Tensor, c: float, first: bool = False, offset: int = 0) -> None:
        """Add c x to the sum; `first` is ignored, because the sum starts at zero."""

        def add_chunk(span: tuple[int, int]) -> None:
            part = x[span[0] - offset : span[1] - offset]
            chunk = part.to(torch.float64, copy=True)  # a copy, because other sums read x later
            self.total[slice(*span)] += chunk.mul_(c / UNIT).round_().long()

        linear.parallel_map(add_chunk, linear.chunk_spans(x, offset, offset + len(x)), x)

    def value(self) -> Tensor:
        out = torch.empty(len(self.total), dtype=self.dtype, device=self.total.device)

        def convert_chunk(span: tuple[int, int]) -> None:
            out[slice(*span)] = self.total[slice(*span)].double().mul_(UNIT)

        linear.parallel_map(convert_chunk, linear.chunk_spans(out, 0, len(out)), out)
        return out


class GatheredIntegerSums(GatheredSums):
    """Integer sums of large slots over the rows, the uploads of clients.

    A rank sums the rows of its own clients; after the reduction, the sums of rank 0 contain all rows. Small slots, and
    the norms of large slots, are not summed but stored for each row.
    """

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """Allocate the sums of a round; `p` (m,) are the weights of the cohort."""
        super().__init__(context, means, p)
        shape = len(context.cohort), len(self.chunks.large)
        self.large_slot_norms = torch.zeros(shape, dtype=torch.float64, device=self.small_rows.device)

    def make_sum(self, name: str, kind: str, n: int) -> linear.RunningSum:
        memory = self.context.buffers
        return IntegerSum(memory.get(f"total {name} {kind}", 1, n, torch.int64)[0].zero_(), memory.like.dtype)

    def add_row(self, i: int, row: Tensor) -> None:
        """Add row i, which belongs to a client that this rank has trained, to all sums."""
        self.small_rows[i] = self.chunks.small_slots_part(row)
        for j, (name, (a, n)) in enumerate(self.chunks.large.items()):
            x = row[a : a + n]
            self.large_slot_norms[i, j] = norm = linear.row_norms(linear.block_norms(x[None]))[0]
            if norm > MAX_ENTRY and (largest := float(x.abs().max())) > MAX_ENTRY:
                raise UserError(
                    f"server.reduce: local is limited to values up to {MAX_ENTRY:g}, but client "
                    f"{self.context.cohort[i]} sent {largest:.4g} in slot {name}; set server.reduce: root"
                )
            if norm.isfinite():  # otherwise the run ends (`sums_contain_all_rows` is false) or refuses the upload
                for total, weights in self.sums_for_slot(name):
                    total.add(x, weights[i], False)

    @property
    def sums_contain_all_rows(self) -> bool:  # type: ignore[override]
        """Whether all values are finite; only then do the sums contain all rows."""
        return bool(self.large_slot_norms.isfinite().all())

    def large_norms(self, name: str) -> Tensor:
        return self.large_slot_norms[:, [*self.chunks.large].index(name)]


class ReducingGather(UploadGather):
    """Sends small slots of all clients to rank 0, and reduces the sums of large slots over a binomial tree of ranks."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """Create the gather; `p` (m,) are the weights of the cohort."""
        super().__init__(context, SendBuffer(context, 0))
        self.totals = GatheredIntegerSums(context, means, p)
        train = {context.placement[k] for k in context.cohort}  # other ranks have nothing to add
        self.ranks = [rank for rank in self.comm.alive if rank == 0 or rank in train]

    def submit(self, client: int) -> None:
        row = self.send_buffer.acquired_row(client)
        self.totals.add_row(self.row_index[client], row)
        if self.comm.rank == 0:
            self.comm.count_local_message(row.element_size() * self.chunks.small.size)

    def _finish(self) -> GatheredUploads | None:
        comm, context, totals = self.comm, self.context, self.totals
        if comm.rank == 0:
            theirs = [(i, context.placement[k]) for i, k in enumerate(context.cohort) if context.placement[k]]
            comm.exchange(
                [], [(rank, x) for i, rank in theirs for x in (totals.small_rows[i], totals.large_slot_norms[i])]
            )
            self._reduce_over_tree()
            return totals
        if comm.rank in self.ranks:
            comm.message_info = context.message_info
            own = [self.row_index[k] for k in context.own_clients]
            small_rows = comm.post(
                [(0, x) for i in own for x in (totals.small_rows[i], totals.large_slot_norms[i])], []
            )
            self._reduce_over_tree()
            comm.finish(small_rows)
        return None

    def _reduce_over_tree(self) -> None:
        """Receive the sums of child ranks in the tree, add this rank's own, and send the result to the parent."""
        comm, me = self.comm, self.ranks.index(self.comm.rank)
        parent, children = find_tree_neighbours(me, len(self.ranks))
        totals = [(slot, total.total) for (slot, _), (total, _) in self.totals.means.items()]
        pieces = [total[a:b] for slot, total in totals for name, a, b in self.chunks.pieces() if name == slot]
        sent = list[Posted]()
        memory = self.context.buffers.get("came", PIECES_AHEAD + 1, max(map(len, pieces), default=0), torch.int64)

        def send_up(piece: Tensor) -> None:
            if me:
                comm.message_info = self.context.message_info
                sent.append(comm.post([(self.ranks[parent], piece)], []))

        def add(add_chunk: Tensor, received: Tensor, child: int) -> None:
            add_chunk.add_(received)
            if child == children[-1]:
                send_up(add_chunk)

        def incoming() -> Incoming:
            for turn, (piece, child) in enumerate(product(pieces, children)):
                received = memory[turn % len(memory)][: len(piece)]
                yield (self.ranks[child], received), partial(add, piece, received, child)

        receive_ahead(comm, incoming(), PIECES_AHEAD)
        for piece in pieces if not children else ():
            send_up(piece)
        for posted in sent:
            comm.finish(posted)
