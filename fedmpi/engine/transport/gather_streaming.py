"""Uploads that rank 0 adds up as they come, in the order of the clients: it holds sums, whatever the cohort's size.

Rows come in pieces, or whole where they travel in formats (comm.wire), the next ones while one is added. For rules that
read large slots through `updates.mean` alone, which their method declares (`means`); nothing may have to be left out or
clipped, as that is known only at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial

import torch
from torch import Tensor

from fedmpi.comm.base import Message, Posted
from fedmpi.common.errors import UserError
from fedmpi.engine.transport.gather import (
    GatherContext,
    GatheredHeads,
    GatheredUploads,
    HeadUploads,
    SendBuffer,
    UploadGather,
)
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads

Means = Mapping[str, tuple[str, ...]]  # large slot -> the weights of its means: "p", "uniform"
AHEAD = 3  # pieces that are under way while one is added


class GatheredSums(GatheredHeads):
    """What is left of the rows: the small slots, sums of the large ones, and the norms of their blocks."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        m = len(context.members)
        super().__init__(context, context.buffers.rows("heads", m, context.chunks.small.size))
        self.weights = {"p": p, "uniform": torch.full((m,), 1 / m, dtype=torch.float64)}
        same = torch.equal(p, self.weights["uniform"])
        self.means: dict[tuple[str, str], tuple[linear.Sum, list[float]]] = {}
        for name, (_, n) in self.chunks.large.items():
            for kind in dict.fromkeys("p" if same else each for each in means.get(name, ("p",))):
                self.means[name, kind] = self.make_sum(name, kind, n), self.weights[kind].tolist()
        self.parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(m)] for name in self.chunks.large}

    def make_sum(self, name: str, kind: str, n: int) -> linear.Sum:
        """Return the sum of a large slot, still empty."""
        like, memory = self.context.buffers.like.dtype, self.context.buffers
        return linear.Sum(memory.rows(f"sum {name} {kind}", 1, n, linear.sum_type(n, like))[0], like)

    def add(self, i: int, name: str, a: int, x: Tensor) -> None:
        """Add the columns from a on of a large slot of row i, whose turn it is."""
        for (slot, _), (sum_, weights) in self.means.items():
            if slot == name:
                sum_.add(x, weights[i], i == 0, a)
        self.parts[name][i].append(linear.block_norms(x[None])[:, 0])

    def add_row(self, i: int, row: Tensor) -> None:
        """Add all of row i, whose turn it is."""
        self.chunks.copy_small(row, self.heads[i])
        # On a CPU in pieces, which are still in the cache when they are read again; a GPU wants few launches.
        whole = ((name, 0, n) for name, (_, n) in self.chunks.large.items())
        for name, a, b in whole if row.is_cuda else self.chunks.pieces():
            self.add(i, name, a, self.chunks.part(row, name, a, b))

    def large_norms(self, name: str) -> Tensor:
        return linear.row_norms(torch.stack([torch.cat(parts) for parts in self.parts[name]], 1))

    def scale(self, place: int, factor: float) -> None:
        raise AssertionError("an upload is clipped only where rows are held")

    def only(self, places: Sequence[int]) -> None:
        raise AssertionError("an upload is left out only where rows are held")

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return StreamedUploads(clients, n, p, self)


class StreamedUploads(HeadUploads):
    """Means of large slots; small ones as ever."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, sums: GatheredSums) -> None:
        super().__init__(clients, n, p, sums)
        self.sums = sums

    def read_large(self, name: str) -> Tensor:
        raise self._undeclared(name, f"reads updates.{name}")

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.chunks.large:
            return super().combine(coefficients, slot, span)
        for (name, kind), (sum_, _) in self.sums.means.items():
            if name == slot and span is None and torch.equal(coefficients, self.sums.weights[kind]):
                return sum_.value().view(self.chunks.packing.shapes[slot])
        raise self._undeclared(slot, "asks for another sum of it")

    def _undeclared(self, slot: str, does: str) -> UserError:
        return UserError(
            f"means says that aggregate reads the slot {slot!r} through updates.mean alone, with the weights declared "
            f"there, but it {does}; leave out {slot!r} in means, and the server holds all rows"
        )


@cache
def _adder() -> ThreadPoolExecutor:
    """The thread that adds what has come, while the rank waits for messages."""
    return ThreadPoolExecutor(1, thread_name_prefix="fedmpi-adder")


class StreamingGather(UploadGather):
    """Rank 0 does not train, unless it is alone."""

    def __init__(self, context: GatherContext, means: Means, p: Tensor) -> None:
        """p: (m,) the cohort's weights."""
        super().__init__(context)
        self.sums = GatheredSums(context, means, p) if self.comm.rank == 0 else None
        self.send_buffer = SendBuffer(context, 0) if self.comm.size == 1 else SendBuffer(context)
        self.ahead = AHEAD if context.upload.coding is None else AHEAD - 1  # of whole rows fewer

    def row(self, client: int) -> Tensor:
        return self.send_buffer.row(client)

    def done(self, client: int) -> None:
        row, coded = self.send_buffer.of(client), self.context.upload.coding is not None
        if self.sums is not None:
            self.sums.add_row(self.order[client], row)
            self.comm.count_own(row.element_size() * self.context.upload.size)
            return
        parts = [self.send_buffer.message(client)] if coded else self.chunks.parts(row)
        self.send_buffer.send(client, [(0, part) for part in parts])

    def _finish(self) -> GatheredUploads | None:
        if self.sums is None:
            self.send_buffer.wait()
        elif self.comm.size > 1:
            self._add_all(self.sums)
        return self.sums

    def _add_all(self, sums: GatheredSums) -> None:
        """Rows in the order of the clients, piece by piece: one is added by a thread while others come, which with MPI
        they do only inside its calls."""
        under_way, adding = deque[tuple[Posted, Callable[[], None] | None]](), deque[Future[None]]()

        def one() -> None:
            posted, add = under_way.popleft()
            self.comm.finish(posted)
            if add is not None:
                adding.append(_adder().submit(add))
            if len(adding) > 1:
                adding[0].result()
                adding.popleft()

        try:
            for message, add in self._coming(sums):
                under_way.append((self.comm.post([], [message]), add))
                if len(under_way) > self.ahead:
                    one()
            while under_way:
                one()
            for each in adding:
                each.result()
        finally:
            wait(adding)  # before anybody else uses the memory

    def _coming(self, sums: GatheredSums) -> Iterator[tuple[Message, Callable[[], None] | None]]:
        """All messages as they are sent, with places for them, and what adds them."""
        context, chunks, turn, coding = self.context, self.chunks, 0, self.context.upload.coding
        many = self.ahead + 2  # one that is added, one that is about to be posted
        if coding is not None:
            whole, row = context.packed(many), context.buffers.rows("row", 1, context.upload.packing.size)[0]

            def add(i: int, came: Tensor) -> None:
                coding.unpack(came, row)
                sums.add_row(i, row)

            for i, client in enumerate(context.members):
                came = whole[i % many]
                yield (context.where[client], came), partial(add, i, came)
            return
        places = context.buffers.rows("pieces", many, max((b - a for _, a, b in chunks.pieces()), default=0))
        for i, client in enumerate(context.members):
            peer = context.where[client]
            for place in chunks.places(sums.heads[i]):
                yield (peer, place), None
            for name, a, b in chunks.pieces():
                came = places[turn % many][: b - a]
                yield (peer, came), partial(sums.add, i, name, a, came)
                turn += 1
