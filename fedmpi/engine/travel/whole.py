"""Uploads of which rank 0 holds every row. Wide ones come in pieces, of which Gram matrices are formed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from fedmpi.comm.base import Message
from fedmpi.engine.travel.cuts import Cuts
from fedmpi.engine.travel.early import Asked, Early, Rows
from fedmpi.engine.travel.gathering import Gathering, Received, Ring, Trip, close_up, neighbours, packed, scale
from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads


class Held(Received):
    """Rows (m, row) in rank 0's own memory."""

    def __init__(self, rows: Tensor, cuts: Cuts, asked: set[Asked]) -> None:
        """asked: the Gram matrices that were asked for in the round before."""
        self.rows, self.cuts = rows, cuts
        self.small = cuts.packing.views(rows)
        self.dw = cuts.packing.spans.get("dw", (0, 0))
        self.early = Early(self._large(), asked)

    def _large(self) -> Rows:
        return {name: (self.rows[:, a : a + n], 0, n) for name, (a, n) in self.cuts.large.items()}

    def norms(self) -> Tensor:
        return linear.row_norms(linear.block_norms(self.rows[:, slice(*self.dw)]))

    def finite(self) -> list[bool]:
        return [found.isfinite().item() for found in linear.block_norms(self.rows).sum(0)]

    def scale(self, place: int, factor: float) -> None:
        self.early.forget(self._large())
        scale(self.rows[place, slice(*self.dw)], factor)

    def only(self, places: Sequence[int]) -> None:
        self.early.rest()
        self.rows = close_up(self.rows, places)
        self.small = self.cuts.packing.views(self.rows)
        self.early.forget(self._large())

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return HeldUploads(clients, n, p, self)

    def tensors(self) -> dict[str, Tensor]:
        return {"up": self.rows}


class HeldUploads(Uploads):
    """Of rows at hand."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, held: Held) -> None:
        super().__init__(clients, n, p, held.small)
        self._early = held.early

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self._early.rows:
            return super().gram(slot, span)
        return linear.total(self._early.take(slot, span or (0, self._early.rows[slot][2])))


class Whole(Gathering):
    """Rows as they are, into rank 0's memory."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip)
        if self.comm.rank:
            self.ring = Ring(trip)
            return
        self.rows = trip.memory.rows("rows", len(trip.members), trip.upload.packing.size, uploads=bool(trip.here))
        self.place = {client: i for i, client in enumerate(trip.members)}
        self.held = Held(self.rows, self.cuts, trip.asked)
        self.comm.count_own(self.rows.element_size() * trip.upload.size * len(trip.here))
        theirs = [i for i, k in enumerate(trip.members) if trip.where[k]]
        self.packed = dict(zip(theirs, packed(trip, len(theirs)), strict=True)) if trip.upload.coding else {}
        if self.packed or self.cuts.large:
            self.coming = {i: [(*part, self.comm.post([], some)) for part, some in self._parts(i)] for i in theirs}
        else:
            every = self.comm.post([], [(trip.where[trip.members[i]], self.rows[i]) for i in theirs])
            self.coming = {-1: [("", 0, every)]}

    def _parts(self, i: int) -> Iterator[tuple[tuple[str, int], list[Message]]]:
        """Of row i as it is sent: the slot and its columns up to which it is there then, messages."""
        peer, row, cuts = self.trip.where[self.trip.members[i]], self.rows[i], self.cuts
        if self.packed:
            yield ("", 0), [(peer, self.packed[i])]
            return
        yield ("", 0), [(peer, part) for part in cuts.small_parts(row)]
        for name, a, b in cuts.pieces():
            yield (name, b), [(peer, cuts.part(row, name, a, b))]

    def row(self, client: int) -> Tensor:
        return self.ring.row(client) if self.comm.rank else self.rows[self.place[client]]

    def block(self, clients: Sequence[int]) -> Tensor | None:
        if self.comm.rank:
            return self.ring.block(clients)
        return neighbours(self.rows, [self.place[client] for client in clients])

    def done(self, client: int) -> None:
        if self.comm.rank:
            coded = self.trip.upload.coding is not None
            parts = [self.ring.message(client)] if coded else self.cuts.parts(self.ring.of(client))
            self.ring.send(client, [(0, part) for part in parts])

    def _finish(self) -> Received | None:
        if self.comm.rank:
            self.ring.wait()
            return None
        early, large = self.held.early, self.cuts.large if self.comm.begins else ()  # else all come at once
        for i, whole in pairwise([*self.coming, len(self.rows)]):
            for name, to, posted in self.coming[i]:
                self.comm.finish(posted)
                if name in large:
                    early.came(name, i, to)
            if i in self.packed:
                self.trip.upload.coding.unpack(self.packed[i], self.rows[i])  # type: ignore[union-attr]
            for name in large:
                early.came(name, whole)
        return self.held
