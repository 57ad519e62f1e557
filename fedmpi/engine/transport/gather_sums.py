"""Gathers of uploads that keep sums in place of rows, so that memory does not depend on the size of the cohort.

They serve methods that read large slots through `updates.mean` only, and declare this (`mean_only_slots`).

Streaming: rank 0 adds rows up as they arrive, in the order of the clients and piece by piece; the next pieces are
received meanwhile. No row can be left out, because bad rows are known only at the end.

Reducing (`server.reduce: local`): each rank adds up the rows of its own clients before it sends one sum:

    total_r = sum over clients i of rank r of round(p_i x_i / UNIT)     64-bit integers, entry by entry
    mean    = UNIT sum_r total_r                                        reduced over a binomial tree of ranks

Sums of integers do not depend on their order, so the bits depend neither on the number of ranks nor on the placement of
clients. They differ from those of the other gathers, which round in other places: here each p_i x_i is rounded, once to
float64 and once to UNIT, and their sum is exact. The amount of data that a rank sends and rank 0 receives does not grow
with the cohort.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from fedmpi.comm.base import Message, Posted, tree
from fedmpi.common.errors import UserError
from fedmpi.engine.transport.gather import (
    GatherContext,
    GatheredUploads,
    HeadUploads,
    SendBuffer,
    UploadGather,
    receive_ahead,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

Means = Mapping[str, tuple[str, ...]]  # large slot -> the weights of its means: "p", "uniform"
Incoming = Iterator[tuple[Message, Callable[[], None]]]
AHEAD = 3  # pieces that are being received while one is added
UNIT = 2.0**-50  # unit of integer sums: 9e-16
LARGEST = 2.0**12  # bound of an entry. Weights sum to one, so a sum has the same bound: half of the range of 64 bits


class GatheredSums(GatheredUploads):
    """The gathered sums: the small slots of all rows, sums of the large slots, and the norms of their blocks."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """Allocate the sums of a round; `p` (m,) are the weights of the cohort."""
        self.context, m = context, len(context.members)
        super().__init__(context.buffers.rows("heads", m, context.chunks.small.size), context.chunks)
        self.weights = {"p": p, "uniform": torch.full((m,), 1 / m, dtype=torch.float64)}
        same = torch.equal(p, self.weights["uniform"])
        self.means: dict[tuple[str, str], tuple[linear.Sum, list[float]]] = {}
        for name, (_, n) in self.chunks.large.items():
            for kind in dict.fromkeys("p" if same else each for each in means.get(name, ("p",))):
                self.means[name, kind] = self.make_sum(name, kind, n), self.weights[kind].tolist()
        self.parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(m)] for name in self.chunks.large}

    def make_sum(self, name: str, kind: str, n: int) -> linear.Sum:
        """Return an empty sum for a large slot with n columns."""
        like, memory = self.context.buffers.like.dtype, self.context.buffers
        return linear.Sum(memory.rows(f"sum {name} {kind}", 1, n, linear.sum_type(n, like))[0], like)

    def sums_of(self, slot: str) -> Iterator[tuple[linear.Sum, list[float]]]:
        """Yield the sums of a slot with their weights (m,)."""
        return (each for (name, _), each in self.means.items() if name == slot)

    def add(self, i: int, name: str, a: int, x: Tensor) -> None:
        """Add the columns x of a large slot of row i, which begin at column a; rows must be added in order."""
        for sum_, weights in self.sums_of(name):
            sum_.add(x, weights[i], i == 0, a)
        self.parts[name][i].append(linear.block_norms(x[None])[:, 0])

    def add_row(self, i: int, row: Tensor) -> None:
        """Add all of row i; rows must be added in order."""
        self.heads[i] = self.chunks.head(row)
        # A CPU adds pieces, which are still in the cache when they are read again; a GPU needs few kernel launches.
        whole = ((name, 0, n) for name, (_, n) in self.chunks.large.items())
        for name, a, b in whole if row.is_cuda else self.chunks.pieces():
            self.add(i, name, a, self.chunks.part(row, name, a, b))

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(torch.stack([torch.cat(parts) for parts in self.parts[name]], 1))

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return SummedUploads(clients, n, p, self)


class SummedUploads(HeadUploads):
    """The uploads that hooks see: means of large slots, and all rows of small slots."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, sums: GatheredSums) -> None:
        super().__init__(clients, n, p, sums)
        self.sums = sums

    def read_large(self, name: str) -> Tensor:
        raise _undeclared(name, f"reads updates.{name}")

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().combine(coefficients, slot, span)
        for (name, kind), (sum_, _) in self.sums.means.items():
            if name == slot and span is None and torch.equal(coefficients, self.sums.weights[kind]):
                return sum_.value().view(self.chunks.packing.shapes[slot])
        raise _undeclared(slot, "asks for another sum of it")


def _undeclared(slot: str, does: str) -> UserError:
    return UserError(
        f"means says that aggregate reads the slot {slot!r} through updates.mean alone, with the weights declared "
        f"there, but it {does}; leave out {slot!r} in means, and the server holds all rows"
    )


@cache
def _adder() -> ThreadPoolExecutor:
    """Return the thread that adds rows which have arrived, while the rank waits for messages."""
    return ThreadPoolExecutor(1, thread_name_prefix="fedmpi-adder")


class StreamingGather(UploadGather):
    """Adds up all rows at rank 0, which does not train clients unless it is the only rank."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        super().__init__(context, SendBuffer(context, 0) if context.comm.size == 1 else SendBuffer(context))
        self.sums = GatheredSums(context, means, p) if self.comm.rank == 0 else None
        self.adding = deque[Future[None]]()

    def done(self, client: int) -> None:
        row, chunks = self.send_buffer.of(client), self.chunks
        if self.sums is not None:
            self.sums.add_row(self.order[client], row)
            self.comm.count_own(row.element_size() * self.context.upload.size)
            return
        parts = [chunks.head(row), *(chunks.part(row, *piece) for piece in chunks.pieces())]
        self.send_buffer.send(client, [(0, part) for part in parts])

    def _finish(self) -> GatheredUploads | None:
        if self.sums is None:
            self.send_buffer.wait()
        elif self.comm.size > 1:
            try:
                receive_ahead(self.comm, self._incoming(self.sums), AHEAD)
                for each in self.adding:
                    each.result()
            finally:
                wait(self.adding)  # before the memory is used for something else
        return self.sums

    def _add_later(self, add: Callable[[], None]) -> None:
        """Add one piece in a second thread while this one receives the next; MPI receives only within its calls."""
        self.adding.append(_adder().submit(add))
        if len(self.adding) > 1:
            self.adding[0].result()
            self.adding.popleft()

    def _incoming(self, sums: GatheredSums) -> Incoming:
        """Yield all messages in the order in which they are sent, with memory for them and functions that add them."""
        context, chunks, turn = self.context, self.chunks, 0
        many = AHEAD + 2  # one piece that is being added, and one that is about to be received
        places = context.buffers.rows("pieces", many, max((b - a for _, a, b in chunks.pieces()), default=0))
        for i, client in enumerate(context.members):
            peer = context.where[client]
            yield (peer, sums.heads[i]), lambda: None
            for name, a, b in chunks.pieces():
                came = places[turn % many][: b - a]
                yield (peer, came), partial(self._add_later, partial(sums.add, i, name, a, came))
                turn += 1


class IntegerSum(linear.Sum):
    """The sum_i round(c_i x_i / UNIT), added in any order, in a tensor (n,) of int64."""

    def add(self, x: Tensor, c: float, first: bool = False, at: int = 0) -> None:
        """Add a vector; `first` is ignored, because the sum begins with zeros."""

        def piece(span: tuple[int, int]) -> None:
            some = x[span[0] - at : span[1] - at].to(
                torch.float64, copy=True
            )  # a copy, because other sums read x later
            self.total[slice(*span)] += some.mul_(c / UNIT).round_().long()

        linear.spread(piece, linear.chunks(x, at, at + len(x)), x)

    def value(self) -> Tensor:
        out = torch.empty(len(self.total), dtype=self.kind, device=self.total.device)

        def piece(span: tuple[int, int]) -> None:
            out[slice(*span)] = self.total[slice(*span)].double().mul_(UNIT)

        linear.spread(piece, linear.chunks(out, 0, len(out)), out)
        return out


class GatheredIntegerSums(GatheredSums):
    """The sums of a rank's rows, finally of all rows: small slots, integer sums of large slots, and their norms."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        super().__init__(context, means, p)
        shape = len(context.members), len(self.chunks.large)
        self.long = torch.zeros(shape, dtype=torch.float64, device=self.heads.device)

    def make_sum(self, name: str, kind: str, n: int) -> linear.Sum:
        memory = self.context.buffers
        return IntegerSum(memory.rows(f"total {name} {kind}", 1, n, torch.int64)[0].zero_(), memory.like.dtype)

    def add_row(self, i: int, row: Tensor) -> None:
        """Add row i, of a client that this rank has trained."""
        self.heads[i] = self.chunks.head(row)
        for j, (name, (a, n)) in enumerate(self.chunks.large.items()):
            x = row[a : a + n]
            self.long[i, j] = norm = linear.row_norms(linear.block_norms(x[None]))[0]
            if norm > LARGEST and (largest := float(x.abs().max())) > LARGEST:
                raise UserError(
                    f"server.reduce: local takes entries of at most {LARGEST:g}, and client {self.context.members[i]} "
                    f"has one of {largest:.4g} in {name}; use server.reduce: root"
                )
            if norm.isfinite():  # otherwise the run ends (`is_complete`), or the round is left out
                for total, weights in self.sums_of(name):
                    total.add(x, weights[i], False)

    @property
    def is_complete(self) -> bool:  # type: ignore[override]
        return bool(self.long.isfinite().all())

    def large_norms(self, name: str) -> Tensor:
        return self.long[:, [*self.chunks.large].index(name)]


class ReducingGather(UploadGather):
    """Sends the small slots of all clients to rank 0, and reduces sums of large slots over a tree of ranks."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        super().__init__(context, SendBuffer(context, 0))
        self.totals = GatheredIntegerSums(context, means, p)
        train = {context.where[k] for k in context.members}  # other ranks have nothing to add
        self.ranks = [rank for rank in self.comm.alive if rank == 0 or rank in train]

    def done(self, client: int) -> None:
        row = self.send_buffer.of(client)
        self.totals.add_row(self.order[client], row)
        if self.comm.rank == 0:
            self.comm.count_own(row.element_size() * self.chunks.small.size)

    def _finish(self) -> GatheredUploads | None:
        comm, context, totals = self.comm, self.context, self.totals
        if comm.rank == 0:
            theirs = [(i, context.where[k]) for i, k in enumerate(context.members) if context.where[k]]
            comm.exchange([], [(rank, x) for i, rank in theirs for x in (totals.heads[i], totals.long[i])])
            self._reduce()
            return totals
        if comm.rank in self.ranks:
            comm.about = context.about
            own = [self.order[k] for k in context.here]
            heads = comm.post([(0, x) for i in own for x in (totals.heads[i], totals.long[i])], [])
            self._reduce()
            comm.finish(heads)
        return None

    def _reduce(self) -> None:
        """Add the totals of this rank's children in the tree to its own, and send the sums to its parent."""
        comm, me = self.comm, self.ranks.index(self.comm.rank)
        parent, below = tree(me, len(self.ranks))
        totals = [(slot, total.total) for (slot, _), (total, _) in self.totals.means.items()]
        pieces = [total[a:b] for slot, total in totals for name, a, b in self.chunks.pieces() if name == slot]
        sent = list[Posted]()
        memory = self.context.buffers.rows("came", AHEAD + 1, max(map(len, pieces), default=0), torch.int64)

        def send_up(piece: Tensor) -> None:
            if me:
                comm.about = self.context.about
                sent.append(comm.post([(self.ranks[parent], piece)], []))

        def add(piece: Tensor, came: Tensor, child: int) -> None:
            piece.add_(came)
            if child == below[-1]:
                send_up(piece)

        def incoming() -> Incoming:
            for turn, (piece, child) in enumerate(product(pieces, below)):
                came = memory[turn % len(memory)][: len(piece)]
                yield (self.ranks[child], came), partial(add, piece, came, child)

        receive_ahead(comm, incoming(), AHEAD)
        for piece in pieces if not below else ():
            send_up(piece)
        for posted in sent:
            comm.finish(posted)
