"""Gram matrices that are formed while rows still come: those that were asked for in the round before.

Nothing declares them: a rule that asks for K asks for it again, mostly, and K has the same bits whenever it is formed.
A thread forms what the rows that are there allow, as many at a time as have come since it last looked; the rank waits
for messages meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock

from torch import Tensor

from fedmpi.flat.linear import Gram
from fedmpi.method.context import Span

Asked = tuple[str, Span]  # a slot, and which of its columns
Rows = Mapping[str, tuple[Tensor, int, int]]  # large slot -> rows (m, n), their first column, the slot's columns


class Early:
    """Of one round's rows on one rank."""

    def __init__(self, rows: Rows, asked: set[Asked]) -> None:
        """asked: what `take` was asked for in the round before; from now on, in this one."""
        self.rows, self.asked = rows, asked
        self.grams = {each: self._gram(*each) for each in asked if each[0] in rows}
        asked.clear()
        self.here: dict[str, tuple[int, int]] = {}
        self.lock, self.busy, self.job = Lock(), False, Future[None]()

    def came(self, name: str, whole: int, to: int = 0) -> None:
        """So many rows of the slot are there, and of the next one the columns up to `to`, the end of a block."""
        with self.lock:
            self.here[name] = whole, to
            if self.grams and not self.busy:
                self.busy, self.job = True, aside().submit(self._form)

    def take(self, name: str, span: Span) -> Tensor:
        """(blocks, m, m) the Gram matrix of all rows, which are there, block by block."""
        self.rest()
        self.asked.add((name, span))
        found = self.grams.get((name, span)) or self._gram(name, span)
        return found.value()

    def rest(self) -> None:
        """Wait for what is being formed."""
        if self.busy:
            self.job.result()

    def forget(self, rows: Rows) -> None:
        """They are others now."""
        self.rest()
        self.rows, self.grams = rows, {}

    def _gram(self, name: str, span: Span) -> Gram:
        rows, first, width = self.rows[name]
        a = max(span[0], first)
        b = max(a, min(span[1], first + rows.shape[1]))
        return Gram(rows[:, a - first : b - first], a, width)

    def _form(self) -> None:
        """Until nothing is left to form."""
        done: dict[str, tuple[int, int]] = {}
        while True:
            with self.lock:
                here = dict(self.here)
                self.busy = here != done
            if here == done:
                return
            for (name, _), gram in self.grams.items():
                if name in here:
                    gram.come(*here[name])
            done = here


@cache
def aside() -> ThreadPoolExecutor:
    """The thread that works on what has come, while the rank waits for messages."""
    return ThreadPoolExecutor(1, thread_name_prefix="fedmpi-aside")
