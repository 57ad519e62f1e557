"""One cause for the end of a job, said once: by rank 0.

A rank that fails adds the cause to the event log of all ranks before it leaves. The first one counts: who fails only
because another has left comes second and is silent. So is a rank that was taken for lost before. A thread on every rank
hears the cause:

    rank 0        closes the run, says the cause, ends the job
    other ranks   wait to be ended by the launcher, and leave by themselves if it does not; where each host has a
                  console of its own, one rank of every other host says the cause there, too

If rank 0 does not take the cause in time, since it is itself what fails, the rank that wrote it speaks. A second thread
sees that the launcher has died, whose ranks would otherwise train on for good. Other events, such as who is taken for
lost, go to those who `subscribe` (group_membership.py, timeout_tracing.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from fedmpi.comm.failures.process_exit import Process
from fedmpi.comm.launchers.job import Job
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.launcher_process import is_alive
from fedmpi.common.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

    from fedmpi.comm.failures.event_log import EventLog

CAUSE = "cause"  # line of the event log: "cause RANK CODE TEXT"
MEMBERS = "members"  # "members GENERATION TIME RANK RANK ...": those that take part from here on
WHOM = "whom"  # "whom ASKER RANK": for whose messages does RANK wait
WELL = "well"  # every rank is at its end
SAID = "said"  # key
DAY_S = 86_400.0
LINGER_S = 0.5  # for the other ranks to read a key of a store that ends with rank 0
LOST = 1  # exit code of a lost rank, and of a defect


class ErrorReporter:
    """One a rank."""

    def __init__(
        self,
        job: Job,
        timeouts: Timeouts | None = None,
        process: Process | None = None,
        launcher_is_alive: Callable[[int, int], bool] = is_alive,
        stop: StopRequest | None = None,
        close_run: Callable[[str], str] = lambda reason: "",
    ) -> None:
        """
        Args:
            job: which rank this process is.
            timeouts: limits of the single steps, and the clock.
            process: ends this process, and prints its last message.
            launcher_is_alive: called with the pids of the launcher and of this process's parent.
            stop: the requests that this process has had to stop.
            close_run: called with the reason first of all where the job fails: rank 0 closes its run directory. Returns
                how to go on.
        """
        self.job, self.timeouts, self.process = job, timeouts or Timeouts(), process or Process(job)
        self.clock = self.timeouts.clock
        self.close_run = close_run
        self._subscribers: list[Callable[[str | None, Store], None]] = []
        self.stop = stop or StopRequest()
        self.members = set(range(job.size))  # whose causes count
        self.at = 0  # lines of the event log that are read
        self._open: Callable[[], Store] | None = None
        self._listener: threading.Event | None = None  # set once the thread that hears causes has ended
        self._expected = 0.0  # until when whoever asks for a silent rank may be expected to tell the cause
        self._heard: str | None = None  # the cause that all heard of
        self._printed = False  # whether this rank has printed a cause
        self._ending, self._printing = threading.Lock(), threading.Lock()
        self.launcher_is_alive = launcher_is_alive
        if job.size > 1 and job.launcher != "env://":  # there may be none: a shell that has ended, or ssh
            launcher = job.launcher_pid()
            self.clock.start_thread(lambda: self._watch_launcher(launcher))

    # ---- a failure of this rank ----
    def fail(self, text: str, code: int, reacts: bool = False) -> NoReturn:
        """End the job for a failure of this rank, or for the one that came before it.

        reacts: this rank has only lost another one, and who knows more goes first.
        """
        cause = f"{CAUSE} {self.job.rank} {code} {who(self.job)}: {text}"
        clock, limits = self.clock, self.timeouts
        until = clock.now() + (limits.probe if reacts else 0.0)  # the rank that is gone may have told why
        while reacts and clock.now() < max(until, self._expected):
            clock.sleep(0.05)
        if self.job.rank == 0:
            self._end(self._tell(cause)[0] or cause)
        if self._open is None:
            self.process.restore_sigterm()
            clock.sleep(limits.defer)
            self._find()
            if self._open is None and self.stop.signal == signal.SIGTERM:  # another rank did fail
                self.process.end_job(code)
        first, said = self._tell(cause)
        first = first or self._heard  # by which rank 0 ended the job
        speaks = True
        if self._open is not None and first is None:  # rank 0 is gone with its store: one rank of a host speaks
            speaks = self.process.is_first_of_host()
            clock.sleep(limits.defer * (3 - speaks - (self.job.rank == self.job.local_rank)))
        if speaks and first in (None, cause) and not said:
            self._print(cause)
        else:
            if first is not None:
                self._print_at_host(first)
            clock.sleep(limits.shutdown)
        self.process.end_job(int((first or cause).split()[2]))

    def _find(self) -> None:
        """The ranks' store, for one that failed before it met the others. Under MPI that would take all of them."""
        if self.job.launcher == "mpi":
            return
        from fedmpi.comm.rendezvous import lookup

        with contextlib.suppress(Exception):
            self._open = lookup.find_store(self.job, self.timeouts.reply, timeouts=self.timeouts).new_connection

    def _tell(self, line: str) -> tuple[str | None, bool]:
        """Log a cause; return (the first one, whether rank 0 has said it). None: the store does not answer."""
        found: list[str] = []

        def tell() -> None:
            with contextlib.suppress(Exception):
                assert self._open is not None
                events = self.event_log()
                first = events.add(line, self._decisive(set(self.members)))
                if first is None or not first.startswith(CAUSE):  # nobody listens any more
                    return
                found.append(first)
                if self.job.rank:
                    events.store.wait([SAID], timedelta(seconds=self.timeouts.reply))
                    found.append("said")

        self._call_for(2 * self.timeouts.reply, tell)
        return (found[0] if found else None), len(found) > 1

    def _call_for(self, seconds: float, call: Callable[[], object]) -> None:
        """Run call(), and leave it behind after so long: a store on a host that is gone may never answer."""
        done = threading.Event()

        def work() -> None:
            call()
            done.set()

        self.clock.start_thread(work)
        self.clock.wait(done, seconds)

    def event_log(self, store: Store | None = None) -> EventLog:
        """From where this rank has read them. store: over another connection to it than one of its own."""
        from fedmpi.comm.failures.event_log import EventLog

        assert store is not None or self._open is not None
        return EventLog(store or self._open(), self.at)  # type: ignore[misc]

    def _decisive(self, members: set[int]) -> Callable[[str], bool]:
        """Whether a line ends the job, in good order or not, or this rank's part in it. To be asked of each in turn."""

        def decisive(line: str) -> bool:
            kind, *words = line.split(maxsplit=2)
            if kind == MEMBERS:
                members.intersection_update(map(int, line.split()[3:]))
                return self.job.rank not in members
            return kind == WELL or (kind == CAUSE and int(words[0]) in members)

        return decisive

    # ---- a cause, from whichever rank ----
    def listen(self, open_store: Callable[[], Store]) -> None:
        """Hear the causes that other ranks tell. open_store() makes another connection to the ranks' store."""
        store = open_store()
        self._open = open_store
        ended, events = threading.Event(), self.event_log(store)
        self._listener = ended

        def hear() -> None:
            try:
                self._listen(events)
            finally:
                ended.set()

        self.clock.start_thread(hear)

    def subscribe(self, subscriber: Callable[[str | None, Store], None]) -> None:
        """Call subscriber(line, store) for lines that are no cause, with the connection over which they came, in the
        thread that reads them. line is None once rank 0 is gone."""
        self._subscribers.append(subscriber)

    def close(self) -> None:
        """Every rank is at its end: stop listening, while the store is still there."""
        if self._listener is not None:
            self._tell(WELL)
            self.clock.wait(self._listener, self.timeouts.reply)

    def _listen(self, events: EventLog) -> None:
        decisive = self._decisive(self.members)
        try:
            while not decisive(line := events.next()) or line.startswith(MEMBERS):
                self.at = events.at
                if line.startswith(WHOM):
                    self._expected = self.clock.now() + self.timeouts.frozen + self.timeouts.shutdown
                for subscriber in self._subscribers:
                    subscriber(line, events.store)
        except Exception:  # whoever held the store is gone; the next message notices it, too
            for subscriber in self._subscribers:
                subscriber(None, events.store)
            return
        if line == WELL:
            return
        self._heard = line
        if self.job.rank == 0:
            self._end(line)
        self._print_at_host(line)
        self._wait_for_launcher()
        self.process.exit(int(line.split()[2]))

    def _print_at_host(self, cause: str) -> None:
        """Print the cause where nobody would see what rank 0 prints: once a host."""
        if self.process.has_own_console() and self.process.is_first_of_host():
            self._print(cause)

    def _print(self, cause: str) -> None:
        """Print a cause, of which the thread that listens and the one that has failed may both want to tell."""
        with self._printing:
            if not self._printed:
                self.process.say(cause.split(" ", 3)[3])
            self._printed = True

    def _wait_for_launcher(self) -> None:
        """Leave the launcher time to end this rank: rank 0 reports the cause first."""
        self.clock.sleep(self.timeouts.reply + self.timeouts.shutdown)

    def _end(self, cause: str) -> NoReturn:
        """Rank 0 ends the job."""
        if not self._ending.acquire(blocking=False):  # another thread does
            self.clock.sleep(DAY_S)
        _, _, code, text = cause.split(" ", 3)
        hint = ""
        with contextlib.suppress(Exception):  # the cause is said, whatever becomes of the run directory
            hint = self.close_run(reason(text))
        self.process.say(f"{text.rstrip()}\n{hint}" if int(code) == LOST else text)
        if self._open is not None:
            self._call_for(self.timeouts.reply, self._said)
        self.process.end_job(int(code))

    def _said(self) -> None:
        with contextlib.suppress(Exception):
            assert self._open is not None
            self._open().set(SAID, "1")
            self.clock.sleep(LINGER_S)

    # ---- the launcher ----
    def _watch_launcher(self, launcher: int) -> None:
        while self.launcher_is_alive(launcher, self.job.parent_pid):
            self.clock.sleep(self.timeouts.launcher)
        if self.job.local_rank and self.job.rank:  # one of this host says so; it would not be heard from others either
            self._wait_for_launcher()
            self.process.exit(1)
        self.fail(f"error: the launcher ({self.job.launcher}, process {launcher}) has died", 1)


def who(job: Job) -> str:
    return f"fedmpi [rank {job.rank} on {job.host}]" if job.rank else "fedmpi"


def reason(text: str) -> str:
    """A message in one line: a mistake's first, a traceback's last."""
    lines = text.strip().splitlines()
    first = lines[0].removeprefix("fedmpi").lstrip(": ")
    return first.replace(": error: ", ": ", 1).removeprefix("error: ") if "error: " in first else lines[-1]
