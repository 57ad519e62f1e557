"""What clients keep, where it lies, and how it follows a client that another rank trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.engine import sampling
from fedmpi.engine.local.client import LocalClient
from fedmpi.engine.worker import Worker


class Shelf(Protocol):
    """Where state rows lie beyond a rank's memory, by client and by the round that made them."""

    def put(self, client: int, t: int, row: Tensor) -> None: ...

    def get(self, client: int, t: int) -> Tensor: ...

    def found(self) -> list[tuple[int, int]]: ...  # (client, round) of all rows

    def whole(self, client: int, t: int) -> bool: ...

    def take_over(self, keys: Iterable[tuple[int, int]]) -> None: ...


START = -1  # in place of a round: before any


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
        self._before: dict[int, tuple[Tensor, int]] = {}  # row and round that made it, before this round; if asked for
        # Where every client's own parts start; nobody asks where there are none.
        n = None if worker.messages.client_state.size else 0
        self.w0, self.b0 = worker.model.w[:n].clone(), worker.model.b[:n].clone()
        self.trained: dict[int, int] = {}
        self.shelf: Shelf | None = None
        self.room, self.shelved_to = 0, -1
        self.gone: set[int] = set()  # clients whose site is lost
        self.careful = False  # whether a round may have to be undone: then what it moved is kept until it is over
        self.moved, self._moves, self._left = False, list[tuple[int, int, int]](), dict[int, Tensor]()
        self.orphans: dict[int, int] = {}  # client -> the dead rank that had its state, of this round
        self.held: dict[tuple[int, int], Tensor] = {}  # (client, round): a state to which the client reverts later
        self.holder: dict[tuple[int, int], int] = {}  # and the rank that has it

    def view(self, client: int, t: int, lr: float, announcement: Tensor, download: Tensor) -> LocalClient:
        """A client with the rows that it received (on any device) and what it kept."""
        row = self._row(client)
        self._make_room()
        download = download.to(self.w0.device)
        return LocalClient(self.worker, client, t, lr, announcement, download, row)

    def at_once(self, clients: int) -> int:
        """How many of so many clients' rows stay in memory together, at least one."""
        return clients if self.shelf is None else min(clients, max(self.room, 1))

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
        self._before[client] = self._row(client).clone(), self.trained.get(client, START)

    def settle(self, undone: Collection[int]) -> None:
        """The round is over: those clients are as they were before it, the others as they are."""
        self.rows |= {client: row for client, (row, _) in self._before.items() if client in undone}
        self._before.clear()

    def close(self) -> None:
        """Nothing that this round has moved is moved back."""
        self._left, self._moves, self.moved, self.orphans = {}, [], False, {}

    def move(self, where: Mapping[int, int]) -> None:
        """client -> rank from now on: state rows travel from the rank that trained the client last."""
        rank, device, size = self.comm.rank, self.comm.device, self.messages.client_state.size
        moves = [(client, self.owner[client], to) for client, to in where.items() if self.owner[client] != to]
        self.owner |= where
        if not size:
            self._moves, self.moved = moves, True
            return
        # A client that never trained has nothing yet; its old rank says so by sending the initial row all the same.
        left = {k: self._pop(k).to(device) for k, source, _ in moves if source == rank}
        self._moves, self._left = moves, left if self.careful else {}
        coming = {k: torch.empty(size, dtype=self.w0.dtype, device=device) for k, _, to in moves if to == rank}
        leaving = [(to, left[k]) for k, source, to in moves if source == rank]
        self.comm.about = None, ("client state",)
        self.comm.exchange(leaving, [(source, coming[k]) for k, source, to in moves if to == rank])
        self.rows |= {k: row.to(self.w0.device) for k, row in coming.items()}
        self.moved = True

    def back(self, stay: bool) -> dict[int, Tensor]:
        """Undo this round as far as it went; the states that it made. stay: every rank has moved what it had to."""
        made = {k: self._pop(k) for k in self._before}
        for k, (row, t) in self._before.items():
            self.rows[k] = row
            self._label(k, t)
        if not stay:
            for k, source, to in self._moves:
                self.owner[k] = source
                if to == self.comm.rank:
                    self.rows.pop(k, None)
            self.rows |= {k: row.to(self.w0.device) for k, row in self._left.items()}
        self._before.clear()
        self._left, self._moves, self.moved = {}, [], False
        return made

    def reassign(self, alive: Collection[int], ranks: Sequence[int], *, move: bool) -> Collection[int]:
        """The clients whose owner is dead, which get one of `ranks` if they move.

        A function of what this rank knew before the round and of `alive`, not of the losses that it has seen since.
        """
        for k, dead in self.orphans.items():
            self.owner[k] = dead
            self.rows.pop(k, None)
        self.orphans = {k: rank for k, rank in self.owner.items() if rank not in alive}
        if move:
            self.owner |= sampling.pinned(list(self.orphans), ranks)
        return self.orphans.keys()

    # ---- states of another round than the last ----
    def newest(self, clients: Collection[int], took_part: Callable[[int, int], bool]) -> dict[int, int]:
        """client -> the round of its newest whole row on the shelf, of those in which it took part."""
        if self.shelf is None:
            return {}
        rows: dict[int, list[int]] = {k: [] for k in clients if k in self.trained}
        found = [(k, t) for k, t in self.shelf.found() if k in clients]
        self.shelf.take_over(found)
        for k, t in found:
            if k in rows and t <= self.trained[k] and took_part(k, t):
                rows[k].append(t)
        newest = {k: next((t for t in sorted(rows[k], reverse=True) if self.shelf.whole(k, t)), START) for k in rows}
        return {k: t for k, t in newest.items() if t != START}

    def revert(self, rounds: Mapping[int, int]) -> None:
        """client -> the round that made the state that it has from now on."""
        for k, t in rounds.items():
            self.rows.pop(k, None)
            self._label(k, t)

    def _label(self, client: int, t: int) -> None:
        """Its state is that of after round t."""
        if t == START:
            self.trained.pop(client, None)
        else:
            self.trained[client] = t

    def hold(self, client: int, t: int) -> None:
        """Keep a copy of its state, which round t has made."""
        self.holder[client, t] = self.owner[client]
        if self.owner[client] == self.comm.rank:
            self.held[client, t] = self._row(client).clone()

    def put(self, client: int, row: Tensor) -> None:
        """The client's state from now on."""
        self.rows[client] = row.to(self.w0.device, copy=True)

    def put_back(self, client: int, row: Tensor) -> None:
        """The same, of a state of an earlier round, which may not be on the shelf any more."""
        self.put(client, row)
        if self.shelf is not None:
            self.shelf.put(client, self.trained[client], row.cpu())

    def blank(self) -> Tensor:
        return self.w0.new_empty(self.messages.client_state.size)

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
