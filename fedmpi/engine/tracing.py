"""The timeline of one rank: how it spends each round, as consecutive spans measured by its host's clock.

    {"round": 3, "at": 1763800000.1234, "s": 2.5031, "spans": [["wait_command", 0.0, 12.3], ["train", 12.3, 480.1, 17],
    ...]}

`at` is the time at which the round began on this rank, as a Unix time in seconds; `s` is its duration in seconds. A
span consists of its name, its start and its duration in ms, and the id or ids of its clients, if it has any. The clock
is read once per span, without waiting for a GPU. A span shorter than MIN_SPAN_S is merged into the next one. After the
first MAX_SPANS spans of a round, only the total time per name is recorded, under "rest", so that the length of a row is
bounded.

    wait_command    waiting for the broadcast, with the command of rank 0 (other ranks)
    broadcast       sending the broadcast (rank 0)
    undo            restoring the states of clients whose uploads were refused in the previous round
    hash            hashing the global model (rank 0)
    checkpoint      copying the state that a checkpoint saves
    evaluate        evaluating and recording the previous round
    migrate_state   moving client states between ranks
    download        sending and receiving the values that differ between clients
    train           training a client, or several at once
    send            starting to send the uploads; if several clients were trained at once, also writing the uploads
    uploads         waiting until uploads have arrived or have been sent, and summing them; with sharded uploads, also
                    answering rank 0's queries about the columns that this rank stores
    step            the server step
    recover         recovering from a rank failure
    analyse         retraining local models for diagnostics
    end             all work after the last round
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
WAIT_SPANS = ("wait_command", "uploads")
MIN_SPAN_S, MAX_SPANS = 2e-5, 200


class Timeline:
    """Records the spans of one rank, and passes one row per round to `write_row`."""

    def __init__(self) -> None:
        """Create a timeline that records nothing until `write_row` is set."""
        self.write_row: Callable[[Row], None] | None = None  # writes a row; None: nothing is recorded
        self.flushes_before_broadcast = False  # whether a row is written before the next broadcast, not after it
        self.on_end: Callable[[], None] = lambda: None  # called at the end of the run
        self.round = -1
        self.round_start = self.last_mark = time.perf_counter()
        self.spans: list[tuple[str, float, float, int | list[int] | None]] = []
        self.summed_spans: dict[str, float] = {}
        self.finished_row: Row | None = None  # the row of a finished round that was not written yet

    def span(self, name: str, client: int | list[int] | None = None) -> None:
        """Record a span with this name, from the end of the previous span until now."""
        now = time.perf_counter()
        if self.write_row is None or now - self.last_mark < MIN_SPAN_S:
            return
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, self.last_mark, now, client))
        else:
            self.summed_spans[name] = self.summed_spans.get(name, 0.0) + now - self.last_mark
        self.last_mark = now

    def begin(self, t: int) -> None:
        """Begin round t, and complete the row of the previous round; do nothing if round t is repeated."""
        if t == self.round:
            return
        if self.spans:
            self.flush()
            ms = [
                (name, round(1e3 * (a - self.round_start), 2), round(1e3 * (b - a), 2), k)
                for name, a, b, k in self.spans
            ]
            spans = [each[:3] if each[3] is None else each for each in ms]
            at = time.time() - (time.perf_counter() - self.round_start)
            row = {
                "round": self.round,
                "at": round(at, 4),
                "s": round(self.last_mark - self.round_start, 6),
                "spans": spans,
            }
            rest = (
                {"rest": {name: round(1e3 * s, 2) for name, s in self.summed_spans.items()}}
                if self.summed_spans
                else {}
            )
            self.finished_row = row | rest
        if self.flushes_before_broadcast:
            self.flush()
        self.round, self.round_start = t, self.last_mark if self.spans else time.perf_counter()
        self.last_mark, self.spans, self.summed_spans = self.round_start, [], {}

    def flush(self) -> None:
        """Write the row of the finished round, if it has not been written yet."""
        if self.finished_row is not None and self.write_row is not None:
            self.write_row(self.finished_row)
        self.finished_row = None

    def end(self) -> None:
        """Write all remaining rows at the end of the run."""
        self.span("end")
        self.begin(self.round + 1)
        self.flush()
        self.on_end()
