"""Recovery from rank failures: the remaining ranks return to the start of the round and repeat it.

    regroup      the ranks that are alive connect again and tell each other which round they were in
    restore      clients and server return to their states at the beginning of rank 0's round
    reassign     clients of failed ranks are assigned to other ranks, with their newest states on disk (not possible if
                 the data stay at a site)
    record       rank 0 records the effect of the failure on the results (lost_ranks.py), and all ranks apply it

With faults.on_lost_rank: drop, the clients that the failed rank should have trained do not take part in the round. With
redo, other ranks train these clients, and the results are bitwise identical to those of a run without the failure. If
all ranks turn out to be alive, one of them was merely slower than in all earlier rounds. From then on, ranks wait
longer, because long rounds would otherwise be interrupted again and again.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedmpi.comm import Communicator, RankLostError
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.faults import lost_ranks
from fedmpi.engine.faults.lost_ranks import INITIAL_STATE, Row
from fedmpi.engine.federation_config import FederationConfig
from fedmpi.engine.round_control import RoundControl
from fedmpi.engine.scheduler import ClientScheduler
from fedmpi.engine.tracing import Timeline

# A silent rank is probed after this many seconds, or this many times the longest round so far, whichever is longer.
MIN_PATIENCE_S, PATIENCE_ROUNDS = 10.0, 5.0


class FailurePolicy:
    """The policy for rank failures (faults.on_lost_rank): restores the start of a round, so that it can be repeated."""

    def __init__(
        self, config: FederationConfig, control: RoundControl, timeline: Timeline, *, can_move_clients: bool
    ) -> None:
        """Create the policy.

        Args:
            can_move_clients: whether other ranks have the data to train the clients of a failed rank.
        """
        self.config, self.control, self.timeline, self.can_move_clients = config, control, timeline, can_move_clients
        self.comm, self.states = control.comm, control.states
        self.scheduler, self.reporter = control.scheduler, control.reporter
        self.alive = list(self.comm.alive)  # on rank 0: the ranks that were alive at the last check
        self.longest_s = 0.0  # the longest duration of a round so far

    def next_round(self, t: int, why: str | None) -> int:
        """Return the next round to run: t + 1, or after a rank failure the round that has to be repeated.

        Args:
            why: the error message of the failure that this rank has noticed; None if round t is complete.

        Raises:
            RankLostError: rank 0 or all training ranks have failed, or this rank was excluded.
        """
        if why is None:
            self._record_duration(time.perf_counter() - self.timeline.round_start)
            return t + 1
        while True:
            before = list(self.comm.alive)
            report = {
                "t": self.states.round,
                "moved": self.states.move_log.is_complete,
                "reported": self.reporter.reported_in == self.states.round,
                "why": why[:500],
                "waited": time.perf_counter() - self.timeline.round_start,
                "spent": self.comm.message_timeout_s >= self.config.timeout_s,
            }
            payloads = self.comm.regroup(json.dumps(report).encode(), self.config.timeout_s)
            reports = {rank: json.loads(text) for rank, text in payloads.items()}
            if not any(rank in reports for rank in self.scheduler.ranks):
                raise RankLostError(f"all training ranks have failed: {why}")
            if self.comm.alive == before:
                self._extend_patience(reports)
            t = self._restore_round_start(reports)
            try:
                self._agree_on_effects(t, [each["why"] for each in reports.values() if each["why"]])
            except RankLostError as error:  # one more rank has failed
                why = str(error)
                continue
            return t

    def _record_duration(self, seconds: float) -> None:
        """Record the duration of a round, which determines how long a rank may be silent before it is probed."""
        self.longest_s = max(self.longest_s, seconds)
        self.comm.message_timeout_s = min(self.config.timeout_s, max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self.longest_s))

    def _extend_patience(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Make ranks wait longer for silent ranks from now on, because all ranks turned out to be alive.

        Raises:
            RankLostError: the ranks have already waited for comm.round_timeout_s; raised on all ranks.
        """
        waited, limit_s = max(each["waited"] for each in reports.values()), self.config.timeout_s
        t = reports[0]["t"]
        if waited >= limit_s and all(each["spent"] for each in reports.values()):
            raise RankLostError(
                f"round {t}: all ranks are alive, but not all have answered within comm.round_timeout_s ({limit_s:g} s)"
            )
        if min(PATIENCE_ROUNDS * waited, limit_s) <= self.comm.message_timeout_s:
            return
        self._record_duration(waited)
        if self.comm.rank == 0:
            text = (
                f"round {t}: no rank has failed, but one was silent for {waited:.0f} s, so the round is repeated; from "
            )
            text += f"now on, a rank is probed after {self.comm.message_timeout_s:.0f} s of silence"
            warnings.warn(text, stacklevel=2)

    def _restore_round_start(self, reports: Mapping[int, Mapping[str, Any]]) -> int:
        """Restore the state at the start of the round that rank 0 is in, and return the number of this round."""
        root, states = reports[0], self.states
        t = int(root["t"])
        self.control.mark_round_begun(t)  # if this rank has not begun the round yet
        # If all ranks have completed their moves, states stay on their new ranks, because a failed rank cannot take its
        # own back.
        keep_moves = all(each["t"] == t and each["moved"] for each in reports.values())
        states.undo_round(t, keep_moves)
        states.record_clients_of_failed_ranks(
            self.comm.alive, [r for r in self.scheduler.ranks if r in reports], move=self.can_move_clients
        )
        self.reporter.reported_in = t if root["reported"] else -1
        return t

    def _agree_on_effects(self, t: int, why: Sequence[str]) -> None:
        """Make all ranks agree on the effect of the failure, i.e. on the clients and states that it affects.

        Args:
            t: the round that has to be repeated.
            why: the error messages of the ranks that have noticed the failure.

        Raises:
            RankLostError: another rank fails in the meantime.
        """
        comm, states, scheduler = self.comm, self.states, self.scheduler
        orphans = sorted(states.reassigned)
        saved_rounds = gather_newest_saved_rounds(comm, scheduler, states, orphans) if self.can_move_clients else {}
        lost = [rank for rank in self.alive if rank not in comm.alive]
        if comm.rank == 0 and lost:
            drops = self.config.on_lost_rank == "drop" and self.control.will_train_round(t)
            placement = scheduler.assign_clients(t, self.alive) if drops else {}
            row = lost_ranks.make_row(
                t,
                {rank: comm.hosts.get(rank, "") for rank in lost},
                clients=[k for k, rank in placement.items() if rank in lost],
                gone=() if self.can_move_clients else set(orphans) - states.unavailable,
                reverted={k: r for k, r in saved_rounds.items() if r != states.last_trained.get(k, INITIAL_STATE)},
                reported=self.reporter.reported_in == t,
                why=next((text for text in why if any(f"rank {rank} " in text for rank in lost)), "".join(why[:1])),
            )
            scheduler.lost_ranks.replace_failures_since(t, [*scheduler.lost_ranks.in_round(t), row])
            self.reporter.callbacks.record_lost_ranks(row)
            self.alive = list(comm.alive)
        apply_lost_ranks(t, scheduler, states, comm.broadcast_json(scheduler.lost_ranks.in_round(t)))


def apply_lost_ranks(t: int, scheduler: ClientScheduler, states: ClientStates, rows: list[Row]) -> None:
    """Store these rows as the rank failures of round t, and apply their effects to the client states."""
    scheduler.lost_ranks.replace_failures_since(t, rows)
    states.unavailable = scheduler.lost_ranks.unavailable_clients(t)
    states.revert_states(scheduler.lost_ranks.reverted_states(t))


def gather_newest_saved_rounds(
    comm: Communicator, scheduler: ClientScheduler, states: ClientStates, orphans: Sequence[int]
) -> dict[int, int]:
    """Return, on rank 0, the round of each orphan's newest intact state on disk (-1: the initial state).

    Other ranks get {}.

    Args:
        orphans: the clients of failed ranks.
    """
    if not orphans or not states.messages.client_state.size:
        return {}
    mine = states.newest_saved_rounds(
        [k for k in orphans if states.owners[k] == comm.rank], lambda k, r: k in scheduler.cohort(r)
    )
    rows = torch.tensor([mine.get(k, INITIAL_STATE) for k in orphans], dtype=torch.float64, device=comm.device)
    if comm.rank:
        comm.exchange([(0, rows)], [])
        return {}
    received = {rank: torch.empty_like(rows) for rank in comm.alive if rank}
    comm.exchange([], list(received.items()))
    received[0] = rows
    return {k: int(received[states.owners[k]][i]) for i, k in enumerate(orphans)}


def rejoin_sites(t: int, control: RoundControl) -> None:
    """Let the sites of failed ranks take part again when a run is resumed at round t with all ranks.

    A replay does nothing here: sites rejoin in the same round as in the recorded run.
    """
    scheduler, states, comm = control.scheduler, control.states, control.comm
    away = sorted(scheduler.lost_ranks.unavailable_clients(t))
    if not away or control.config.replays_failures:
        return
    saved_rounds = gather_newest_saved_rounds(comm, scheduler, states, away)
    rows = scheduler.lost_ranks.in_round(t)
    if comm.rank == 0:
        back = {k: r for k, r in saved_rounds.items() if r != states.last_trained.get(k, INITIAL_STATE)}
        rows = [*rows, lost_ranks.make_row(t, {}, back=away, reverted=back)]
    apply_lost_ranks(t, scheduler, states, comm.broadcast_json(rows))
