"""Uploads of which rank 0 holds every row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedmpi.engine.transport.gather import (
    GatherContext,
    GatheredUploads,
    SendBuffer,
    UploadGather,
    close_up,
    neighbours,
    scale,
)
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing
from fedmpi.method.context import Uploads


class GatheredRows(GatheredUploads):
    """Rows (m, row) in rank 0's own memory."""

    def __init__(self, rows: Tensor, packing: Packing) -> None:
        self.rows, self.packing = rows, packing
        self.small = packing.views(rows)
        self.dw = slice(*packing.spans.get("dw", (0, 0)))

    def norms(self) -> Tensor:
        return linear.row_norms(linear.block_norms(self.rows[:, self.dw]))

    def finite(self) -> list[bool]:
        return linear.block_norms(self.rows).sum(0).isfinite().tolist()

    def scale(self, place: int, factor: float) -> None:
        scale(self.rows[place, self.dw], factor)

    def only(self, places: Sequence[int]) -> None:
        self.rows = close_up(self.rows, places)
        self.small = self.packing.views(self.rows)

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return Uploads(clients, n, p, self.small)

    def tensors(self) -> dict[str, Tensor]:
        return {"updates": self.rows}


class RowGather(UploadGather):
    """Rows as they are, into rank 0's memory."""

    def __init__(self, context: GatherContext) -> None:
        super().__init__(context)
        if self.comm.rank:
            self.send_buffer = SendBuffer(context)
            return
        own, size = len(context.here), context.upload.packing.size
        self.rows = context.buffers.rows("rows", len(context.members), size, uploads=bool(own))
        self.comm.count_own(self.rows.element_size() * context.upload.size * own)
        theirs = [i for i, k in enumerate(context.members) if context.where[k]]
        self.packed = dict(zip(theirs, context.packed(len(theirs)), strict=True)) if context.upload.coding else {}
        self.coming = {
            i: self.comm.post([], [(context.where[context.members[i]], self.packed.get(i, self.rows[i]))])
            for i in theirs
        }

    def row(self, client: int) -> Tensor:
        return self.send_buffer.row(client) if self.comm.rank else self.rows[self.order[client]]

    def block(self, clients: Sequence[int]) -> Tensor | None:
        if self.comm.rank:
            return self.send_buffer.block(clients)
        return neighbours(self.rows, [self.order[client] for client in clients])

    def done(self, client: int) -> None:
        if self.comm.rank:
            self.send_buffer.send(client, [(0, self.send_buffer.message(client))])

    def _finish(self) -> GatheredUploads | None:
        if self.comm.rank:
            self.send_buffer.wait()
            return None
        for i, posted in self.coming.items():
            self.comm.finish(posted)
            if i in self.packed:
                self.context.upload.coding.unpack(self.packed[i], self.rows[i])  # type: ignore[union-attr]
        return GatheredRows(self.rows, self.context.upload.packing)
