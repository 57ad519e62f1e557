"""Who still takes part in a job, settled anew after a loss: all living ranks, or nobody goes on.

The rank that notices a loss calls the others through the event log. Whoever is called gives its vote, by coming to
`regroup`. A rank in the middle of its training comes late; that it lives, a thread of it answers at once. Rank 0 asks
again and again, and waits. It does not wait for a dead rank, whose connection to the store has ended, nor for a frozen
one, which does not answer in time. Then

    rank 0        writes who the members are; from there on, nobody listens to others
    members       connect to each other anew, and say so
    rank 0        says `go`; or `again`, if one more rank was lost meanwhile: all begin anew, with the members left

A rank that finds itself left out ends by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import final

from torch.distributed import DistError, Store

from fedmpi.comm.base import ConnectionLostError, Lost
from fedmpi.comm.failures.error_reporter import ASK, MEMBERS, ErrorReporter, EventLog, who
from fedmpi.comm.rendezvous.store import STORE_IS_GONE, RankStore
from fedmpi.comm.timeouts import T

CALL, GO, AGAIN = "regroup", "go", "again"  # lines of the event log


@final
class GroupMembership:
    """One a rank. `store` holds votes; lines come over the error reporter's connection."""

    def __init__(self, store: RankStore, rank: int, size: int, error_reporter: ErrorReporter) -> None:
        self.store, self.rank, self.error_reporter = store, rank, error_reporter
        self.timeouts, self.clock, self.process = error_reporter.timeouts, error_reporter.clock, error_reporter.process
        self.alive = list(range(size))
        self.generation = 0  # attempts to settle so far, with or without success
        self.called = 0  # the attempt that somebody has called for; beyond `generation` if this rank must come to it
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # that are not read yet
        self._arrived = threading.Event()  # a line has been added, or rank 0 is gone
        self._rank_0_is_gone = False  # with its store
        self.release: Callable[[Store], None] = lambda store: None  # ends a wait of this rank for others' bytes
        store.set_at_end(f"dead/{rank}", "1")
        error_reporter.on_event = self._on_event

    def regroup_requested(self) -> bool:
        """Whether the other ranks wait for this one to `regroup`, or have no rank 0 left."""
        return self.called > self.generation or self._rank_0_is_gone

    def _on_event(self, line: str | None, store: Store) -> None:
        """Handle a line, in the thread that reads the event log."""
        if line is None:
            self._rank_0_is_gone = True
            self._arrived.set()
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
        else:
            self._lines.put(line)
            self._arrived.set()

    def regroup(
        self, payload: bytes, deadline_s: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]]:
        """(what connects the members, their payloads). build(store, generation, members) connects this rank to them.

        Raises Lost if rank 0 is dead or silent, or no members could connect by the deadline.
        """
        until = self.clock.now() + deadline_s
        try:
            while True:
                self.generation += 1
                result = self._attempt(payload, until, build)
                if result is not None:
                    return result
                if self.clock.now() > until:
                    raise Lost(f"the ranks left ({', '.join(map(str, self.alive))}) do not connect to each other")
        except DistError as error:
            raise ConnectionLostError(STORE_IS_GONE) from error

    def _attempt(
        self, payload: bytes, until: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]] | None:
        generation = self.generation
        self.store.set(f"vote/{generation}/{self.rank}", payload)
        if self.called < generation:
            self._add(f"{CALL} {generation}")
        if self.rank == 0:
            others = self._members_with_key(f"vote/{generation}", self.alive[1:], until)
            self._add(f"{MEMBERS} {generation} {int(time.time())} {' '.join(map(str, [0, *others]))}")
        self.alive = [int(word) for word in self._next_line(until, MEMBERS).split()[3:]]
        results = self._build(generation, build)
        if self.rank == 0:
            name, members, limit = f"built/{generation}", self.alive, self.clock.now() + self.timeouts.connect
            self.alive = self._members_with_key(name, members, limit, every=True)
            is_well = self.alive == members and all(self.store.get(f"{name}/{rank}") == b"1" for rank in members)
            self._add(f"{GO if is_well else AGAIN} {generation}")
        if self._next_line(until + self.timeouts.connect, GO, AGAIN).startswith(AGAIN):
            return None
        votes = self.store.multi_get([f"vote/{generation}/{rank}" for rank in self.alive])
        return results[0], dict(zip(self.alive, votes, strict=True))

    def _build(self, generation: int, build: Callable[[Store, int, list[int]], T]) -> list[T]:
        """Connect, in a thread that is left behind if a member dies meanwhile; its result comes into the list."""
        results: list[T] = []
        store, alive = self.store.new_connection(), list(self.alive)

        def work() -> None:
            try:
                results.append(build(store, generation, alive))
                store.set(f"built/{generation}/{self.rank}", "1")
            except Exception as error:
                store.set(f"built/{generation}/{self.rank}", f"{type(error).__name__}: {error}")

        self.clock.start_thread(work)
        return results

    def _members_with_key(self, name: str, ranks: list[int], until: float, every: bool = False) -> list[int]:
        """Those of `ranks` that live and have written the key name/RANK; for rank 0. Waits for all that live.

        every: none of them may be missing, so that there is nothing to wait for once one is lost.
        """
        expected = ranks
        while True:
            ranks = self._living(ranks)
            if every and ranks != expected:
                return ranks
            limit_s = min(self.timeouts.probe, until - self.clock.now())
            present = self.error_reporter.present(self.store, name, ranks, limit_s)
            if present == ranks or self.clock.now() > until:
                return present

    def _living(self, ranks: list[int]) -> list[int]:
        """Return those of `ranks` that answer."""
        return [*self.error_reporter.roll_call(EventLog(self.store, self.error_reporter.at), ranks)]

    def _next_line(self, until: float, *kinds: str) -> str:
        """The next line of these kinds about this attempt; looks now and then whether rank 0 still lives."""
        while self.clock.now() < until + 2 * self.timeouts.reply:
            self._arrived.clear()
            if self._lines.empty() and not self._rank_0_is_gone:
                # The store of a frozen rank 0, a process of its own, answers all the same.
                if not self.clock.wait(self._arrived, self.timeouts.probe) and self.rank and not self._living([0]):
                    raise Lost("rank 0 is silent: it is frozen, or its host does not answer")
                continue
            if self._lines.empty():
                raise ConnectionLostError(STORE_IS_GONE)
            line = self._lines.get()
            if line.startswith(f"{ASK} 0/"):  # rank 0 waits, too
                until = max(until, self.clock.now())
            elif line.split()[0] in kinds and int(line.split()[1]) == self.generation:
                return line
        raise Lost("rank 0 is silent: it has not said which ranks go on")

    def _add(self, line: str) -> None:
        EventLog(self.store, self.error_reporter.at).add(line)
