"""How long a rank waits for others, and the clock that measures it.

Every wait of the communication layer reads its limit from one `Timeouts` object, and passes through its clock. Tests
use a simulated clock, in which ranks that are threads wait for hours within milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Real time."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment; differences count."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until the event is set, `seconds` at most; return whether it is."""
        return event.wait(max(0.0, seconds))

    def start_thread(self, target: Callable[[], object]) -> None:
        """Run target() in a thread that does not keep the process alive."""
        threading.Thread(target=target, daemon=True).start()

    def call(self, seconds: float, function: Callable[[], T]) -> T:
        """Return function(), which runs in a thread of its own; raise TimeoutError if it takes longer.

        Torch's own time-outs do not cover a host that takes a connection and never answers.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.start_thread(work)
        self.wait(done, seconds)
        if errors:
            raise errors[0]
        if not results:
            raise TimeoutError
        return results[0]


@dataclass(frozen=True)
class Timeouts:
    """The limits of all waits between ranks, in seconds.

    Args:
        start: until all ranks of the job have arrived (comm.start_timeout_s).
        round: for one message of a round, including the training before it (comm.round_timeout_s).
        shutdown: for the ranks of a failed job to be ended by the launcher, before they end by themselves.
        reply: for rank 0's store to answer, beyond what it was asked to wait.
        store: until ranks under MPI, which can do without a store, give it up at the start.
        probe: between two questions of rank 0 to the ranks it waits for, where they regroup.
        frozen: for a living rank to answer such a question, whatever its threads do.
        connect: for the members of a new group to connect to each other.
        defer: before a rank reports an error itself, since rank 0 may report the cause.
        launcher: between two checks that the launcher is alive.
        clock: measures all of them.
    """

    start: float = 300.0
    round: float = 1800.0
    shutdown: float = 2.0
    reply: float = 5.0
    store: float = 10.0
    probe: float = 1.5
    frozen: float = 5.0
    connect: float = 20.0
    defer: float = 3.0
    launcher: float = 1.0
    clock: Clock = field(default_factory=Clock)
