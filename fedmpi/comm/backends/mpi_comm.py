"""MPI through mpi4py: buffers only (the calls with a capital letter), never pickles.

Nothing here blocks inside MPI: most libraries spin while they wait and would take the core from a rank that trains.
Requests are posted, then tested with pauses in between, until a deadline.

After a loss no new communicator is made: messages between two ranks need none, where MPI lives on (ULFM). What is left
of the messages before is told apart by its tag.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm import launchers
from fedmpi.comm.backends.mpi import finalize, load, world
from fedmpi.comm.base import (
    ALLGATHER_BYTES,
    START_REMEDY,
    Communicator,
    ConnectionLostError,
    Lost,
    Message,
    absent_error,
    ranks,
    tree_broadcast,
)
from fedmpi.comm.failures.error_reporter import ErrorReporter
from fedmpi.comm.failures.group_membership import GroupMembership
from fedmpi.comm.job import Job
from fedmpi.comm.rendezvous.store import RankStore, StoreAllgather
from fedmpi.comm.timeouts import Timeouts

DATA, CONTROL = 0, 1  # tags
EAGER_S = 0.05  # requests are first tested without pauses for so long: MPI moves messages only inside its calls
PAUSE_S = 1e-3  # the longest pause: 0.1 % of a round of one second, and hardly any processor time
LOOK_S = 0.5  # between two looks which messages are not there yet
CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> type that MPI knows


def connect(job: Job, timeouts: Timeouts) -> Mpi:
    return Mpi(job, world(job, timeouts.start), timeouts)


def buffer(x: Tensor) -> np.ndarray:
    """x's own memory as an array of a type that MPI has: bfloat16 travels as 16-bit integers, bit for bit."""
    return x.detach().view(CARRIER[x.element_size()]).numpy()


class Posted(NamedTuple):
    """A message under way, and the memory that it uses."""

    peer: int
    request: Any
    x: Tensor
    comes: bool


@final
class Mpi(Communicator):
    def __init__(self, job: Job, comm: Any, timeouts: Timeouts) -> None:
        Communicator.__init__(self, torch.device("cpu"), comm.rank, comm.size, timeouts.round)
        self.timeouts, self.clock = timeouts, timeouts.clock
        self.job = job
        self.comm = comm
        self.can_regroup = "MPI goes on without a rank only where it has ULFM: Open MPI 5 and `mpirun --with-ft ulfm`"
        self.membership: GroupMembership | None = None
        self.under_way: dict[int, list[Posted]] = {}  # that somebody will wait for
        self.past: list[Posted] = []  # messages that came to nothing

    def outlive(self, store: RankStore, error_reporter: ErrorReporter) -> None:
        """Have the ranks settle who goes on after a loss, if MPI and its launcher outlive one."""
        if self.job.launcher != "mpi" or launchers.survivors(self.job, os.environ):
            return
        self.comm.Set_errhandler(load().ERRORS_RETURN)
        self.membership = GroupMembership(store, self.rank, self.size, error_reporter)
        self.can_regroup = ""

    def regroup(self, payload: bytes, deadline_s: float) -> dict[int, bytes]:
        if self.membership is None:
            raise Lost(f"the job cannot go on without a rank: {self.can_regroup}")
        until = self.clock.now() + deadline_s
        payloads = self.membership.regroup(payload, deadline_s, lambda *_: None)[1]
        self.alive = list(payloads)
        self._forget(until)
        return payloads

    def _barrier(self) -> None:
        self.allgather_bytes(b"", self.round_timeout_s)

    def _shutdown(self) -> None:
        if len(self.alive) == self.size or self.membership is None:
            finalize(self.job, self.round_timeout_s)
        else:  # MPI_Finalize would wait for who is lost
            StoreAllgather(self.membership.store, self.rank, self.alive).leave(self.round_timeout_s)

    def _broadcast(self, x: Tensor) -> None:
        tree_broadcast(x, self.alive.index(self.rank), self.alive, self._exchange)

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> list[Posted]:
        requests = [self._receive(peer, x, DATA) for peer, x in incoming]
        requests += [self._send(peer, x, DATA) for peer, x in outgoing]
        self.under_way[id(requests)] = requests
        return requests

    def _finish(self, posted: list[Posted]) -> None:
        late = self._wait(posted, self.patience_s)
        self.under_way.pop(id(posted), None)
        if late:
            raise self.silent(late)

    def _receive(self, peer: int, x: Tensor, kind: int) -> Posted:
        return Posted(peer, self.comm.Irecv(buffer(x), peer, kind + self._tag()), x, True)

    def _send(self, peer: int, x: Tensor, kind: int) -> Posted:
        return Posted(peer, self.comm.Isend(buffer(x), peer, kind + self._tag()), x, False)

    def _tag(self) -> int:
        """Of the messages since the last loss: what is under way from before it meets no receiver."""
        return 2 * self.membership.generation if self.membership else 0

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        """Rank 0 gathers the payloads and alone decides which ranks are silent, so that all ranks act alike."""
        frames = torch.zeros(self.size, 4 + ALLGATHER_BYTES, dtype=torch.uint8)  # length, payload
        mine = bytearray(len(payload).to_bytes(4, "little") + payload)
        frames[self.rank, : len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
        silent = torch.zeros(self.size, dtype=torch.uint8)
        others = self.alive[1:]
        if self.rank == 0:
            posted = [self._receive(peer, frames[peer], CONTROL) for peer in others]
            silent[list(self._wait(posted, deadline_s))] = 1
            told = [self._send(peer, silent, CONTROL) for peer in others if not silent[peer]]
            self._wait(told, self.timeouts.reply)
        else:
            posted = [self._send(0, frames[self.rank], CONTROL), self._receive(0, silent, CONTROL)]
            silent[list(self._wait(posted, deadline_s + self.timeouts.reply))] = 1
        if silent.any():
            absent, remedy = silent.nonzero().flatten().tolist(), "" if self.hosts else START_REMEDY
            raise absent_error(absent, len(self.alive), deadline_s, self.hosts, remedy)
        tree_broadcast(frames.flatten(), self.alive.index(self.rank), self.alive, self._exchange)
        found = map(bytes, frames[self.alive].numpy())
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in found]

    def _wait(self, requests: list[Posted], timeout_s: float) -> set[int]:
        """Wait for all requests and return the peers of those that are not done in time."""
        handles = [posted.request for posted in requests]
        began = self.clock.now()
        pause_s, look_s = 0.0, 0.1
        try:
            while not load().Request.Testall(handles):
                waited_s = self.clock.now() - began
                if waited_s > timeout_s:
                    self.past += requests
                    self.waiting_for = {posted.peer for posted in requests if not posted.request.Test()}
                    return set(self.waiting_for)
                if waited_s > look_s:  # here, since the thread that answers other ranks may not call MPI
                    self.waiting_for = {posted.peer for posted in requests if not posted.request.Test()}
                    look_s = waited_s + LOOK_S
                if self.membership is not None and self.membership.regroup_requested():
                    self.past += requests
                    raise Lost("another rank has lost one")
                self.clock.sleep(pause_s)
                pause_s = 0.0 if waited_s < EAGER_S else min(PAUSE_S, 2 * pause_s + 1e-5)
        except load().Exception as error:
            self.past += requests
            failed = [rank for rank in self._failed() if rank in self.alive]
            if not failed:
                raise ConnectionLostError(f"MPI has lost a rank ({error})") from error
            verb = "is" if len(failed) == 1 else "are"
            raise ConnectionLostError(f"{ranks(failed, self.hosts)} {verb} dead: the connection has ended") from error
        self.waiting_for = ()
        return set()

    def _failed(self) -> list[int]:
        """The ranks that MPI knows to be dead; only ULFM does."""
        if self.membership is None:
            return []
        places = self.comm.Get_group().Translate_ranks(range(self.size), self.comm.Get_failed())
        return [rank for rank, place in enumerate(places) if place >= 0]

    def _forget(self, until: float) -> None:
        """Take back what was to be received before a loss, lest it come into memory that is in use again.

        A message half received cannot be taken back, and is waited for. One that was to be sent stays, with its memory:
        nobody asks for it.
        """
        every = [*self.past, *(posted for each in self.under_way.values() for posted in each)]
        self.past = list({id(posted): posted for posted in every}.values())
        self.under_way.clear()
        pending = [posted for posted in self.past if posted.comes and posted.request]
        for posted in pending:
            posted.request.Cancel()
        while pending := [posted for posted in pending if not self._over(posted.request)]:
            if self.clock.now() > until:
                raise Lost(f"{ranks({posted.peer for posted in pending})} stopped in the middle of a message")
            self.clock.sleep(PAUSE_S)
        self.past = [posted for posted in self.past if not posted.comes]

    def _over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except load().Exception:  # its rank is dead
            return True
