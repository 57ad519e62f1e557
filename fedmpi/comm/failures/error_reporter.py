"""Report the error that ends a job: it is printed exactly once, normally on rank 0.

A rank that fails adds the cause of the failure to an event log, which all ranks share, before it exits. Only the first
cause counts: a rank that fails because another rank has exited adds its cause later, and prints nothing. If the ranks
have regrouped without a rank, causes from that rank are ignored. On every rank a thread reads the log:

    rank 0        closes the run directory, prints the cause and ends the job
    other ranks   wait until the launcher ends them, and exit on their own if it does not; if the launcher does not
                  collect the output of all hosts, one rank of every other host also prints the cause

If rank 0 does not confirm the cause in time, for example because rank 0 itself has failed, the rank that added the
cause prints it. A second thread ends this rank if the launcher has died.

The thread that reads the log also answers two questions of other ranks: whether this rank is alive, and which ranks it
waits for. They are asked after a time-out, because the awaited rank is often waiting for another rank itself. The ranks
at fault are those that do not answer or, if all answer, those that wait for no other rank (`trace_waiting_ranks`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, final

from fedmpi.comm.failures.process_exit import RankProcess
from fedmpi.comm.launchers import Job
from fedmpi.comm.timeouts import Timeouts
from fedmpi.common.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

CAUSE = "cause"  # a line of the event log: "cause RANK CODE TEXT"
MEMBERS = "members"  # "members GENERATION TIME RANK RANK ...": the ranks that take part from now on
QUESTION = "ask"  # "ask QUESTION PURPOSE": all ranks answer which ranks' messages they wait for
TIMEOUT = "silence"  # the purpose of a question by a rank that is about to report a time-out
FINISHED = "well"  # every rank has called `close`
PRINTED = "printed"  # key of the store: rank 0 has printed the cause
DAY = timedelta(days=1)
POLL_S = 0.01
STORE_LINGER_S = 0.5  # time in which other ranks can read a key of the store before it ends with rank 0
FAILURE_CODE = 1  # exit code of a job that ends because of a lost rank or a defect


@final
class EventLog:
    """A log in the ranks' store, to which every rank can add lines; all ranks read them in the same order.

    The common order makes the ranks agree, for instance on whether a rank failed before or after it was declared lost.
    Methods raise DistError if the store no longer answers.

    Args:
        store: a connection to the store for this log only.
        position: number of the next line to read.
    """

    def __init__(self, store: Store, position: int = 0) -> None:
        self.store, self.position = store, position

    def read_next(self) -> str:
        """Wait for the next line of the log and return it."""
        self.store.wait([f"events/{self.position}"], DAY)
        line = self.store.get(f"events/{self.position}").decode()
        self.position += 1
        return line

    def add(self, line: str, decisive: Callable[[str], bool] = lambda line: False) -> str | None:
        """Read the log to its end and add a line there; stop at the first line for which decisive(line) is true.

        Returns:
            That first decisive line, which may be the added one; None if no line is decisive.
        """
        while True:
            existing: str = self.store.compare_set(f"events/{self.position}", "", line).decode()
            if decisive(existing):
                return existing
            self.position += 1
            if existing == line:
                return None


class ErrorReporter:
    """Reports this rank's error to all ranks, and ends this process if the job fails; each rank has one.

    Args:
        job: this process's rank, and the number of ranks.
        timeouts: the time limits for waiting for other ranks, and the clock that measures them.
        process: the functions that print this process's last message and end it.
        launcher_is_alive: returns whether the launcher, which is the parent of this process, is alive.
        stop: tells whether this process was asked to stop, for example by a signal.
        close_run: called on rank 0 with the reason if the job fails, before the error is printed; it closes the run
            directory and returns a hint on how to resume the run.

    Attributes:
        waiting_for: a function that returns the ranks from which this rank is waiting for messages.
        on_event: on_event(line, store) is called in the thread that reads the event log, for each line that does not
            end the job. `store` is that thread's connection to the store on rank 0, which contains the log; `line` is
            None if this store no longer answers.
    """

    def __init__(
        self,
        job: Job,
        timeouts: Timeouts | None = None,
        process: RankProcess | None = None,
        launcher_is_alive: Callable[[], bool] | None = None,
        stop: StopRequest | None = None,
        close_run: Callable[[str], str] = lambda reason: "",
    ) -> None:
        self.job, self.timeouts, self.process = job, timeouts or Timeouts(), process or RankProcess(job)
        self.clock = self.timeouts.clock
        self.launcher_is_alive = launcher_is_alive or (lambda: os.getppid() == job.parent_pid)
        self.stop, self.close_run = stop or StopRequest(), close_run
        self.waiting_for: Callable[[], Iterable[int]] = lambda: ()
        self.on_event: Callable[[str | None, Store], None] = lambda line, store: None
        self.members = set(range(job.size))  # the ranks whose causes count
        self.position = 0  # number of lines of the event log that have been read
        self._questions = 0  # number of questions that this rank has asked so far
        self._open_store: Callable[[], Store] | None = None
        self._listener: threading.Event | None = None  # set once the thread that reads the log has ended
        self._expected_until = 0.0  # time by which a rank that asked about a time-out should have reported its cause
        self._cause: str | None = None  # the cause that ends the job
        self._has_printed = False
        self._ending = threading.Lock()
        if job.size > 1 and job.launcher != "env://":  # under env:// the parent may be ssh, or a shell that has ended
            self.clock.start_thread(self._watch_launcher)

    # ---- a failure of this rank ----
    def fail(self, text: str, code: int, is_consequence: bool = False) -> NoReturn:
        """End the job because this rank has failed, or because of an earlier cause in the event log.

        Args:
            text: the error message.
            code: exit code of the job.
            is_consequence: whether this rank has only noticed the failure of another rank. It then waits, so that a
                rank that knows the cause can report first.
        """
        cause = f"{CAUSE} {self.job.rank} {code} {make_message_prefix(self.job)}: {text}"
        clock, limits = self.clock, self.timeouts
        until = clock.now() + (
            limits.probe if is_consequence else 0.0
        )  # the rank that was lost may have reported the cause
        while is_consequence and clock.now() < max(until, self._expected_until):
            clock.sleep(0.05)
        if self.job.rank == 0:
            self._end_job(self._add_to_log(cause)[0] or cause)
        if self._open_store is None:  # rank 0 may print the same error; the launcher then ends this rank
            self.process.restore_sigterm()
            clock.sleep(limits.defer)
            if self.stop.signal != signal.SIGTERM:
                self._print_cause_once(cause)
            self.process.end_job(code)
        first, is_printed = self._add_to_log(cause)
        first = first or self._cause
        if first is None:  # rank 0 and its store have ended: one rank of each host prints the error
            prints = self.process.is_first_caller_on_host()
            clock.sleep(limits.defer * (3 - prints - (self.job.rank == self.job.local_rank)))
        else:
            prints = first == cause and not is_printed
        if prints:
            self._print_cause_once(cause)
        else:
            clock.sleep(limits.shutdown)
        self.process.end_job(int((first or cause).split()[2]))

    def _add_to_log(self, line: str) -> tuple[str | None, bool]:
        """Add a line to the event log.

        Returns:
            A pair: the first cause of failure in the log, or None if the store does not answer; and whether rank 0 has
            printed that cause.
        """
        answers: list[str] = []

        def add() -> None:
            events = self.connect_to_event_log()
            first = events.add(line, self._make_job_end_test(set(self.members)))
            if first is None or not first.startswith(CAUSE):  # the other ranks no longer read the log
                return
            answers.append(first)
            if self.job.rank:
                events.store.wait([PRINTED], timedelta(seconds=self.timeouts.reply))
                answers.append(PRINTED)

        with contextlib.suppress(Exception):
            self.clock.call_with_timeout(2 * self.timeouts.reply, add)
        return (answers[0] if answers else None), len(answers) > 1

    def connect_to_event_log(self) -> EventLog:
        """Open the event log over a new connection, at the position up to which this rank has read it."""
        assert self._open_store is not None
        return EventLog(self._open_store(), self.position)

    def _make_job_end_test(self, members: set[int]) -> Callable[[str], bool]:
        """Return a function that tells whether a line of the event log means that the job ends or this rank must exit.

        The function must be called with all lines in order, because it removes lost ranks from `members`.
        """

        def decisive(line: str) -> bool:
            kind, *words = line.split(maxsplit=2)
            if kind == MEMBERS:
                members.intersection_update(map(int, line.split()[3:]))
                return self.job.rank not in members
            return kind == FINISHED or (kind == CAUSE and int(words[0]) in members)

        return decisive

    # ---- questions: which ranks are alive, and which ranks does each wait for? ----
    def query_waiting_ranks(self, events: EventLog, ranks: Iterable[int], purpose: str = "") -> dict[int, list[int]]:
        """Ask ranks which other ranks they are waiting for.

        Args:
            events: the event log, to which the question is added.
            ranks: the ranks whose answers are awaited.
            purpose: TIMEOUT if this rank is about to report a time-out, otherwise "".

        Returns:
            {rank: the ranks that it waits for}, for each rank that answers in time.
        """
        self._questions += 1
        question = f"{self.job.rank}/{self._questions}"
        events.add(f"{QUESTION} {question} {purpose}")
        store, until, answers = events.store, self.clock.now() + self.timeouts.frozen, dict[int, list[int]]()
        while living := [rank for rank in ranks if rank not in answers and not store.check([f"dead/{rank}"])]:
            for rank in living:
                if store.check([key := f"answer/{question}/{rank}"]):
                    answers[rank] = [int(word) for word in store.get(key).decode()[1:].split()]
            if self.clock.now() > until:
                break
            self.clock.sleep(POLL_S)  # polled, because torch's stores print a stack trace if a wait times out
        return answers

    def find_root_cause(self, peers: Iterable[int]) -> list[int]:
        """Return the ranks that caused a time-out in which this rank waited for `peers`; `peers` if that is unknown."""
        with contextlib.suppress(Exception):  # the store may be on a host that is down and never answers
            limit_s, ranks = 3 * self.timeouts.frozen, set(self.members)
            waiting = self.clock.call_with_timeout(
                limit_s, lambda: self.query_waiting_ranks(self.connect_to_event_log(), ranks, TIMEOUT)
            )
            return trace_waiting_ranks(self.job.rank, peers, waiting)
        return sorted(peers)

    # ---- causes reported by any rank ----
    def listen(self, open_store: Callable[[], Store]) -> None:
        """Start the thread that reads the event log; `open_store` returns a new connection to the ranks' store."""
        self._open_store = open_store
        ended, events = threading.Event(), self.connect_to_event_log()
        self._listener = ended

        def read() -> None:
            try:
                self._read_log(events)
            finally:
                ended.set()

        self.clock.start_thread(read)

    def close(self) -> None:
        """Stop reading the event log; called when all ranks have finished, while the store still exists."""
        if self._listener is not None:
            self._add_to_log(FINISHED)
            self.clock.wait(self._listener, self.timeouts.reply)

    def _read_log(self, events: EventLog) -> None:
        decisive = self._make_job_end_test(self.members)
        try:
            while not decisive(line := events.read_next()) or line.startswith(MEMBERS):
                self.position = events.position
                if line.startswith(QUESTION):
                    if line.endswith(TIMEOUT):
                        self._expected_until = self.clock.now() + self.timeouts.frozen + self.timeouts.shutdown
                    waits = " ".join(map(str, self.waiting_for()))
                    events.store.set(f"answer/{line.split()[1]}/{self.job.rank}", f"={waits}")
                self.on_event(line, events.store)
        except Exception:  # rank 0 and its store are lost; this rank's next message will fail, too
            self.on_event(None, events.store)
            return
        if line == FINISHED:
            return
        self._cause = line
        if self.job.rank == 0:
            self._end_job(line)
        if self.process.has_own_console() and self.process.is_first_caller_on_host():
            self._print_cause_once(line)
        self._wait_for_launcher()
        self.process.exit(int(line.split()[2]))

    def _print_cause_once(self, cause: str) -> None:
        """Print a cause only once: both the thread that reads the log and a thread that fails may call this method."""
        if not self._has_printed:
            self._has_printed = True
            self.process.print_message(cause.split(" ", 3)[3])

    def _wait_for_launcher(self) -> None:
        """Wait a few seconds for the launcher, which normally terminates this rank after rank 0 has exited."""
        self.clock.sleep(self.timeouts.reply + self.timeouts.shutdown)

    def _end_job(self, cause: str) -> NoReturn:
        """Close the run directory, print the cause and exit; called on rank 0."""
        if not self._ending.acquire(blocking=False):  # another thread is already ending the job
            self.clock.sleep(DAY.total_seconds())
        _, _, code, text = cause.split(" ", 3)
        hint = ""
        with contextlib.suppress(Exception):  # the cause must be printed even if the run directory cannot be closed
            hint = self.close_run(summarize_error(text))
        self.process.print_message(f"{text.rstrip()}\n{hint}" if int(code) == FAILURE_CODE else text)
        if self._open_store is not None:
            with contextlib.suppress(Exception):
                self.clock.call_with_timeout(
                    self.timeouts.reply, lambda: self.connect_to_event_log().store.set(PRINTED, "1")
                )
            self.clock.sleep(STORE_LINGER_S)
        self.process.end_job(int(code))

    # ---- the launcher ----
    def _watch_launcher(self) -> None:
        while self.launcher_is_alive():
            self.clock.sleep(self.timeouts.launcher)
        if self.job.local_rank and self.job.rank:  # only one rank of each host prints the error
            self._wait_for_launcher()
            self.process.exit(1)
        self.fail(f"error: the launcher ({self.job.launcher}, process {self.job.parent_pid}) has died", 1)


def trace_waiting_ranks(rank: int, peers: Iterable[int], waiting: Mapping[int, Iterable[int]]) -> list[int]:
    """Return the ranks that caused a time-out of `rank`, in ascending order.

    Each chain of waiting ranks is followed to its end. The result is the ranks that did not answer; if all answered,
    the ranks that wait for no other rank; if all wait for other ranks, `peers`.

    Args:
        rank: the rank that timed out.
        peers: the ranks that it waited for.
        waiting: the ranks that each rank waits for; ranks that did not answer are missing.

    >>> trace_waiting_ranks(1, [0], {0: [2], 1: [0]}), trace_waiting_ranks(1, [0], {0: [2], 1: [0], 2: []})
    ([2], [2])
    """
    seen, ask, silent, busy = {rank}, set(peers), set[int](), set[int]()
    while ask:
        seen |= ask
        silent |= ask - waiting.keys()
        busy |= {peer for peer in ask & waiting.keys() if not waiting[peer]}
        ask = {other for peer in ask & waiting.keys() for other in waiting[peer]} - seen
    return sorted(silent or busy or peers)


def make_message_prefix(job: Job) -> str:
    """Return the prefix of a message: the name of the program and, except on rank 0, the rank and its host."""
    return f"fedmpi [rank {job.rank} on {job.host}]" if job.rank else "fedmpi"


def summarize_error(text: str) -> str:
    """Shorten an error text to one line: the first line of a user's error, the last line of a traceback."""
    lines = text.strip().splitlines()
    first = lines[0].removeprefix("fedmpi").lstrip(": ")
    return first.replace(": error: ", ": ", 1).removeprefix("error: ") if "error: " in first else lines[-1]
