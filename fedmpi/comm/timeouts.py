"""The time limits for waiting for other ranks, and the clock that measures them.

Whenever the communication layer waits, the limit and the clock come from one `Timeouts` object. In tests, ranks run as
threads with a simulated clock, so that waiting for hours takes milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """A clock that measures real time."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary moment; only differences are meaningful."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread for `seconds` seconds."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until the event is set, for at most `seconds`; return whether it is set."""
        return event.wait(max(0.0, seconds))

    def start_thread(self, target: Callable[[], object]) -> None:
        """Run target() in a daemon thread, which does not keep the process alive."""
        threading.Thread(target=target, daemon=True).start()

    def call_with_timeout(self, seconds: float, function: Callable[[], T]) -> T:
        """Run function() in a separate thread and return its result; raise TimeoutError after `seconds`.

        Torch's time-outs do not cover a host that accepts a connection but never answers.
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
    """The time limits, in seconds, for waiting for other ranks.

    Args:
        start: for all ranks of the job to arrive (comm.start_timeout_s).
        round: for one message of a round, including the training that precedes it (comm.round_timeout_s).
        shutdown: for the launcher to end the ranks of a failed job; after that, they exit on their own.
        reply: for a reply from rank 0's store. If the request asks the store to wait, this waiting time is added.
        store: for finding the store if comm.backend is mpi; after that, the ranks continue without it.
        probe: interval at which a rank checks, while the ranks regroup, that those it waits for are alive.
        frozen: for the answer to such a check; a healthy rank answers even while it is training.
        connect: for the members of a new group to connect to each other.
        defer: for rank 0 to print the cause of an error; after that, a rank that has failed prints its own error.
        launcher: interval at which a rank checks that the launcher is alive.
        clock: the clock that measures these times.
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
