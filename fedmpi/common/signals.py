"""Treat signals as requests to stop the run.

After the first signal a run ends its round early and writes its results; a second request ends the process immediately.
Launchers and Slurm repeat signals and send several kinds, so signals within SAME_REQUEST_S seconds of the first count
as the same request. A second Ctrl-C already counts as a new request after CTRL_C_INTERVAL_S seconds, the shortest
interval at which a person can press it. `fedmpi run` installs its handlers before it imports torch, because a rank that
is killed by a signal would end the whole job. If not all ranks are connected, a rank exits EXIT_DELAY_S seconds after
the signal.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SAME_REQUEST_S, CTRL_C_INTERVAL_S = 10.0, 0.5
EXIT_DELAY_S = 20.0  # below the 30 s that Slurm, by default, leaves between SIGTERM and SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass
class StopRequest:
    """The request to stop this process, made by a signal or by a limit on the number of rounds.

    Calling the object returns whether a stop was requested.

    Attributes:
        signal: number of the first signal; 0 if none was received.
        max_rounds: stop after this number of rounds even if the config has more rounds; 0: no limit.
        rounds_done: whether `max_rounds` rounds are done.
    """

    signal: int = 0
    max_rounds: int = 0
    rounds_done: bool = False
    _signalled_at: float = 0.0
    _previous_handlers: dict[int, Any] = field(default_factory=dict)  # signal -> its handler before `install_handlers`
    _exit_code_until_connected: int | None = None  # exit code while this rank is not connected to the others

    def __call__(self) -> bool:
        return self.rounds_done or self.signal != 0

    def install_handlers(self, *ignored: int) -> None:
        """Install handlers for all SIGNALS except those in `ignored`.

        Outside the main thread, for example in a notebook's worker, this has no effect.
        """
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number in ignored or number in self._previous_handlers:
                    continue
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # set by nohup
                    self._previous_handlers[number] = signal.signal(number, self._handle)

    def set_exit_code_until_connected(self, code: int | None) -> None:
        """Set the exit code for a stop request that arrives before all ranks are connected.

        The rank exits EXIT_DELAY_S seconds after the request, unless this method is called with None in the meantime.

        Args:
            code: the exit code, or None once all ranks are connected.
        """
        self._exit_code_until_connected = code
        if self.signal and code is not None:
            self._start_exit_timer()

    def _start_exit_timer(self) -> None:
        timer = threading.Timer(
            EXIT_DELAY_S,
            lambda: None if self._exit_code_until_connected is None else os._exit(self._exit_code_until_connected),
        )
        timer.daemon = True
        timer.start()

    def restore_handlers(self, process_ends: bool = False) -> None:
        """Restore the handlers that the signals had before `install_handlers`.

        Args:
            process_ends: whether the process is about to end. If a stop was requested, further signals are then
                ignored, because a repeated signal would change the exit code.
        """
        for number, handler in self._previous_handlers.items():
            ignore = process_ends and self.signal
            signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._signalled_at = number, time.monotonic()
            if self._exit_code_until_connected is not None:
                self._start_exit_timer()
        elif time.monotonic() - self._signalled_at > (
            CTRL_C_INTERVAL_S if number == self.signal == signal.SIGINT else SAME_REQUEST_S
        ):
            os._exit(128 + number)


@dataclass
class ProcessStartState:
    """The state that a `fedmpi run` process has from its start: the stop request and the launcher's process id."""

    stop: StopRequest = field(default_factory=StopRequest)
    parent_pid: int = field(default_factory=os.getppid)  # the launcher, which may die before torch is imported
