"""Stopping by signal. At the first signal the run leaves its round and writes its results; another request ends the
process at once. Launchers and Slurm repeat themselves, in other signals too: what comes within REPEAT_S is the same
request, but for a second Ctrl-C, for which a person needs HAND_S. The command `fedmpi run` listens before it imports
the rest: a rank that a signal kills would take the others with it. Until all ranks have met it waits for START_S only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

REPEAT_S, HAND_S = 10.0, 0.5
START_S = 20.0  # below the 30 s that Slurm, by default, leaves between SIGTERM and SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass
class StopRequest:
    """Callable: whether somebody asked this process to stop.

    Attributes:
        signal: its number; 0 before.
        after: the rounds that are asked for, where they are fewer than those of the config; 0: all.
        enough: whether these are done.
    """

    signal: int = 0
    after: int = 0
    enough: bool = False
    _heard_at: float = 0.0
    _before: dict[int, Any] = field(default_factory=dict)  # signal -> its handler before `listen`
    _alone: int | None = None  # exit code of a rank that has not met the others

    def __call__(self) -> bool:
        return self.enough or self.signal != 0

    def listen(self, *but: int) -> None:
        """Start to listen to all SIGNALS but these; only a main thread can (in a notebook's worker thread signals stay
        as they are)."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number in but or number in self._before:
                    continue
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._hear)

    def alone(self, code: int | None) -> None:
        """code: with which a rank that was told to stop leaves if it does not meet the others soon. None: it has."""
        self._alone = code
        if self.signal and code is not None:
            self._bound()

    def _bound(self) -> None:
        bound = threading.Timer(START_S, lambda: None if self._alone is None else os._exit(self._alone))
        bound.daemon = True
        bound.start()

    def deaf(self, process_ends: bool = False) -> None:
        """Stop listening: the signals have the handlers that they had before.

        process_ends: repeats of a request that was heard are ignored instead; one of them would end it with its code.
        """
        for number, handler in self._before.items():
            ignore = process_ends and self.signal
            signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._heard_at = number, time.monotonic()
            if self._alone is not None:
                self._bound()
        elif time.monotonic() - self._heard_at > (HAND_S if number == self.signal == signal.SIGINT else REPEAT_S):
            os._exit(128 + number)


@dataclass
class CommandProcess:
    """The process of one command of `fedmpi`, made as soon as it starts."""

    stop: StopRequest = field(default_factory=StopRequest)
    parent_pid: int = field(default_factory=os.getppid)  # the launcher, which may have died before torch is imported
