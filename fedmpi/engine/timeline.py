"""What a rank does when: the spans of each round, without gaps, by the clock of its host.

    {"round": 3, "at": 1763800000.1234, "s": 2.5031, "spans": [["word", 0.0, 12.3], ["train", 12.3, 480.1, 17], ...]}

`at`: seconds since 1970 at which the round began here; `s`: how long it lasted; a span: what, from when on and for how
many ms, which client or clients. The clock is read once a span, without waiting for a GPU. A span shorter than LEAST_S
counts for the one after it; those beyond MOST in a round are summed by name, under "rest": no line is longer than that.

    word        waiting for the announcement (not rank 0)   announce    sending it (rank 0)
    settle      clients of the last round that are undone   checkpoint  copying what is to be written
    hash        of the global model (rank 0)                evaluate    the round before, and writing its line
    move        states of clients that change ranks         download    what differs from client to client
    train       a client, or several at once                send        its row, posted (of several: and written)
    uploads     waiting until rows have arrived, or are sent; includes the work of adding them up, or of
                holding columns for rank 0
    step        the server's                                recover     going on without a rank
    analyse     local models made once more, and looked at  end         after the last round
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Line = dict[str, Any]
WAITS = ("word", "uploads")
LEAST_S, MOST = 2e-5, 200


class Timeline:
    """Records what one rank does."""

    def __init__(self) -> None:
        self.to: Callable[[Line], None] | None = None  # receives the lines; None: nothing is recorded
        self.early = False  # whether a round is passed on before the next broadcast, or after it
        self.ended: Callable[[], None] = lambda: None  # called at the end
        self.round = -1
        self.began = self.mark = time.perf_counter()
        self.spans: list[tuple[str, float, float, int | list[int] | None]] = []
        self.rest: dict[str, float] = {}
        self.done: Line | None = None  # a finished round that has not been passed on

    def span(self, what: str, client: int | list[int] | None = None) -> None:
        """Record what was done since the last span."""
        now = time.perf_counter()
        if self.to is None or now - self.mark < LEAST_S:
            return
        if len(self.spans) < MOST:
            self.spans.append((what, self.mark, now, client))
        else:
            self.rest[what] = self.rest.get(what, 0.0) + now - self.mark
        self.mark = now

    def begin(self, t: int) -> None:
        """Begin round t, unless it is repeated."""
        if t == self.round:
            return
        if self.spans:
            self.flush()
            ms = [(what, round(1e3 * (a - self.began), 2), round(1e3 * (b - a), 2), k) for what, a, b, k in self.spans]
            spans = [each[:3] if each[3] is None else each for each in ms]
            at = time.time() - (time.perf_counter() - self.began)
            line = {"round": self.round, "at": round(at, 4), "s": round(self.mark - self.began, 6), "spans": spans}
            rest = {"rest": {what: round(1e3 * s, 2) for what, s in self.rest.items()}} if self.rest else {}
            self.done = line | rest
        if self.early:
            self.flush()
        self.round, self.began = t, self.mark if self.spans else time.perf_counter()
        self.mark, self.spans, self.rest = self.began, [], {}

    def flush(self) -> None:
        """Pass on the finished round."""
        if self.done is not None and self.to is not None:
            self.to(self.done)
        self.done = None

    def end(self) -> None:
        """Pass on all that is left."""
        self.span("end")
        self.begin(self.round + 1)
        self.flush()
        self.ended()
