"""The control message of a round: rank 0 decides whether the round is made, and broadcasts that.

The decision is one number of the broadcast that also holds the model. A further message may follow: which clients'
uploads of the round before were refused, so that their state is undone; and the pace of ranks (scheduler.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum

from fedmpi.comm import Communicator
from fedmpi.engine.client_states import MoveLog
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.scheduler import ClientScheduler


class RoundCommand(IntEnum):
    """Whether a round is made; if not, why the run ends before it."""

    TRAIN = 0
    FINISHED = 1  # all rounds are made
    STOPPED = 2  # a rank was asked to stop
    ABORTED = 3  # a rank was asked to stop within the round before, which does not count
    DIVERGED = 4
    EARLY_STOPPED = 5  # the validation metric has not improved for long enough


TRAIN = RoundCommand.TRAIN
NEWS = 8  # added to the command in the number that is broadcast if that message follows


class RoundControl:
    """Opens rounds: rank 0 decides, all ranks receive the decision with the model, and apply it to the round before."""

    def __init__(
        self, comm: Communicator, scheduler: ClientScheduler, reporter: Reporter, stop_requested: Callable[[], bool]
    ) -> None:
        self.comm, self.scheduler, self.reporter, self.stop_requested = comm, scheduler, reporter, stop_requested
        self.config, self.states, self.transport = reporter.config, reporter.states, reporter.transport
        self.server = reporter.server
        self.first_round = 0  # of this job; later than 0 where a run is resumed
        self.opened_at = 0.0  # when rank 0 decided about the latest round, by time.perf_counter
        self._decided = -1, 0  # rank 0's: the latest round about which it has decided, and what
        self._pace = scheduler.pace  # with that

    def open_round(self, t: int) -> RoundCommand:
        """Broadcast, at rank 0, or receive what becomes of round t, with the model and the declared server state.

        Every rank then undoes what refused clients did in the round before. A round that is repeated after a rank
        failure is opened with the same decision.
        """
        number = int(TRAIN)
        if self.server is not None:
            self.begin_round(t)
            if self._decided[0] != t:
                self.opened_at = time.perf_counter()
                self._decided = t, self._decide(t)
            number = self._decided[1]
        if t > self.first_round:
            self.transport.changed = self.transport.messages.groups(t - 1)
        number = int(self.transport.broadcast(float(number), self.server))
        command, undone = RoundCommand(number % NEWS), list[int]()
        self.begin_round(t)
        if number & NEWS:
            refused = self.server.refused if self.server is not None else []
            with self.comm.uncounted():  # its length depends on time
                news = self.comm.broadcast_json({"refused": refused, "pace": [*self._pace.items()]})
            undone = news["refused"] if self.states.keeps_undo else []
            self.scheduler.pace = dict(map(tuple, news["pace"]))
        if command is RoundCommand.ABORTED and self.states.keeps_undo:
            undone, self.states.trained = self.scheduler.cohort(t - 1), self.scheduler.last_rounds(t - 2)
        self.states.end_round(undone)
        if self.scheduler.lost_ranks.rows:
            self.states.unavailable = self.scheduler.lost_ranks.gone(t)
        if self.config.replays_failures:
            self.states.replay_failures(t, self.scheduler.lost_ranks, evaluated=False)
        return command

    def begin_round(self, t: int) -> None:
        """Note that this rank is in round t. The one before is over: all of its uploads have reached rank 0."""
        states, before = self.states, self.states.round
        if before == t:
            return
        if before >= self.first_round:  # the rows of those who took part are what the round before has made
            states.trained |= dict.fromkeys(self.scheduler.cohort(before), before)
        states.move_log, states.reassigned, states.round = MoveLog(), {}, t  # what has moved stays where it is

    def trains(self, t: int) -> bool:
        """Whether rank 0 has decided that round t is made."""
        return self._decided[0] == t and self._decided[1] % NEWS == TRAIN

    def leave(self, command: RoundCommand) -> str:
        """End the run; return why: "finished", "stopped", "diverged" or "early_stopped"."""
        if self.config.on_lost_rank != "abort":  # no rank leaves while another one may have to repeat a round
            self.comm.allgather_bytes(b"", self.comm.patience_s)
        diverges = self.reporter.divergence.ends  # at the end of all rounds only rank 0 knows
        if command is RoundCommand.DIVERGED or (command is RoundCommand.FINISHED and diverges):
            return "diverged"
        return {RoundCommand.FINISHED: "finished", RoundCommand.EARLY_STOPPED: "early_stopped"}.get(command, "stopped")

    def _decide(self, t: int) -> int:
        """Decide at rank 0 about round t: the command, and which messages follow it."""
        assert self.server is not None
        self._pace = self.scheduler.pace
        if t > self.first_round and self.reporter.metrics_row is None:
            return RoundCommand.ABORTED
        news = NEWS if self.states.keeps_undo and self.server.refused else 0
        if t == self.config.rounds:
            return RoundCommand.FINISHED + news
        if self.stop_requested():
            return RoundCommand.STOPPED + news
        if self.reporter.divergence.ends:
            return RoundCommand.DIVERGED + news
        if self.server.best and self.server.best.should_stop():
            return RoundCommand.EARLY_STOPPED + news
        self._pace = self.scheduler.choose_pace(t)
        return TRAIN + (NEWS if self._pace != self.scheduler.pace else news)
