"""What clients keep, where it lies, and how it follows a client that another rank trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine import sampling
from fedmpi.engine.local_client import LocalClient
from fedmpi.engine.worker import Worker


class ClientStates:
    """The clients of one experiment as one rank knows them.

    `owner` (client -> rank that has its state) is the same on every rank; `rows` holds this rank's own.
    """

    def __init__(self, comm: Communicator, worker: Worker, ranks: Sequence[int]) -> None:
        self.comm, self.worker, self.messages = comm, worker, worker.messages
        self.owner = sampling.pinned(range(worker.data.clients), ranks)
        self.rows: dict[int, Tensor] = {}  # client -> its state row, on the model's device; made when first needed
        self._before: dict[int, Tensor] = {}  # rows as they were before this round, where they may be needed again
        self.w0, self.b0 = worker.model.w.clone(), worker.model.b.clone()  # where every client's own parts start

    def view(self, client: int, t: int, lr: float, announcement: Tensor, download: Tensor) -> LocalClient:
        """A client with the rows that it received (on any device) and what it kept."""
        self._make(client)
        download = download.to(self.w0.device)
        return LocalClient(self.worker, client, t, lr, announcement, download, self.rows[client])

    def _make(self, client: int) -> None:
        if client not in self.rows:
            self.rows[client] = self.messages.initial_client_state(self.w0, self.b0)

    # ---- rounds that are undone ----
    def remember(self, client: int) -> None:
        """A copy of the client's state, for `settle`."""
        self._make(client)
        self._before[client] = self.rows[client].clone()

    def settle(self, undone: Collection[int]) -> None:
        """The round is over: those clients are as they were before it, the others as they are."""
        for client, row in self._before.items():
            if client in undone:
                self.rows[client].copy_(row)
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
        self.comm.exchange(leaving, [(source, coming[k]) for k, source, to in moves if to == rank])
        self.rows |= {k: row.to(self.w0.device) for k, row in coming.items()}

    def _pop(self, client: int) -> Tensor:
        self._make(client)
        return self.rows.pop(client)
