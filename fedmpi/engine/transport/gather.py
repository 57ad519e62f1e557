"""How the uploads of a round are gathered: the code that all modes share, and the mode `rows`.

    mode       what is stored                                                  which aggregation rules may be used
    rows       rank 0 stores all rows                                          all
    streaming  rank 0 adds rows up as they arrive, and stores only sums        those that read only means
    sharded    every rank stores some columns of all rows                      all
    reducing   every rank adds up the rows of its own clients; these sums      those that read only means; the last bits
               are reduced over a binomial tree of ranks                       differ from those of the other modes
    secure     rank 0 stores the sum of masked rows, from which it removes     those that read only means; the bits are
               the masks (privacy.secagg)                                      those of reducing

For each of its clients, in order, a rank calls acquire_row(client), writes the row, and calls submit(client). Then it
calls finish().
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
from fedmpi.engine.messages import NO_STEPS, UploadLayout
from fedmpi.flat import linear
from fedmpi.flat.packing import Packing, Views
from fedmpi.method.context import Uploads

PIECE_ENTRIES = 1 << 21  # largest number of entries of a large slot in one message; a multiple of the block size
# smallest number of messages per large slot, if it has enough blocks: one is added while the next is received
MIN_PIECES = 8
MAX_UNSENT_BYTES = 1 << 30  # limit for the rows that a rank has written but not sent yet


class ChunkPlan:
    """The division of upload rows into messages.

    A slot is large if it has more columns than one block (flat/linear.py), otherwise small. Small slots come first in a
    row, and are sent to rank 0 together. Large slots are sent in pieces, or are divided among all ranks in whole blocks
    of columns.
    """

    def __init__(self, packing: Packing, *, split: bool = True) -> None:
        """Plan how rows with the packing `packing` are divided into messages.

        If `split` is false, all slots are treated as small, so that none of them is divided.
        """
        self.packing, self.block = packing, linear.BLOCK
        spans = packing.spans.items()
        # slot -> its first entry, and its number of columns
        self.large = {name: (a, b - a) for name, (a, b) in spans if split and b - a > self.block}
        self.small = Packing({name: shape for name, shape in packing.shapes.items() if name not in self.large})

    def small_slots_part(self, row: Tensor) -> Tensor:
        """Return the part of a row that contains its small slots."""
        return row[: self.small.size]

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Yield (slot, a, b) for each message with a part of a large slot: the slot's columns a to b, without b."""
        for name, (_, n) in self.large.items():
            size = max(min(PIECE_ENTRIES, n // MIN_PIECES) // self.block, 1) * self.block
            for a in range(0, n, size):
                yield name, a, min(a + size, n)

    def large_slot_columns(self, row: Tensor, name: str, a: int, b: int) -> Tensor:
        """Return the columns a to b of a large slot of an upload row."""
        start, _ = self.large[name]
        return row[start + a : start + b]

    def holder_span(self, name: str, holder: int, num_holders: int) -> tuple[int, int]:
        """Return the columns (a, b) of a large slot that a holder stores.

        Args:
            holder: the position of the holder among the `num_holders` ranks that store columns, from 0.
        """
        n = self.large[name][1]
        blocks = -(-n // self.block)
        a, b = (min(j * blocks // num_holders * self.block, n) for j in (holder, holder + 1))
        return a, b


@dataclass
class BufferPool:
    """Named buffers for messages, whose memory is reused in each round."""

    like: Tensor  # a tensor with the type and device of messages
    pin_memory: bool = False  # whether to pin memory for uploads: clients train on a GPU, and messages are on the CPU
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def get(
        self, name: str, count: int, size: int, dtype: torch.dtype | None = None, *, for_uploads: bool = False
    ) -> Tensor:
        """Return a buffer (count, size); later calls with the same name may return the same memory.

        Args:
            dtype: the type of the entries; by default the type of messages.
            for_uploads: whether the buffer is for upload rows of this rank's clients. Its memory may then be pinned,
                because a GPU copies faster to pinned memory.
        """
        tensor, dtype, n = self.tensors.get(name), dtype or self.like.dtype, count * size
        if tensor is None or tensor.dtype != dtype or len(tensor) < n:
            tensor = None
            self.tensors.pop(name, None)  # frees the old memory before the new one is allocated
            # not for larger memory, because the operating system cannot page out pinned memory
            pin = self.pin_memory and for_uploads and n * dtype.itemsize <= MAX_UNSENT_BYTES
            tensor = self.tensors[name] = torch.empty(n, dtype=dtype, device=self.like.device, pin_memory=pin)
        return tensor[:n].view(count, size)


@dataclass
class GatherContext:
    """The inputs of a round's gather on one rank: the clients, their ranks, the layout of uploads, and buffers."""

    comm: Communicator
    t: int
    upload: UploadLayout
    cohort: Sequence[int]
    placement: Mapping[int, int]  # client -> rank
    buffers: BufferPool

    def __post_init__(self) -> None:
        self.chunks = ChunkPlan(self.upload.packing)
        self.own_clients = [k for k in self.cohort if self.placement[k] == self.comm.rank]  # this rank's clients
        self.row_index = {client: i for i, client in enumerate(self.cohort)}
        self.message_info = self.t, tuple(self.upload.packing.shapes)  # description of the messages for the audit log

    def encoded_buffers(self, count: int) -> Tensor:
        """Return a buffer (count, bytes) for `count` encoded uploads, or an empty tensor if uploads are not encoded."""
        codec, buffers = self.upload.codec, self.buffers
        return buffers.get("packed", count, codec.num_entries).view(torch.uint8) if codec else buffers.like[:0]


class GatheredUploads:
    """The uploads of a round on rank 0: the small slots of all rows; subclasses give access to the large slots."""

    sums_contain_all_rows = True  # whether sums contain all rows; those with values that are not finite may be missing

    def __init__(self, small_rows: Tensor, chunks: ChunkPlan) -> None:
        """Store the small slots of all rows, (m, entries)."""
        self.small_rows, self.chunks = small_rows, chunks
        self.small = chunks.small.views(small_rows)

    def large_norms(self, name: str) -> Tensor:
        """Return the norm of each row of a large slot, (m,) float64."""
        raise NotImplementedError

    def update_norms(self) -> Tensor:
        """Return ||dw|| of each row, (m,) float64; nan if a value is not finite, 0 if dw is not sent."""
        if "dw" in self.chunks.large:
            return self.large_norms("dw")
        return linear.row_norms(linear.block_norms(self.small.dw if "dw" in self.small else self.small_rows[:, :0]))

    def finite_rows(self) -> list[bool]:
        """Return, for each row, whether all of its values are finite."""
        norms = linear.block_norms(self.small_rows).sum(0) + sum(self.large_norms(name) for name in self.chunks.large)
        return norms.isfinite().tolist()

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Keep only the rows with these indices, given in ascending order."""
        self.small_rows = compact_rows(self.small_rows, indices)
        self.small = self.chunks.small.views(self.small_rows)

    def as_uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        """Return the uploads as hooks see them; n and p (m,) are the sample counts and weights of the clients."""
        return Uploads(clients, n, p, self.small)

    def mean_train_loss(self, p: Tensor) -> dict[str, float]:
        """Return {"train_loss": the mean training loss of the clients that took steps}; {} if no client took steps.

        The mean is weighted by p (m,); the weights of these clients are rescaled so that they sum to one.
        """
        losses, steps = self.small._loss.double().cpu(), (self.small._flag != NO_STEPS).cpu()
        if not steps.any():
            return {}
        return {"train_loss": float(p @ losses if steps.all() else p[steps] @ losses[steps] / p[steps].sum())}

    def release(self) -> None:
        """Release the uploads at the end of the round."""


class SmallSlotUploads(Uploads, ABC):
    """The uploads as hooks see them, when rank 0 stores only small slots; subclasses give access to large slots."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, gathered: GatheredUploads) -> None:
        """Wrap gathered uploads; n and p (m,) are the sample counts and weights of the clients."""
        self.chunks, small = gathered.chunks, gathered.small

        def slot(name: str) -> Tensor:
            return self.read_large_slot(name) if name in self.chunks.large else getattr(small, name)

        super().__init__(clients, n, p, Views({}, tuple(gathered.chunks.packing.shapes), slot))

    @abstractmethod
    def read_large_slot(self, name: str) -> Tensor:
        """Return the rows of a large slot, (m, *shape)."""


def compact_rows(rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Move the rows with these indices (ascending) to the front of a matrix, in place, and return these rows."""
    for to, place in enumerate(indices):
        if to != place:
            rows[to] = rows[place]
    return rows[: len(indices)]


class SendBuffer:
    """A buffer for the upload rows of a rank's clients; the place of a row is reused once the row has been sent."""

    def __init__(
        self, context: GatherContext, max_bytes: int | None = MAX_UNSENT_BYTES, rows: Tensor | None = None
    ) -> None:
        """Allocate the buffer.

        Args:
            max_bytes: the maximum size of the buffer, which always holds at least one row; None: it holds the rows of
                all clients of this rank.
            rows: an existing buffer for the rows of the whole cohort, which is used instead of a new one; None: a
                buffer is allocated.
        """
        self.context, clients = context, context.own_clients if rows is None else context.cohort
        self.row_index = {client: i for i, client in enumerate(clients)}
        if rows is None:
            size, count = context.upload.packing.size, len(clients)
            if max_bytes is not None:
                count = min(count, max(1, max_bytes // max(size * context.buffers.like.element_size(), 1)))
            rows = context.buffers.get("rows", count, size, for_uploads=True)
        self.rows = rows
        self.posted: dict[int, Posted] = {}  # index of a row in `rows` -> its message

    def row_index_of_client(self, client: int) -> int:
        """Return the index in `rows` at which a client's row is stored."""
        return self.row_index[client] % len(self.rows)

    def acquire_row(self, client: int) -> Tensor:
        """Return the place for a client's row, after waiting until the previous row in this place has been sent."""
        self._wait(self.row_index_of_client(client))
        return self.acquired_row(client)

    def acquire_adjacent_rows(self, clients: Sequence[int]) -> Tensor | None:
        """Return the places for the rows of n clients as one tensor (n, row) if they are adjacent; otherwise None."""
        indices = [self.row_index_of_client(client) for client in clients]
        for place in indices:
            self._wait(place)
        first = indices[0]
        return self.rows[first : first + len(indices)] if indices == [*range(first, first + len(indices))] else None

    def acquired_row(self, client: int) -> Tensor:
        """Return the place that `acquire_row` returned for a client's row."""
        return self.rows[self.row_index_of_client(client)]

    def encode_message(self, client: int) -> Tensor:
        """Return the message for a client's row: the encoded row, or the row itself if uploads are not encoded."""
        row, codec = self.acquired_row(client), self.context.upload.codec
        return (
            row
            if codec is None
            else codec.encode(row, self.context.encoded_buffers(len(self.rows))[self.row_index_of_client(client)])
        )

    def send(self, client: int, messages: Sequence[Message]) -> None:
        """Start sending the messages of a client's row."""
        self.context.comm.message_info = self.context.message_info
        self.posted[self.row_index_of_client(client)] = self.context.comm.post(messages, [])

    def wait_all(self) -> None:
        """Wait until all messages have been sent."""
        while self.posted:
            self._wait(next(iter(self.posted)))

    def _wait(self, place: int) -> None:
        if place in self.posted:
            self.context.comm.finish(self.posted.pop(place))


class UploadGather(ABC):
    """The gather of a round's uploads, on one rank."""

    def __init__(self, context: GatherContext, send_buffer: SendBuffer) -> None:
        """Create the gather; `send_buffer` holds the rows of this rank's clients until they are sent."""
        self.context, self.comm, self.chunks, self.row_index = context, context.comm, context.chunks, context.row_index
        self.send_buffer = send_buffer
        self._acknowledged: Posted = []

    def acquire_row(self, client: int) -> Tensor:
        """Return the place for a client's upload, after waiting until the previous upload there has been sent."""
        return self.send_buffer.acquire_row(client)

    def acquire_adjacent_rows(self, clients: Sequence[int]) -> Tensor | None:
        """Return the places for uploads of n clients as one tensor (n, row) if they are adjacent; otherwise None."""
        return self.send_buffer.acquire_adjacent_rows(clients)

    @abstractmethod
    def submit(self, client: int) -> None:
        """Send a client's upload, which has been written to its row, or add it to this rank's sums."""

    def finish(self) -> GatheredUploads | None:
        """Wait for all messages; return the uploads on rank 0, and None elsewhere.

        Raises:
            RankLostError: a rank has failed.
        """
        received = self._finish()
        if self._acknowledged:
            self.comm.finish(self._acknowledged)
        return received

    @abstractmethod
    def _finish(self) -> GatheredUploads | None:
        """Wait for the messages with uploads; return the uploads on rank 0, and None elsewhere."""

    def acknowledge_broadcast(self) -> None:
        """On ranks without clients in this round, confirm to rank 0 that the broadcast has arrived.

        Without the confirmation, such a rank could fall a whole round behind unnoticed. It could then no longer return
        to the start of the current round, and the other ranks might already have deleted checkpoints with the states of
        its clients. The bytes are not counted as traffic, because which ranks have no clients depends on measured
        times, so the count would vary from run to run.
        """
        comm, context = self.comm, self.context
        idle = sorted(set(comm.alive) - {0, *context.placement.values()})
        if not idle or comm.rank not in {0, *idle}:
            return
        note = torch.zeros(len(idle), device=comm.device)
        with comm.exclude_from_counts():
            comm.message_info = context.t, ("heard",)
            incoming = [] if comm.rank else [(rank, note[i : i + 1]) for i, rank in enumerate(idle)]
            self._acknowledged = comm.post([(0, note[:1])] if comm.rank else [], incoming)


class RowGather(UploadGather):
    """Gathers complete rows on rank 0."""

    def __init__(self, context: GatherContext) -> None:
        """Start receiving rows (rank 0), or allocate a buffer for sending them (other ranks)."""
        cohort, placement, own = context.cohort, context.placement, bool(context.own_clients)
        self.receiving: dict[int, Posted] = {}
        if context.comm.rank:
            super().__init__(context, SendBuffer(context))
            return
        rows = context.buffers.get("rows", len(cohort), context.upload.packing.size, for_uploads=own)
        super().__init__(context, SendBuffer(context, rows=rows))
        theirs = [i for i, k in enumerate(cohort) if placement[k]]
        self.encoded = (
            dict(zip(theirs, context.encoded_buffers(len(theirs)), strict=True)) if context.upload.codec else {}
        )
        self.receiving = {i: self.comm.post([], [(placement[cohort[i]], self.encoded.get(i, rows[i]))]) for i in theirs}

    def submit(self, client: int) -> None:
        if self.comm.rank:
            self.send_buffer.send(client, [(0, self.send_buffer.encode_message(client))])
        else:
            self.comm.count_local_message(self.send_buffer.rows.element_size() * self.context.upload.size)

    def _finish(self) -> GatheredUploads | None:
        rows, upload = self.send_buffer.rows, self.context.upload
        self.send_buffer.wait_all()
        for i, posted in self.receiving.items():
            self.comm.finish(posted)
            if upload.codec is not None:
                upload.codec.decode(self.encoded[i], rows[i])
        return None if self.comm.rank else GatheredUploads(rows, ChunkPlan(upload.packing, split=False))


def receive_ahead(comm: Communicator, incoming: Iterable[tuple[Message, Callable[[], None]]], ahead: int) -> None:
    """Receive messages in order, with several in progress at a time, and call a function after each one.

    Args:
        incoming: pairs of a message and the function to call when this message has arrived.
        ahead: how many later messages are already being received while the function waits for one.
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
