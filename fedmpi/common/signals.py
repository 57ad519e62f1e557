"""Stop requests by signal.

At the first signal a run leaves its round and writes its results; a second request ends the process at once. Launchers
and Slurm repeat their signals, also as other ones, so a signal within REPEAT_S counts as the same request. A second
Ctrl-C counts after HAND_S, which is as fast as a person can type it. `fedmpi run` listens before it imports torch,
since a rank that is killed by a signal would end the whole job. Until all ranks are connected it waits only START_S.
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
    """Whether this process was asked to stop, by a signal or a number of rounds; call it to ask.

    Attributes:
        signal: the signal's number; 0 before one has come.
        max_rounds: stop after so many rounds, where they are fewer than those of the config; 0: all.
        rounds_done: whether these are done.
    """

    signal: int = 0
    max_rounds: int = 0
    rounds_done: bool = False
    _signalled_at: float = 0.0
    _before: dict[int, Any] = field(default_factory=dict)  # signal -> its handler before `listen`
    _alone_code: int | None = None  # exit code while this rank is not connected with the others

    def __call__(self) -> bool:
        return self.rounds_done or self.signal != 0

    def listen(self, *but: int) -> None:
        """Handle all SIGNALS except these. Without effect outside the main thread, as in a notebook's worker."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number in but or number in self._before:
                    continue
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._handle)

    def exit_if_alone(self, code: int | None) -> None:
        """Have a rank that was asked to stop exit with `code` unless all ranks are connected within START_S.

        None: they are connected.
        """
        self._alone_code = code
        if self.signal and code is not None:
            self._start_timer()

    def _start_timer(self) -> None:
        timer = threading.Timer(START_S, lambda: None if self._alone_code is None else os._exit(self._alone_code))
        timer.daemon = True
        timer.start()

    def restore_handlers(self, process_ends: bool = False) -> None:
        """Restore the handlers that the signals had before `listen`.

        Args:
            process_ends: after a request ignore the signals instead, as a repeated one would change the exit code.
        """
        for number, handler in self._before.items():
            ignore = process_ends and self.signal
            signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._signalled_at = number, time.monotonic()
            if self._alone_code is not None:
                self._start_timer()
        elif time.monotonic() - self._signalled_at > (HAND_S if number == self.signal == signal.SIGINT else REPEAT_S):
            os._exit(128 + number)


@dataclass
class CommandProcess:
    """What is known about this process from its start: stop requests, and the launcher."""

    stop: StopRequest = field(default_factory=StopRequest)
    parent_pid: int = field(default_factory=os.getppid)  # the launcher, which may have died before torch is imported
