"""What rank 0 says to all at the start of a round, and what each rank makes of it.

To the word itself is added what follows it in messages of their own: whose round is undone, by what clients are placed.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fedmpi.engine.faults import recovery
from fedmpi.engine.pace import Pace
from fedmpi.engine.plan import ABANDONED, APART, DONE, ENOUGH, GO, PACE, STOPPED, UNDO
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.server import FederationServer
from fedmpi.engine.worker import Worker


class Run(recovery.Run, Protocol):
    """What this needs of a run on one rank (engine/federation.py)."""

    server: FederationServer | None
    worker: Worker
    report: Reporter
    first: int  # the round to begin with
    line: dict[str, Any] | None  # that of the round before, if any
    undoes: bool
    refused: list[int]


def word(fed: Run, t: int) -> float:
    """What rank 0 says at the start of round t."""
    if t > fed.first and fed.line is None:  # the round before was abandoned
        return ABANDONED
    best = fed.server.best if fed.server else None
    early = APART if fed.report.watch.ends else ENOUGH if best and best.ends() else GO
    said = DONE if t == fed.plan.rounds else STOPPED if fed.worker.stop() else early
    placed = fed.roster.settle(t) if said == GO else None
    if placed is not None:
        fed.sink.placement(placed)
    tells = said == GO and fed.roster.pace != fed.roster.told
    return said + (UNDO if fed.undoes and fed.refused else 0.0) + (PACE if tells else 0.0)


def settled(fed: Run, t: int, said: float) -> float:
    """The word itself. What clients keep of round t - 1 stands, or is undone where their upload was refused, and for
    all of them where it was abandoned."""
    undone: list[int] = []
    if said == ABANDONED and fed.undoes:
        undone, fed.states.trained = fed.roster.cohort(t - 1), fed.roster.last_rounds(t - 2)
    if said % PACE >= UNDO:
        members = fed.roster.cohort(t - 1)
        told = torch.tensor([float(k in fed.refused) for k in members], device=fed.comm.device)
        fed.comm.broadcast(told)
        undone = [k for k, bad in zip(members, told.tolist(), strict=True) if bad]
    if said >= PACE:
        fed.roster.pace = fed.roster.told = Pace.of(recovery.told(fed.comm, fed.roster.pace.row()))
    if not fed.begun.settled:
        fed.states.settle(undone)
        fed.states.gone = fed.roster.losses.gone(t)
        if fed.plan.replay:
            recovery.replay(fed, t)
    fed.begun.settled = True
    return said % UNDO
