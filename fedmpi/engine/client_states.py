"""Client states: their storage on the ranks, and their transfer when a client is assigned to another rank."""

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
from fedmpi.engine.faults.lost_ranks import INITIAL_STATE, LostRanks
from fedmpi.engine.local.client_context import ClientContext


class StateStore(Protocol):
    """Storage on disk for rows of client state; a row is identified by its client and the round that produced it."""

    def put(self, client: int, t: int, row: Tensor) -> None:
        """Store the client's state row as produced by round t."""

    def get(self, client: int, t: int) -> Tensor:
        """Return the client's state row as produced by round t."""

    def list_keys(self) -> list[tuple[int, int]]:
        """Return the keys (client, round) of all stored rows."""

    def is_intact(self, client: int, t: int) -> bool:
        """Return whether the client's row of round t can be read without errors."""

    def take_over(self, keys: Iterable[tuple[int, int]]) -> None:
        """Make this rank the owner of rows that a failed rank has stored.

        keys: the (client, round) of each row.
        """


class StateOwners(dict[int, int]):
    """The mapping from each client to the rank that has its state.

    Only clients that have moved are stored, because there may be a million clients.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Distribute all clients evenly over the training ranks."""
        super().__init__()
        self.ranks = ranks

    def __missing__(self, client: int) -> int:
        return self.ranks[client % len(self.ranks)]  # as assigned by scheduler.assign_pinned


@dataclass
class MoveLog:
    """The client states that were moved between ranks in this round. If a rank fails, they are moved back."""

    moves: list[tuple[int, int, int]] = field(default_factory=list)  # (client, source rank, destination rank)
    sent_rows: dict[int, Tensor] = field(default_factory=dict)  # client -> its row, which this rank sent to another
    is_complete: bool = False  # whether this rank has completed all of its sends and receives


class ClientStates:
    """The client states that one rank has, one row per client.

    Changes made in a round can be undone until the round has ended:

        event                  recorded in    undone by
        a client trains        _rows_before   end_round, if the upload is refused; undo_round, if the round is repeated
        its row is moved       move_log       undo_round, unless every rank has completed its moves
        its rank fails         reassigned     record_clients_of_failed_ranks, if another rank fails in the same round

    `RoundControl.mark_round_begun` discards the records of the last two kinds when the next round begins. `end_round`
    discards those of the first kind, once it is known which uploads were refused.

    Attributes:
        owners: client -> the rank that has its state; the same on every rank.
        last_trained: client -> the last round in which the client took part; the same on every rank.
        rows: the state rows of this rank that are in memory, the least recently used first.
        max_in_memory: the maximum number of rows kept in memory, if there is a store.
        stored_up_to: the round up to which all rows have been written to the store; -1: none have.
    """

    def __init__(self, comm: Communicator, trainer: ClientTrainer, ranks: Sequence[int]) -> None:
        """Distribute the clients over `ranks`, the ranks that train clients; no state is created yet."""
        self.comm, self.trainer, self.messages = comm, trainer, trainer.messages
        self.owners = StateOwners(ranks)
        self.rows: dict[int, Tensor] = {}  # client -> its state row, on the model's device; created when first needed
        # Initial values of the parts of the model that each client keeps; empty if there are none.
        n = None if trainer.messages.client_state.size else 0
        self.w0, self.b0 = trainer.model.w[:n].clone(), trainer.model.b[:n].clone()
        self.last_trained: dict[int, int] = {}
        self.store: StateStore | None = None
        self.max_in_memory, self.stored_up_to = 0, -1
        # The values of stored_up_to one save ago and two saves ago; all ranks have written their files up to the
        # latter.
        self.previous_stored_up_to = self.written_up_to = -1
        self.unavailable: set[int] = set()  # clients whose site has failed
        self.round = -1  # the current round of this rank
        self.keeps_undo = False  # whether the training of a round may have to be undone
        self.keeps_moves = False  # whether moves may have to be undone, because the run tolerates rank failures
        # client -> its row before it trained in round `_rows_before_round`, and the round that produced that row
        self._rows_before: dict[int, tuple[Tensor, int]] = {}
        self._rows_before_round = -1
        self.move_log = MoveLog()
        self.received_rows: set[int] = set()  # clients whose rows came from other ranks, and may not be in files yet
        self.reassigned: dict[int, int] = {}  # client -> the failed rank that had its state
        # In a replay: (client, round) -> the rank that has a copy of this state, and the copy itself if this rank has
        # it.
        self.copies: dict[tuple[int, int], tuple[int, Tensor | None]] = {}

    def client_context(self, client: int, t: int, lr: float, broadcast: Tensor, download: Tensor) -> ClientContext:
        """Return the context in which a client trains or is evaluated.

        Args:
            client, t, lr: the client, the round, and the learning rate.
            broadcast: the broadcast row of the round, on the model's device.
            download: the client's own download row, on any device.
        """
        row = self._get_row(client)
        if self.store is not None and len(self.rows) > max(self.max_in_memory, 1):
            self._evict_rows(self.store)
        download = download.to(self.w0.device, non_blocking=True)
        return ClientContext(self.trainer, client, t, lr, broadcast, download, row)

    def take_unsaved_rows(self) -> dict[int, Tensor]:
        """Return CPU copies of this rank's rows that are not in the store yet, and mark them as stored."""
        fresh = {
            k: row for k, row in self.rows.items() if self.last_trained.get(k, -1) > self.stored_up_to and len(row)
        }
        self.written_up_to, self.previous_stored_up_to = self.previous_stored_up_to, self.stored_up_to
        self.stored_up_to = max(self.last_trained.values(), default=-1)
        self.received_rows = {
            k for k in self.received_rows if self.last_trained.get(k, INITIAL_STATE) > self.written_up_to
        }
        return {k: row.to("cpu", copy=True) for k, row in fresh.items()}

    # ---- training and moves of a round, and how they are undone ----
    def save_before_training(self, client: int) -> None:
        """Keep a copy of a client's state, so that its training can be undone."""
        self._rows_before_round = self.round
        self._rows_before[client] = self._get_row(client).clone(), self.last_trained.get(client, INITIAL_STATE)

    def end_round(self, undone: Collection[int]) -> None:
        """End the round, and restore the states that the clients in `undone` had before it."""
        self.rows |= {client: row for client, (row, _) in self._rows_before.items() if client in undone}
        self._rows_before.clear()

    def move_states(self, placement: Mapping[int, int]) -> None:
        """Send state rows between ranks so that each client's row is on the rank that `placement` assigns it to."""
        rank, size = self.comm.rank, self.messages.client_state.size
        moves = [(client, self.owners[client], to) for client, to in placement.items() if self.owners[client] != to]
        self.owners |= placement
        self.move_log = MoveLog(moves, is_complete=not size)
        if not size:
            return
        # Initial rows of clients that never trained are sent, too, so that all ranks know which messages there are.
        sent_rows = {k: self._get_row(k).to(self.comm.device) for k, source, _ in moves if source == rank}
        for k in sent_rows:
            del self.rows[k]
        self.move_log.sent_rows = sent_rows if self.keeps_moves else {}
        incoming = {k: self._new_row_buffer() for k, _, to in moves if to == rank}
        outgoing = [(to, sent_rows[k]) for k, source, to in moves if source == rank]
        self.comm.message_info = None, ("client state",)
        self.comm.exchange(outgoing, [(source, incoming[k]) for k, source, to in moves if to == rank])
        self._store_rows(incoming)
        self.received_rows |= incoming.keys()
        self.move_log.is_complete = True

    def undo_round(self, t: int, keep_moves: bool) -> None:
        """Undo the changes that round t has made to the client states of this rank.

        Args:
            keep_moves: whether rows that were moved in this round stay on their new ranks.
        """
        if self._rows_before_round == t:
            self.rows |= {k: row for k, (row, _) in self._rows_before.items()}
            self._record_state_rounds({k: made_by for k, (_, made_by) in self._rows_before.items()})
            self._rows_before.clear()
        log, self.move_log = self.move_log, MoveLog()
        if keep_moves:
            return
        for k, source, to in log.moves:
            self.owners[k] = source
            if to == self.comm.rank:
                self.rows.pop(k, None)
        self._store_rows(log.sent_rows)

    def record_clients_of_failed_ranks(self, alive: Collection[int], ranks: Sequence[int], *, move: bool) -> None:
        """Record the clients of failed ranks in `reassigned`, each with its failed rank, and optionally move them.

        The result depends only on the arguments and on which rank owned each client before the round.

        Args:
            alive: the ranks that are alive.
            ranks: the training ranks that are alive.
            move: whether to assign the clients of failed ranks to `ranks`; otherwise they are only recorded.
        """
        for k, dead in self.reassigned.items():
            self.owners[k] = dead
            self.rows.pop(k, None)
        clients = range(self.trainer.data.clients)
        self.reassigned = {k: self.owners[k] for k in clients if self.owners[k] not in alive}
        if move:
            self.owners |= scheduler.assign_pinned(list(self.reassigned), ranks)

    # ---- states of earlier rounds ----
    def newest_saved_rounds(self, clients: Collection[int], took_part: Callable[[int, int], bool]) -> dict[int, int]:
        """Return, for each client, the latest round in which it took part and whose state is intact in the store.

        Args:
            clients: the clients to look up; those without an intact state are not in the result.
            took_part: a function (client, round) that returns whether the client took part in the round.
        """
        if self.store is None:
            return {}
        stored = sorted((k, t) for k, t in self.store.list_keys() if k in clients)
        self.store.take_over(stored)
        candidates = (
            (k, t) for k, t in stored if k in self.last_trained and t <= self.last_trained[k] and took_part(k, t)
        )
        # of several rounds of a client, the last one counts
        return {k: t for k, t in candidates if self.store.is_intact(k, t)}

    def revert_states(self, rounds: Mapping[int, int]) -> None:
        """Set clients back to the states that earlier rounds produced; `rounds` maps each client to such a round."""
        for k in rounds:
            self.rows.pop(k, None)
        self._record_state_rounds(rounds)

    def replay_failures(self, t: int, lost_ranks: LostRanks, *, evaluated: bool) -> None:
        """Apply the rank failures recorded for round t to the client states, in a replay (faults.replay).

        Args:
            t: the round that begins.
            lost_ranks: all recorded rank failures.
            evaluated: whether the replay has evaluated round t - 1. If not, only the failures that preceded this
                evaluation in the recorded run are applied.
        """
        applied = lost_ranks if evaluated else lost_ranks.before_evaluation(t)
        self.unavailable = applied.unavailable_clients(t)
        if not self.messages.client_state.size:
            return
        for k, r in sorted(lost_ranks.needed_states() - self.copies.keys()):
            if self.last_trained.get(k) == r:
                rank = self.owners[k]
                self.copies[k, r] = rank, self._get_row(k).clone() if rank == self.comm.rank else None
        before = lost_ranks.before_evaluation(t).reverted_states(t) if evaluated else {}
        self._revert_to_copies({k: r for k, r in applied.reverted_states(t).items() if before.get(k) != r})

    def _revert_to_copies(self, rounds: Mapping[int, int]) -> None:
        """Set clients back to the states that the given rounds produced.

        Ranks have copies of these states in the attribute `copies`; each is sent to the rank that owns the client.
        """
        mine, outgoing, incoming = dict[int, Tensor](), list[Message](), list[Message]()
        for k, t in sorted(rounds.items()):
            if t == INITIAL_STATE:
                continue
            if (k, t) not in self.copies:
                raise UserError(
                    f"client {k} reverts to its state of round {t}, which is not in the checkpoint; begin the replay "
                    "at an earlier round"
                )
            (source, row), to = self.copies[k, t], self.owners[k]
            if to == self.comm.rank:
                mine[k] = self._new_row_buffer() if row is None else row.clone()
                incoming += [(source, mine[k])] if row is None else []
            elif row is not None:
                outgoing.append((to, row.to(self.comm.device)))
        self.comm.exchange(outgoing, incoming)
        self.revert_states(rounds)
        self._store_rows(mine)
        for k, row in mine.items() if self.store is not None else ():
            self.store.put(k, self.last_trained[k], row.cpu())  # type: ignore[union-attr]

    # ---- rows ----
    def _new_row_buffer(self) -> Tensor:
        """Allocate a buffer for a state row that is received from another rank."""
        return torch.empty(self.messages.client_state.size, dtype=self.w0.dtype, device=self.comm.device)

    def _store_rows(self, rows: Mapping[int, Tensor]) -> None:
        """Add state rows, which may be on any device, to the rows of this rank."""
        self.rows |= {k: row.to(self.w0.device) for k, row in rows.items()}

    def _record_state_rounds(self, rounds: Mapping[int, int]) -> None:
        """Record for each client in `rounds` which round produced its state."""
        self.last_trained = {k: t for k, t in {**self.last_trained, **rounds}.items() if t != INITIAL_STATE}

    def _get_row(self, client: int) -> Tensor:
        """Return a client's state row from memory or the store, or a new one, and mark it as most recently used."""
        row = self.rows.pop(client, None)
        if row is None and self.store is not None and client in self.last_trained:
            row = self.store.get(client, self.last_trained[client]).to(self.w0.device)
        elif row is None:
            row = self.messages.initial_state("client_state", self.w0, self.b0)
        self.rows[client] = row
        return row

    def _evict_rows(self, store: StateStore) -> None:
        """Remove the least recently used rows from memory, after writing unsaved ones to the store."""
        evicted = list[tuple[int, int]]()
        for client in islice(self.rows, len(self.rows) - max(self.max_in_memory, 1)):
            if client in self._rows_before:  # this row and all after it may have to be undone, and must not be stored
                break
            last = self.last_trained.get(client, INITIAL_STATE)
            if client not in self.received_rows or not self.written_up_to < last <= self.stored_up_to:
                evicted.append((client, last))
        for client, last in evicted:
            row = self.rows.pop(client)
            if last > self.stored_up_to:
                store.put(client, last, row.cpu())
