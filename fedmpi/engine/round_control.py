"""The command with which rank 0 opens each round, and how all ranks carry it out.

The command is one number in the broadcast that also contains the model. A second message may follow it. It contains the
ids of the clients whose uploads were refused in the previous round, so that their states are restored, and the relative
costs of ranks (scheduler.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from fedmpi.comm import Communicator
from fedmpi.engine.client_states import MoveLog
from fedmpi.engine.reporting import Reporter
from fedmpi.engine.scheduler import ClientScheduler

if TYPE_CHECKING:  # needs the packages of fedmpi[privacy]
    from fedmpi.privacy.budget import PrivacyBudget


class RoundCommand(IntEnum):
    """Rank 0's command at the beginning of a round: run the round, or end the run for a given reason."""

    TRAIN = 0
    FINISHED = 1  # all rounds have been run
    STOPPED = 2  # a rank was asked to stop
    ABORTED = 3  # a rank was asked to stop during the previous round, which does not count
    DIVERGED = 4
    EARLY_STOPPED = 5  # the validation metric has not improved for long enough
    BUDGET_SPENT = 6  # a further round would exceed privacy.dp.max_epsilon


TRAIN = RoundCommand.TRAIN
FURTHER_MESSAGE = 8  # added to the command in the broadcast if a further message follows


class RoundControl:
    """Starts rounds: rank 0 decides what to do; all ranks receive its command with the model and carry it out."""

    def __init__(
        self, comm: Communicator, scheduler: ClientScheduler, reporter: Reporter, stop_requested: Callable[[], bool]
    ) -> None:
        """Create the control; `stop_requested` is a function that returns whether this rank was asked to stop."""
        self.comm, self.scheduler, self.reporter, self.stop_requested = comm, scheduler, reporter, stop_requested
        self.config, self.states, self.transport = reporter.config, reporter.states, reporter.transport
        self.server = reporter.server
        self.first_round = 0  # the first round of this process; greater than 0 if the run was resumed
        self.opened_at = 0.0  # time.perf_counter() on rank 0's decision about the latest round
        self._decided = -1, 0  # on rank 0: the round of the latest decision, and the decision
        self._rank_costs = scheduler.rank_costs  # the relative costs of ranks that belong to this decision

    def open_round(self, t: int) -> RoundCommand:
        """Send (rank 0) or receive the broadcast of round t: the command, the model and the declared server state.

        Then restore the states of clients whose uploads were refused in the previous round. If the round is repeated
        after a rank failure, it is opened with the same command.
        """
        number = int(TRAIN)
        if self.server is not None:
            self.mark_round_begun(t)
            if self._decided[0] != t:
                self.opened_at = time.perf_counter()
                self._decided = t, self._decide(t)
            number = self._decided[1]
            if number % FURTHER_MESSAGE == TRAIN and self.states.trainer.private_steps is not None:
                self.states.trainer.private_steps.record_release(t)  # before clients train
        if t > self.first_round:
            self.transport.changed_groups = self.transport.messages.groups_in_round(t - 1)
        number = int(self.transport.broadcast(float(number), self.server))
        command, undone = RoundCommand(number % FURTHER_MESSAGE), list[int]()
        self.mark_round_begun(t)
        if number & FURTHER_MESSAGE:
            refused = self.server.refused_clients if self.server is not None else []
            with self.comm.exclude_from_counts():  # because its length depends on measured times
                message = self.comm.broadcast_json({"refused": refused, "costs": [*self._rank_costs.items()]})
            undone = message["refused"] if self.states.keeps_undo else []
            self.scheduler.rank_costs = dict(map(tuple, message["costs"]))
        if command is RoundCommand.ABORTED and self.states.keeps_undo:
            undone, self.states.last_trained = self.scheduler.cohort(t - 1), self.scheduler.last_trained_rounds(t - 2)
        self.states.end_round(undone)
        if self.scheduler.lost_ranks.rows:
            self.states.unavailable = self.scheduler.lost_ranks.unavailable_clients(t)
        if self.config.replays_failures:
            self.states.replay_failures(t, self.scheduler.lost_ranks, evaluated=False)
        if command is TRAIN and self.states.trainer.private_steps is not None:
            self.states.trainer.private_steps.attempts[t] += 1
        return command

    @property
    def privacy_budget(self) -> PrivacyBudget | None:
        """On rank 0: the releases of differential privacy so far; None without it."""
        assert self.server is not None
        steps = self.states.trainer.private_steps
        return self.server.privacy.budget if self.server.privacy else steps and steps.budget

    def mark_round_begun(self, t: int) -> None:
        """Record that round t has begun on this rank; client states moved so far stay on their new ranks."""
        states, before = self.states, self.states.round
        if before == t:
            return
        # the states of the clients that took part are now those that the previous round produced
        if before >= self.first_round:
            states.last_trained |= dict.fromkeys(self.scheduler.cohort(before), before)
        # states that were moved stay on their new ranks
        states.move_log, states.reassigned, states.round = MoveLog(), {}, t

    def will_train_round(self, t: int) -> bool:
        """Return whether rank 0 has decided to run round t; called only on rank 0."""
        return self._decided[0] == t and self._decided[1] % FURTHER_MESSAGE == TRAIN

    def finish_run_on_this_rank(self, command: RoundCommand) -> str:
        """End the run on this rank; return why it ended, as `Federation.run` does."""
        if self.config.on_lost_rank != "abort":  # wait: another rank may have to repeat a round
            self.comm.allgather_bytes(b"", self.comm.message_timeout_s)
        diverges = self.reporter.divergence.should_stop  # after the last round only rank 0 knows this
        if command is RoundCommand.DIVERGED or (command is RoundCommand.FINISHED and diverges):
            return "diverged"
        ends = (RoundCommand.FINISHED, RoundCommand.EARLY_STOPPED, RoundCommand.BUDGET_SPENT)
        return command.name.lower() if command in ends else "stopped"

    def _decide(self, t: int) -> int:
        """Decide, on rank 0, whether to run round t or to end the run, and why; return the command as a number.

        FURTHER_MESSAGE is added to the number if a second message follows.
        """
        assert self.server is not None
        self._rank_costs = self.scheduler.rank_costs
        if t > self.first_round and self.reporter.metrics_row is None:
            return RoundCommand.ABORTED
        message = FURTHER_MESSAGE if self.states.keeps_undo and self.server.refused_clients else 0
        if t == self.config.rounds:
            return RoundCommand.FINISHED + message
        if self.stop_requested():
            return RoundCommand.STOPPED + message
        if self.reporter.divergence.should_stop:
            return RoundCommand.DIVERGED + message
        if self.server.best and self.server.best.should_stop():
            return RoundCommand.EARLY_STOPPED + message
        budget = self.privacy_budget
        if budget is not None and not budget.permits_round(t):
            return RoundCommand.BUDGET_SPENT + message
        self._rank_costs = self.scheduler.choose_rank_costs(t)
        return TRAIN + (FURTHER_MESSAGE if self._rank_costs != self.scheduler.rank_costs else message)
