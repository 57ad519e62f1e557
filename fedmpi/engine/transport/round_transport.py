"""What travels in a round, on one rank: the announcement to all, downloads client by client, uploads.

Every rank keeps a full announcement. In a round in which only some groups of the model have changed, the message holds
those groups alone, and each rank writes them into the announcement that it keeps.
With comm.wire.down the announcement that they keep, rank 0's too, has the model as it arrives, and the model itself
lies beside it. Of a format for changes (int8, topk) the message holds the difference between the two, so that what it
leaves out comes later; the first message of a job, and the first after a loss, is what rank 0 keeps, number by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common.errors import UserError
from fedmpi.engine.checks import check_finite
from fedmpi.engine.messages import ENGINE_DOWN, ENGINE_UP, WORD, Announcement, Messages, Upload
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.gather import BufferPool, ChunkPlan, GatherContext, UploadGather
from fedmpi.engine.transport.gather_reduce import ReducingGather
from fedmpi.engine.transport.gather_rows import RowGather
from fedmpi.engine.transport.gather_sharded import ShardedGather
from fedmpi.engine.transport.gather_streaming import StreamingGather
from fedmpi.flat.coding import Coding
from fedmpi.method.base import means_of

Placement = Mapping[int, int]  # client -> rank
ALIGNED = 64  # bytes: as torch allocates


class RoundTransport:
    """Sends and receives, on one rank, all messages of a round: the broadcast, single downloads, and uploads.

    Attributes:
        message: the whole broadcast (model and declared server state), on the communicator's device.
        inbox: the same, on the device on which clients train.
        changed: the groups of the model that the server has changed since the last broadcast, which the next contains.
    """

    def __init__(
        self,
        comm: Communicator,
        messages: Messages,
        model: Tensor,
        sharded: bool = False,
        *,
        sums: bool = False,
        reduce: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """model: any tensor of the clients'.

        sharded: all ranks hold columns of the uploads' large slots; sums: rank 0 need not hold rows, where the method
        reads means alone; reduce: each rank adds up its own clients' then; acknowledge: ranks without clients in a
        round tell rank 0 that they have heard of it, so that none is more than one round behind.
        """
        self.comm, self.messages = comm, messages
        self.sharded, self.sums, self.reduce, self.acknowledge = sharded, sums, reduce, acknowledge
        self.full = messages.announcement()
        pins = model.is_cuda and comm.device.type == "cpu"
        # Rank 0 evaluates the model in its message. Kernels round differently for weights that begin within a cache
        # line, and the weights of an ordinary tensor begin at one: so do those of the message.
        most, (before, _) = ALIGNED // model.dtype.itemsize, self.full.packing.spans["_w"]
        place = torch.zeros(self.full.packing.size + most, dtype=model.dtype, device=comm.device, pin_memory=pins)
        first = -(before + place.data_ptr() // model.dtype.itemsize) % most
        self.message = place[first:][: self.full.packing.size]
        self.inbox = self.message.to(model.device, copy=self.message.device != model.device)
        form = messages.wire.down
        # The model as the other ranks have it, where the next message is a difference to it; else None.
        self.last_sent = self.message if form is not None and form.changes_only else None
        self.no_download = self.message.new_zeros(messages.per_client.size)  # the row of a client that is sent nothing
        self.changed = messages.shared_groups
        self.resync = (
            True  # whether other ranks may lack `last_sent`: then the next broadcast is that, number by number
        )
        self.broadcast_round: int | None = None  # rank 0's: the latest round for which `last_sent` was updated
        self.traffic = TrafficCounter(messages)
        self.buffers = BufferPool(self.message, pins)
        self._chunks: dict[Upload, ChunkPlan] = {}

    def model_storage(self) -> tuple[Tensor, Tensor]:
        """Where the global w and b live at the root: in the next message, if it holds all of them; else beside it."""
        held, messages = self.full.packing.views(self.message), self.messages
        coded = self.full.coding is not None
        w = held._w if messages.shared.whole and not coded else self.message.new_empty(messages.sizes["d"])
        b = held._b if messages.shared_b.whole else self.message.new_empty(messages.sizes["b"])
        return w, b

    # ---- down ----
    def broadcast(self, word: float, server: FederationServer | None, t: int = 0, moves: bool = True) -> float:
        """Rank 0's word and news to all ranks, before round t; returns the word. `server` is rank 0's, None elsewhere.

        moves: whether the model has; else what was sent before stands.
        """
        messages, news = self.messages, self.messages.announcement(self.changed)
        if server is not None:  # the root's full message, apart from the model where that lies in it (`model_storage`)
            coded = () if self.full.coding is None else self.full.coding.formats
            values = {n: getattr(server.state, n) for n in messages.method.receives if n not in coded}
            if not messages.shared.whole and "_w" not in coded:
                values["_w"] = messages.shared.take(server.w)
            if not messages.shared_b.whole:
                values["_b"] = messages.shared_b.take(server.b)
            self.full.packing.write(self.message, {**values, WORD: word})
        if self.full.coding is not None:
            begins, moves, self.broadcast_round = (
                self.broadcast_round is None,
                moves and t != self.broadcast_round,
                t,
            )  # before a loss can cut it
            self._broadcast_coded(news, server, begins, moves)
        elif news is self.full:
            self.comm.broadcast(self.message)
        elif server is not None:
            self.comm.broadcast(self._pack(news))
        else:
            came = self.message.new_empty(news.packing.size)
            self.comm.broadcast(came)
            self._unpack(news, came)
        if self.inbox is not self.message:
            self.inbox.copy_(self.message)
        return float(self.full.packing.views(self.message)._word)

    def exact(self, server: FederationServer | None) -> tuple[Tensor, Tensor] | None:
        """The global w and b on every rank; None where announcements are exact, and all have them."""
        if self.full.coding is None:
            return None
        sizes = self.messages.sizes["d"], self.messages.sizes["b"]
        both = self.message.new_empty(sum(sizes)) if server is None else torch.cat([server.w, server.b])
        self.comm.broadcast(both)
        w, b = both.split(sizes)
        return w, b

    def _broadcast_coded(self, news: Announcement, server: FederationServer | None, begins: bool, moves: bool) -> None:
        """The same in a format. moves: whether rank 0 is to bring what it keeps nearer to the model; begins: to it."""
        coding, form = news.coding, self.messages.wire.down
        assert coding is not None
        assert form is not None
        packed = torch.empty(coding.nbytes, dtype=torch.uint8, device=self.message.device)
        if server is not None:
            held = self.message if news is self.full else self._pack(news)
            now = held.clone()
            if moves or not form.changes_only:
                news.packing.write(now, self._current(news, server))
            if form.changes_only and begins:
                held.copy_(now)
            coding.pack_news(now, held, packed)
            if form.name == "fp16" and not bool(held.isfinite().all()):
                raise UserError("comm.wire.down: fp16 ends at 65,504, and the model does not; use bf16")
            if held is not self.message:
                self._unpack(news, held)
        if form.changes_only and self.resync:
            self.comm.broadcast(self.message)
        else:
            self.comm.broadcast(packed)
            if server is None:
                held = self.message if news is self.full else self._pack(news)
                coding.unpack_news(packed, held)
                if held is not self.message:
                    self._unpack(news, held)
        self.resync = False

    def _current(self, news: Announcement, server: FederationServer) -> dict[str, Tensor]:
        """What the server has of the slots that travel in a format."""
        assert news.coding is not None
        w = news.w.take(self.messages.shared.take(server.w))
        return {name: w if name == "_w" else getattr(server.state, name) for name in news.coding.formats}

    def _pack(self, news: Announcement) -> Tensor:
        """The part of the root's full message that is news."""
        full, row = self.full.packing.views(self.message), self.message.new_empty(news.packing.size)
        values = {name: getattr(full, name) for name in full}
        news.packing.write(row, values | {"_w": news.w.take(full._w), "_b": news.b.take(full._b)})
        return row

    def _unpack(self, news: Announcement, row: Tensor) -> None:
        """News into another rank's full message; what they do not hold stays as it came earlier."""
        full, came = self.full.packing.views(self.message), news.packing.views(row)
        self.full.packing.write(self.message, {name: getattr(came, name) for name in came if name not in ("_w", "_b")})
        news.w.put(came._w, full._w)
        news.b.put(came._b, full._b)

    def send_downloads(
        self, t: int, clients: Iterable[int], where: Placement, server: FederationServer | None
    ) -> dict[int, Tensor]:
        """Round t's download that differs from client to client, for this rank's clients; empty if none is declared."""
        packing, rank, coding = self.messages.per_client, self.comm.rank, self.messages.personal_coding
        mine = [k for k in clients if server is not None or where[k] == rank]
        if not packing.size:
            return dict.fromkeys(mine, self.no_download)
        rows = {k: self.no_download.clone() for k in mine}
        if server is None:
            came = {k: coming(row, coding) for k, row in rows.items()}
            self.comm.exchange([], [(0, message) for message in came.values()])
            for k, message in came.items():
                arrived(message, rows[k], coding)
            return rows
        for k, row in rows.items():
            packing.write(row, server.download(t, k))
            if coding is not None:
                coding.settle(row, {})
            check_finite(server.method, "download", packing, row, f"round {t}, client {k}")
        # As with uploads: the root's own clients' rows pass the communicator onto themselves.
        sent = {k: leaving(row, coding) for k, row in rows.items()}
        own = [(0, message) for k, message in sent.items() if where[k] == 0]
        self.comm.exchange([(where[k], message) for k, message in sent.items()], own)
        return rows

    # ---- up ----
    def gather_uploads(self, t: int, members: Sequence[int], where: Placement, p: Tensor) -> UploadGather:
        """This rank's part in round t's uploads. p: (m,) the cohort's weights."""
        upload, comm = self.messages.upload(t), self.comm
        if upload not in self._chunks:
            self._chunks[upload] = ChunkPlan(upload.packing)
        chunks = self._chunks[upload]
        here = [k for k in members if where[k] == comm.rank]
        context = GatherContext(comm, t, upload, chunks, members, where, here, self.buffers)
        adds = (self.sums or self.reduce) and chunks.large and members  # of nobody there is no sum
        means = means_of(self.messages.method) if adds else None
        gather: UploadGather
        if self.sharded and chunks.large and len(comm.alive) > 1:
            gather = ShardedGather(context)
        elif means is not None and set(chunks.large) <= {*means, "_b"}:
            gather = ReducingGather(context, means, p) if self.reduce else StreamingGather(context, means, p)
        else:
            gather = RowGather(context)
        if self.acknowledge:
            gather.acknowledge()
        return gather


def leaving(row: Tensor, coding: Coding | None) -> Tensor:
    """Return the message that carries a row: the row itself, or its bytes in the format of `coding`."""
    return row if coding is None else coding.pack(row)


def coming(row: Tensor, coding: Coding | None) -> Tensor:
    """Return the memory into which the message that carries `row` is received."""
    return row if coding is None else torch.empty(coding.nbytes, dtype=torch.uint8, device=row.device)


def arrived(message: Tensor, row: Tensor, coding: Coding | None) -> None:
    """Decode a message that has been received into `row`; without a format it lies there already."""
    if coding is not None:
        coding.unpack(message, row)


class TrafficCounter:
    """Which version of the model each client has, and from that how many numbers clients send and are sent.

    Counted client by client, as papers do, whichever rank trains whom: a client is not sent again what it has already.
    The engine's own numbers are left out. Where the format of a message takes fewer bytes (comm.wire) so many numbers
    count as would take these bytes. Of a format for differences only who has the version before can make use.
    A group's version is the number of rounds that have changed it; a client knows those that it was sent.
    """

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.current = dict.fromkeys(messages.shared_groups, 0)  # group -> rounds in which it was stepped, so far
        self._latest: tuple[int, dict[str, int]] = -1, {}  # the round counted last, and its numbers
        self.known: dict[int, dict[str, int]] = {}  # client -> the versions that it has; none where it never took part

    def count(self, t: int, members: Sequence[int]) -> dict[str, int]:
        """Round t's up_parameters and down_parameters over its cohort, which from now on has the current versions.

        A round that is made again after a rank failure is counted once.
        """
        if self._latest[0] == t:
            return self._latest[1]
        messages, form = self.messages, self.messages.wire.down
        personal = messages.personal_coding.entries if messages.personal_coding else messages.per_client.size
        down, sizes = len(members) * (personal - ENGINE_DOWN), dict[int, int]()
        for k in members:
            known = self.known.get(k, {})
            key = id(self.known.get(k))  # clients of an earlier round share their versions
            if key not in sizes:
                missing = frozenset(group for group, version in self.current.items() if known.get(group) != version)
                news = messages.announcement(missing)
                whole = form is not None and form.changes_only
                whole = whole and any(known.get(group) != self.current[group] - 1 for group in missing)
                sizes[key] = news.packing.size if whole else news.size
            down += sizes[key]
        now = dict(self.current)
        self.known |= dict.fromkeys(members, now)
        self.current |= {group: self.current[group] + 1 for group in messages.groups(t)}
        up = len(members) * (messages.upload(t).size - ENGINE_UP)
        self._latest = t, {"up_parameters": up, "down_parameters": down}
        return self._latest[1]
