"""Test the protocols of fedmpi/comm with ranks as threads and a simulated clock, without network and real waits.

The simulated time does not change while any thread of any rank runs. When all threads wait, it jumps to the earliest
deadline. A rank can be killed or frozen at any point; its connections, and rank 0's store, end with it. The tests use
the real classes `ErrorReporter`, `GroupMembership` and `Gloo`; the clock, the store, the process group and the rank's
process are simulated.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any, NoReturn

import torch
from torch.distributed import DistNetworkError, DistStoreError

from fedmpi.comm.backends.torch_dist import GlooCommunicator
from fedmpi.comm.base import ConnectionLostError, RankTimeoutError
from fedmpi.comm.failures.error_reporter import ErrorReporter
from fedmpi.comm.failures.group_membership import GroupMembership
from fedmpi.comm.launchers import Job
from fedmpi.comm.rendezvous.store_server import ALL_PRESENT
from fedmpi.comm.timeouts import Clock, Timeouts

LIMIT_S = 120.0  # limit of real time for a job, in case threads that do not use the clock are in a deadlock


class RankExit(BaseException):
    """Raised in the threads of a dead rank to end them."""


class Condition:
    """An event that is set while `holds()` is true."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self.is_set = holds


NEVER = Condition(lambda: False)


@dataclass(eq=False)
class Wait:
    """A thread of a rank that waits for an event until a deadline."""

    rank: SimulatedRank
    event: Any
    deadline: float
    woken: threading.Condition

    def can_go_on(self, now: float) -> bool:
        return self.rank.dead or (not self.rank.frozen and (self.event.is_set() or now >= self.deadline))


class SimulatedTime:
    """The simulated time of all ranks, which advances only while every thread waits."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.now, self.running = 0.0, 0
        self.waits: list[Wait] = []
        self.deadlock = False

    def wait(self, rank: SimulatedRank, event: Any, deadline: float) -> bool:
        with self.lock:
            mine = Wait(rank, event, deadline, threading.Condition(self.lock))
            self.waits.append(mine)
            self.running -= 1
            self.wake()
            while not mine.can_go_on(self.now) and not self.deadlock:
                mine.woken.wait()
            self.waits.remove(mine)
            self.running += 1
            if rank.dead:
                raise RankExit
            if not mine.can_go_on(self.now):
                raise AssertionError("every rank waits for ever")
            return bool(event.is_set())

    def wake(self) -> None:
        """Wake the threads that can continue; if none can and none runs, advance the time until one can."""
        ready = [wait for wait in self.waits if wait.can_go_on(self.now)]
        if not ready and not self.running and self.waits:
            deadline = min((wait.deadline for wait in self.waits if not wait.rank.frozen), default=inf)
            frozen = [wait.rank for wait in self.waits if wait.rank.frozen]
            if deadline < inf:
                self.now = deadline
            elif frozen:  # all other ranks have ended
                for rank in frozen:
                    rank.dead, rank.code = True, -9
            else:
                self.deadlock = True
            ready = [wait for wait in self.waits if self.deadlock or wait.can_go_on(self.now)]
        for wait in ready:
            wait.woken.notify()

    def start(self, rank: SimulatedRank, target: Callable[[], object]) -> threading.Thread:
        def body() -> None:
            try:
                target()
            except RankExit:
                pass
            except BaseException as error:
                rank.job.errors.append(error)
            finally:
                with self.lock:
                    self.running -= 1
                    self.wake()

        with self.lock:
            self.running += 1
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread


class SimulatedStore:
    """A rank's connection to the simulated store, which ends with rank 0."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank, self.values = rank, rank.job.values

    def open_connection(self) -> SimulatedStore:
        return SimulatedStore(self.rank)

    def set(self, key: str, value: str | bytes) -> None:
        with self._opened() as values:
            values[key] = value if isinstance(value, bytes) else value.encode()

    def set_on_disconnect(self, key: str, value: str) -> None:
        self.rank.on_close[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._opened() as values:
            return values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        with self._opened() as values:
            return all(key in values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._opened() as values:
            if values.get(key, b"") == expected.encode():
                values[key] = desired.encode()
            return values.get(key, expected.encode())

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        there = Condition(lambda: self._is_gone() or all(key in self.values for key in keys))
        if not self.rank.clock.wait(there, timeout.total_seconds()):
            raise DistStoreError(f"not there: one of {keys[:3]}")
        self.check([])

    def gather(
        self, name: str, call: int, rank: int, ranks: list[int], value: bytes, seconds: float, skip_dead: bool = False
    ) -> tuple[str, list[bytes]]:
        verdict, keys = f"{name}/{call}/silent", [f"{name}/{call}/{each}" for each in ranks]
        self.set(f"{name}/{call}/{rank}", value)
        self.values.pop(f"dead/{rank}", None)

        def is_decided() -> bool:
            there = {f"{name}/{call}/{each}" for each in ranks if skip_dead and f"dead/{each}" in self.values}
            return verdict in self.values or self.values.keys() | there >= set(keys) or self._is_gone()

        self.rank.clock.wait(Condition(is_decided), seconds)
        with self.rank.job.time.lock:  # the verdict reaches all ranks, even if rank 0 ends immediately afterwards
            if verdict not in self.values:
                self.check([])
                missing = [str(each) for each, key in zip(ranks, keys, strict=True) if key not in self.values]
                self.values[verdict] = (" ".join(missing) or ALL_PRESENT).encode()
            return self.values[verdict].decode(), [self.values.get(key, b"") for key in keys]

    def _is_gone(self) -> bool:
        return self.rank.job.ranks[0].dead

    @contextmanager
    def _opened(self) -> Iterator[dict[str, bytes]]:
        self.rank.clock.pause_while_frozen()
        if self._is_gone():
            raise DistNetworkError("rank 0's store has ended")
        with self.rank.job.time.lock:
            yield self.values


class SkippingClock(Clock):
    """A clock that advances only by calls of `sleep`, which return at once."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class RankClock(Clock):
    """The clock of one rank, which reads the simulated time and stops the rank's threads while it is frozen."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank, self.time = rank, rank.job.time

    def now(self) -> float:
        self.pause_while_frozen()
        return self.time.now

    def sleep(self, seconds: float) -> None:
        self.wait(NEVER, seconds)

    def wait(self, event: Any, seconds: float) -> bool:
        return self.time.wait(self.rank, event, self.time.now + max(0.0, seconds))

    def start_thread(self, target: Callable[[], object]) -> None:
        self.time.start(self.rank, target)

    def pause_while_frozen(self) -> None:
        if self.rank.dead:
            raise RankExit
        if self.rank.frozen:
            self.time.wait(self.rank, Condition(lambda: True), inf)


class SimulatedProcess:
    """A simulated process of a rank, which records its messages and its exit code."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank = rank

    def print_message(self, text: str) -> None:
        self.rank.job.messages.append((self.rank.number, text.strip()))

    def exit(self, code: int) -> NoReturn:
        self.rank.die(code)
        raise RankExit

    end_job = exit

    def exit_after_eviction(self) -> NoReturn:
        self.exit(1)

    def restore_sigterm(self) -> None: ...

    def has_own_console(self) -> bool:
        return self.rank.job.host_of(self.rank.number) != self.rank.job.host_of(0)

    def is_first_caller_on_host(self) -> bool:
        first, host = self.rank.job.first_of_host, self.rank.job.host_of(self.rank.number)
        with self.rank.job.time.lock:
            return first.setdefault(host, self.rank) is self.rank


class SimulatedGroup:
    """A process group that behaves like gloo's.

    A send completes when the peer has received the message; sends and receives fail if the connection to the peer has
    ended. A member's connections end when its rank dies, or no reference to the group is left.
    """

    def __init__(self, rank: SimulatedRank, name: str, place: int) -> None:
        self.rank, self.place = rank, place
        with rank.job.time.lock:
            self.members: dict[int, Connections] = rank.job.groups[name]
            self.mine = self.members[place] = Connections(rank)

    def __del__(self) -> None:
        self.mine.closed = True

    def send(self, tensors: list[torch.Tensor], place: int, tag: int) -> Work:
        message = Message(tensors[0])
        with self.rank.job.time.lock:
            self.members[place].inbox[self.place].append(message)
        return Work(self, place, lambda: message.received, lambda: None)

    def recv(self, tensors: list[torch.Tensor], place: int, tag: int) -> Work:
        with self.rank.job.time.lock:
            inbox, target = self.mine.inbox[place], tensors[0]

        def take() -> None:
            message = inbox.popleft()
            target.copy_(message.x)
            message.received = True

        return Work(self, place, lambda: bool(inbox), take)


@dataclass
class Message:
    x: torch.Tensor
    received: bool = False


class Connections:
    """A group member's side of its connections."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank, self.closed = rank, False
        self.inbox: dict[int, deque[Message]] = defaultdict(deque)  # number of the sender in the group -> messages

    @property
    def ended(self) -> bool:
        return self.closed or self.rank.dead


@dataclass
class Work:
    group: SimulatedGroup
    place: int
    is_done: Callable[[], bool]
    finish: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        peer = self.group.members[self.place]
        ready = Condition(lambda: self.is_done() or peer.ended)
        if not self.group.rank.clock.wait(ready, timeout.total_seconds()):
            raise RuntimeError("timed out")
        if not self.is_done():
            raise RuntimeError("connection closed by peer")
        self.finish()


@dataclass(eq=False)
class SimulatedRank:
    """A simulated rank, which is the argument of the rank's program."""

    job: SimulatedJob
    number: int
    dead: bool = False
    frozen: bool = False
    code: int | None = None  # exit code of its process; -9: killed
    died_at: float = 0.0
    on_close: dict[str, bytes] = field(default_factory=dict, repr=False)  # values that the store sets at its end
    comm: GlooCommunicator = field(init=False, repr=False)
    error_reporter: ErrorReporter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.clock = RankClock(self)

    def die(self, code: int = -9) -> None:
        """End the process of this rank; any rank may call this."""
        with self.job.time.lock:
            if not self.dead:
                self.dead, self.code, self.died_at = True, code, self.job.time.now
                self.job.values.update(self.on_close)  # the store sets these when the connection ends
            self.job.time.wake()

    def kill(self) -> NoReturn:
        self.die()
        raise RankExit

    def freeze(self) -> None:
        """Stop all threads of this rank until another one wakes it."""
        self.frozen = True
        self.clock.pause_while_frozen()

    def thaw(self) -> None:
        with self.job.time.lock:
            self.frozen = False
            self.job.time.wake()

    def connect(self) -> GlooCommunicator:
        """Connect this rank to the job like `fedmpi.comm.connect`, with simulated parts."""
        job, timeouts = Job("slurm", self.number, self.job.size, self.number, self.job.size, "node"), self.timeouts
        self.error_reporter = ErrorReporter(job, timeouts, SimulatedProcess(self), lambda: self.job.launcher_alive)
        store = SimulatedStore(self)
        self.error_reporter.listen(store.open_connection)
        group = self.create_group(store, "group", self.number, self.job.size, timeouts.start)
        membership = GroupMembership(store, self.number, self.job.size, self.error_reporter)
        self.comm = GlooCommunicator(job, group, store, membership, timeouts, self.create_group)
        self.comm.on_close = self.error_reporter.close
        self.error_reporter.waiting_for = lambda: self.comm.waiting_for
        return self.comm

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(**self.job.limits, clock=self.clock)

    def create_group(self, store: Any, name: str, place: int, size: int, timeout_s: float) -> SimulatedGroup:
        group = SimulatedGroup(self, name, place)
        if not self.clock.wait(Condition(lambda: len(group.members) == size), timeout_s):
            raise RuntimeError("not all members connect")
        return group

    def fail(self, error: Exception, code: int = 1) -> NoReturn:
        """End the job because of an error, as the command line does."""
        if isinstance(error, RankTimeoutError):
            error = error.with_other_peers(self.error_reporter.find_root_cause(error.peers))
        self.error_reporter.fail(f"error: {error}", code, is_consequence=isinstance(error, ConnectionLostError))


class SimulatedJob:
    """A simulated job.

    Args:
        size: number of ranks.
        per_host: ranks per host, each of which has its own console; None: all ranks are on one host.
        limits: fields of `Timeouts` that differ from the defaults.
    """

    def __init__(self, size: int, per_host: int | None = None, **limits: float) -> None:
        self.size, self.per_host, self.limits = size, per_host or size, limits
        self.time = SimulatedTime()
        self.values: dict[str, bytes] = {}
        self.groups: dict[str, dict[int, Connections]] = defaultdict(dict)
        self.messages: list[tuple[int, str]] = []  # (rank, printed text)
        self.errors: list[BaseException] = []
        self.launcher_alive = True
        self.first_of_host: dict[int, SimulatedRank] = {}
        self.ranks = [SimulatedRank(self, number) for number in range(size)]

    def host_of(self, number: int) -> int:
        return number // self.per_host

    def run(self, program: Callable[[SimulatedRank], Any], absent: tuple[int, ...] = ()) -> dict[int, Any]:
        """Run program(rank) on all ranks that are not absent.

        A frozen rank is killed when all others have ended.

        Returns:
            {rank: result}, of the ranks whose programs returned.
        """
        results: dict[int, Any] = {}

        def body(rank: SimulatedRank) -> None:
            results[rank.number] = program(rank)
            rank.die(0)

        present = [rank for rank in self.ranks if rank.number not in absent]
        with self.time.lock:  # the time must not advance before all threads have started
            threads = [self.time.start(rank, lambda rank=rank: body(rank)) for rank in present]
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a thread neither waits nor ends"
        if self.errors:
            raise self.errors[0]
        return results

    @property
    def codes(self) -> list[int | None]:
        return [rank.code for rank in self.ranks]
