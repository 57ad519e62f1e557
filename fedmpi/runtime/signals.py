"""Stopping by signal. At the first signal the run leaves its round and writes its results; the second ends the process
at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopRequest:
    """Callable: whether somebody asked this process to stop. `signal` is the number, 0 before."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}  # signal -> its handler before `listen`

    def __call__(self) -> bool:
        return self.signal != 0

    def listen(self) -> None:
        """Start to listen; only a main thread can (in a notebook's worker thread signals stay as they are)."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._hear)

    def deaf(self) -> None:
        """Stop listening: the signals have the handlers that they had before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
