"""What clients keep, where it lies, and how it follows a client that another rank trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.comm.base import Message
from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.faults.lost_ranks import START, LostRanks
from fedmpi.engine.local.context import ClientContext


class StateStore(Protocol):
    """Where state rows lie beyond a rank's memory, by client and by the round that made them."""

    def put(self, client: int, t: int, row: Tensor) -> None: ...

    def get(self, client: int, t: int) -> Tensor: ...

    def found(self) -> list[tuple[int, int]]: ...  # (client, round) of all rows

    def whole(self, client: int, t: int) -> bool: ...

    def take_over(self, keys: Iterable[tuple[int, int]]) -> None: ...


class Owners(dict[int, int]):
    """client -> the rank that has its state; of clients that have not moved it holds nothing, as most of a million have
    not."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self.ranks = ranks

    def __missing__(self, client: int) -> int:
        return scheduler.pinned([client], self.ranks)[client]


@dataclass
class MoveLog:
    """What a round has moved so far, as long as a loss may cut it."""

    moves: list[tuple[int, int, int]] = field(default_factory=list)  # client, from which rank, to which
    left: dict[int, Tensor] = field(default_factory=dict)  # client -> its row, which this rank has sent away
    done: bool = False  # whether this rank has moved all that it had to


class ClientStates:
    """The clients of one experiment as one rank knows them.

    `owner` (client -> rank that has its state) and `trained` (client -> the last round that it took part in) are the
    same on every rank; `rows` holds this rank's own, the least recently used first. With a shelf, at most `room` rows
    stay in memory: the others lie there, whatever `shelved_to`, the last round whose rows were all put there.

    What a round does to them is remembered until nobody may ask to have it undone:

        a client trains      _before    settle: undone where its upload does not count;  restore: undone
        its row moves        moved      restore: undone, unless every rank has moved what it had to
        its rank is dead     orphans    reassign: undone, to be done anew where one more fails in this round
    `RoundControl.begin_round` and `settle` end that: the next round has begun, and rank 0 has said whose uploads count.
    """

    def __init__(self, comm: Communicator, trainer: ClientTrainer, ranks: Sequence[int]) -> None:
        self.comm, self.trainer, self.messages = comm, trainer, trainer.messages
        self.owner = Owners(ranks)
        self.rows: dict[int, Tensor] = {}  # client -> its state row, on the model's device; made when first needed
        # Where every client's own parts start; nobody asks where there are none.
        n = None if trainer.messages.client_state.size else 0
        self.w0, self.b0 = trainer.model.w[:n].clone(), trainer.model.b[:n].clone()
        self.trained: dict[int, int] = {}
        self.shelf: StateStore | None = None
        self.room, self.shelved_to = 0, -1
        self.saved, self.written_to = -1, -1  # shelved_to one save ago, and two: so far all ranks' files are there
        self.gone: set[int] = set()  # clients whose site is lost
        self.round = -1  # in which this rank is
        self.undoes = False  # whether a round may have to be undone
        self.keeps_moves = False  # whether moves may have to be, as a rank may fail
        self._before: dict[int, tuple[Tensor, int]] = {}  # client -> its row before `_trained_in`, and who made that
        self._trained_in = -1  # the round of these
        self.moved = MoveLog()
        self.came: set[int] = set()  # clients whose rows other ranks have sent, and may still be writing themselves
        self.orphans: dict[int, int] = {}  # client -> the dead rank that had its state
        # (client, round) -> the rank that holds that state, and there a copy: in a run that is given its losses
        self.held: dict[tuple[int, int], tuple[int, Tensor | None]] = {}

    def view(self, client: int, t: int, lr: float, announcement: Tensor, download: Tensor) -> ClientContext:
        """A client with the rows that it received (on any device) and what it kept."""
        row = self._row(client)
        if self.shelf is not None and len(self.rows) > max(self.room, 1):
            self._make_room(self.shelf)
        download = download.to(self.w0.device, non_blocking=True)  # nobody writes to it any more
        return ClientContext(self.trainer, client, t, lr, announcement, download, row)

    def at_once(self, clients: int) -> int:
        """How many of so many clients' rows stay in memory together, at least one."""
        return clients if self.shelf is None else min(clients, max(self.room, 1))

    def news(self) -> dict[int, Tensor]:
        """CPU copies of this rank's rows that are not on the shelf yet; from now on they count as if they were."""
        fresh = {k: row for k, row in self.rows.items() if self.trained.get(k, -1) > self.shelved_to and len(row)}
        self.written_to, self.saved = self.saved, self.shelved_to
        self.shelved_to = max(self.trained.values(), default=-1)
        self.came = {k for k in self.came if self.trained.get(k, START) > self.written_to}
        return {k: row.to("cpu", copy=True) for k, row in fresh.items()}

    # ---- what a round does, and how it is undone ----
    def remember(self, client: int) -> None:
        """Keep a copy of the client's state, as it is about to train."""
        self._trained_in = self.round
        self._before[client] = self._row(client).clone(), self.trained.get(client, START)

    def settle(self, undone: Collection[int]) -> None:
        """The round is over: those clients are as they were before it, the others as they are."""
        self.rows |= {client: row for client, (row, _) in self._before.items() if client in undone}
        self._before.clear()

    def move(self, where: Mapping[int, int]) -> None:
        """client -> rank from now on: state rows travel from the rank that trained the client last."""
        rank, device, size = self.comm.rank, self.comm.device, self.messages.client_state.size
        moves = [(client, self.owner[client], to) for client, to in where.items() if self.owner[client] != to]
        self.owner |= where
        self.moved = MoveLog(moves, done=not size)
        if not size:
            return
        # A client that never trained has nothing yet; its old rank says so by sending the initial row all the same.
        left = {k: self._row(k).to(device) for k, source, _ in moves if source == rank}
        for k in left:
            del self.rows[k]
        self.moved.left = left if self.keeps_moves else {}
        coming = {k: self._empty() for k, _, to in moves if to == rank}
        leaving = [(to, left[k]) for k, source, to in moves if source == rank]
        self.comm.about = None, ("client state",)
        self.comm.exchange(leaving, [(source, coming[k]) for k, source, to in moves if to == rank])
        self.rows |= {k: row.to(self.w0.device) for k, row in coming.items()}
        self.came |= coming.keys()
        self.moved.done = True

    def restore(self, t: int, stay: bool) -> None:
        """Undo what this rank has done in round t, as far as it came. stay: leave rows where they have moved."""
        if self._trained_in == t:
            for k, (row, made_by) in self._before.items():
                self.rows[k] = row
                self._label(k, made_by)
            self._before.clear()
        moved, self.moved = self.moved, MoveLog()
        if stay:
            return
        for k, source, to in moved.moves:
            self.owner[k] = source
            if to == self.comm.rank:
                self.rows.pop(k, None)
        self.rows |= {k: row.to(self.w0.device) for k, row in moved.left.items()}

    def reassign(self, alive: Collection[int], ranks: Sequence[int], *, move: bool) -> Collection[int]:
        """The clients whose owner is dead, which get one of `ranks` if they move.

        A function of what this rank knew before the round and of `alive`, not of the losses that it has seen since.
        """
        for k, dead in self.orphans.items():
            self.owner[k] = dead
            self.rows.pop(k, None)
        clients = range(self.trainer.data.clients)
        self.orphans = {k: self.owner[k] for k in clients if self.owner[k] not in alive}
        if move:
            self.owner |= scheduler.pinned(list(self.orphans), ranks)
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

    def hold(self, client: int, t: int) -> None:
        """Keep a copy of its state, which round t has made, for `revert_to_held`."""
        rank = self.owner[client]
        self.held[client, t] = rank, self._row(client).clone() if rank == self.comm.rank else None

    def revert_to_held(self, rounds: Mapping[int, int]) -> None:
        """`revert`, of states that may not be on the shelf any more: from the ranks that hold them."""
        mine, leaving, coming = dict[int, Tensor](), list[Message](), list[Message]()
        for k, t in sorted(rounds.items()):
            if t == START:
                continue
            if (k, t) not in self.held:
                raise UserError(
                    f"client {k} reverts to its state of round {t}, which this checkpoint lacks; begin earlier"
                )
            (source, row), to = self.held[k, t], self.owner[k]
            if to == self.comm.rank:
                mine[k] = self._empty() if row is None else row
            if row is None and to == self.comm.rank:
                coming.append((source, mine[k]))
            elif row is not None and to != self.comm.rank:
                leaving.append((to, row.to(self.comm.device)))
        self.comm.exchange(leaving, coming)
        self.revert(rounds)
        for k, row in mine.items():
            self.put(k, row)
            if self.shelf is not None:
                self.shelf.put(k, self.trained[k], row.cpu())

    def replay_failures(self, t: int, lost_ranks: LostRanks, *, evaluated: bool) -> None:
        """Bring the states to where recorded rank failures of round t have left them (faults.replay).

        Args:
            t: the round that begins.
            lost_ranks: all recorded rank failures.
            evaluated: whether round t - 1 has been evaluated. Before that only those failures count that came before
                its evaluation in the recorded run.
        """
        known = lost_ranks if evaluated else lost_ranks.before(t)
        self.gone = known.gone(t)
        if not self.messages.client_state.size:
            return
        for client, r in sorted(lost_ranks.needed() - self.held.keys()):
            if self.trained.get(client) == r:
                self.hold(client, r)
        before = lost_ranks.before(t).reverted(t) if evaluated else {}
        self.revert_to_held({k: r for k, r in known.reverted(t).items() if before.get(k) != r})

    def put(self, client: int, row: Tensor) -> None:
        """The client's state from now on."""
        self.rows[client] = row.to(self.w0.device, copy=True)

    # ---- rows ----
    def _empty(self) -> Tensor:
        """Where a row comes from another rank."""
        return torch.empty(self.messages.client_state.size, dtype=self.w0.dtype, device=self.comm.device)

    def _label(self, client: int, t: int) -> None:
        """Its state is that of after round t."""
        if t == START:
            self.trained.pop(client, None)
        else:
            self.trained[client] = t

    def _row(self, client: int) -> Tensor:
        """The client's row, from now on the one used last."""
        row = self.rows.pop(client, None)
        if row is None and self.shelf is not None and client in self.trained:
            row = self.shelf.get(client, self.trained[client]).to(self.w0.device)
        elif row is None:
            row = self.messages.initial_state("client_state", self.w0, self.b0)
        self.rows[client] = row
        return row

    def _make_room(self, shelf: StateStore) -> None:
        """Let go of the rows used longest ago; what only memory holds goes to the shelf first."""
        gone = list[int]()
        for client in islice(self.rows, len(self.rows) - max(self.room, 1)):
            if client in self._before:  # it may have to be undone, and the shelf must not have it; so all behind it
                break
            if client not in self.came or not self.written_to < self.trained.get(client, START) <= self.shelved_to:
                gone.append(client)
        for client in gone:
            row, last = self.rows.pop(client), self.trained.get(client, START)
            if last > self.shelved_to:
                shelf.put(client, last, row.cpu())
