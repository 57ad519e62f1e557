"""One cause for the end of a job, printed once: by rank 0.

A rank that fails adds the cause to the event log of all ranks before it leaves. The first one counts: who fails only
because another has left comes second and is silent. So is a rank that was taken for lost before. A thread on every rank
reads the log:

    rank 0        closes the run, prints the cause, ends the job
    other ranks   wait to be ended by the launcher, and leave by themselves if it does not; where each host has a
                  console of its own, one rank of every other host prints the cause there, too

If rank 0 does not take the cause in time, since it is itself what fails, the rank that wrote it prints it. A second
thread sees that the launcher has died, whose ranks would otherwise train on for good.

The same thread answers when a rank asks who lives, and for whom each waits. A rank that waits in vain is often not the
first: rank 1 awaits the model of rank 0, which awaits the update of rank 2, which is frozen; whose patience ends first
is chance. At fault is who does not answer; if all do, who waits for nobody (`root_cause`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, final

from fedmpi.comm.failures.process_exit import Process
from fedmpi.comm.launchers import Job
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

CAUSE = "cause"  # line of the event log: "cause RANK CODE TEXT"
MEMBERS = "members"  # "members GENERATION TIME RANK RANK ...": those that take part from here on
ASK = "ask"  # "ask QUESTION PURPOSE": all ranks answer for whose messages they wait
SILENCE = "silence"  # purpose of a rank that will report a silence
WELL = "well"  # every rank is at its end
PRINTED = "printed"  # key of the store: rank 0 has printed the cause
DAY = timedelta(days=1)
POLL_S = 0.01
LINGER_S = 0.5  # for the other ranks to read a key of a store that ends with rank 0
LOST = 1  # exit code of a lost rank, and of a defect


@final
class EventLog:
    """Lines in the ranks' store that all ranks read in one order, and to which each may add one.

    The order is what makes ranks act alike: whether a rank failed before it was taken for lost, or after, is the same
    for all. Raises DistError once the store is gone.

    Args:
        store: a connection of its own.
        at: number of the next line.
    """

    def __init__(self, store: Store, at: int = 0) -> None:
        self.store, self.at = store, at

    def next(self) -> str:
        """Wait for the next line and return it."""
        self.store.wait([f"events/{self.at}"], DAY)
        line = self.store.get(f"events/{self.at}").decode()
        self.at += 1
        return line

    def add(self, line: str, decisive: Callable[[str], bool] = lambda line: False) -> str | None:
        """Add a line and pass all before it; or stop at the first one (this one, too) that is decisive: that one."""
        while True:
            there: str = self.store.compare_set(f"events/{self.at}", "", line).decode()
            if decisive(there):
                return there
            self.at += 1
            if there == line:
                return None


class ErrorReporter:
    """One a rank.

    Args:
        job: which rank this process is.
        timeouts: limits of the single steps, and the clock.
        process: ends this process, and prints its last message.
        launcher_is_alive: whether the launcher, the parent of this process, lives.
        stop: the requests that this process has had to stop.
        close_run: called with the reason first of all where the job fails: rank 0 closes its run directory. Returns
            how to go on.

    Attributes:
        waiting_for: tells the ranks for whose messages this one waits.
        on_event: called with each line that is no cause, and the connection over which it came, in the thread that
            reads them; with None once rank 0 is gone.
    """

    def __init__(
        self,
        job: Job,
        timeouts: Timeouts | None = None,
        process: Process | None = None,
        launcher_is_alive: Callable[[], bool] | None = None,
        stop: StopRequest | None = None,
        close_run: Callable[[str], str] = lambda reason: "",
    ) -> None:
        self.job, self.timeouts, self.process = job, timeouts or Timeouts(), process or Process(job)
        self.clock = self.timeouts.clock
        self.launcher_is_alive = launcher_is_alive or (lambda: os.getppid() == job.parent_pid)
        self.stop, self.close_run = stop or StopRequest(), close_run
        self.waiting_for: Callable[[], Iterable[int]] = lambda: ()
        self.on_event: Callable[[str | None, Store], None] = lambda line, store: None
        self.members = set(range(job.size))  # whose causes count
        self.at = 0  # lines of the event log that are read
        self._questions = 0  # of this rank so far
        self._open_store: Callable[[], Store] | None = None
        self._listener: threading.Event | None = None  # set once the thread that reads the log has ended
        self._expected_until = 0.0  # when whoever asks about a silence must have told the cause
        self._cause: str | None = None  # the one by which the job ends
        self._has_printed = False
        self._ending = threading.Lock()
        if job.size > 1 and job.launcher != "env://":  # there may be none: a shell that has ended, or ssh
            self.clock.start_thread(self._watch_launcher)

    # ---- a failure of this rank ----
    def fail(self, text: str, code: int, reacts: bool = False) -> NoReturn:
        """End the job for a failure of this rank, or for the one that came before it.

        reacts: this rank has only lost another one, and who knows more goes first.
        """
        cause = f"{CAUSE} {self.job.rank} {code} {who(self.job)}: {text}"
        clock, limits = self.clock, self.timeouts
        until = clock.now() + (limits.probe if reacts else 0.0)  # the rank that is gone may have told why
        while reacts and clock.now() < max(until, self._expected_until):
            clock.sleep(0.05)
        if self.job.rank == 0:
            self._end(self._add(cause)[0] or cause)
        if self._open_store is None:  # rank 0 may have the same error, and its launcher ends this rank then
            self.process.restore_sigterm()
            clock.sleep(limits.defer)
            if self.stop.signal != signal.SIGTERM:
                self._print(cause)
            self.process.end_job(code)
        first, is_printed = self._add(cause)
        first = first or self._cause
        if first is None:  # rank 0 is gone with its store: one rank of a host prints
            prints = self.process.is_first_of_host()
            clock.sleep(limits.defer * (3 - prints - (self.job.rank == self.job.local_rank)))
        else:
            prints = first == cause and not is_printed
        if prints:
            self._print(cause)
        else:
            clock.sleep(limits.shutdown)
        self.process.end_job(int((first or cause).split()[2]))

    def _add(self, line: str) -> tuple[str | None, bool]:
        """Log a line; return (the first cause, whether rank 0 has printed it). None: the store does not answer."""
        answers: list[str] = []

        def add() -> None:
            events = self.event_log()
            first = events.add(line, self._decisive(set(self.members)))
            if first is None or not first.startswith(CAUSE):  # nobody listens any more
                return
            answers.append(first)
            if self.job.rank:
                events.store.wait([PRINTED], timedelta(seconds=self.timeouts.reply))
                answers.append(PRINTED)

        with contextlib.suppress(Exception):
            self.clock.call(2 * self.timeouts.reply, add)
        return (answers[0] if answers else None), len(answers) > 1

    def event_log(self) -> EventLog:
        """Return the log from where this rank has read it, over a connection of its own."""
        assert self._open_store is not None
        return EventLog(self._open_store(), self.at)

    def _decisive(self, members: set[int]) -> Callable[[str], bool]:
        """Whether a line ends the job, in good order or not, or this rank's part in it. To be asked of each in turn."""

        def decisive(line: str) -> bool:
            kind, *words = line.split(maxsplit=2)
            if kind == MEMBERS:
                members.intersection_update(map(int, line.split()[3:]))
                return self.job.rank not in members
            return kind == WELL or (kind == CAUSE and int(words[0]) in members)

        return decisive

    # ---- who lives, and for whom each waits ----
    def roll_call(self, events: EventLog, ranks: Iterable[int], purpose: str = "") -> dict[int, list[int]]:
        """Ask `ranks` for whose messages they wait: {rank: these} of those that answer in time."""
        self._questions += 1
        question = f"{self.job.rank}/{self._questions}"
        events.add(f"{ASK} {question} {purpose}")
        store, until, answers = events.store, self.clock.now() + self.timeouts.frozen, dict[int, list[int]]()
        while living := [rank for rank in ranks if rank not in answers and not store.check([f"dead/{rank}"])]:
            for rank in living:
                if store.check([key := f"answer/{question}/{rank}"]):
                    answers[rank] = [int(word) for word in store.get(key).decode()[1:].split()]
            if self.clock.now() > until:
                break
            self.clock.sleep(POLL_S)  # torch's stores print a stack where a wait exceeds its time-out
        return answers

    def find_root_cause(self, peers: Iterable[int]) -> list[int]:
        """Return the ranks at fault where `peers` have been silent to this one; where nobody can tell, the peers."""
        with contextlib.suppress(Exception):  # the store may be on a host that is gone, and never answer
            limit_s, ranks = 3 * self.timeouts.frozen, set(self.members)
            waiting = self.clock.call(limit_s, lambda: self.roll_call(self.event_log(), ranks, SILENCE))
            return trace(self.job.rank, peers, waiting)
        return sorted(peers)

    # ---- a cause, from whichever rank ----
    def listen(self, open_store: Callable[[], Store]) -> None:
        """Read the causes that other ranks add. open_store() makes another connection to the ranks' store."""
        self._open_store = open_store
        ended, events = threading.Event(), self.event_log()
        self._listener = ended

        def read() -> None:
            try:
                self._read(events)
            finally:
                ended.set()

        self.clock.start_thread(read)

    def close(self) -> None:
        """Every rank is at its end: stop listening, while the store is still there."""
        if self._listener is not None:
            self._add(WELL)
            self.clock.wait(self._listener, self.timeouts.reply)

    def _read(self, events: EventLog) -> None:
        decisive = self._decisive(self.members)
        try:
            while not decisive(line := events.next()) or line.startswith(MEMBERS):
                self.at = events.at
                if line.startswith(ASK):
                    if line.endswith(SILENCE):
                        self._expected_until = self.clock.now() + self.timeouts.frozen + self.timeouts.shutdown
                    waits = " ".join(map(str, self.waiting_for()))
                    events.store.set(f"answer/{line.split()[1]}/{self.job.rank}", f"={waits}")
                self.on_event(line, events.store)
        except Exception:  # whoever held the store is gone; the next message notices it, too
            self.on_event(None, events.store)
            return
        if line == WELL:
            return
        self._cause = line
        if self.job.rank == 0:
            self._end(line)
        if self.process.has_own_console() and self.process.is_first_of_host():
            self._print(line)
        self._wait_for_launcher()
        self.process.exit(int(line.split()[2]))

    def _print(self, cause: str) -> None:
        """Print a cause once: the thread that listens and the one that has failed may both want to."""
        if not self._has_printed:
            self._has_printed = True
            self.process.say(cause.split(" ", 3)[3])

    def _wait_for_launcher(self) -> None:
        """Leave the launcher time to end this rank, after rank 0 has reported the cause."""
        self.clock.sleep(self.timeouts.reply + self.timeouts.shutdown)

    def _end(self, cause: str) -> NoReturn:
        """Rank 0 ends the job."""
        if not self._ending.acquire(blocking=False):  # another thread does
            self.clock.sleep(DAY.total_seconds())
        _, _, code, text = cause.split(" ", 3)
        hint = ""
        with contextlib.suppress(Exception):  # the cause is printed, whatever becomes of the run directory
            hint = self.close_run(reason(text))
        self.process.say(f"{text.rstrip()}\n{hint}" if int(code) == LOST else text)
        if self._open_store is not None:
            with contextlib.suppress(Exception):
                self.clock.call(self.timeouts.reply, lambda: self.event_log().store.set(PRINTED, "1"))
            self.clock.sleep(LINGER_S)
        self.process.end_job(int(code))

    # ---- the launcher ----
    def _watch_launcher(self) -> None:
        while self.launcher_is_alive():
            self.clock.sleep(self.timeouts.launcher)
        if self.job.local_rank and self.job.rank:  # one of this host prints it
            self._wait_for_launcher()
            self.process.exit(1)
        self.fail(f"error: the launcher ({self.job.launcher}, process {self.job.parent_pid}) has died", 1)


def trace(rank: int, peers: Iterable[int], waiting: Mapping[int, Iterable[int]]) -> list[int]:
    """Return the ranks at fault where `peers` have been silent to `rank`, ascending.

    waiting: for whom each rank waits; who did not answer is missing.

    >>> trace(1, [0], {0: [2], 1: [0]}), trace(1, [0], {0: [2], 1: [0], 2: []})
    ([2], [2])
    """
    seen, ask, silent, busy = {rank}, set(peers), set[int](), set[int]()
    while ask:
        seen |= ask
        silent |= ask - waiting.keys()
        busy |= {peer for peer in ask & waiting.keys() if not waiting[peer]}
        ask = {other for peer in ask & waiting.keys() for other in waiting[peer]} - seen
    return sorted(silent or busy or peers)


def who(job: Job) -> str:
    return f"fedmpi [rank {job.rank} on {job.host}]" if job.rank else "fedmpi"


def reason(text: str) -> str:
    """A message in one line: a mistake's first, a traceback's last."""
    lines = text.strip().splitlines()
    first = lines[0].removeprefix("fedmpi").lstrip(": ")
    return first.replace(": error: ", ": ", 1).removeprefix("error: ") if "error: " in first else lines[-1]
