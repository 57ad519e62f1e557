"""The gather of a round's uploads: what its four ways have in common.

    whole      rank 0 holds every row                                       any rule
    streamed   rank 0 adds them up as they come, and holds sums             rules that read means alone
    sharded    every rank holds the same columns of all rows                any rule
    reduced    every rank adds up its own clients' rows; sums go up a tree  rules that read means alone; other bits
On each rank, in the order of its clients:  row(client), write it, done(client); then finish().
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.comm.base import Message, Posted
from fedmpi.engine.messages import NO_STEPS, Upload
from fedmpi.flat import linear
from fedmpi.flat.layout import merge_spans
from fedmpi.flat.packing import Packing, Views
from fedmpi.method.context import Uploads

PIECE = 1 << 21  # the most entries of a large slot that travel as one message, in whole blocks
PIECES = 8  # messages, at least, if it has so many blocks: what is done with one is done while the next one comes
UNSENT = 1 << 30  # bytes of rows that a rank may have written and not yet sent


class ChunkPlan:
    """How upload rows are cut: small slots go to rank 0; slots of more columns than a block (flat/linear.py) are sent
    in pieces, or shared out to all ranks in whole blocks of columns."""

    def __init__(self, packing: Packing) -> None:
        self.packing, self.block = packing, linear.BLOCK
        spans = packing.spans.items()
        self.large = {name: (a, b - a) for name, (a, b) in spans if b - a > self.block}  # first entry, columns
        self.small = Packing({name: shape for name, shape in packing.shapes.items() if name not in self.large})
        # The small slots' entries in a row; put together they are `small`.
        self.runs = merge_spans([span for name, span in spans if name not in self.large])

    def small_parts(self, row: Tensor) -> list[Tensor]:
        return [row[a:b] for a, b in self.runs]

    def places(self, small: Tensor) -> list[Tensor]:
        """Return the places of these parts in a row of `small`."""
        return list(small.split([b - a for a, b in self.runs]))

    def copy_small(self, row: Tensor, small: Tensor) -> None:
        """Copy the small slots of a row to a row of `small`."""
        for source, place in zip(self.small_parts(row), self.places(small), strict=True):
            place.copy_(source)

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield (slot, columns a to b) of each message of the large slots."""
        for name, (_, n) in self.large.items():
            size = max(min(PIECE, n // PIECES) // self.block, 1) * self.block
            for a in range(0, n, size):
                yield name, a, min(a + size, n)

    def parts(self, row: Tensor) -> list[Tensor]:
        """Return all messages of a row."""
        return [*self.small_parts(row), *(self.part(row, *piece) for piece in self.pieces())]

    def part(self, row: Tensor, name: str, a: int, b: int) -> Tensor:
        """Return the columns a to b of a large slot in a row."""
        start, _ = self.large[name]
        return row[start + a : start + b]

    def share(self, name: str, holder: int, holders: int) -> tuple[int, int]:
        """Return the columns a to b of a large slot that the holder with this number has."""
        n = self.large[name][1]
        blocks = -(-n // self.block)
        a, b = (min(j * blocks // holders * self.block, n) for j in (holder, holder + 1))
        return a, b


@dataclass
class BufferPool:
    """Memory for messages that is used again in each round."""

    like: Tensor  # of their type and device
    pins: bool = False  # whether clients train on a GPU, and messages are on the CPU
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def rows(
        self, name: str, count: int, size: int, dtype: torch.dtype | None = None, *, uploads: bool = False
    ) -> Tensor:
        """Return memory (count, size). uploads: of this rank's clients; a GPU copies them faster to pinned memory."""
        tensor, dtype, n = self.tensors.get(name), dtype or self.like.dtype, count * size
        if tensor is None or tensor.dtype != dtype or len(tensor) < n:
            tensor = None
            self.tensors.pop(name, None)  # before the new one is made
            pin = self.pins and uploads and n * dtype.itemsize <= UNSENT  # the system cannot move pinned memory
            tensor = self.tensors[name] = torch.empty(n, dtype=dtype, device=self.like.device, pin_memory=pin)
        return tensor[:n].view(count, size)


@dataclass
class GatherContext:
    """The round whose uploads are gathered, on one rank."""

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

    def packed(self, count: int) -> Tensor:
        """Return memory (count, bytes) for uploads in formats; empty without formats."""
        coding, buffers = self.upload.coding, self.buffers
        return buffers.rows("packed", count, coding.entries).view(torch.uint8) if coding else buffers.like[:0]


class GatheredUploads(ABC):
    """A round's uploads at rank 0. small: views of all small slots, the engine's own among them."""

    small: Views
    is_complete = True  # whether sums include all rows; those with numbers that are not finite may be left out

    @abstractmethod
    def norms(self) -> Tensor:
        """Return ||dw_i||, (m,) float64; nan where a number is not finite, 0 where none is sent."""

    @abstractmethod
    def finite(self) -> list[bool]:
        """Return for each row whether all of it is finite."""

    @abstractmethod
    def scale(self, place: int, factor: float) -> None:
        """dw <- factor dw, for one row."""

    @abstractmethod
    def only(self, places: Sequence[int]) -> None:
        """Keep only these rows."""

    @abstractmethod
    def uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads: ...

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that hooks may read and not write."""

    def train_loss(self, p: Tensor) -> dict[str, float]:
        """Return {"train_loss": sum_k p_k loss_k} over clients that made steps, with p_k scaled to sum to one; else {}.

        p: (m,) float64.
        """
        losses, steps = self.small._loss.double().cpu(), (self.small._flag != NO_STEPS).cpu()
        if not steps.any():
            return {}
        return {"train_loss": float(p @ losses if steps.all() else p[steps] @ losses[steps] / p[steps].sum())}

    def release(self) -> None:  # noqa: B027  (rows in memory need no release)
        """End the use of these uploads."""


class GatheredHeads(GatheredUploads):
    """Uploads of which rank 0 has the small slots of all rows, `heads`, and something else of the large ones."""

    def __init__(self, context: GatherContext, heads: Tensor) -> None:
        self.context, self.chunks, self.heads = context, context.chunks, heads
        self.small = context.chunks.small.views(heads)

    @abstractmethod
    def large_norms(self, name: str) -> Tensor:
        """Return the norms of the rows of a large slot, (m,) float64."""

    def norms(self) -> Tensor:
        if "dw" in self.chunks.large:
            return self.large_norms("dw")
        dw = self.small.dw if "dw" in self.small else self.heads[:, :0]
        return linear.row_norms(linear.block_norms(dw))

    def finite(self) -> list[bool]:
        norms = linear.block_norms(self.heads).sum(0) + sum(self.large_norms(name) for name in self.chunks.large)
        return norms.isfinite().tolist()

    def tensors(self) -> dict[str, Tensor]:
        return {"updates": self.heads}


class HeadUploads(Uploads):
    """What hooks see of them: small slots as ever; what becomes of large ones is a matter of the way they travel."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredHeads) -> None:
        self.chunks, small = gathered.chunks, gathered.small

        def slot(name: str) -> Tensor:
            return self.read_large(name) if name in self.chunks.large else getattr(small, name)

        super().__init__(clients, n, p, Views({}, tuple(gathered.chunks.packing.shapes), slot))

    @abstractmethod
    def read_large(self, name: str) -> Tensor:
        """Return the rows of a large slot, (m, *shape)."""


def scale(x: Tensor, factor: float) -> None:
    """Scale x in place: x <- factor x; in float64, as the type of x may not hold the factor."""
    for a, b in linear.chunks(x, 0, len(x)):
        x[a:b] = x[a:b].double() * factor


def close_up(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Move these rows to the front, and return them."""
    for to, place in enumerate(places):
        if to != place:
            rows[to] = rows[place]
    return rows[: len(places)]


class UploadGather(ABC):
    """This rank's part in the gather of a round's uploads."""

    def __init__(self, context: GatherContext) -> None:
        self.context, self.comm, self.chunks, self.order = context, context.comm, context.chunks, context.order
        self._acknowledged: Posted = []

    @abstractmethod
    def row(self, client: int) -> Tensor:
        """Return memory for this client's upload, after waiting for an earlier one to be sent, if need be."""

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Return the rows of these clients as one tensor (n, row) if they are neighbours in memory, else None."""
        return None

    @abstractmethod
    def done(self, client: int) -> None:
        """Send this client's upload, which has been written."""

    def finish(self) -> GatheredUploads | None:
        """Wait for all messages; return the uploads at rank 0, None elsewhere. Raises Lost."""
        received = self._finish()
        if self._acknowledged:
            self.comm.finish(self._acknowledged)
        return received

    @abstractmethod
    def _finish(self) -> GatheredUploads | None:
        """Finish the messages of the uploads."""

    def acknowledge(self) -> None:
        """Let ranks without clients in this round confirm its broadcast to rank 0.

        A rank that missed a whole round could not go back to its start, and the others would remove checkpoints from
        which its clients' rows are restored. These bytes are not counted: which ranks have no clients depends on time.
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


class SendBuffer:
    """The rows that a rank sends: written, sent, and used again once they are sent."""

    def __init__(self, context: GatherContext, max_bytes: int | None = UNSENT) -> None:
        """max_bytes: of the rows that have not been sent yet, at least one row; None: all rows of this rank."""
        size, count = context.upload.packing.size, len(context.here)
        if max_bytes is not None:
            count = min(count, max(1, max_bytes // max(size * context.buffers.like.element_size(), 1)))
        self.context, self.order = context, {client: i for i, client in enumerate(context.here)}
        self.rows = context.buffers.rows("rows", count, size, uploads=True)
        self.sent: list[Posted | None] = [None] * count

    def place(self, client: int) -> int:
        return self.order[client] % len(self.rows)

    def row(self, client: int) -> Tensor:
        """Return memory for a client's row, once an earlier row there is sent."""
        self._wait(self.place(client))
        return self.of(client)

    def block(self, clients: Sequence[int]) -> Tensor | None:
        """Return the rows of several clients as one tensor if they are neighbours in memory, else None."""
        places = [self.place(client) for client in clients]
        for place in places:
            self._wait(place)
        return neighbours(self.rows, places)

    def of(self, client: int) -> Tensor:
        """Return a client's row without waiting: it is being written."""
        return self.rows[self.place(client)]

    def message(self, client: int) -> Tensor:
        """Return the message for a client's row: in formats, if there are some, else the row."""
        row, coding = self.of(client), self.context.upload.coding
        return row if coding is None else coding.pack(row, self.context.packed(len(self.rows))[self.place(client)])

    def send(self, client: int, messages: Sequence[Message]) -> None:
        """Post the messages of a client's row."""
        comm, context = self.context.comm, self.context
        comm.about = context.t, tuple(context.upload.packing.shapes)
        self.sent[self.place(client)] = comm.post(messages, [])

    def wait(self) -> None:
        for place in range(len(self.rows)):
            self._wait(place)

    def _wait(self, place: int) -> None:
        posted = self.sent[place]
        if posted is not None:
            self.context.comm.finish(posted)
        self.sent[place] = None


def neighbours(rows: Tensor, places: Sequence[int]) -> Tensor | None:
    """Return the rows at `places` as one view if these numbers follow one another, else None."""
    first = places[0]
    return rows[first : first + len(places)] if [*places] == [*range(first, first + len(places))] else None
