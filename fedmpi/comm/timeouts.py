"""The time limits of waits for other ranks, and the clock that measures them.

Every wait of the communication layer takes its limit from one `Timeouts` object, and uses its clock. In tests, ranks
run as threads with a simulated clock, so that waiting for hours takes milliseconds.
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
        """Pause the calling thread for a time in seconds."""
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
    """The limits of all waits between ranks, in seconds.

    Args:
        start: limit for all ranks of the job to arrive (comm.start_timeout_s).
        round: limit for one message of a round, including the training before it (comm.round_timeout_s).
        shutdown: time in which the launcher may end the ranks of a failed job before they end themselves.
        reply: limit for an answer of rank 0's store, in addition to the waiting time that the request contains.
        store: limit for finding the store with comm.backend=mpi; after it, the ranks continue without the store.
        probe: interval at which a rank checks, during a regroup, that the ranks it waits for are alive.
        frozen: limit for the answer to such a check; a healthy rank answers even while it trains.
        connect: limit for the members of a new group to connect to each other.
        defer: time that a rank waits before it prints an error itself, since rank 0 may print the cause.
        launcher: interval of the checks that the launcher is alive.
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
