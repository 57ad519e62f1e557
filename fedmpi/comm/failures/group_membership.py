"""Who still takes part in a job, settled anew after a loss: all living ranks, or nobody goes on.

The rank that notices a loss calls the others through the event log (event_log.py). Whoever is called gives its vote, by
coming to `settle`. A rank in the middle of its training comes late; that it lives, a thread of it says at once. Rank 0
asks it again and again, and waits; it does not wait for who no longer answers, be it dead (whose connections have
ended as well) or frozen. Then

    rank 0        writes who the members are; from there on, nobody listens to others
    members       connect to each other anew, and say so
    rank 0        says `go`; or `again`, if one more rank was lost meanwhile: all begin anew, with the members left

A rank that finds itself left out ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import final

from torch.distributed import DistError, Store

from fedmpi.comm.base import ConnectionLostError, Lost, T
from fedmpi.comm.failures.error_reporter import MEMBERS, WHOM, ErrorReporter, who
from fedmpi.comm.failures.event_log import EventLog
from fedmpi.comm.rendezvous.store import RankStore

CALL, ASK, GO, AGAIN = "regroup", "ask", "go", "again"  # lines of the event log
POLL_S = 0.01


@final
class GroupMembership:
    """One a rank. `store` holds votes; lines come over the error reporter's connection."""

    def __init__(self, store: RankStore, rank: int, size: int, error_reporter: ErrorReporter) -> None:
        self.store, self.rank, self.error_reporter = store, rank, error_reporter
        self.timeouts, self.clock, self.process = error_reporter.timeouts, error_reporter.clock, error_reporter.process
        self.alive = list(range(size))
        self.generation = 0  # attempts to settle so far, with or without success
        self.asked = 0  # questions of this rank so far
        self.called = 0  # the attempt that somebody has called for; beyond `generation` if this rank must come to it
        self._news: deque[str | None] = deque()  # lines that are not read yet; None: the store is gone
        self._arrived = threading.Event()  # a line has been added
        self._gone = False  # rank 0, with its store
        self.release: Callable[[Store], None] = lambda store: None  # ends a wait of this rank for others' bytes
        error_reporter.subscribe(self._on_news)

    def regroup_requested(self) -> bool:
        """Whether the other ranks wait for this one to `settle`, or have no rank 0 left."""
        return self.called > self.generation or self._gone

    # ---- the thread that reads the event log ----
    def _on_news(self, line: str | None, store: Store) -> None:
        if line is None:
            self._gone = True
            self._add_line(None)
            return
        kind, *words = line.split()
        if kind == CALL:
            self.called = max(self.called, int(words[0]))
            if self.regroup_requested():
                self.release(store)
        elif kind == ASK:
            store.set(f"answer/{words[0]}/{self.rank}", "1")
            self._add_line(line)
        elif kind == WHOM:  # for timeout_tracing.py
            return
        elif kind == MEMBERS and self.rank not in self.error_reporter.members:
            self._leave(words[1])
        else:
            self._add_line(line)

    def _add_line(self, line: str | None) -> None:
        self._news.append(line)
        self._arrived.set()

    def _leave(self, when: str) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(int(when)))
        text = f"error: this rank was taken for lost at {at}: it was frozen, or came too late"
        self.process.say(f"{who(self.error_reporter.job)}: {text}")
        self.process.exit_after_eviction()

    # ---- settling ----
    def regroup(
        self, payload: bytes, ended: Iterable[int], deadline_s: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]]:
        """(what connects the members, their payloads). build(store, generation, members) connects this rank to them.

        ended: the ranks to which this one's connection has ended, be it that they are dead or that they let go.
        Raises Lost if rank 0 is dead or silent, or no members could connect by the deadline.
        """
        until = self.clock.now() + deadline_s
        vote = " ".join(map(str, ended)).encode() + b"=" + payload
        try:
            while True:
                self.generation += 1
                found = self._attempt(vote, until, build)
                if found is not None:
                    return found
                if self.clock.now() > until:
                    raise Lost(f"the ranks left ({', '.join(map(str, self.alive))}) do not connect to each other")
        except DistError as error:
            raise ConnectionLostError("rank 0 is dead: its store no longer answers") from error

    def _attempt(
        self, vote: bytes, until: float, build: Callable[[Store, int, list[int]], T]
    ) -> tuple[T, dict[int, bytes]] | None:
        here = self.generation
        self.store.set(f"vote/{here}/{self.rank}", vote)
        if self.called < here:
            self._add(f"{CALL} {here}")
        if self.rank == 0:
            others = self._members_with_key(f"vote/{here}", self.alive[1:], until)
            self._add(f"{MEMBERS} {here} {int(time.time())} {' '.join(map(str, [0, *others]))}")
        line = self._next_line(MEMBERS, until)
        self.alive = [int(word) for word in line.split()[3:]]
        made = self._build(here, build)
        if self.rank == 0:
            members = self.alive
            self.alive = self._members_with_key(
                f"built/{here}", members, self.clock.now() + self.timeouts.connect, every=True
            )
            well = self.alive == members and all(self.store.get(f"built/{here}/{rank}") == b"1" for rank in members)
            self._add(f"{GO if well else AGAIN} {here}")
        word = self._next_line(GO, until + self.timeouts.connect, AGAIN)
        if word.startswith(AGAIN):
            return None
        votes = self.store.multi_get([f"vote/{here}/{rank}" for rank in self.alive])
        return made[0], {rank: vote.partition(b"=")[2] for rank, vote in zip(self.alive, votes, strict=True)}

    def _build(self, here: int, build: Callable[[Store, int, list[int]], T]) -> list[T]:
        """Connect, in a thread that is left behind if a member dies meanwhile; what it makes comes into the list."""
        made: list[T] = []
        store, alive = self.store.new_connection(), list(self.alive)

        def work() -> None:
            try:
                made.append(build(store, here, alive))
                store.set(f"built/{here}/{self.rank}", "1")
            except Exception as error:
                store.set(f"built/{here}/{self.rank}", f"{type(error).__name__}: {error}")

        self.clock.start_thread(work)
        return made

    def _members_with_key(self, name: str, ranks: list[int], until: float, every: bool = False) -> list[int]:
        """Those of `ranks` that live and have written the key name/RANK; for rank 0. Waits for all that live.

        every: none of them may be missing, so that there is nothing to wait for once one is lost.
        """
        asked = ranks
        while True:
            self.asked += 1
            self._add(f"{ASK} {self.asked}")
            limits, answer = self.timeouts, f"answer/{self.asked}"
            silent = self._absent(answer, ranks, limits.probe)
            ended = self._ended() if silent else set()
            frozen = self._absent(answer, [r for r in silent if r not in ended], limits.frozen - limits.probe)
            ranks = [rank for rank in ranks if rank not in frozen and rank not in ended.intersection(silent)]
            if every and ranks != asked:
                return ranks
            absent = self._absent(name, ranks, min(limits.probe, until - self.clock.now()))
            if not absent or self.clock.now() > until:
                return [rank for rank in ranks if rank not in absent]

    def _absent(self, name: str, ranks: list[int], seconds: float) -> list[int]:
        """Those of `ranks` that have not written name/RANK after so long; returns as soon as all have."""
        until = self.clock.now() + seconds
        while ranks := [rank for rank in ranks if not self.store.check([f"{name}/{rank}"])]:
            if self.clock.now() > until:
                break
            self.clock.sleep(POLL_S)  # torch's stores print a stack where a wait exceeds its time-out
        return ranks

    def _ended(self) -> set[int]:
        """The ranks of which a voter says that its connection to them has ended."""
        votes = [f"vote/{self.generation}/{rank}" for rank in self.alive]
        found = [self.store.get(vote).partition(b"=")[0].split() for vote in votes if self.store.check([vote])]
        return {int(rank) for each in found for rank in each}

    def _next_line(self, kind: str, until: float, other: str = "") -> str:
        """The next line of this kind about this attempt; looks now and then whether rank 0 still lives."""
        while self.clock.now() < until + 2 * self.timeouts.reply:
            self._arrived.clear()
            if not self._news and not self.clock.wait(self._arrived, self.timeouts.probe):
                self.store.check(["vote"])
                if self.rank:
                    self._look_at_rank_0()
                continue
            if not self._news:  # the event was set for a line that is read already
                continue
            line = self._news.popleft()
            if line is None:
                raise ConnectionLostError("rank 0 is dead: its store no longer answers")
            if line.startswith(ASK) and "/" not in line:  # rank 0 waits, too
                until = max(until, self.clock.now())
            elif line.split()[0] in (kind, other) and int(line.split()[1]) == self.generation:
                return line
        raise Lost("rank 0 is silent: it has not said which ranks go on")

    def _look_at_rank_0(self) -> None:
        """Its store may be a process of its own, which answers although rank 0 is frozen."""
        self.asked += 1
        question = f"{self.rank}/{self.asked}"
        self._add(f"{ASK} {question}")
        if self._absent(f"answer/{question}", [0], self.timeouts.frozen):
            raise Lost("rank 0 is silent: it is frozen, or its host does not answer")

    def _add(self, line: str) -> None:
        EventLog(self.store, self.error_reporter.at).add(line)
