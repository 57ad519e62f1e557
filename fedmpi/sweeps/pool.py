"""Train the runs of a sweep side by side on this machine: each in a process forked from one that has imported torch.

`concurrent.futures` does not fit: it pickles what a worker is given, and one that is killed ends the pool for all.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
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
from fedmpi.sweeps import progress

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.25  # between two looks at whether one more run may start
FIRST_ROUND_S = 60.0  # after which the first run has taken its memory, even if its first round is not complete
FILLED = 0.9  # of the available memory, at most
Job = Callable[[Settings], NoReturn]  # trains, and ends the process with its exit code


@dataclass(frozen=True)
class Resources:
    """What runs may use at the same time.

    Attributes:
        jobs: number of runs.
        gpus: values of CUDA_VISIBLE_DEVICES, one for each run; (): it is left as it is.
        check_memory: whether there are only as many runs as fit into memory, judged by the first one.
    """

    jobs: int
    gpus: tuple[str, ...] = ()
    check_memory: bool = True


@dataclass
class Running:
    """A run that is training or has just ended. rounds: how many were done when it was started."""

    settings: Settings
    process: BaseProcess
    slot: int
    rounds: int
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Pool:
    """Trains runs in child processes.

    Args:
        job: what a child does.
        on_end: called with each run that has ended.
    """

    def __init__(self, job: Job, resources: Resources, on_end: Callable[[Running], None]) -> None:
        self.job, self.resources, self.on_end = job, resources, on_end
        self.running: list[Running] = []
        self.ended = 0
        self.stop_signals = 0
        self.most = None if resources.check_memory else resources.jobs  # runs at once; None: not known yet

    def run(self, todo: Sequence[Settings]) -> bool:
        """Train runs in their order; return False if a signal ended that early. No child outlives the call."""
        before = [signal.signal(number, self._stop) for number in SIGNALS]
        waiting = deque(todo)
        try:
            while self.running or (waiting and not self.stop_signals):
                while waiting and not self.stop_signals and self._has_room():
                    self._start(waiting.popleft())
                wait([each.process.sentinel for each in self.running], POLL_S)
                for each in [each for each in self.running if each.process.exitcode is not None]:
                    self.running.remove(each)
                    self.ended += 1
                    self.on_end(each)
        finally:
            for each in self.running:  # only where something else has failed
                each.process.kill()
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
        return not self.stop_signals

    def _stop(self, number: int, frame: object) -> None:
        """Handle a stop signal: children finish their round; at the third signal they are killed."""
        self.stop_signals += 1
        for each in self.running:
            with suppress(ProcessLookupError):  # it has just been waited for
                os.kill(each.process.pid or 0, signal.SIGTERM if self.stop_signals < 3 else signal.SIGKILL)

    def _has_room(self) -> bool:
        """Return whether one more run may start; the second one waits until the memory of the first is known."""
        if not self.running:
            return True
        if self.most is None:
            first = self.running[0]
            rounds = progress.rounds_done(first.settings) - first.rounds
            if not (self.ended or rounds > 0 or first.seconds > FIRST_ROUND_S):
                return False
            self.most = min(self.resources.jobs, 1 + _runs_that_fit(first.process.pid))
        return len(self.running) < self.most

    def _start(self, settings: Settings) -> None:
        slot = min({*range(self.resources.jobs)} - {each.slot for each in self.running})
        gpus = self.resources.gpus
        gpu, rounds = gpus[slot % len(gpus)] if gpus else None, progress.rounds_done(settings)
        sys.stdout.flush()
        gc.freeze()  # what has been imported stays shared between the children
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if not self.stop_signals:  # one that came since would not be handed on to a run that begins now
                child = multiprocessing.get_context("fork").Process(
                    target=_train, args=(self.job, settings, gpu, os.getpid(), blocked)
                )
                child.start()
                self.running.append(Running(settings, child, slot, rounds, time.monotonic()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _train(job: Job, settings: Settings, gpu: str | None, parent: int, unblocked: set[signal.Signals]) -> None:
    """Train in a child process, which writes to its log instead of the console and ends with the sweep."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(RESTART_LATER)
    os.setpgid(0, 0)  # Ctrl-C is the sweep's, which hands it on once
    with log(settings).open("ab") as file, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    job(settings)


def log(settings: Settings) -> Path:
    """Return the path of a run's console log, beside its directory, which may not exist yet."""
    return settings.output / f"{settings.name}.log"


def resources(jobs: str, todo: Sequence[Settings]) -> Resources:
    """Return the resources for --jobs: a number of runs, or auto for as many as cores, GPUs and memory allow."""
    gpus = _gpus() if any(settings.compute.device != "cpu" for settings in todo) else ()
    if jobs != "auto":
        if not jobs.isdigit() or int(jobs) < 1:
            raise UserError(f"--jobs: {jobs}; auto, or a number from 1 on, is needed")
        return Resources(min(int(jobs), len(todo)), gpus, check_memory=False)
    threads = max(settings.compute.threads for settings in todo)
    most = max(1, min(host_memory.usable_cores() // threads, len(todo)))
    return Resources(min(most, len(gpus)) if gpus else most, gpus)


def _gpus() -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the numbers of all GPUs. CUDA is not initialised for that."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else map(str, range(count))
    return tuple(name.strip() for name in names)[:count]


def _runs_that_fit(pid: int | None) -> int:
    """Return for how many more runs there is memory, if each takes as much as this one or one that has ended."""
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        largest = max([largest, *(int(words[1]) for words in lines if words[0] == "VmHWM:")])
    free = host_memory.available_bytes()
    return sys.maxsize if free is None or not largest else int(FILLED * free // (1024 * largest))
