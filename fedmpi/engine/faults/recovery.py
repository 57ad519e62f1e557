"""A round that has lost ranks: the others meet, agree on what is left, and begin it once more.

    regroup    who is alive; rank 0 says which round it is in, and all go back to the start of that round
    stock      the clients of dead ranks get living ones (a site has none), with the newest state that lies on the shelf
    losses     rank 0 writes down what this means for the numbers (engine/faults/losses.py) and tells it to all
Where nobody is lost, one only took longer than any round so far: what it took counts as a round's, or a round that must
last would be cut for ever.
What living ranks have trained in this round they keep, and send it again. drop: the clients that the dead rank had to
train sit the round out; redo: living ranks train them, and the bits are those of a run without the fault.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fedmpi.comm import Communicator, Lost
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.faults import losses
from fedmpi.engine.faults.losses import START, Row
from fedmpi.engine.plan import Begun, Plan, Sink
from fedmpi.engine.sampling import Roster

PATIENCE_S, TIMES = 10.0, 5.0  # silence to ask after, in seconds and in rounds


class Run(Protocol):
    """What this needs of a run on one rank (engine/federation.py)."""

    plan: Plan
    comm: Communicator
    sink: Sink
    states: ClientStates
    roster: Roster
    ranks: list[int]  # those that train
    sites: bool  # whether a client's data lie with one rank alone
    at: int  # the round that it is in
    begun: Begun
    alive: list[int]  # rank 0's: as it last knew
    longest_s: float  # a round's

    def begin(self, t: int) -> None: ...


def recover(fed: Run, why: str) -> int:
    """After a message has failed: the round to begin (again), with the ranks that are left.

    Raises Lost where the run cannot go on: rank 0 or all that train are gone, or this rank was left out.
    """
    while True:
        here, begun = list(fed.comm.alive), fed.begun
        facts = {"t": fed.at, "moved": fed.states.moved.done, "reported": begun.reported, "why": why[:500]}
        spent = fed.comm.patience_s >= fed.plan.timeout_s and begun.uploads.keys() <= begun.made.keys()  # nothing new
        facts |= {"waited": time.perf_counter() - begun.began, "spent": spent}
        payload = json.dumps(facts)
        said = {rank: json.loads(text) for rank, text in fed.comm.regroup(payload.encode(), fed.plan.timeout_s).items()}
        if not any(rank in said for rank in fed.ranks):
            raise Lost(f"no rank that trains is left: {why}")
        if fed.comm.alive == here:
            _wait_longer(fed, said)
        t = _back(fed, said)
        try:
            _agree(fed, t, [each["why"] for each in said.values() if each["why"]])
            return t
        except Lost as error:  # one more is lost
            why = str(error)


def lasted(fed: Run, seconds: float) -> None:
    """A round did, so long. Who is silent for some times that is asked whether it lives."""
    fed.longest_s = max(fed.longest_s, seconds)
    fed.comm.patience_s = min(fed.plan.timeout_s, max(PATIENCE_S, TIMES * fed.longest_s))


def _wait_longer(fed: Run, said: Mapping[int, Mapping[str, Any]]) -> None:
    """All live. Raises Lost, on all ranks alike, where the longest patience was spent, and nothing new came of it."""
    waited, before, most = max(each["waited"] for each in said.values()), fed.comm.patience_s, fed.plan.timeout_s
    if waited >= most and all(each["spent"] for each in said.values()):
        raise Lost(f"round {said[0]['t']}: all ranks live, but not all come within {most:g} s (comm.round_timeout_s)")
    if min(TIMES * waited, most) <= before:
        return
    lasted(fed, waited)
    if fed.comm.rank == 0:
        took = f"round {said[0]['t']}: no rank is lost, but one took {waited:.0f} s to its next message"
        now = f"from now on ranks are asked after {fed.comm.patience_s:.0f} s of silence, not {before:.0f}"
        warnings.warn(f"{took}, and the round begins again; {now}", stacklevel=2)


def _back(fed: Run, said: Mapping[int, Mapping[str, Any]]) -> int:
    """To the start of rank 0's round, which it returns; what was trained in it is kept for when it is needed again."""
    root = said[0]
    fed.begin(root["t"])  # where it has not heard of that round: all of the one before has reached rank 0
    stay = all(each["t"] == root["t"] and each["moved"] for each in said.values())
    states = fed.states.back(stay) if fed.begun.settled else {}
    new = {k: (row.clone(), states.get(k)) for k, row in fed.begun.uploads.items()}
    orphans = fed.states.reassign(fed.comm.alive, [r for r in fed.ranks if r in said], move=not fed.sites)
    fed.begun.made = {k: made for k, made in (fed.begun.made | new).items() if k not in orphans}
    fed.begun.uploads, fed.begun.reported = {}, root["reported"]
    return int(root["t"])


def _agree(fed: Run, t: int, why: Sequence[str]) -> None:
    """What the loss means, on all ranks alike. Raises Lost."""
    comm, states = fed.comm, fed.states
    orphans = sorted(states.orphans)
    found = {} if fed.sites else stock(fed, orphans)
    if comm.rank == 0:
        lost = [rank for rank in fed.alive if rank not in comm.alive]
        if lost:
            where = fed.roster.placed(t, fed.alive) if fed.plan.on_lost == "drop" and fed.begun.goes else {}
            row = losses.row(
                t,
                {rank: comm.hosts.get(rank, "") for rank in lost},
                clients=[k for k, rank in where.items() if rank in lost],
                gone=set(orphans) - states.gone if fed.sites else (),
                reverted={k: r for k, r in found.items() if r != states.trained.get(k, START)},
                reported=fed.begun.reported,
                why=next((text for text in why if any(f"rank {rank} " in text for rank in lost)), next(iter(why), "")),
            )
            fed.roster.losses.replace(t, [*fed.roster.losses.of(t), row])
            fed.sink.loss(row)
            fed.alive = list(comm.alive)
    commit(fed, t, told(comm, fed.roster.losses.of(t)))


def commit(fed: Run, t: int, rows: list[Row]) -> None:
    """From now on these are the losses of round t."""
    fed.roster.losses.replace(t, rows)
    fed.states.gone = fed.roster.losses.gone(t)
    fed.states.revert(fed.roster.losses.reverted(t))


def stock(fed: Run, orphans: Sequence[int]) -> dict[int, int]:
    """client -> the round that made the newest state of it that can be read; at rank 0, elsewhere {}."""
    comm, states = fed.comm, fed.states
    if not orphans or not states.messages.client_state.size:
        return {}
    mine = states.newest([k for k in orphans if states.owner[k] == comm.rank], lambda k, r: k in fed.roster.cohort(r))
    rows = torch.tensor([mine.get(k, START) for k in orphans], dtype=torch.float64, device=comm.device)
    if comm.rank:
        comm.exchange([(0, rows)], [])
        return {}
    came = {rank: torch.empty_like(rows) for rank in comm.alive if rank}
    comm.exchange([], list(came.items()))
    came[0] = rows
    return {k: int(came[states.owner[k]][i]) for i, k in enumerate(orphans)}


def heard(comm: Communicator, t: int, where: Mapping[int, int]) -> Callable[[], None]:
    """Who trains nobody in round t tells rank 0 that it has heard of it: who missed a whole one could not go back, and
    others would remove the checkpoints that do without the rows that it has not written yet.

    Returns what waits until all have. These bytes are not counted: who trains nobody is a matter of time.
    """
    idle = set(comm.alive) - {0, *where.values()}
    if not idle or comm.rank not in {0, *idle}:
        return lambda: None
    word, counted = torch.zeros(len(idle), device=comm.device), (comm.sent_bytes, comm.received_bytes)
    comm.about = t, ("heard",)
    if comm.rank:
        posted = comm.post([(0, word[:1])], [])
    else:
        posted = comm.post([], [(rank, word[i : i + 1]) for i, rank in enumerate(sorted(idle))])
    comm.sent_bytes, comm.received_bytes = counted
    return lambda: comm.finish(posted)


def told(comm: Communicator, rows: Any) -> Any:
    """Rank 0's rows on all ranks."""
    text = json.dumps(rows).encode() if comm.rank == 0 else b""
    size = torch.tensor([len(text)], device=comm.device)
    comm.broadcast(size)
    body = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8).to(comm.device)
    comm.broadcast(body)
    return json.loads(bytes(body.tolist()))


def welcome_back(fed: Run, t: int) -> None:
    """A run goes on before round t with all ranks: sites that were gone take part again, as they were. In a replay they
    do so when they did."""
    away = sorted(fed.roster.losses.gone(t))
    if not away or fed.plan.replay:
        return
    found = stock(fed, away)
    rows = fed.roster.losses.of(t)
    if fed.comm.rank == 0:
        back = {k: r for k, r in found.items() if r != fed.states.trained.get(k, START)}
        rows = [*rows, losses.row(t, {}, back=away, reverted=back)]
    commit(fed, t, told(fed.comm, rows))


# ---- a run without faults that is given the losses of another ----
def replay(fed: Run, t: int, evaluated: bool = False) -> None:
    """Who is gone in round t; hold the states to which clients revert later, once they have them, and let those revert
    that do so in round t. evaluated: round t - 1 is; before that it knows of what was lost before that."""
    states, losses = fed.states, fed.roster.losses
    known = losses if evaluated else losses.before(t)
    states.gone = known.gone(t)
    if not states.messages.client_state.size:
        return
    for k, r in sorted(losses.needed() - states.held.keys()):
        if states.trained.get(k) == r:
            states.hold(k, r)
    before = losses.before(t).reverted(t) if evaluated else {}
    states.revert_to_held({k: r for k, r in known.reverted(t).items() if before.get(k) != r})
