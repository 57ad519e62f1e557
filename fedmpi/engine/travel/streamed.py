"""Uploads that rank 0 adds up as they come, in the order of the clients: it holds sums, whatever the cohort's size.

Rows come in pieces, or whole where they travel in formats (comm.wire), the next ones while one is added. For rules that
read large slots through `up.mean` alone, which their method declares (`means`); nothing may have to be left out or
clipped, as that is known only at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.comm.base import Message, Posted
from fedmpi.common.errors import UserError
from fedmpi.engine.travel.cuts import PIECE
from fedmpi.engine.travel.gathering import Gathering, Received, Ring, Trip, packed
from fedmpi.flat import linear
from fedmpi.flat.packing import Views
from fedmpi.method.context import Span, Uploads

Means = Mapping[str, tuple[str, ...]]  # large slot -> the weights of its means: "p", "uniform"
AHEAD = 3  # pieces that may be under way while one is added


class Sums(Received):
    """What is left of the rows: the small slots, sums of the large ones, and the norms of their blocks."""

    def __init__(self, trip: Trip, means: Means, p: Tensor) -> None:
        cuts, m = trip.cuts, len(trip.members)
        self.cuts, self.trip = cuts, trip
        self.heads = trip.memory.rows("heads", m, cuts.small.size)
        self.small = cuts.small.views(self.heads)
        weights = {"p": p, "uniform": torch.full((m,), 1 / m, dtype=torch.float64)}
        same = torch.equal(p, weights["uniform"])
        self.means: dict[tuple[str, str], tuple[linear.Sum, list[float]]] = {}
        for name, (_, n) in cuts.large.items():
            for kind in dict.fromkeys("p" if same else each for each in means.get(name, ("p",))):
                place = trip.memory.rows(f"sum {name} {kind}", 1, n, linear.sum_type(n, trip.memory.like.dtype))[0]
                self.means[name, kind] = linear.Sum(place, trip.memory.like.dtype), weights[kind].tolist()
        self.weights = weights
        self.parts: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(m)] for name in cuts.large}

    def add(self, i: int, name: str, a: int, x: Tensor) -> None:
        """The columns from a on of a large slot of row i, whose turn it is."""
        for (slot, _), (sum_, weights) in self.means.items():
            if slot == name:
                sum_.add(x, weights[i], i == 0, a)
        self.parts[name][i].append(linear.norm_parts(x[None])[:, 0])

    def add_row(self, i: int, row: Tensor) -> None:
        """All of row i, whose turn it is."""
        for source, place in zip(self.cuts.small_parts(row), self.cuts.places(self.heads[i]), strict=True):
            place.copy_(source)
        for name, a, b in self.cuts.pieces():  # what is read twice is still in the cache
            self.add(i, name, a, self.cuts.part(row, name, a, b))

    def norms(self) -> Tensor:
        if "dw" in self.parts:
            return self._norms("dw")
        dw = getattr(self.small, "dw", self.heads[:, :0]) if "dw" in self.small else self.heads[:, :0]
        return linear.norms(linear.norm_parts(dw))

    def _norms(self, name: str) -> Tensor:
        return linear.norms(torch.stack([torch.cat(parts) for parts in self.parts[name]], 1))

    def finite(self) -> list[bool]:
        found = linear.norm_parts(self.heads).sum(0) + sum(self._norms(name) for name in self.parts)
        return [bool(each) for each in found.isfinite()]

    def scale(self, place: int, factor: float) -> None:
        raise AssertionError("an upload is clipped only where rows are held")

    def only(self, places: Sequence[int]) -> None:
        raise AssertionError("an upload is left out only where rows are held")

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return StreamedUploads(clients, n, p, self)

    def tensors(self) -> dict[str, Tensor]:
        return {"up": self.heads}


class StreamedUploads(Uploads):
    """Means of large slots; small ones as ever."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, sums: Sums) -> None:
        super().__init__(clients, n, p, Views({}, tuple(sums.cuts.packing.shapes), self._slot))
        self.sums = sums

    def _slot(self, name: str) -> Tensor:
        if name in self.sums.cuts.large:
            raise self._undeclared(name, f"reads up.{name}")
        return getattr(self.sums.small, name)

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        sums = self.sums
        if slot not in sums.cuts.large:
            return super().combine(coefficients, slot, span)
        for (name, kind), (sum_, _) in sums.means.items():
            if name == slot and span is None and torch.equal(coefficients, sums.weights[kind]):
                return sum_.value().view(sums.cuts.packing.shapes[slot])
        raise self._undeclared(slot, "asks for another sum of it")

    def _undeclared(self, slot: str, does: str) -> UserError:
        return UserError(
            f"means says that aggregate reads the slot {slot!r} through up.mean alone, with the weights declared "
            f"there, but it {does}; leave out {slot!r} in means, and the server holds all rows"
        )


class Streamed(Gathering):
    """Rank 0 does not train, unless it is alone."""

    def __init__(self, trip: Trip, means: Means, p: Tensor) -> None:
        """p: (m,) the cohort's weights."""
        super().__init__(trip)
        self.order = {client: i for i, client in enumerate(trip.members)}
        self.sums = Sums(trip, means, p) if self.comm.rank == 0 else None
        self.ring = Ring(trip, 0) if self.comm.size == 1 else Ring(trip)

    def row(self, client: int) -> Tensor:
        return self.ring.row(client)

    def done(self, client: int) -> None:
        row, cuts = self.ring.of(client), self.cuts
        if self.sums is None and self.trip.upload.coding is not None:
            self.ring.send(client, [(0, self.ring.message(client))])
        elif self.sums is None:
            pieces = [*cuts.small_parts(row), *(cuts.part(row, *piece) for piece in cuts.pieces())]
            self.ring.send(client, [(0, x) for x in pieces])
        else:
            self.sums.add_row(self.order[client], row)
            self.comm.count_own(row.element_size() * self.trip.upload.size)

    def finish(self) -> Received | None:
        if self.sums is None:
            self.ring.wait()
        elif self.comm.size > 1:
            self._add_all(self.sums)
        return self.sums

    def _add_all(self, sums: Sums) -> None:
        """Rows in the order of the clients, piece by piece."""
        under_way: deque[tuple[Posted, int, str, int, Tensor]] = deque()
        coding = self.trip.upload.coding
        row = self.trip.memory.rows("row", 1, self.trip.upload.packing.size)[0] if coding else sums.heads[:0]

        def one() -> None:
            posted, i, name, a, x = under_way.popleft()
            self.comm.finish(posted)
            if coding is not None:
                coding.unpack(x, row)
                sums.add_row(i, row)
            elif name:
                sums.add(i, name, a, x)

        for message, i, name, a in self._coming(sums):
            under_way.append((self.comm.post([], [message]), i, name, a, message[1]))
            if len(under_way) > AHEAD:
                one()
        while under_way:
            one()

    def _coming(self, sums: Sums) -> Iterator[tuple[Message, int, str, int]]:
        """All messages as they are sent, with places for them."""
        trip, cuts, turn = self.trip, self.cuts, 0
        if trip.upload.coding is not None:
            whole = packed(trip, AHEAD + 1)
            for i, client in enumerate(trip.members):
                yield (trip.where[client], whole[i % len(whole)]), i, "", 0
            return
        longest = max((b - a for _, a, b in cuts.pieces()), default=0)
        places = trip.memory.rows("pieces", AHEAD + 1, min(longest, max(PIECE, cuts.block)))
        for i, client in enumerate(trip.members):
            peer = trip.where[client]
            for place in cuts.places(sums.heads[i]):
                yield (peer, place), i, "", 0
            for name, a, b in cuts.pieces():
                yield (peer, places[turn % len(places)][: b - a]), i, name, a
                turn += 1
