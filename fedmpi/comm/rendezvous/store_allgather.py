"""A few bytes of every rank on every rank, through a store; past a deadline the silent ranks are named.

Rank 0 alone decides which ranks are silent and writes its verdict, so that all ranks act alike: otherwise a rank that
has seen all others would go on while one that has not gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch.distributed import DistError, Store

from fedmpi.comm.base import Gone, Lost, absent_error, within
from fedmpi.comm.timeouts import Timeouts

RELEASED = b"?"  # what a key holds that was set only to end a wait


@final
class StoreAllgather:
    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        name: str = "allgather",
        wanted: Callable[[], bool] = lambda: False,
        timeouts: Timeouts | None = None,
    ) -> None:
        """
        Args:
            store: holds the payloads.
            rank: this rank.
            ranks: those that take part, ascending.
            name: prefix of the keys.
            wanted: whether to give up, as a rank is lost.
            timeouts: `reply` is allowed after the deadline for rank 0's verdict to reach the others.
        """
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.name = name
        self.wanted = wanted
        self.timeouts = timeouts or Timeouts()
        self.clock = self.timeouts.clock
        self.awaited: list[str] = []  # the keys waited for
        self.calls = 0  # number of calls so far: each call has keys of its own

    def __call__(self, payload: bytes, deadline_s: float, remedy: str = "") -> list[bytes]:
        """All payloads, in the order of the ranks. Raises Lost naming the ranks that are not there by the deadline.

        remedy: added to the message of that error.
        """
        limit_s = deadline_s + 3 * self.timeouts.reply
        gone = f"rank 0 is silent: its store has not answered for {limit_s:.0f} s"
        return within(limit_s, lambda: self.gather(payload, deadline_s, remedy), gone, self.clock)

    def gather(self, payload: bytes, deadline_s: float, remedy: str = "") -> list[bytes]:
        began = self.clock.now()
        name = f"{self.name}/{self.calls}"
        keys = [f"{name}/{rank}" for rank in self.ranks]
        mine, verdict = f"{name}/{self.rank}", f"{name}/silent"
        self.calls += 1
        try:
            self.store.set(mine, b"=" + payload)  # type: ignore[arg-type]  # the stub knows no bytes
            if self.rank == 0:
                self.store.set(verdict, " ".join(str(self.ranks[i]) for i in self.absent(keys, began + deadline_s)))
            if self.absent([verdict], began + deadline_s + self.timeouts.reply):
                silent = [rank for rank in self.ranks if not self.store.check([f"{name}/{rank}"])] or [0]
            else:
                told = self.store.get(verdict)
                self.give_up(told == RELEASED)
                silent = [int(rank) for rank in told.split()]
            if not silent:
                self.forget_the_last()
                return [value[1:] for value in self.store.multi_get(keys)]
            self.tell(keys, mine, silent)
        except DistError as error:
            raise Gone("rank 0 is dead: its store no longer answers") from error
        raise absent_error(silent, len(self.ranks), deadline_s, remedy=remedy)

    def forget_the_last(self) -> None:
        """Delete the keys of the call before: all ranks are in this call, so all have read them."""
        if self.rank == 0 and self.calls > 1:
            for name in ("silent", *self.ranks):
                self.store.delete_key(f"{self.name}/{self.calls - 2}/{name}")

    def absent(self, keys: list[str], deadline: float) -> list[int]:
        """Wait for the keys; the positions of those that are not in the store by the deadline."""
        self.awaited = keys
        self.give_up()
        try:
            self.store.wait(keys, timedelta(seconds=max(0.01, deadline - self.clock.now())))
        except DistError:
            return [i for i, key in enumerate(keys) if not self.store.check([key])]
        finally:
            self.awaited = []
        self.give_up()
        return []

    def give_up(self, released: bool = False) -> None:
        if released or self.wanted():
            raise Lost("another rank has lost one")

    def release(self, store: Store) -> None:
        """End a wait from another thread, with a connection of its own, once `wanted` holds."""
        for key in self.awaited:
            store.compare_set(key, "", RELEASED.decode())

    def tell(self, keys: list[str], mine: str, silent: list[int]) -> None:
        """Let rank 0, which holds the store, stay until the ranks present have read which ranks are silent."""
        self.store.set(mine + "/heard", "1")
        if self.rank == 0:
            present = [key + "/heard" for rank, key in zip(self.ranks, keys, strict=True) if rank not in silent]
            self.absent(present, self.clock.now() + self.timeouts.reply)

    def leave(self, timeout_s: float) -> None:
        """The last call of every rank. Rank 0 may hold the store, so it leaves last. Raises Lost if a rank does not."""
        others = [0] if self.rank else [rank for rank in self.ranks if rank]
        try:
            if self.rank:
                self.store.set(f"left/{self.rank}", "1")
            late = self.absent([f"left/{rank}" for rank in others], self.clock.now() + timeout_s)
            if not self.rank:
                self.store.set("left/0", "1")
        except DistError:  # it has left, and the store with it
            return
        if late:
            raise Lost(f"rank {others[late[0]]} is silent: it has not left for {timeout_s:g} s after the last message")
