"""What clients keep, where it lies, and how it follows a client that another rank trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine import sampling
from fedmpi.engine.local_client import LocalClient
from fedmpi.engine.worker import Worker


class Shelf(Protocol):
    """Where state rows lie beyond a rank's memory, by client and by the round that made them."""

    def put(self, client: int, t: int, row: Tensor) -> None: ...

    def get(self, client: int, t: int) -> Tensor: ...


class ClientStates:
    """The clients of one experiment as one rank knows them.

    `owner` (client -> rank that has its state) and `trained` (client -> the last round that it took part in) are the
    same on every rank; `rows` holds this rank's own, the least recently used first. With a shelf, at most `room` rows
    stay in memory: the others lie there, whatever `shelved_to`, the last round whose rows were all put there.
    """

    def __init__(self, comm: Communicator, worker: Worker, ranks: Sequence[int]) -> None:
        self.comm, self.worker, self.messages = comm, worker, worker.messages
        self.owner = sampling.pinned(range(worker.data.clients), ranks)
        self.rows: dict[int, Tensor] = {}  # client -> its state row, on the model's device; made when first needed
        self._before: dict[int, Tensor] = {}  # rows as they were before this round, where they may be needed again
        self.w0, self.b0 = worker.model.w.clone(), worker.model.b.clone()  # where every client's own parts start
        self.trained: dict[int, int] = {}
        self.shelf: Shelf | None = None
        self.room, self.shelved_to = 0, -1

    def view(self, client: int, t: int, lr: float, announcement: Tensor, download: Tensor) -> LocalClient:
        """A client with the rows that it received (on any device) and what it kept."""
        row = self._row(client)
        self._make_room()
        download = download.to(self.w0.device)
        return LocalClient(self.worker, client, t, lr, announcement, download, row)

    def took_part(self, t: int, clients: Iterable[int]) -> None:
        """Their rows are those that round t made."""
        self.trained |= dict.fromkeys(clients, t)

    def news(self) -> dict[int, Tensor]:
        """CPU copies of this rank's rows that are not on the shelf yet; from now on they count as if they were."""
        fresh = {k: row for k, row in self.rows.items() if self.trained.get(k, -1) > self.shelved_to and len(row)}
        self.shelved_to = max(self.trained.values(), default=-1)
        return {k: row.to("cpu", copy=True) for k, row in fresh.items()}

    # ---- rounds that are undone ----
    def remember(self, client: int) -> None:
        """A copy of the client's state, for `settle`."""
        self._before[client] = self._row(client).clone()

    def settle(self, undone: Collection[int]) -> None:
        """The round is over: those clients are as they were before it, the others as they are."""
        self.rows |= {client: row for client, row in self._before.items() if client in undone}
        self._before.clear()

    def move(self, where: Mapping[int, int]) -> None:
        """client -> rank from now on: state rows travel from the rank that trained the client last."""
        rank, device, size = self.comm.rank, self.comm.device, self.messages.client_state.size
        moves = [(client, self.owner[client], to) for client, to in where.items() if self.owner[client] != to]
        self.owner |= where
        if not size:
            return
        # A client that never trained has nothing yet; its old rank says so by sending the initial row all the same.
        leaving = [(to, self._pop(client).to(device)) for client, source, to in moves if source == rank]
        coming = {k: torch.empty(size, dtype=self.w0.dtype, device=device) for k, _, to in moves if to == rank}
        self.comm.about = None, ("client state",)
        self.comm.exchange(leaving, [(source, coming[k]) for k, source, to in moves if to == rank])
        self.rows |= {k: row.to(self.w0.device) for k, row in coming.items()}

    def _pop(self, client: int) -> Tensor:
        if client in self.rows:
            return self.rows.pop(client)
        if self.shelf is not None and client in self.trained:
            return self.shelf.get(client, self.trained[client]).to(self.w0.device)
        return self.messages.initial_client_state(self.w0, self.b0)

    def _row(self, client: int) -> Tensor:
        """The client's row, from now on the one used last."""
        self.rows[client] = row = self._pop(client)
        return row

    def _make_room(self) -> None:
        """Let go of the rows used longest ago; what only memory holds goes to the shelf first."""
        while self.shelf is not None and len(self.rows) > max(self.room, 1):
            client = next(iter(self.rows))
            row = self.rows.pop(client)
            if self.trained.get(client, -1) > self.shelved_to:
                self.shelf.put(client, self.trained[client], row.cpu())
