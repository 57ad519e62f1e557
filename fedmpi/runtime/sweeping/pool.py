"""The runs of a sweep side by side on this machine: forked from one process that has imported torch for all of them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fedmpi.common.errors import COME_AGAIN
from fedmpi.config import Settings
from fedmpi.runtime.sweeping import progress
from fedmpi.runtime.sweeping.room import Held, Room

PR_SET_PDEATHSIG = 1
TICK_S, LOOK_S = 0.02, 0.25  # how often it is asked whether a run has ended; how far the runs are
Job = Callable[[Settings], NoReturn]  # trains, and ends the process with its exit code
Todo = tuple[str, Settings]  # its group: runs of one group need the same memory


@dataclass
class Ended:
    """A run that has ended: its process, exit code (-n: by signal n), and how long it took here. again: it will be gone
    on with."""

    settings: Settings
    pid: int
    code: int
    seconds: float
    again: bool = False


@dataclass
class Pool:
    """job: what a child does; room: for how many; tell: hears of each run that ends, look of those under way."""

    job: Job
    room: Room
    tell: Callable[[Ended], None]
    look: Callable[[Sequence[Held]], None] = lambda running: None
    running: dict[int, Held] = field(default_factory=dict)  # by pid
    asked: int = 0  # signals to stop
    looked: float = 0.0

    def run(self, todo: Sequence[Todo]) -> bool:
        """All of them, in their order; False where a signal has ended it earlier. No child is left behind."""
        before = [signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)]
        waiting = deque(todo)
        try:
            while self.running or (waiting and not self.asked):
                while waiting and not self.asked and self._may(waiting[0][0]):
                    self._start(*waiting.popleft())
                waiting.extendleft(self._wait())
        finally:
            for pid in self.running:  # only where something else has failed
                os.kill(pid, signal.SIGKILL)
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)
        return not self.asked

    def _may(self, group: str) -> bool:
        return len(self.running) < self.room.at_once and self.room.fits(group, self.running.values())

    def _stop(self, number: int, frame: object) -> None:
        """The first request: children close their round; the third: they are killed."""
        self.asked += 1
        for pid in self.running:
            with suppress(ProcessLookupError):  # it has just been waited for
                os.kill(pid, signal.SIGTERM if self.asked < 3 else signal.SIGKILL)

    def _start(self, group: str, settings: Settings) -> None:
        slot = min(set(range(self.room.at_once)) - {each.slot for each in self.running.values()})
        parent = os.getpid()
        rounds = progress.rounds(settings)
        sys.stdout.flush()
        gc.freeze()  # what has been imported stays shared between the children
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        if self.asked:  # by a signal that came since: nobody would tell a run that begins now
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            return
        pid = os.fork()
        if pid == 0:
            code: object = 1
            try:
                _own(settings, self.room.gpu(slot), parent)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                self.job(settings)
            except SystemExit as done:
                code = done.code
            finally:
                os._exit(code if isinstance(code, int) else 1)  # nothing of the parent's is tidied up here
        self.running[pid] = Held(settings, group, time.monotonic(), slot, rounds)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _wait(self) -> list[Todo]:
        """A moment, or until one of the children has ended. Returns what has to be gone on with."""
        now = time.monotonic()
        if now - self.looked > LOOK_S:
            self.looked = now
            self._look(now)
        pid, status, used = os.wait4(-1, os.WNOHANG) if self.running else (0, 0, None)
        if used is None or pid not in self.running:
            time.sleep(TICK_S)
            return []
        each = self.running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or each.seen:
            self.room.learn(each, max(used.ru_maxrss * 1024, each.most))
        again = each.ended and code != 0 and not self.asked
        self.tell(Ended(each.settings, pid, code, now - each.began, again))
        return [(each.group, each.settings)] if again else []

    def _look(self, now: float) -> None:
        for pid, each in self.running.items():
            each.look(pid, progress.rounds(each.settings), now)
        held = list(self.running.values())
        if len(held) > 1 and not any(each.ended for each in held) and self.room.scarce():
            pid, youngest = max(self.running.items(), key=lambda pair: pair[1].began)
            youngest.ended = True
            self.room.learn(youngest, int(1.25 * youngest.most))
            os.kill(pid, signal.SIGKILL)  # at once: its last round is on disk
        self.look(held)


def _own(settings: Settings, gpu: str | None, parent: int) -> None:
    """What is a child's own: its log in place of the console, a GPU, its end with that of the sweep."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(COME_AGAIN)
    os.setpgid(0, 0)  # Ctrl-C is the sweep's, which hands it on once
    with log(settings).open("ab") as said, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def log(settings: Settings) -> Path:
    """What a run says on its console; beside its directory, since it may end before that is made."""
    return settings.output / f"{settings.name}.log"
