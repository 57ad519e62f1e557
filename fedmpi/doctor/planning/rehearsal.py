"""Rounds as rank 0 goes through them, with nobody at the other end: every message is counted, none leaves.

What comes from the other ranks are the uploads of a few clients that take one step each, here, again and again; parts
of sums are zero, so that rank 0's own part of them stands for all. Sizes of messages depend on none of that, so the
bytes are those of a run, and the server's step takes as long as in one.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedmpi.comm.base import Communicator, Message, Posted
from fedmpi.common import seeds
from fedmpi.engine.federation import Federation
from fedmpi.engine.travel.gathering import Gathering
from fedmpi.engine.travel.sharded import Sharded

CLIENTS = 3  # of which uploads are made


@final
class Nobody(Communicator):
    """Rank 0 of `size` ranks of which the others are not there."""

    def __init__(self, size: int, device: torch.device) -> None:
        Communicator.__init__(self, rank=0, size=size, device=device)
        self.parts: list[Tensor] = []  # what comes, one after another, and from the start again
        self.at = 0

    def _meet(self) -> None:
        """There is nobody to wait for."""

    def _part(self) -> None:
        """Nor to leave."""

    def _broadcast(self, x: Tensor) -> None:
        """Rank 0 has it already."""

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Posted:
        for _, x in incoming:
            part = self.parts[self.at % len(self.parts)] if self.parts else x[:0]
            if (part.dtype, part.shape) == (x.dtype, x.shape):
                x.copy_(part)
                self.at += 1
            else:  # an answer
                x.zero_()
        return []

    def _finish(self, posted: Posted) -> None:
        """Do nothing: `_post` has already answered every message."""

    def _allgather_bytes(self, payload: bytes, deadline_s: float) -> list[bytes]:
        return [payload] * self.size


@dataclass(frozen=True)
class Round:
    """A kind of round. count: how often a run has it; sent, received: rank 0's bytes; server_s: of the step."""

    first: int
    count: int
    sent: int
    received: int
    server_s: float


def kinds(fed: Federation) -> list[Round]:
    """The kinds of rounds of the run, in the order in which they first occur; `fed` is spent by this.

    Rounds are of one kind where the same groups of the model and the same slots travel, up and down, of as many clients
    (the last round of a cycle has fewer), and rank 0 trains as many.
    """
    fed.worker.recipe = replace(fed.worker.recipe, epochs=None, steps=1)
    first: dict[Hashable, int] = {}
    often: Counter[Hashable] = Counter()
    messages = fed.worker.messages
    for t in range(fed.plan.rounds):
        down = messages.groups(t - 1) if t else "all"
        own = sum(rank == 0 for rank in fed.scheduler.assign(t).values()) if 0 in fed.scheduler.ranks else 0
        kind = (down, messages.upload(t), messages.travel(t), len(fed.scheduler.sample(t)), own)
        first.setdefault(kind, t)
        often[kind] += 1
    return [_one(fed, t, often[kind]) for kind, t in first.items()]


def _one(fed: Federation, t: int, count: int) -> Round:
    comm, members, where = fed.comm, fed.scheduler.cohort(t), fed.scheduler.assign(t)
    assert isinstance(comm, Nobody)
    fed.states.owner |= where  # what moves is counted apart, over all rounds
    fed.control.first_round = fed.reporter.reported_in = t  # the round before is not evaluated
    fed.reporter.line = None
    comm.parts, comm.at = [part for row in _made(fed, t, members) for part in _parts(fed, t, row)], 0
    before = comm.sent_bytes, comm.received_bytes
    if t:
        fed.transport.close_round(t - 1)
    fed.run_round(t)
    line = fed.reporter.line
    assert line is not None  # no upload says that its rank was asked to stop
    return Round(t, count, comm.sent_bytes - before[0], comm.received_bytes - before[1], line["server_s"])


def way(fed: Federation, t: int) -> Gathering:
    """How the uploads of round t travel."""
    members, where = fed.scheduler.cohort(t), fed.scheduler.assign(t)
    return fed.transport.gather_uploads(t, members, where, fed.scheduler.weights(members)[1])


def _made(fed: Federation, t: int, members: Sequence[int]) -> list[Tensor]:
    """Uploads of some clients, which keep nothing of it."""
    upload, found = fed.worker.messages.upload(t), []
    for k in members[:CLIENTS]:
        row = fed.worker.model.w.new_zeros(upload.packing.size)
        kept = fed.states.rows.get(k)
        kept = None if kept is None else kept.clone()
        with seeds.restored():
            fed.client(k, t, fed.transport.no_download).run_round(row)
        fed.states.rows.pop(k, None)
        if kept is not None:
            fed.states.rows[k] = kept
        found.append(row.to(fed.comm.device))
    return found


def _parts(fed: Federation, t: int, row: Tensor) -> list[Tensor]:
    """What rank 0 is sent of an upload, as it travels."""
    gathering, coding = way(fed, t), fed.worker.messages.upload(t).coding
    if isinstance(gathering, Sharded):
        shard = gathering.shard
        return [*shard.small_parts(row), *(part for name in shard.names if len(part := shard.parts(row, name)[0]))]
    return gathering.cuts.parts(row) if coding is None else [coding.pack(row)]


def moved(fed: Federation, itemsize: int) -> tuple[int, int]:
    """Bytes of clients' states that rank 0 sends and receives in all rounds, where clients are placed by samples."""
    size = fed.worker.messages.client_state.size * itemsize
    if not size or 0 not in fed.scheduler.ranks:
        return 0, 0
    owner, sent, received = ChainMap({}, fed.states.owner), 0, 0
    for t in range(fed.plan.rounds):
        for client, rank in fed.scheduler.assign(t).items():
            if owner[client] != rank:
                sent += size * (owner[client] == 0)
                received += size * (rank == 0)
            owner[client] = rank
    return sent, received
