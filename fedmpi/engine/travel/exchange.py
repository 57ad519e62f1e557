"""What travels in a round, on one rank: the announcement to all, downloads client by client, uploads.

Every rank keeps a full announcement. In a round in which only some groups of the model have changed, the message holds
those groups alone, and each rank writes them into the announcement that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine.checks import check_finite
from fedmpi.engine.messages import WORD, Announcement, Messages, Upload
from fedmpi.engine.server import FederationServer
from fedmpi.engine.travel.cuts import Cuts
from fedmpi.engine.travel.gathering import Gathering, Memory, Trip, Whole
from fedmpi.engine.travel.sharded import Sharded
from fedmpi.engine.travel.streamed import Streamed
from fedmpi.engine.travel.versions import Versions
from fedmpi.method.base import means_of

Placement = Mapping[int, int]  # client -> rank


class Exchange:
    """What this rank sends and receives.

    message: the full announcement, where messages live (the communicator's device); inbox: the same where clients
    train. changed: the groups of the model that the other ranks do not have yet.
    """

    def __init__(
        self,
        comm: Communicator,
        messages: Messages,
        model: Tensor,
        sharded: bool = False,
        *,
        sums: bool = False,
        keep: bool = False,
    ) -> None:
        """model: any tensor of the clients'.

        sharded: all ranks hold columns of the uploads' large slots; sums: rank 0 need not hold rows, where the method
        reads means alone; keep: rows stay where they were written until the round is over, to be sent once more.
        """
        self.comm, self.messages = comm, messages
        self.sharded, self.sums, self.keep = sharded, sums, keep
        self.full = messages.announcement()
        self.message = torch.zeros(self.full.packing.size, dtype=model.dtype, device=comm.device)
        self.inbox = self.message.to(model.device, copy=self.message.device != model.device)
        self.changed = messages.shared_groups
        self.versions = Versions(messages)
        self.memory = Memory(self.message)
        self._cuts: dict[Upload, Cuts] = {}

    def model_storage(self) -> tuple[Tensor, Tensor]:
        """Where the global w and b live at the root: in the next message, if it holds all of them; else beside it."""
        held, messages = self.full.packing.views(self.message), self.messages
        w = held._w if messages.shared.whole else self.message.new_empty(messages.sizes["d"])
        b = held._b if messages.shared_b.whole else self.message.new_empty(messages.sizes["b"])
        return w, b

    # ---- down ----
    def announce(self, word: float, server: FederationServer | None) -> float:
        """Rank 0's word and news to all ranks; returns the word. `server` is rank 0's, None elsewhere."""
        news = self.messages.announcement(self.changed)
        if server is not None:
            self._write(word, server)
        if news is self.full:
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

    def _write(self, word: float, server: FederationServer) -> None:
        """The root's full message, apart from the model where that lies in it (`model_storage`)."""
        messages, values = self.messages, {n: getattr(server.state, n) for n in self.messages.method.receives}
        if not messages.shared.whole:
            values["_w"] = messages.shared.take(server.w)
        if not messages.shared_b.whole:
            values["_b"] = messages.shared_b.take(server.b)
        self.full.packing.write(self.message, {**values, WORD: word})

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

    def deliver(
        self, t: int, clients: Iterable[int], where: Placement, server: FederationServer | None
    ) -> dict[int, Tensor]:
        """Round t's download that differs from client to client, for this rank's clients; empty if none is declared."""
        packing, rank = self.messages.per_client, self.comm.rank
        rows = {k: self.no_download() for k in clients if server is not None or where[k] == rank}
        if not packing.size:
            return rows
        if server is None:
            self.comm.exchange([], [(0, row) for row in rows.values()])
            return rows
        for k, row in rows.items():
            packing.write(row, server.download(t, k))
            check_finite(server.method, "download", packing, row, f"round {t}, client {k}")
        # As with uploads: the root's own clients' rows pass the communicator onto themselves.
        own = [(0, row) for k, row in rows.items() if where[k] == 0]
        self.comm.exchange([(where[k], row) for k, row in rows.items()], own)
        return rows

    def no_download(self) -> Tensor:
        """The row of a client that is sent nothing."""
        return self.message.new_zeros(self.messages.per_client.size)

    # ---- up ----
    def gathering(self, t: int, members: Sequence[int], where: Placement, p: Tensor) -> Gathering:
        """This rank's part in round t's uploads. p: (m,) the cohort's weights."""
        upload, comm = self.messages.upload(t), self.comm
        if upload not in self._cuts:
            self._cuts[upload] = Cuts(upload.packing, self.message)
        cuts = self._cuts[upload]
        trip = Trip(comm, t, upload, cuts, members, where, self.memory, self.keep)
        if self.sharded and cuts.large and len(comm.alive) > 1:
            return Sharded(trip)
        means = means_of(self.messages.method) if self.sums and cuts.large else None
        if means is not None and set(cuts.large) <= {*means, "_b"}:
            return Streamed(trip, means, p)
        return Whole(trip)

    def close_round(self, t: int) -> None:
        """The server has stepped the groups of round t: they are what the next announcement tells."""
        self.changed = self.messages.groups(t)
