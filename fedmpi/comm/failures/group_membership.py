"""Regroup the ranks of a job after a rank failure: either all live ranks continue, or none does.

The rank that notices the failure asks the others through the event log to regroup. Each rank votes by calling
`regroup`. A rank that is training votes late, but one of its threads immediately answers that the rank is alive. The
store waits for all votes except those of dead ranks, whose connections have closed. Rank 0 repeatedly asks the others
whether they are alive, and marks frozen ranks as dead; the other ranks check rank 0 in the same way. Then

    rank 0    writes the list of members, the ranks that have voted; from then on, failures reported by
              ranks that are not on the list are ignored
    members   connect to each other and confirm that they are connected; if another rank is lost in the
              meantime, all start again

A rank that is not on the list of members exits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from torch.distributed import DistError, Store

from fedmpi.comm.base import ConnectionLostError, RankLostError
from fedmpi.comm.failures.error_reporter import MEMBERS, ErrorReporter, EventLog, make_message_prefix
from fedmpi.comm.rendezvous.store import STORE_IS_GONE, RankStore
from fedmpi.comm.rendezvous.store_server import ALL_PRESENT
from fedmpi.comm.timeouts import T

REGROUP = "regroup"  # "regroup GENERATION", a line of the event log: all ranks must regroup
CHECK_INTERVAL_S = 0.2  # interval at which members are checked for having died


@final
class GroupMembership:
    """Keeps track of the ranks that take part in the job, and regroups them after a rank failure.

    Each rank has one such object. The ranks vote through `store`. The event log contains requests to regroup and the
    lists of members; `error_reporter` reads it in a thread of its own, in which it calls `_on_event` for each line.
    """

    def __init__(self, store: RankStore, rank: int, size: int, error_reporter: ErrorReporter) -> None:
        self.store, self.rank, self.error_reporter = store, rank, error_reporter
        self.timeouts, self.clock, self.process = error_reporter.timeouts, error_reporter.clock, error_reporter.process
        self.alive = list(range(size))
        self.generation = 0  # number of attempts to regroup so far, successful or not
        self.requested_generation = (
            0  # the latest attempt that a rank has called for; above `generation` if this rank must join it
        )
        self.rank_0_is_lost = False  # rank 0 and its store are lost
        self.cancel_wait: Callable[[Store], None] = lambda store: None  # cancels an allgather that this rank waits in
        store.set_on_disconnect(f"dead/{rank}", "1")
        error_reporter.on_event = self._on_event

    def regroup_requested(self) -> bool:
        """Return whether this rank must call `regroup`, because the other ranks wait for it or rank 0 is lost."""
        return self.requested_generation > self.generation or self.rank_0_is_lost

    def _on_event(self, line: str | None, store: Store) -> None:
        """Handle a line of the event log; called in the thread that reads the log.

        If rank 0's store no longer answers, `line` is None.
        """
        if line is None:
            self.rank_0_is_lost = True
            return
        kind, *words = line.split()
        if kind == REGROUP:
            self.requested_generation = max(self.requested_generation, int(words[0]))
            if self.regroup_requested():
                self.cancel_wait(store)
        elif kind == MEMBERS and self.rank not in self.error_reporter.members:
            at = time.strftime("%H:%M:%S", time.localtime(int(words[1])))
            text = f"error: the other ranks continued without this rank at {at}: it was frozen, or responded too late"
            self.process.print_message(f"{make_message_prefix(self.error_reporter.job)}: {text}")
            self.process.exit_after_eviction()

    def regroup(
        self, payload: bytes, deadline_s: float, connect: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]]:
        """Agree with the other ranks on the members of the job, and connect to them.

        Args:
            payload: bytes that this rank sends to the other members.
            deadline_s: time limit in seconds for the votes of ranks that are still training.
            connect: connect(store, generation, members) connects this rank to the members and returns the connection.

        Returns:
            The connection, and {rank: its payload} of all members.

        Raises:
            RankLostError: rank 0 is dead or frozen, or the members could not connect by the deadline.
        """
        until = self.clock.now() + deadline_s
        while self.clock.now() <= until:
            done = threading.Event()
            self.clock.start_thread(partial(self._mark_silent_ranks, done))
            try:
                result = self._try_regroup(payload, until, connect)
            except DistError as error:
                raise ConnectionLostError(STORE_IS_GONE) from error
            finally:
                done.set()
            if result is not None:
                return result
        raise RankLostError(f"the remaining ranks ({', '.join(map(str, self.alive))}) cannot connect to each other")

    def _try_regroup(
        self, payload: bytes, until: float, connect: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]] | None:
        self.generation += 1
        if self.requested_generation < self.generation:
            self._add_to_log(f"{REGROUP} {self.generation}")
        votes = self._exchange_and_drop_late_ranks("vote", payload, until - self.clock.now())
        if self.rank == 0:
            self._add_to_log(f"{MEMBERS} {self.generation} {int(time.time())} {' '.join(map(str, votes))}")
        results = self._connect(connect)
        built = self._exchange_and_drop_late_ranks("built", b"1" * len(results), self.timeouts.connect)
        return (results[0], votes) if list(built) == list(votes) and all(built.values()) else None

    def _exchange_and_drop_late_ranks(self, name: str, value: bytes, seconds: float) -> dict[int, bytes]:
        """Exchange a value with all ranks, remove late ranks from `alive`, and return {rank: value} for the rest."""
        name, limit_s = f"{name} {self.generation}", max(0.01, seconds)
        verdict, values = self.store.gather(name, 0, self.rank, self.alive, value, limit_s, skip_dead=True)
        missing = [] if verdict == ALL_PRESENT else [int(word) for word in verdict.split()]
        if 0 in missing:
            raise RankLostError("rank 0 is silent: it is frozen, or its host does not answer")
        if self.rank in missing:
            self.clock.sleep(self.timeouts.reply)  # meanwhile the thread that reads the event log ends this rank
        present = {rank: value for rank, value in zip(self.alive, values, strict=True) if rank not in missing}
        self.alive = list(present)
        return present

    def _mark_silent_ranks(self, done: threading.Event) -> None:
        """Check repeatedly, until `done` is set, whether other ranks answer, and mark those that do not as dead.

        Rank 0 checks all other ranks, and each of these checks rank 0.
        """
        watched = self.alive[1:] if self.rank == 0 else [0]
        with suppress(DistError):
            store = self.store.open_connection()
            while not self.clock.wait(done, self.timeouts.probe):
                answers = self.error_reporter.query_waiting_ranks(
                    EventLog(store, self.error_reporter.position), watched
                )
                for rank in set(watched) - answers.keys():
                    store.set(f"dead/{rank}", "1")

    def _connect(self, connect: Callable[[Store, int, list[int]], T]) -> list[T]:
        """Connect to the members in a thread; give up if a member dies in the meantime.

        Returns:
            A list with the connection; an empty list if connecting failed.
        """
        results: list[T] = []
        ended, until, members = threading.Event(), self.clock.now() + self.timeouts.connect, list(self.alive)
        store = self.store.open_connection()

        def work() -> None:
            with suppress(Exception):
                results.append(connect(store, self.generation, members))
            ended.set()

        self.clock.start_thread(work)
        while not self.clock.wait(ended, CHECK_INTERVAL_S) and self.clock.now() < until:
            if any(self.store.check([f"dead/{rank}"]) for rank in members):
                break
        return results

    def _add_to_log(self, line: str) -> None:
        EventLog(self.store, self.error_reporter.position).add(line)
