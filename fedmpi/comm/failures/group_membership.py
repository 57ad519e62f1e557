"""Who still takes part in a job, settled anew after a loss: all living ranks, or nobody goes on.

The rank that notices a loss calls the others through the event log. Whoever is called gives its vote, by coming to
`regroup`. A rank in the middle of its training comes late; that it lives, a thread of it answers at once. The store
waits for all votes but those of dead ranks, whose connection has ended. Rank 0 asks again and again who lives, and
has a frozen rank count as dead; the others do so with rank 0. Then

    rank 0    writes who the members are, which are those that have voted; from there on, nobody listens to others
    members   connect to each other anew, and say so; if one more rank was lost meanwhile all begin anew

A rank that finds itself left out ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from torch.distributed import DistError, Store

from fedmpi.comm.base import ConnectionLostError, Lost
from fedmpi.comm.failures.error_reporter import MEMBERS, ErrorReporter, EventLog, who
from fedmpi.comm.rendezvous.store import STORE_IS_GONE, RankStore
from fedmpi.comm.rendezvous.store_server import ALL
from fedmpi.comm.timeouts import T

CALL = "regroup"  # "regroup GENERATION", a line of the event log: all are to come
LOOK_S = 0.2  # between two looks whether a member has died


@final
class GroupMembership:
    """One a rank. `store` holds votes; lines come over the error reporter's connection."""

    def __init__(self, store: RankStore, rank: int, size: int, error_reporter: ErrorReporter) -> None:
        self.store, self.rank, self.error_reporter = store, rank, error_reporter
        self.timeouts, self.clock, self.process = error_reporter.timeouts, error_reporter.clock, error_reporter.process
        self.alive = list(range(size))
        self.generation = 0  # attempts to settle so far, with or without success
        self.called = 0  # the attempt that somebody has called for; beyond `generation` if this rank must come to it
        self.rank_0_is_gone = False  # with its store
        self.release: Callable[[Store], None] = lambda store: None  # ends a wait of this rank for others' bytes
        store.set_at_end(f"dead/{rank}", "1")
        error_reporter.on_event = self._on_event

    def regroup_requested(self) -> bool:
        """Whether the other ranks wait for this one to `regroup`, or have no rank 0 left."""
        return self.called > self.generation or self.rank_0_is_gone

    def _on_event(self, line: str | None, store: Store) -> None:
        """Handle a line, in the thread that reads the event log."""
        if line is None:
            self.rank_0_is_gone = True
            return
        kind, *words = line.split()
        if kind == CALL:
            self.called = max(self.called, int(words[0]))
            if self.regroup_requested():
                self.release(store)
        elif kind == MEMBERS and self.rank not in self.error_reporter.members:
            at = time.strftime("%H:%M:%S", time.localtime(int(words[1])))
            text = f"error: this rank was taken for lost at {at}: it was frozen, or came too late"
            self.process.say(f"{who(self.error_reporter.job)}: {text}")
            self.process.exit_after_eviction()

    def regroup(
        self, payload: bytes, deadline_s: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]]:
        """(what connects the members, their payloads). build(store, generation, members) connects this rank to them.

        Raises Lost if rank 0 is dead or silent, or no members could connect by the deadline.
        """
        until = self.clock.now() + deadline_s
        while self.clock.now() <= until:
            done = threading.Event()
            self.clock.start_thread(partial(self._mark_silent_ranks, done))
            try:
                result = self._attempt(payload, until, build)
            except DistError as error:
                raise ConnectionLostError(STORE_IS_GONE) from error
            finally:
                done.set()
            if result is not None:
                return result
        raise Lost(f"the ranks left ({', '.join(map(str, self.alive))}) do not connect to each other")

    def _attempt(
        self, payload: bytes, until: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]] | None:
        self.generation += 1
        if self.called < self.generation:
            self._add(f"{CALL} {self.generation}")
        votes = self._gather("vote", payload, until - self.clock.now())
        if self.rank == 0:
            self._add(f"{MEMBERS} {self.generation} {int(time.time())} {' '.join(map(str, votes))}")
        results = self._connect(build)
        built = self._gather("built", b"1" * len(results), self.timeouts.connect)
        return (results[0], votes) if list(built) == list(votes) and all(built.values()) else None

    def _gather(self, name: str, value: bytes, seconds: float) -> dict[int, bytes]:
        """Return the values of the ranks that come in time; the others no longer belong to `alive`."""
        name, limit_s = f"{name} {self.generation}", max(0.01, seconds)
        verdict, values = self.store.gather(name, 0, self.rank, self.alive, value, limit_s, living=True)
        missing = [] if verdict == ALL else [int(word) for word in verdict.split()]
        if 0 in missing:
            raise Lost("rank 0 is silent: it is frozen, or its host does not answer")
        if self.rank in missing:
            self.clock.sleep(self.timeouts.reply)  # in which the thread that reads the event log ends this rank
        came = {rank: value for rank, value in zip(self.alive, values, strict=True) if rank not in missing}
        self.alive = list(came)
        return came

    def _mark_silent_ranks(self, done: threading.Event) -> None:
        """Have frozen ranks count as dead while this rank waits: rank 0 those of the others, the others rank 0."""
        watched = self.alive[1:] if self.rank == 0 else [0]
        with suppress(DistError):
            store = self.store.new_connection()
            while not self.clock.wait(done, self.timeouts.probe):
                answers = self.error_reporter.roll_call(EventLog(store, self.error_reporter.at), watched)
                for rank in set(watched) - answers.keys():
                    store.set(f"dead/{rank}", "1")

    def _connect(self, build: Callable[[Store, int, list[int]], T]) -> list[T]:
        """Connect, in a thread that is left behind if a member dies meanwhile. Returns the result, or nothing."""
        results: list[T] = []
        ended, until, members = threading.Event(), self.clock.now() + self.timeouts.connect, list(self.alive)
        store = self.store.new_connection()

        def work() -> None:
            with suppress(Exception):
                results.append(build(store, self.generation, members))
            ended.set()

        self.clock.start_thread(work)
        while not self.clock.wait(ended, LOOK_S) and self.clock.now() < until:
            if any(self.store.check([f"dead/{rank}"]) for rank in members):
                break
        return results

    def _add(self, line: str) -> None:
        EventLog(self.store, self.error_reporter.at).add(line)
