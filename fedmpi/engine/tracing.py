"""The timeline of one rank: the spans of each round, without gaps, by the clock of its host.

    {"round": 3, "at": 1763800000.1234, "s": 2.5031, "spans": [["word", 0.0, 12.3], ["train", 12.3, 480.1, 17], ...]}

`at`: seconds since 1970 at which the round began on this rank; `s`: its duration in seconds; a span: its name, its
start and its duration in ms, and the client or clients. The clock is read once per span, without waiting for a GPU. A
span shorter than LEAST_S is counted in the span after it. Spans beyond the first MOST of a round are summed by name,
under "rest", which bounds the length of a row.

    word        waiting for the broadcast (not rank 0)      announce    sending the broadcast (rank 0)
    settle      restoring clients of the last round         checkpoint  copying the state that is to be saved
    hash        hashing the global model (rank 0)           evaluate    evaluating and recording the last round
    move        sending states of clients to other ranks    download    sending values of single clients
    train       training a client, or several at once       send        posting uploads (of several clients: and
                                                                        writing them)
    uploads     waiting until uploads have arrived, or are sent; includes adding them up, and answering requests
                of rank 0 about columns
    step        the server step                             recover     recovering from a rank failure
    analyse     training local models again, for analyses   end         all work after the last round
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Line = dict[str, Any]
WAITS = ("word", "uploads")
LEAST_S, MOST = 2e-5, 200


class Timeline:
    """Records the spans of one rank."""

    def __init__(self) -> None:
        self.to: Callable[[Line], None] | None = None  # receives the rows; None: nothing is recorded
        self.early = False  # pass a round's row on before the next broadcast, and not after it
        self.ended: Callable[[], None] = lambda: None  # called at the end of the run
        self.round = -1
        self.began = self.mark = time.perf_counter()
        self.spans: list[tuple[str, float, float, int | list[int] | None]] = []
        self.rest: dict[str, float] = {}
        self.done: Line | None = None  # the row of a finished round that was not passed on yet

    def span(self, what: str, client: int | list[int] | None = None) -> None:
        """Record a span with this name, from the end of the last span until now."""
        now = time.perf_counter()
        if self.to is None or now - self.mark < LEAST_S:
            return
        if len(self.spans) < MOST:
            self.spans.append((what, self.mark, now, client))
        else:
            self.rest[what] = self.rest.get(what, 0.0) + now - self.mark
        self.mark = now

    def begin(self, t: int) -> None:
        """Begin round t, and complete the row of the round before; do nothing if round t is repeated."""
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
        """Pass on the row of the finished round."""
        if self.done is not None and self.to is not None:
            self.to(self.done)
        self.done = None

    def end(self) -> None:
        """Pass on all remaining rows at the end of the run."""
        self.span("end")
        self.begin(self.round + 1)
        self.flush()
        self.ended()
