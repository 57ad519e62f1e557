"""Recovery from rank failures: the remaining ranks return to the start of the round and repeat it.

    regroup      the ranks that are alive connect again, and exchange in which round each of them was
    restore      clients and server have the states that they had when rank 0's round began
    reassign     clients of failed ranks are assigned to other ranks, with their newest states on disk (unless their
                 data are at a site)
    record       rank 0 records the effect of the failure on the results (lost_ranks.py), and all ranks apply it

With faults.on_lost_rank: drop the clients that the failed rank had to train do not take part in the round; with redo
other ranks train them, and the results have the same bits as without the failure. If all ranks are alive and one of
them only took longer than in any round so far, the ranks wait longer from then on; otherwise a long round would be
interrupted again and again.
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

# A rank that is silent is probed after this many seconds, or this many durations of a round, whichever is longer.
MIN_PATIENCE_S, PATIENCE_ROUNDS = 10.0, 5.0


class FailurePolicy:
    """Decides which round follows a rank failure, and restores the state at its start (faults.on_lost_rank)."""

    def __init__(
        self, config: FederationConfig, control: RoundControl, timeline: Timeline, *, can_move_clients: bool
    ) -> None:
        """Create the policy; `movable`: other ranks have the data with which to train a failed rank's clients."""
        self.config, self.control, self.timeline, self.can_move_clients = config, control, timeline, can_move_clients
        self.comm, self.states = control.comm, control.states
        self.scheduler, self.reporter = control.scheduler, control.reporter
        self.alive = list(self.comm.alive)  # at rank 0: the ranks that were alive at the last check
        self.longest_s = 0.0  # the longest duration of a round so far

    def next_round(self, t: int, why: str | None) -> int:
        """Return the number of the next round: t + 1, or after a rank failure the round that has to be repeated.

        Args:
            why: the failure as this rank noticed it; None if round t is complete.

        Raises:
            RankLostError: rank 0 or all ranks that train have failed, or this rank was excluded.
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
                raise RankLostError(f"no rank that trains is left: {why}")
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
        """Record the duration of a round; a rank that is silent for several times the longest duration is probed."""
        self.longest_s = max(self.longest_s, seconds)
        self.comm.message_timeout_s = min(self.config.timeout_s, max(MIN_PATIENCE_S, PATIENCE_ROUNDS * self.longest_s))

    def _extend_patience(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Wait longer for silent ranks from now on, because all ranks are alive.

        Raises:
            RankLostError: on all ranks, if they have waited for comm.round_timeout_s already.
        """
        waited, limit_s = max(each["waited"] for each in reports.values()), self.config.timeout_s
        t = reports[0]["t"]
        if waited >= limit_s and all(each["spent"] for each in reports.values()):
            raise RankLostError(
                f"round {t}: all ranks live, but not all come within {limit_s:g} s (comm.round_timeout_s)"
            )
        if min(PATIENCE_ROUNDS * waited, limit_s) <= self.comm.message_timeout_s:
            return
        self._record_duration(waited)
        if self.comm.rank == 0:
            text = f"round {t}: no rank is lost, but one took {waited:.0f} s to its next message, and the round begins "
            text += f"again; from now on ranks are asked after {self.comm.message_timeout_s:.0f} s of silence"
            warnings.warn(text, stacklevel=2)

    def _restore_round_start(self, reports: Mapping[int, Mapping[str, Any]]) -> int:
        """Restore the state at the start of rank 0's round, and return the number of that round."""
        root, states = reports[0], self.states
        t = int(root["t"])
        self.control.begin_round(t)  # if this rank has not begun the round yet
        # Moved states stay where they are if all ranks have completed their moves: a failed rank cannot take its own
        # back.
        keep_moves = all(each["t"] == t and each["moved"] for each in reports.values())
        states.undo_round(t, keep_moves)
        states.reassign(self.comm.alive, [r for r in self.scheduler.ranks if r in reports], move=self.can_move_clients)
        self.reporter.reported_in = t if root["reported"] else -1
        return t

    def _agree_on_effects(self, t: int, why: Sequence[str]) -> None:
        """Make all ranks agree on the effect of the failure: which clients and states are affected.

        Raises:
            RankLostError: one more rank fails.
        """
        comm, states, scheduler = self.comm, self.states, self.scheduler
        orphans = sorted(states.reassigned)
        saved_rounds = gather_newest_saved_rounds(comm, scheduler, states, orphans) if self.can_move_clients else {}
        lost = [rank for rank in self.alive if rank not in comm.alive]
        if comm.rank == 0 and lost:
            drops = self.config.on_lost_rank == "drop" and self.control.is_trained(t)
            placement = scheduler.assign(t, self.alive) if drops else {}
            row = lost_ranks.make_row(
                t,
                {rank: comm.hosts.get(rank, "") for rank in lost},
                clients=[k for k, rank in placement.items() if rank in lost],
                gone=() if self.can_move_clients else set(orphans) - states.unavailable,
                reverted={k: r for k, r in saved_rounds.items() if r != states.last_trained.get(k, INITIAL_STATE)},
                reported=self.reporter.reported_in == t,
                why=next((text for text in why if any(f"rank {rank} " in text for rank in lost)), "".join(why[:1])),
            )
            scheduler.lost_ranks.replace_rows(t, [*scheduler.lost_ranks.in_round(t), row])
            self.reporter.callbacks.record_lost_ranks(row)
            self.alive = list(comm.alive)
        apply_lost_ranks(t, scheduler, states, comm.broadcast_json(scheduler.lost_ranks.in_round(t)))


def apply_lost_ranks(t: int, scheduler: ClientScheduler, states: ClientStates, rows: list[Row]) -> None:
    """Record these rows as the rank failures of round t, and apply them to the client states."""
    scheduler.lost_ranks.replace_rows(t, rows)
    states.unavailable = scheduler.lost_ranks.unavailable_clients(t)
    states.revert_states(scheduler.lost_ranks.reverted_states(t))


def gather_newest_saved_rounds(
    comm: Communicator, scheduler: ClientScheduler, states: ClientStates, orphans: Sequence[int]
) -> dict[int, int]:
    """Return client -> the round of its newest readable state on disk, for clients `orphans`; {} except at rank 0."""
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
    """Let sites of failed ranks take part again when a run is resumed with all ranks at round t.

    In a replay they rejoin in the round in which they did in the recorded run.
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
