"""The gather of a round's uploads: the parts that all four ways share, and the gather of rows.

    rows       rank 0 holds every row                                       any rule
    streaming  rank 0 adds rows up as they arrive, and holds sums           rules that read only means
    sharded    every rank holds the same columns of all rows                any rule
    reducing   every rank adds up its own clients' rows; the sums are       rules that read only means; the result
               reduced over a binomial tree                                 has other bits

Each rank calls, for its clients in their order, row(client), writes the row, and calls done(client); then finish().
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.comm.base import Message, Posted
from fedmpi.engine.messages import NO_STEPS, Upload
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing, Views
from fedmpi.method.context import Uploads

PIECE = 1 << 21  # largest number of entries of a large slot in one message, in whole blocks
PIECES = 8  # least number of messages, if there are enough blocks: one is processed while the next is received
UNSENT = 1 << 30  # largest size in bytes of the rows that a rank has written but not sent


class ChunkPlan:
    """The division of upload rows into messages.

    Small slots, which come first in a row, are sent to rank 0. Slots with more columns than a block (flat/linear.py)
    are sent in pieces, or divided among all ranks in whole blocks of columns.
    """

    def __init__(self, packing: Packing, *, cut: bool = True) -> None:
        """Divide the rows of a packing; with `cut` false all slots count as small."""
        self.packing, self.block = packing, linear.BLOCK
        spans = packing.spans.items()
        # first entry, number of columns
        self.large = {name: (a, b - a) for name, (a, b) in spans if cut and b - a > self.block}
        self.small = Packing({name: shape for name, shape in packing.shapes.items() if name not in self.large})

    def head(self, row: Tensor) -> Tensor:
        """Return the small slots of a row."""
        return row[: self.small.size]

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield (slot, a, b) for each message of the large slots, which contains the columns a to b of the slot."""
        for name, (_, n) in self.large.items():
            size = max(min(PIECE, n // PIECES) // self.block, 1) * self.block
            for a in range(0, n, size):
                yield name, a, min(a + size, n)

    def part(self, row: Tensor, name: str, a: int, b: int) -> Tensor:
        """Return the columns a to b of a large slot in a row."""
        start, _ = self.large[name]
        return row[start + a : start + b]

    def share(self, name: str, holder: int, holders: int) -> tuple[int, int]:
        """Return the range a, b of the columns of a large slot that the holder with this number has."""
        n = self.large[name][1]
        blocks = -(-n // self.block)
        a, b = (min(j * blocks // holders * self.block, n) for j in (holder, holder + 1))
        return a, b


@dataclass
class BufferPool:
    """Memory for messages that is reused in each round."""

    like: Tensor  # a tensor of the messages' type and device
    pins: bool = False  # whether clients train on a GPU while messages are on the CPU
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def rows(
        self, name: str, count: int, size: int, dtype: torch.dtype | None = None, *, uploads: bool = False
    ) -> Tensor:
        """Return the memory (count, size) with this name; with `uploads`, for rows of this rank's clients.

        Memory for uploads may be pinned, because a GPU copies faster to pinned memory.
        """
        tensor, dtype, n = self.tensors.get(name), dtype or self.like.dtype, count * size
        if tensor is None or tensor.dtype != dtype or len(tensor) < n:
            tensor = None
            self.tensors.pop(name, None)  # frees the old memory before the new one is allocated
            pin = self.pins and uploads and n * dtype.itemsize <= UNSENT  # the system cannot page pinned memory out
            tensor = self.tensors[name] = torch.empty(n, dtype=dtype, device=self.like.device, pin_memory=pin)
        return tensor[:n].view(count, size)


@dataclass
class GatherContext:
    """The round whose uploads are gathered, as one rank sees it: clients, their ranks, layout, and memory."""

    comm: Communicator
    t: int
    upload: Upload
    members: Sequence[int]
    where: Mapping[int, int]  # client -> rank
    buffers: BufferPool

    def __post_init__(self) -> None:
        self.chunks = ChunkPlan(self.upload.packing)
        self.here = [k for k in self.members if self.where[k] == self.comm.rank]  # this rank's clients
        self.order = {client: i for i, client in enumerate(self.members)}
        self.about = self.t, tuple(self.upload.packing.shapes)  # description for the audit of sent data

    def packed(self, count: int) -> Tensor:
        """Return memory (count, bytes) for encoded uploads; an empty tensor if uploads are not encoded."""
        coding, buffers = self.upload.coding, self.buffers
        return buffers.rows("packed", count, coding.entries).view(torch.uint8) if coding else buffers.like[:0]


class GatheredUploads:
    """A round's uploads at rank 0: the small slots of all rows; subclasses provide the large slots."""

    is_complete = True  # whether sums include all rows; rows with values that are not finite may be left out

    def __init__(self, heads: Tensor, chunks: ChunkPlan) -> None:
        """Store the small slots of all rows, `heads` (m, entries)."""
        self.heads, self.chunks = heads, chunks
        self.small = chunks.small.views(heads)

    def large_norms(self, name: str) -> Tensor:
        """Return the norms of the rows of a large slot, (m,) float64."""
        raise NotImplementedError

    def norms(self) -> Tensor:
        """Return ||dw_i|| of all rows, (m,) float64; nan if a value is not finite, 0 if dw is not sent."""
        if "dw" in self.chunks.large:
            return self.large_norms("dw")
        return linear.row_norms(linear.block_norms(self.small.dw if "dw" in self.small else self.heads[:, :0]))

    def finite(self) -> list[bool]:
        """Return for each row whether all of its values are finite."""
        norms = linear.block_norms(self.heads).sum(0) + sum(self.large_norms(name) for name in self.chunks.large)
        return norms.isfinite().tolist()

    def only(self, places: Sequence[int]) -> None:
        """Keep only the rows with these indices."""
        self.heads = close_up(self.heads, places)
        self.small = self.chunks.small.views(self.heads)

    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return Uploads(clients, n, p, self.small)

    def train_loss(self, p: Tensor) -> dict[str, float]:
        """Return {"train_loss": sum_k p_k loss_k} over the clients that made steps; {} if there are none.

        The weights p (m,) float64 are scaled so that those of these clients sum to one.
        """
        losses, steps = self.small._loss.double().cpu(), (self.small._flag != NO_STEPS).cpu()
        if not steps.any():
            return {}
        return {"train_loss": float(p @ losses if steps.all() else p[steps] @ losses[steps] / p[steps].sum())}

    def release(self) -> None:
        """Release the resources of these uploads at the end of the round."""


class HeadUploads(Uploads, ABC):
    """The uploads that hooks see if rank 0 has no rows of large slots; subclasses define access to these."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredUploads) -> None:
        self.chunks, small = gathered.chunks, gathered.small

        def slot(name: str) -> Tensor:
            return self.read_large(name) if name in self.chunks.large else getattr(small, name)

        super().__init__(clients, n, p, Views({}, tuple(gathered.chunks.packing.shapes), slot))

    @abstractmethod
    def read_large(self, name: str) -> Tensor:
        """Return the rows of a large slot, (m, *shape)."""


def close_up(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Move the rows with these indices to the front of a matrix, in place, and return them."""
    for to, place in enumerate(places):
        if to != place:
            rows[to] = rows[place]
    return rows[: len(places)]


class SendBuffer:
    """Memory for the rows of a rank's clients; it is reused after a row was sent."""

    def __init__(self, context: GatherContext, max_bytes: int | None = UNSENT, rows: Tensor | None = None) -> None:
        """Args:
        max_bytes: limit for rows that have not been sent yet, at least one row; None: memory for all rows of this rank.
        rows: memory for all clients' rows that is used instead.
        """
        self.context, clients = context, context.here if rows is None else context.members
        self.order = {client: i for i, client in enumerate(clients)}
        if rows is None:
            size, count = context.upload.packing.size, len(clients)
            if max_bytes is not None:
                count = min(count, max(1, max_bytes // max(size * context.buffers.like.element_size(), 1)))
            rows = context.buffers.rows("rows", count, size, uploads=True)
        self.rows = rows
        self.sent: dict[int, Posted] = {}  # place -> the message with the row at that place

    def place(self, client: int) -> int:
        return self.order[client] % len(self.rows)

    def row(self, client: int) -> Tensor:
        """Return memory for a client's row, after waiting until the row that it contained before was sent."""
        self._wait(self.place(client))
        return self.of(client)

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Return the rows of several clients as one tensor if they are adjacent in memory, else None."""
        places = [self.place(client) for client in clients]
        for place in places:
            self._wait(place)
        first = places[0]
        return self.rows[first : first + len(places)] if places == [*range(first, first + len(places))] else None

    def of(self, client: int) -> Tensor:
        """Return a client's row without waiting, while it is being written."""
        return self.rows[self.place(client)]

    def message(self, client: int) -> Tensor:
        """Return the message for a client's row: its encoded form if uploads are encoded, else the row."""
        row, coding = self.of(client), self.context.upload.coding
        return row if coding is None else coding.pack(row, self.context.packed(len(self.rows))[self.place(client)])

    def send(self, client: int, messages: Sequence[Message]) -> None:
        """Start sending the messages of a client's row."""
        self.context.comm.about = self.context.about
        self.sent[self.place(client)] = self.context.comm.post(messages, [])

    def wait(self) -> None:
        while self.sent:
            self._wait(next(iter(self.sent)))

    def _wait(self, place: int) -> None:
        if place in self.sent:
            self.context.comm.finish(self.sent.pop(place))


class UploadGather(ABC):
    """The gather of a round's uploads on one rank."""

    def __init__(self, context: GatherContext, send_buffer: SendBuffer) -> None:
        self.context, self.comm, self.chunks, self.order = context, context.comm, context.chunks, context.order
        self.send_buffer = send_buffer
        self._acknowledged: Posted = []

    def row(self, client: int) -> Tensor:
        """Return memory for this client's upload, after waiting until the upload that it contained before was sent."""
        return self.send_buffer.row(client)

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Return the rows of these clients as one tensor (n, row) if they are adjacent in memory, else None."""
        return self.send_buffer.block(clients)

    @abstractmethod
    def done(self, client: int) -> None:
        """Send this client's upload, which has been written to its row."""

    def finish(self) -> GatheredUploads | None:
        """Wait for all messages; return the uploads at rank 0, None elsewhere. Raises Lost after a rank failure."""
        received = self._finish()
        if self._acknowledged:
            self.comm.finish(self._acknowledged)
        return received

    @abstractmethod
    def _finish(self) -> GatheredUploads | None:
        """Complete the messages of the uploads."""

    def acknowledge(self) -> None:
        """Confirm the round's broadcast to rank 0 from ranks that have no clients in this round.

        A rank that missed a whole round could not return to its start, and the others would delete checkpoints from
        which its clients' states are restored. These bytes are not counted, because it depends on measured times which
        ranks have no clients.
        """
        comm, context = self.comm, self.context
        idle = sorted(set(comm.alive) - {0, *context.where.values()})
        if not idle or comm.rank not in {0, *idle}:
            return
        note = torch.zeros(len(idle), device=comm.device)
        with comm.uncounted():
            comm.about = context.t, ("heard",)
            incoming = [] if comm.rank else [(rank, note[i : i + 1]) for i, rank in enumerate(idle)]
            self._acknowledged = comm.post([(0, note[:1])] if comm.rank else [], incoming)


class RowGather(UploadGather):
    """Gathers complete rows in rank 0's memory."""

    def __init__(self, context: GatherContext) -> None:
        members, where, own = context.members, context.where, bool(context.here)
        self.coming: dict[int, Posted] = {}
        if context.comm.rank:
            super().__init__(context, SendBuffer(context))
            return
        rows = context.buffers.rows("rows", len(members), context.upload.packing.size, uploads=own)
        super().__init__(context, SendBuffer(context, rows=rows))
        theirs = [i for i, k in enumerate(members) if where[k]]
        self.packed = dict(zip(theirs, context.packed(len(theirs)), strict=True)) if context.upload.coding else {}
        self.coming = {i: self.comm.post([], [(where[members[i]], self.packed.get(i, rows[i]))]) for i in theirs}

    def done(self, client: int) -> None:
        if self.comm.rank:
            self.send_buffer.send(client, [(0, self.send_buffer.message(client))])
        else:
            self.comm.count_own(self.send_buffer.rows.element_size() * self.context.upload.size)

    def _finish(self) -> GatheredUploads | None:
        rows, upload = self.send_buffer.rows, self.context.upload
        self.send_buffer.wait()
        for i, posted in self.coming.items():
            self.comm.finish(posted)
            if upload.coding is not None:
                upload.coding.unpack(self.packed[i], rows[i])
        return None if self.comm.rank else GatheredUploads(rows, ChunkPlan(upload.packing, cut=False))


def receive_ahead(comm: Communicator, incoming: Iterable[tuple[Message, Callable[[], None]]], ahead: int) -> None:
    """Receive messages in order, with up to `ahead` more of them in progress, and call the function of each one.

    Args:
        incoming: pairs of a message and the function to call when it has arrived.
    """
    under_way = deque[tuple[Posted, Callable[[], None]]]()

    def finish_first() -> None:
        posted, use = under_way.popleft()
        comm.finish(posted)
        use()

    for message, use in incoming:
        under_way.append((comm.post([], [message]), use))
        if len(under_way) > ahead:
            finish_first()
    while under_way:
        finish_first()
