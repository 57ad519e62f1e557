"""The control message of a round: rank 0 decides whether the round is made, and every rank is told.

The decision is one number of the broadcast that also carries the model. Two things may follow it in messages of their
own: which clients' uploads of the round before were refused, so that their state is undone; and the measured speeds by
which clients are assigned to ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from fedmpi.comm import Communicator
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.pace import Pace
from fedmpi.engine.plan import Plan
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.scheduler import ClientScheduler
from fedmpi.engine.server import FederationServer
from fedmpi.engine.travel.exchange import Exchange


class RoundCommand(IntEnum):
    """Whether a round is made; if not, why the run ends before it."""

    TRAIN = 0
    FINISHED = 1  # all rounds are made
    STOPPED = 2  # a rank was asked to stop
    ABORTED = 3  # a rank was asked to stop within the round before, which does not count
    DIVERGED = 4
    EARLY_STOPPED = 5  # the validation metric has not improved for long enough


TRAIN = RoundCommand.TRAIN


class RoundHeader(NamedTuple):
    """Rank 0's decision about a round, and which messages follow it."""

    command: RoundCommand
    undoes: bool = False  # the clients whose uploads of the round before were refused follow
    rebalances: bool = False  # new speeds, by which clients are assigned to ranks, follow

    def encode(self) -> float:
        """Return the number that is broadcast."""
        return float(self.command + 8 * self.undoes + 16 * self.rebalances)

    @classmethod
    def decode(cls, number: float) -> RoundHeader:
        bits = int(number)
        return cls(RoundCommand(bits % 8), bool(bits & 8), bool(bits & 16))


class RoundControl:
    """Opens rounds: rank 0 decides, all ranks receive the decision with the model, and apply it to the round before."""

    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        scheduler: ClientScheduler,
        states: ClientStates,
        transport: Exchange,
        reporter: Reporter,
        server: FederationServer | None,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.plan, self.comm, self.scheduler, self.states = plan, comm, scheduler, states
        self.transport, self.reporter, self.server, self.stop_requested = transport, reporter, server, stop_requested
        self.first_round = 0  # of this job; later than 0 where a run is resumed
        self.opened_at = 0.0  # when rank 0 decided about the latest round, by time.perf_counter
        self._header: tuple[int, RoundHeader] | None = None  # rank 0's latest decision and its round

    def open_round(self, t: int) -> RoundCommand:
        """Broadcast, at rank 0, or receive what becomes of round t, with the model and the declared server state.

        Every rank then undoes what refused clients did in the round before. A round that is repeated after a rank
        failure is opened with the same decision.
        """
        header = RoundHeader(TRAIN)
        if self.server is not None:
            self.begin_round(t)
            header = self._decide_once(t)
        if t > self.first_round:
            self.transport.close_round(t - 1)
        moved = header.command is not RoundCommand.ABORTED
        header = RoundHeader.decode(self.transport.announce(header.encode(), self.server, t, moved))
        self.begin_round(t)
        undone = self._broadcast_refused(t - 1) if header.undoes else []
        if header.rebalances:
            speeds = self.comm.broadcast_json(self.scheduler.pace.row())
            self.scheduler.pace = self.scheduler.announced = Pace.of(speeds)
        if header.command is RoundCommand.ABORTED and self.states.undoes:
            undone, self.states.trained = self.scheduler.cohort(t - 1), self.scheduler.last_rounds(t - 2)
        self.states.settle(undone)
        self.states.gone = self.scheduler.losses.gone(t)
        if self.plan.replay:
            self.states.replay_failures(t, self.scheduler.losses, evaluated=False)
        return header.command

    def begin_round(self, t: int) -> None:
        """Note that this rank is in round t. The one before is over: all of its uploads have reached rank 0."""
        states = self.states
        if states.round == t:
            return
        if states.round >= self.first_round:
            states.took_part(states.round, self.scheduler.cohort(states.round))
            states.close()
        states.round = t

    def trains(self, t: int) -> bool:
        """Whether rank 0 has decided that round t is made."""
        return self._header is not None and self._header[0] == t and self._header[1].command is TRAIN

    def leave(self, command: RoundCommand) -> str:
        """End the run; return why: "finished", "stopped", "apart" or "enough"."""
        if self.plan.on_lost != "abort":  # no rank leaves while another one may have to repeat a round
            self.comm.allgather_bytes(b"", self.comm.patience_s)
        diverges = self.reporter.watch.ends  # at the end of all rounds only rank 0 knows
        if command is RoundCommand.DIVERGED or (command is RoundCommand.FINISHED and diverges):
            return "apart"
        return {RoundCommand.FINISHED: "finished", RoundCommand.EARLY_STOPPED: "enough"}.get(command, "stopped")

    def _decide_once(self, t: int) -> RoundHeader:
        if self._header is None or self._header[0] != t:
            self.opened_at = time.perf_counter()
            self._header = t, self._decide(t)
        return self._header[1]

    def _decide(self, t: int) -> RoundHeader:
        """Decide at rank 0 about round t."""
        assert self.server is not None
        if t > self.first_round and self.reporter.line is None:
            return RoundHeader(RoundCommand.ABORTED)
        undoes, best = self.states.undoes and bool(self.server.refused), self.server.best
        if t == self.plan.rounds:
            return RoundHeader(RoundCommand.FINISHED, undoes)
        if self.stop_requested():
            return RoundHeader(RoundCommand.STOPPED, undoes)
        if self.reporter.watch.ends:
            return RoundHeader(RoundCommand.DIVERGED, undoes)
        if best and best.ends():
            return RoundHeader(RoundCommand.EARLY_STOPPED, undoes)
        placed = self.scheduler.commit(t)
        if placed is not None:
            self.reporter.sink.placement(placed)
        return RoundHeader(TRAIN, undoes, self.scheduler.pace != self.scheduler.announced)

    def _broadcast_refused(self, t: int) -> list[int]:
        """Return the clients whose uploads of round t were refused, as rank 0 tells them."""
        members = self.scheduler.cohort(t)
        refused = self.server.refused if self.server is not None else ()
        flags = torch.tensor([float(k in refused) for k in members], device=self.comm.device)
        self.comm.broadcast(flags)
        return [k for k, flag in zip(members, flags.tolist(), strict=True) if flag]
