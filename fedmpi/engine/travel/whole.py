"""Uploads of which rank 0 holds every row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedmpi.engine.travel.gathering import Gathering, Received, Ring, Trip, close_up, neighbours, packed, scale
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing
from fedmpi.method.context import Uploads


class Held(Received):
    """Rows (m, row) in rank 0's own memory."""

    def __init__(self, rows: Tensor, packing: Packing) -> None:
        self.rows, self.packing = rows, packing
        self.small = packing.views(rows)
        self.dw = packing.spans.get("dw", (0, 0))

    def norms(self) -> Tensor:
        return linear.row_norms(linear.block_norms(self.rows[:, slice(*self.dw)]))

    def finite(self) -> list[bool]:
        return linear.block_norms(self.rows).sum(0).isfinite().tolist()

    def scale(self, place: int, factor: float) -> None:
        scale(self.rows[place, slice(*self.dw)], factor)

    def only(self, places: Sequence[int]) -> None:
        self.rows = close_up(self.rows, places)
        self.small = self.packing.views(self.rows)

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return Uploads(clients, n, p, self.small)

    def tensors(self) -> dict[str, Tensor]:
        return {"updates": self.rows}


class Whole(Gathering):
    """Rows as they are, into rank 0's memory."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip)
        if self.comm.rank:
            self.ring = Ring(trip)
            return
        self.rows = trip.memory.rows("rows", len(trip.members), trip.upload.packing.size, uploads=bool(trip.here))
        self.place = {client: i for i, client in enumerate(trip.members)}
        self.comm.count_own(self.rows.element_size() * trip.upload.size * len(trip.here))
        theirs = [i for i, k in enumerate(trip.members) if trip.where[k]]
        self.packed = dict(zip(theirs, packed(trip, len(theirs)), strict=True)) if trip.upload.coding else {}
        self.coming = {
            i: self.comm.post([], [(trip.where[trip.members[i]], self.packed.get(i, self.rows[i]))]) for i in theirs
        }

    def row(self, client: int) -> Tensor:
        return self.ring.row(client) if self.comm.rank else self.rows[self.place[client]]

    def block(self, clients: Sequence[int]) -> Tensor | None:
        if self.comm.rank:
            return self.ring.block(clients)
        return neighbours(self.rows, [self.place[client] for client in clients])

    def done(self, client: int) -> None:
        if self.comm.rank:
            self.ring.send(client, [(0, self.ring.message(client))])

    def _finish(self) -> Received | None:
        if self.comm.rank:
            self.ring.wait()
            return None
        for i, posted in self.coming.items():
            self.comm.finish(posted)
            if i in self.packed:
                self.trip.upload.coding.unpack(self.packed[i], self.rows[i])  # type: ignore[union-attr]
        return Held(self.rows, self.trip.upload.packing)
