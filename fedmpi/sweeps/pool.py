"""Train several runs of a sweep in parallel on this machine, each in a child process forked after importing torch.

`concurrent.futures` is not used because it pickles the arguments of workers, and because its pool breaks if a worker is
killed.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch

from fedmpi.common import host_memory
from fedmpi.common.errors import RESTART_LATER, UserError
from fedmpi.config import Settings

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MIN_FREE_BYTES_PER_RUN = 2 << 30  # free memory that --jobs auto requires for each run that trains at the same time
TrainFunction = Callable[[Settings], NoReturn]  # trains a run and exits with its exit code


@dataclass
class ActiveRun:
    """A run and the child process that executes it, or that has just ended."""

    settings: Settings
    process: BaseProcess
    slot: int  # number from 0, different for all runs that train at the same time
    started_at: float  # time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.started_at


class ProcessPool:
    """A pool of child processes, each of which trains one run.

    Args:
        train_run: the function that a child process calls with the settings of its run.
        max_active: the number of runs that train at the same time.
        gpus: values for CUDA_VISIBLE_DEVICES; each run gets one of them. (): the variable is not changed.
        on_end: called with each run that has ended.
    """

    def __init__(
        self, train_run: TrainFunction, max_active: int, gpus: Sequence[str], on_end: Callable[[ActiveRun], None]
    ) -> None:
        self.train_run, self.max_active, self.gpus, self.on_end = train_run, max_active, gpus, on_end
        self.active_runs: list[ActiveRun] = []
        self.num_ended = 0
        self.stop_signals = 0

    def run(self, todo: Sequence[Settings]) -> bool:
        """Train runs in the given order, and return when all child processes have ended.

        Returns:
            Whether all runs were started; False if a signal stopped the sweep.
        """
        before = [signal.signal(number, self._forward_stop_signal) for number in STOP_SIGNALS]
        waiting = deque(todo)
        try:
            while self.active_runs or (waiting and not self.stop_signals):
                while waiting and not self.stop_signals and len(self.active_runs) < self.max_active:
                    self._start_run(waiting.popleft())
                wait([each.process.sentinel for each in self.active_runs])
                for each in [each for each in self.active_runs if each.process.exitcode is not None]:
                    self.active_runs.remove(each)
                    self.num_ended += 1
                    self.on_end(each)
        finally:
            for each in self.active_runs:  # some are left only after an unexpected error
                each.process.kill()
            for number, handler in zip(STOP_SIGNALS, before, strict=True):
                signal.signal(number, handler)
        return not self.stop_signals

    def _forward_stop_signal(self, number: int, frame: object) -> None:
        """Handle a stop signal by sending SIGTERM to all child processes, or SIGKILL from the third signal on."""
        self.stop_signals += 1
        for each in self.active_runs:
            with suppress(ProcessLookupError):  # the process has ended in the meantime
                os.kill(each.process.pid or 0, signal.SIGTERM if self.stop_signals < 3 else signal.SIGKILL)

    def _start_run(self, settings: Settings) -> None:
        """Start a child process that trains a run, unless a stop signal has arrived."""
        slot = min({*range(self.max_active)} - {each.slot for each in self.active_runs})
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        sys.stdout.flush()
        gc.freeze()  # keeps the memory pages of imported modules shared between the child processes
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if not self.stop_signals:  # a signal that has already arrived would not be forwarded to this run
                child = multiprocessing.get_context("fork").Process(
                    target=_train_in_child, args=(self.train_run, settings, gpu, os.getpid(), blocked)
                )
                child.start()
                self.active_runs.append(ActiveRun(settings, child, slot, time.monotonic()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _train_in_child(
    train_run: TrainFunction, settings: Settings, gpu: str | None, parent: int, unblocked: set[signal.Signals]
) -> None:
    """Train a run in this child process, with its output in a log file; stop if the parent process dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(RESTART_LATER)
    os.setpgid(0, 0)  # Ctrl-C then reaches only the sweep's process, which forwards it once
    with get_console_log_path(settings).open("ab") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    train_run(settings)


def get_console_log_path(settings: Settings) -> Path:
    """Return the path of a run's console log; it lies next to the run directory, which may not exist yet."""
    return settings.output / f"{settings.name}.log"


def choose_parallelism(jobs: str, todo: Sequence[Settings]) -> tuple[int, tuple[str, ...]]:
    """Choose how many runs train at the same time, and on which GPUs.

    Args:
        jobs: the value of --jobs: a number, or "auto" for as many runs as cores, GPUs and free memory allow.
        todo: the settings of the runs.

    Returns:
        The number of runs; and values for CUDA_VISIBLE_DEVICES, or () if all runs train on CPUs or there is no GPU.

    Raises:
        UserError: if `jobs` is invalid.
    """
    gpus = _list_gpus() if any(settings.compute.device != "cpu" for settings in todo) else ()
    if jobs != "auto":
        if not jobs.isdigit() or int(jobs) < 1:
            raise UserError(f"--jobs: {jobs} is not allowed; must be auto or a whole number >= 1")
        return min(int(jobs), len(todo)), gpus
    cores = host_memory.count_usable_cores() // max(settings.compute.threads for settings in todo)
    free = host_memory.get_available_bytes()
    limits = [
        len(todo),
        cores,
        *([len(gpus)] if gpus else []),
        *([free // MIN_FREE_BYTES_PER_RUN] if free is not None else []),
    ]
    return max(1, min(limits)), gpus


def _list_gpus() -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES or, if it is not set, the numbers of all GPUs."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else map(str, range(count))
    return tuple(name.strip() for name in names)[:count]
