"""The messages of a round on one rank: the broadcast to all ranks, downloads of single clients, and uploads.

Every rank keeps the complete broadcast. If only some layout groups of the model have changed, the message contains only
these groups, and each rank writes them into its copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine.hook_checks import check_finite
from fedmpi.engine.messages import COMMAND, ENGINE_DOWN, ENGINE_UP, Announcement, Messages
from fedmpi.engine.server import FederationServer
from fedmpi.engine.transport.gather import BufferPool, GatherContext, RowGather, UploadGather
from fedmpi.engine.transport.gather_sharded import ShardedGather
from fedmpi.engine.transport.gather_sums import ReducingGather, StreamingGather
from fedmpi.method.base import get_mean_only_slots

Placement = Mapping[int, int]  # client -> rank
ALIGNED = 64  # bytes, as torch aligns its allocations


class RoundTransport:
    """Sends and receives all messages of a round on one rank: the broadcast, single downloads, and uploads.

    Attributes:
        message: the complete broadcast (model and declared server state), on the communicator's device.
        inbox: the same, on the device on which clients train.
        changed: the layout groups that the server has changed since the last broadcast; the next one contains them.
    """

    def __init__(
        self,
        comm: Communicator,
        messages: Messages,
        model: Tensor,
        way: str = "rows",
        *,
        acknowledge: bool = False,
    ) -> None:
        """Args:
        model: any tensor of the clients' model.
        way: how uploads are gathered: rows or sharded; streaming or reducing, in rounds in which only means are read.
        acknowledge: ranks without clients in a round confirm to rank 0 that they have received its broadcast, so that
        no rank is more than one round behind.
        """
        self.comm, self.messages, self.way, self.acknowledge = comm, messages, way, acknowledge
        self.full = messages.announcement()
        pins = model.is_cuda and comm.device.type == "cpu"
        # Rank 0 evaluates the model in this memory. The rounding of kernels depends on the alignment of weights, and
        # ordinary tensors begin at a cache line; therefore w begins at one, too.
        most, (before, _) = ALIGNED // model.dtype.itemsize, self.full.packing.spans["_w"]
        place = torch.zeros(self.full.packing.size + most, dtype=model.dtype, device=comm.device, pin_memory=pins)
        first = -(before + place.data_ptr() // model.dtype.itemsize) % most
        self.message = place[first:][: self.full.packing.size]
        self.inbox = self.message.to(model.device, copy=self.message.device != model.device)
        # the row of a client that receives no values of its own
        self.no_download = self.message.new_zeros(messages.per_client.size)
        self.changed = messages.shared_groups
        self.traffic = TrafficCounter(messages)
        self.buffers = BufferPool(self.message, pins)

    def model_storage(self) -> tuple[Tensor, Tensor]:
        """Return memory for the global w and b at rank 0, which is in the broadcast if that contains all of them."""
        fields, messages = self.full.packing.views(self.message), self.messages
        w = fields._w if messages.shared.whole else self.message.new_empty(messages.sizes["d"])
        b = fields._b if messages.shared_b.whole else self.message.new_empty(messages.sizes["b"])
        return w, b

    # ---- downloads ----
    def broadcast(self, command: float, server: FederationServer | None) -> float:
        """Broadcast rank 0's command and the changed parts of model and server state; return the command.

        Args:
            command: the command at rank 0; ignored at other ranks.
            server: the server at rank 0; None at other ranks.
        """
        messages, news = self.messages, self.messages.announcement(self.changed)
        if server is not None:  # the model needs no copy if `model_storage` is in the message
            values = {COMMAND: command, **{name: getattr(server.state, name) for name in messages.method.receives}}
            if not messages.shared.whole:
                values["_w"] = messages.shared.take(server.w)
            if not messages.shared_b.whole:
                values["_b"] = messages.shared_b.take(server.b)
            self.full.packing.write(self.message, values)
        if news is self.full:
            self.comm.broadcast(self.message)
        else:
            self._broadcast_part(news)
        if self.inbox is not self.message:
            self.inbox.copy_(self.message)
        return float(self.full.packing.views(self.message)._command)

    def _broadcast_part(self, news: Announcement) -> None:
        """Broadcast the changed part of the complete broadcast, and update every rank's copy."""
        full, row = self.full.packing.views(self.message), self.message.new_empty(news.packing.size)
        if self.comm.rank == 0:
            values = {name: getattr(full, name) for name in full}
            news.packing.write(row, values | {"_w": news.w.take(full._w), "_b": news.b.take(full._b)})
        self.comm.broadcast(row)
        if self.comm.rank:
            changed = news.packing.views(row)
            rest = {name: getattr(changed, name) for name in changed if name not in ("_w", "_b")}
            self.full.packing.write(self.message, rest)
            news.w.put(changed._w, full._w)
            news.b.put(changed._b, full._b)

    def send_downloads(
        self, t: int, clients: Iterable[int], where: Placement, server: FederationServer | None
    ) -> dict[int, Tensor]:
        """Send the downloads of single clients in round t; return client -> download row for this rank's clients.

        Rank 0 returns the rows of all `clients`.
        """
        packing, rank = self.messages.per_client, self.comm.rank
        mine = [k for k in clients if server is not None or where[k] == rank]
        if not packing.size:
            return dict.fromkeys(mine, self.no_download)
        rows = {k: self.no_download.clone() for k in mine}
        if server is None:
            self.comm.exchange([], [(0, row) for row in rows.values()])
            return rows
        for k, row in rows.items():
            packing.write(row, server.download(t, k))
            check_finite(server.method, "download", packing, row, f"round {t}, client {k}")
        # The rows of rank 0's own clients are sent through the communicator, too, like their uploads.
        own = [(0, row) for k, row in rows.items() if where[k] == 0]
        self.comm.exchange([(where[k], row) for k, row in rows.items()], own)
        return rows

    # ---- uploads ----
    def gather_uploads(self, t: int, members: Sequence[int], where: Placement, p: Tensor) -> UploadGather:
        """Return the object that gathers round t's uploads on this rank; `p` (m,) are the weights of the cohort."""
        context = GatherContext(self.comm, t, self.messages.upload(t), members, where, self.buffers)
        large, means = context.chunks.large, get_mean_only_slots(self.messages.method)
        sums = bool(large and members) and means is not None and set(large) <= {*means, "_b"}
        gather: UploadGather
        if self.way == "sharded" and large and len(self.comm.alive) > 1:
            gather = ShardedGather(context)
        elif self.way == "reducing" and sums:
            gather = ReducingGather(context, means or {}, p)
        elif self.way == "streaming" and sums:
            gather = StreamingGather(context, means or {}, p)
        else:
            gather = RowGather(context)
        if self.acknowledge:
            gather.acknowledge()
        return gather


class TrafficCounter:
    """Counts the numbers that clients upload and download, given what each client has received before.

    The count is per client, as in papers, and does not depend on ranks: a client does not download again what it has.
    The engine's own numbers are not counted. With comm.compression, bytes are counted and converted to numbers of the
    model's type.
    """

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        # layout group -> the last round in which the server changed it
        self.stepped = dict.fromkeys(messages.shared_groups, -1)
        self.seen: dict[int, int] = {}  # client -> the last round in which it took part
        self.latest: tuple[int, dict[str, int]] = -1, {}  # the last round that was counted, and its numbers

    def count(self, t: int, members: Sequence[int]) -> dict[str, int]:
        """Return up_parameters and down_parameters of round t, and mark the model as downloaded by its cohort.

        A round that is repeated after a rank failure is counted once.
        """
        if self.latest[0] == t:
            return self.latest[1]
        messages, before = self.messages, [self.seen.get(k, -1) for k in members]
        sizes = {r: self._news_since(r) + messages.per_client.size - ENGINE_DOWN for r in {*before}}
        up = len(members) * (messages.upload(t).size - ENGINE_UP)
        self.latest = t, {"up_parameters": up, "down_parameters": sum(sizes[r] for r in before)}
        self.seen |= dict.fromkeys(members, t)
        self.stepped |= dict.fromkeys(messages.groups(t) & messages.shared_groups, t)
        return self.latest[1]

    def _news_since(self, r: int) -> int:
        """Return the size of the broadcast for a client that took part last in round r (-1: never)."""
        return self.messages.announcement(frozenset(g for g, last in self.stepped.items() if last >= r)).packing.size
